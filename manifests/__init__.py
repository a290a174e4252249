"""Committed pins and public keys."""
