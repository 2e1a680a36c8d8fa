"""Attention to the keys and values that an earlier layer stored (https://arxiv.org/abs/2405.12981)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ...backend.cache_values import LayerCache
from ...backend.values import Array, AttentionSpec, ForwardBatch, Norm
from ...layers.linear import ColumnParallelLinear, RowParallelLinear
from ...layers.loading import TransformedWeights
from ...layers.norm import balancing_factors, norm_gain
from ..spec import linear, norm, weights_of
from .attention import Attention, AttentionPart, QueryKeyNorm
from .part import LayerSource, Part, PartTensors, SharedValues


@dataclass(frozen=True)
class SharedAttentionPart(Part):
    """``own`` attention, with norms of heads, without its keys and values: those of layer ``source`` are read.

    That layer differs by its weights and its window alone. Layers are named ``{stack}.{number}``.
    """

    own: AttentionPart
    source: int

    def __post_init__(self) -> None:
        assert self.own.qk_norm is QueryKeyNorm.HEAD and len(self.own.qkv) == 3
        assert not (self.own.output_gate or self.own.sinks or self.own.relative or self.own.slopes)

    @property
    def source_layer(self) -> int:
        return self.source

    @property
    def divided(self) -> Mapping[str, int]:
        return self.own.divided

    @property
    def shared_heads(self) -> int:
        return self.own.kv_heads

    def share(self, shared: SharedValues) -> None:
        self.own.share(shared)

    def stated(self, layer: str) -> PartTensors:
        own, width = self.own, self.own.features[0]
        query, out = f"{layer}.{own.qkv[0]}", f"{layer}.{own.out}"
        after = linear(out, (own.hidden_size, width), own.out_bias)
        tensors = linear(query, (width, own.hidden_size), own.qkv_bias) | after
        return PartTensors(tensors | norm(f"{layer}.{own.q_norm}", own.head_dim), weights_of(query), tuple(after))

    def build(self, source: LayerSource) -> SharedAttention:
        ops, own, storing = source.ops, self.own, f"{source.name.rpartition('.')[0]}.{self.source}"
        weights = TransformedWeights(source.weights, own.row_transforms(source.name) | own.row_transforms(storing))
        gain = partial(norm_gain, weights, scale=own.norm_scale(1), offset=own.norm_offset)
        query = gain(f"{source.name}.{own.q_norm}")
        balance = balancing_factors(gain(f"{storing}.{own.q_norm}"), gain(f"{storing}.{own.k_norm}"))
        of_int8 = Norm(ops.vector(query * balance), own.norm_eps)
        spec = AttentionSpec(
            own.heads,
            own.kv_heads,
            own.head_dim,
            own.head_dim**-0.5 if own.score_scale is None else own.score_scale,
            window=own.window,
            rope=source.shared.rope(own.rotary, own.head_dim),
            q_norm=Norm(ops.vector(query), own.norm_eps),
            softcap=own.softcap,
            int8_norms=(of_int8, of_int8),
        ).shard(ops.communicator.tp_size)
        names = [f"{source.name}.{own.qkv[0]}"]
        heads = ColumnParallelLinear(ops, weights, names, [own.features[0]], own.qkv_bias)
        return SharedAttention(
            ops, spec, heads, RowParallelLinear(ops, weights, f"{source.name}.{own.out}", own.out_bias)
        )


@dataclass(frozen=True)
class SharedAttention(Attention):
    """Computes :class:`SharedAttentionPart`; ``qkv`` computes queries alone."""

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool = False) -> Array:
        """As :meth:`.Attention.hidden`; ``cache`` is that of the layer which stored this step's keys and values."""
        attention = self.ops.last_token_shared_attention if only_last else self.ops.shared_attention
        return attention(self.project(x), self.spec, cache, batch)
