"""Discovered, not listed: one module each."""
