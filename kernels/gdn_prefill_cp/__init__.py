"""Context-parallel gated-delta-net prefill."""
