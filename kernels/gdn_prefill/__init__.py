"""Gated-delta-net prefill."""
