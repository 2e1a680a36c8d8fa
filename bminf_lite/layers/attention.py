"""Self-attention with grouped heads, and the two kinds of attention that an encoder-decoder adds."""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache
from .cache import SourceCache
from .linear import Linear


class Attention:
    """``o(attend(qkv(x)))``, added to the residual stream. Tokens see themselves and those before them.

    ``qkv`` computes query, key and value side by side.
    """

    def __init__(self, ops: Backend, spec: AttentionSpec, qkv: Linear, o: Linear):
        self.ops = ops
        self.spec = spec
        self.qkv = qkv
        self.o = o

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the attention of the normalised ``x``."""
        return self.o.add_to(residual, self.ops.attention(self.qkv(x), self.spec, cache, batch))


class EncoderAttention:
    """Attention of every token to its whole sequence, which is all in one step, added to the residual stream."""

    def __init__(self, ops: Backend, spec: AttentionSpec, qkv: Linear, o: Linear):
        self.ops = ops
        self.spec = spec
        self.qkv = qkv
        self.o = o

    def add_to(self, residual: Array, x: Array, batch: ForwardBatch) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the attention of the normalised ``x``."""
        return self.o.add_to(residual, self.ops.encoder_attention(self.qkv(x), self.spec, batch))


class CrossAttention:
    """``o(attend(q(x)))`` over an encoded source, added to the residual stream.

    The source's keys and values, which ``kv`` computes side by side, are the same for every token that is decoded:
    :meth:`fill_cache` computes them once.
    """

    def __init__(self, ops: Backend, spec: AttentionSpec, q: Linear, kv: Linear, o: Linear):
        self.ops = ops
        self.spec = spec
        self.q = q
        self.kv = kv
        self.o = o

    def fill_cache(self, source: Array, cache: LayerCache, batch: ForwardBatch) -> None:
        """Put keys and values of the encoder's output ``[T, features]`` for a step's sources into the cache."""
        self.ops.store_source(self.kv(source), self.spec, cache, batch)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, source: SourceCache, batch: ForwardBatch) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the attention of the normalised ``x``."""
        return self.o.add_to(residual, self.ops.cross_attention(self.q(x), self.spec, cache, source.lengths, batch))
