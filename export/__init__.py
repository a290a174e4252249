"""Builds sealed bundles from one pinned source: source, patch, compile, assemble, inspect, link, describe, sign."""
