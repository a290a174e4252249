"""XQA: decode attention over a paged KV cache."""
