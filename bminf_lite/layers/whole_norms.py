"""Self-attention whose queries and keys are each normalised over all heads together (OLMo 2)."""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache
from .linear import Linear
from .norm import NormLayer


@dataclass(frozen=True)
class AttentionWithWholeNorms:
    """``o(attend([q_norm(q(x)), k_norm(k(x)), v(x)]))``, causal. The norms' weights cover all heads."""

    ops: Backend
    spec: AttentionSpec
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: NormLayer
    k_norm: NormLayer

    def attend(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The heads' outputs ``[T, heads * head_dim]``, which ``o`` reads."""
        q, k = self.q_norm(self.q.fp32(x)), self.k_norm(self.k.fp32(x))
        return self.ops.attention(self.ops.join([q, k, self.v(x)]), self.spec, cache, batch)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        return self.o.add_to(residual, self.attend(x, cache, batch))
