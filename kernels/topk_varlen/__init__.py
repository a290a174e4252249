"""Top-k over rows of a decode step."""
