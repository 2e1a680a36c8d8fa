"""The CPU: the reference itself."""

from __future__ import annotations

from .base import Backend


class CpuBackend(Backend):
    """NumPy with fp32 activations."""
