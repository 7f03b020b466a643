"""Paged-memory kernels for JAX, usable alone: nothing here imports kvjax.

Each operation has one signature, a validator, and implementations tried in order.
"""

from pallas_kernels.attention import IMPLEMENTATIONS, paged_attention, validate

__all__ = ["IMPLEMENTATIONS", "paged_attention", "validate"]
