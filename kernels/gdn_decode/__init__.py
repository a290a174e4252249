"""Gated-delta-net decode."""
