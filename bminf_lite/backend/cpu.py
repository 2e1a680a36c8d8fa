"""The CPU: the definition itself, in fp32."""

from __future__ import annotations

from .base import Backend


class CpuBackend(Backend):
    """NumPy with fp32 activations."""
