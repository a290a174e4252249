"""Sparse attention over selected KV blocks (QSA)."""
