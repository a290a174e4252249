"""Source patches and PTX rules, each with its reason."""
