"""Offload: cached pages beyond device memory, in chunks sized per group."""
