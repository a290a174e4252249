"""Logits of paged multi-query attention for sparse-attention indexers."""
