"""Top-k over rows of scores."""
