"""Paged prefill: attention of packed query rows over a paged KV cache, planned on the host."""
