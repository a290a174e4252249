"""One folder an op; the upstream and toolchain pins."""
