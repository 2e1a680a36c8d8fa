"""The attention of an encoder-decoder: an encoder's in both directions, and a decoder's over an encoded source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ...backend.base import Backend
from ...backend.cache_values import LayerCache
from ...backend.values import Array, AttentionSpec, ForwardBatch
from ...layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ..spec import Fold, Tensors, linear, weights_of
from .attention import Attention, AttentionPart
from .part import LayerSource, Part, PartLayer, PartTensors


@dataclass(frozen=True)
class EncoderAttentionPart(AttentionPart):
    """Attention where a token sees its whole sequence, all of which is in one step. It keeps nothing in a cache."""

    @property
    def layout(self) -> None:
        return None

    def build(self, source: LayerSource) -> EncoderAttention:
        attention = super().build(source)
        return EncoderAttention(attention.ops, attention.spec, attention.qkv, attention.out)


def in_both_directions(part: AttentionPart) -> EncoderAttentionPart:
    """The same attention over whole texts, whose tokens see those behind them too."""
    assert part.softcap is None and part.sinks is None and not part.slopes and not part.output_gate
    return EncoderAttentionPart(**{field.name: getattr(part, field.name) for field in fields(part)})


@dataclass(frozen=True)
class CrossAttentionPart(Part):
    """Attention to an encoded source, whose keys and values are computed once: each query head has a head of them.

    ``kv`` has one name where key and value are one matrix, else two. Scores are multiplied by ``score_scale``.
    """

    hidden_size: int
    heads: int
    head_dim: int
    q: str
    kv: tuple[str, ...]
    out: str
    score_scale: float

    @property
    def divided(self) -> Mapping[str, int]:
        return {"heads": self.heads}

    @property
    def features(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    def stated(self, layer: str) -> PartTensors:
        """Factors move from value heads, which have a matrix of their own, to the output."""
        q, out, kv = f"{layer}.{self.q}", f"{layer}.{self.out}", [f"{layer}.{name}" for name in self.kv]
        tensors: Tensors = linear(q, (self.features, self.hidden_size))
        for name in kv:
            tensors |= linear(name, (2 * self.features // len(kv), self.hidden_size))
        after = linear(out, (self.hidden_size, self.features))
        value_heads = (Fold(weights_of(kv[1]), weights_of(out), self.head_dim),) if len(kv) == 2 else ()
        return PartTensors(
            tensors | after, weights_of(q), tuple(after), value_heads=value_heads, source_readers=weights_of(*kv)
        )

    def build(self, source: LayerSource) -> PartLayer:
        ops, weights, width = source.ops, source.weights, self.features
        spec = AttentionSpec(self.heads, self.heads, self.head_dim, self.score_scale)
        return CrossAttention(
            ops,
            spec.shard(ops.communicator.tp_size),
            ColumnParallelLinear(ops, weights, source.named((self.q,)), [width]),
            ColumnParallelLinear(ops, weights, source.named(self.kv), [width] * 2),
            RowParallelLinear(ops, weights, f"{source.name}.{self.out}"),
        )


class EncoderAttention(Attention):
    """Computes :class:`EncoderAttentionPart`: ``out(attend(qkv(x)))``."""

    def hidden(self, x: Array, cache: LayerCache | None, batch: ForwardBatch, only_last: bool = False) -> Array:
        return self.ops.encoder_attention(self.qkv(x), self.spec, batch)


@dataclass(frozen=True)
class CrossAttention:
    """Computes :class:`CrossAttentionPart`: ``out(attend(q(x)))``; ``kv`` computes a source's keys and values."""

    ops: Backend
    spec: AttentionSpec
    q: Linear
    kv: Linear
    out: RowParallelLinear

    def fill_cache(self, encoded: Array, cache: LayerCache, batch: ForwardBatch) -> None:
        """Store keys and values of the encoder's output ``[T, features]`` for a step's sources."""
        self.ops.store_source(self.kv(encoded), self.spec, cache, batch)

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool) -> Array:
        """The heads' outputs, which ``out`` reads. ``cache.source`` holds the layer's part of the sources."""
        assert cache.source is not None
        return self.ops.cross_attention(self.q(x), self.spec, cache.source, batch)

    def fp32(self, hidden: Array) -> Array:
        return self.out.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.out.add_to(residual, hidden)
