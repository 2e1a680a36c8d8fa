"""Self-attention with grouped heads, and the two kinds of attention that an encoder-decoder adds.

``add_to`` adds the output to the residual stream, fp32 ``[T, features]``; ``x`` is the normalised stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache
from .linear import Linear, RowParallelLinear


@dataclass(frozen=True)
class Attention:
    """``o(attend(qkv(x)))``, causal. ``qkv`` computes query, key and value side by side."""

    ops: Backend
    spec: AttentionSpec
    qkv: Linear
    o: RowParallelLinear

    def attend(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool = False) -> Array:
        """The heads' outputs ``[T, heads * head_dim]``, which ``o`` reads; with ``only_last`` those of last tokens."""
        attention = self.ops.last_token_attention if only_last else self.ops.attention
        return attention(self.qkv(x), self.spec, cache, batch)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        return self.o.add_to(residual, self.attend(x, cache, batch))


@dataclass(frozen=True)
class EncoderAttention:
    """``o(attend(qkv(x)))``, where a token sees its whole sequence, all of which is in one step."""

    ops: Backend
    spec: AttentionSpec
    qkv: Linear
    o: RowParallelLinear

    def add_to(self, residual: Array, x: Array, batch: ForwardBatch) -> Array:
        return self.o.add_to(residual, self.ops.encoder_attention(self.qkv(x), self.spec, batch))


@dataclass(frozen=True)
class CrossAttention:
    """``o(attend(q(x)))`` over an encoded source.

    ``kv`` computes the source's keys and values side by side. They are the same for every token that is decoded, so
    :meth:`fill_cache` computes them once.
    """

    ops: Backend
    spec: AttentionSpec
    q: Linear
    kv: Linear
    o: RowParallelLinear

    def fill_cache(self, source: Array, cache: LayerCache, batch: ForwardBatch) -> None:
        """Store keys and values of the encoder's output ``[T, features]`` for a step's sources."""
        self.ops.store_source(self.kv(source), self.spec, cache, batch)

    def add_to(self, residual: Array, x: Array, source: LayerCache, batch: ForwardBatch) -> Array:
        return self.o.add_to(residual, self.ops.cross_attention(self.q(x), self.spec, source, batch))
