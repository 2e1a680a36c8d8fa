"""Self-attention whose queries and keys are each normalised over all heads together (OLMo 2)."""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, Norm
from .linear import Linear, RowParallelLinear


@dataclass(frozen=True)
class AttentionWithWholeNorms:
    """``o(attend(norm_qk(qkv(x))))``, causal. The norms' weights cover all heads."""

    ops: Backend
    spec: AttentionSpec
    qkv: Linear
    o: RowParallelLinear
    q_norm: Norm
    k_norm: Norm

    def attend(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool = False) -> Array:
        """The heads' outputs ``[T, heads * head_dim]``, which ``o`` reads; with ``only_last`` those of last tokens."""
        qkv = self.ops.norm_qk(self.qkv.fp32(x), self.q_norm, self.k_norm)
        attention = self.ops.last_token_attention if only_last else self.ops.attention
        return attention(qkv, self.spec, cache, batch)
