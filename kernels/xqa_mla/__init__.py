"""XQA: multi-head latent attention decode over a paged cache."""
