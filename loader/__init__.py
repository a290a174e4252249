"""Python runtime of kernseal: verify a bundle, open it, call its kernels."""
