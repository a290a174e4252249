"""Serving engines that run on a bundle's kernels. Here, unlike in the rest of the loader, ops are called by name."""
