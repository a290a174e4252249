"""Ragged prefill: attention of packed sequences over packed keys and values, planned on the host."""
