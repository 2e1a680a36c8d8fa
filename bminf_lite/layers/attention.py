"""The kinds of attention that an encoder-decoder has beside causal self-attention.

``add_to`` adds the output to the residual stream, fp32 ``[T, features]``; ``x`` is the normalised stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache
from .linear import Linear, RowParallelLinear


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
