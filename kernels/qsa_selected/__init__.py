"""Attention over selected positions of a paged cache (QSA on SM120)."""
