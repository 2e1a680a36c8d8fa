"""Self-attention with grouped heads, and the cache that hides the difference between prefill and decode."""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, LayerCache, Step
from .linear import Linear
from .loading import Weights


class Attention:
    """``o(attend(qkv(x)))``, added to the residual stream."""

    def __init__(
        self,
        ops: Backend,
        weights: Weights,
        name: str,
        spec: AttentionSpec,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ):
        self.ops = ops
        self.spec = spec
        self.qkv = Linear(ops, weights, [f"{name}.{p}_proj" for p in "qkv"], qkv_bias)
        self.o = Linear(ops, weights, [f"{name}.o_proj"], o_bias)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, step: Step) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the attention of the normalised ``x``."""
        return self.o.add_to(residual, self.ops.attention(self.qkv(x), self.spec, cache, step))
