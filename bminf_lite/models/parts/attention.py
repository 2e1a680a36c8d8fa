"""Causal self-attention with grouped key-value heads (https://arxiv.org/abs/2305.13245)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from ...backend.base import Backend
from ...backend.cache_values import LayerCache
from ...backend.communicator import shard
from ...backend.values import Array, AttentionSpec, ForwardBatch, Norm
from ...layers.cache import KeyValues
from ...layers.linear import ColumnParallelLinear, KeyValueHeads, Linear, RowParallelLinear
from ...layers.loading import RowTransform, TransformedWeights, Weights
from ...layers.norm import balanced_gains, norm_gain, rms_norm
from .._rotary import Rotary, rotary_pairs
from ..spec import Fold, KeyHeads, Parameter, Role, Tensors, linear, norm, weights_of
from .part import LayerSource, Part, PartTensors, RelativeBiasTable, SharedValues


class QueryKeyNorm(Enum):
    """The RMSNorm of queries and keys: none, of each head, the same without a weight, or of all heads together."""

    NONE = "none"
    HEAD = "head"
    PLAIN_HEAD = "head, without a weight"
    WHOLE = "whole"


@dataclass(frozen=True)
class AttentionPart(Part):
    """Attention of ``heads`` query heads to ``kv_heads`` heads of keys and values, of ``head_dim`` elements each.

    ``qkv`` has one name where query, key and value are one matrix, else three. ``fused_rows`` gives the rows of one
    matrix, as stored, in the order queries, keys, values; None if they are in that order. ``transposed``: matrices are
    stored ``[in, out]``. ``score_scale`` multiplies attention scores; None means one over the root of the head's size.
    ``softcap`` limits them. ``slopes`` has the slope of each head with ALiBi (see
    :class:`~bminf_lite.backend.values.LinearBias`), else it is empty; ``relative`` is another bias by distance.
    ``multiplier`` multiplies the output, and ``input_multiplier`` the input. ``sinks`` names those of the heads, see
    :class:`.values.AttentionSpec`. ``norm_eps`` and ``norm_offset`` are those of the norms of queries and keys. With
    an ``output_gate`` the matrix of queries, of three, has for each head its query and behind that the gate of its
    output; a ``gate`` names a matrix of these gates alone, without a bias, with ``gate_by_head`` one for each head.
    ``gate_function`` is that of :class:`.values.AttentionSpec`. ``value_norm``: each head of values has an
    RMSNorm without a weight. With ``norm_after_rope`` queries and keys are normalised behind the rotation, which is of
    whole heads then. Keys and values have one matrix if its name stands twice in ``qkv``; then values are the
    keys before their norm and rotation.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None = None
    window: int | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    qkv_bias: bool = False
    out_bias: bool = False
    transposed: bool = False
    fused_rows: Callable[[AttentionPart], np.ndarray] | None = None
    qk_norm: QueryKeyNorm = QueryKeyNorm.NONE
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    score_scale: float | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] = ()
    multiplier: float = 1.0
    relative: RelativeBiasTable | None = None
    sinks: str | None = None
    output_gate: bool = False
    gate: str | None = None
    input_multiplier: float = 1.0
    value_norm: bool = False
    norm_after_rope: bool = False
    gate_function: str = "sigmoid"
    gate_by_head: bool = False

    def __post_init__(self) -> None:
        assert self.gate is not None or not self.gate_by_head
        assert self.qk_norm is QueryKeyNorm.HEAD or not self.norm_after_rope
        is_alone = not (self.output_gate or self.qkv_bias) and self.qk_norm is not QueryKeyNorm.WHOLE
        assert self.gate is None or is_alone, "a matrix of gates excludes biases, gated queries and norms of all heads"

    @property
    def has_gate(self) -> bool:
        """Whether the output has a gate."""
        return self.output_gate or self.gate is not None

    @property
    def gates(self) -> int:
        """The rows of the matrix of gates."""
        return self.heads if self.gate_by_head else self.features[0]

    @property
    def projections(self) -> tuple[str, ...]:
        """The matrices that read the input: that of the gates, if they have one, and ``qkv``."""
        return self.qkv if self.gate is None else (self.gate, *self.qkv)

    @property
    def layout(self) -> KeyValues | None:
        return KeyValues(self.kv_heads, self.head_dim, window=self.window)

    @property
    def divided(self) -> Mapping[str, int]:
        return {"heads": self.heads}

    @property
    def shared_heads(self) -> int:
        return self.kv_heads

    @property
    def features(self) -> tuple[int, int, int]:
        """Widths of query, key and value."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    def stated(self, layer: str) -> PartTensors:
        """Factors move from value heads, which have a matrix of their own, to the output."""
        qkv, out = [f"{layer}.{name}" for name in self.qkv], f"{layer}.{self.out}"
        widths = [self.features[0] * (2 if self.output_gate else 1), *self.features[1:]]
        widths = widths if len(qkv) == 3 else [sum(widths)]
        before = [
            linear(name, (width, self.hidden_size), self.qkv_bias, self.transposed)
            for name, width in zip(qkv, widths, strict=True)
        ]
        after = linear(out, (self.hidden_size, self.features[0]), self.out_bias, self.transposed)
        tensors: Tensors = {}
        for matrix in before:
            tensors |= matrix
        if self.gate is not None:
            tensors |= linear(f"{layer}.{self.gate}", (self.gates, self.hidden_size), transposed=self.transposed)
        tensors |= after | self._norm_tensors(layer) | (self.relative.tensors(layer) if self.relative else {})
        if self.sinks is not None:
            tensors[f"{layer}.{self.sinks}"] = Parameter((self.heads,), Role.VECTOR)
        key_heads, group = [], self.heads // self.kv_heads
        has_values = len(qkv) == 3 and qkv[2] != qkv[1] and not self.value_norm
        fold = (Fold(tuple(before[2]), weights_of(out), self.head_dim, group),) if has_values else ()
        if len(qkv) == 3 and self.qk_norm is QueryKeyNorm.NONE and not self.output_gate:
            pairs = rotary_pairs(self.rotary, self.head_dim)
            key_heads.append(KeyHeads(tuple(before[0]), tuple(before[1]), pairs, group))
        readers = dict.fromkeys(f"{layer}.{name}" for name in self.projections)
        return PartTensors(
            tensors, weights_of(*readers), tuple(after), fold if self.has_gate else (),
            value_heads=() if self.has_gate else fold,  # which can be rotated
            key_heads=tuple(key_heads),
        )  # fmt: skip

    def _norm_tensors(self, layer: str) -> Tensors:
        if self.qk_norm in (QueryKeyNorm.NONE, QueryKeyNorm.PLAIN_HEAD):
            return {}
        counts = (self.heads, self.kv_heads) if self.qk_norm is QueryKeyNorm.WHOLE else (1, 1)
        found: Tensors = {}
        for name, count in zip((self.q_norm, self.k_norm), counts, strict=True):
            found |= norm(f"{layer}.{name}", count * self.head_dim)
        return found

    def row_transforms(self, layer: str) -> dict[str, RowTransform]:
        """The changes of the tensors as they are read, by name."""
        changes: dict[str, RowTransform] = {}
        if self.multiplier != 1:
            changes[f"{layer}.{self.out}"] = RowTransform(factors=self.multiplier)
        of_head = self.rotary.head_transform(self.head_dim) if self.rotary else None
        if of_head is None and self.fused_rows is None and not self.output_gate:
            return changes
        assert len(set(self.qkv)) == len(self.qkv), "values of the keys' matrix have its order"
        rows = np.arange(sum(self.features)) if self.fused_rows is None else self.fused_rows(self)
        parts = [part.reshape(-1, self.head_dim) for part in np.split(rows, np.cumsum(self.features)[:-1])]
        factors = [np.ones(part.shape, np.float32) for part in parts]
        if of_head is not None:
            for i in range(2):
                parts[i] = parts[i][:, of_head.order]
                factors[i] *= 1 if of_head.factors is None else of_head.factors
        has_factors = of_head is not None and of_head.factors is not None
        if len(self.qkv) == 1:
            order, all_factors = (np.concatenate([part.ravel() for part in x]) for x in (parts, factors))
            changes[f"{layer}.{self.qkv[0]}"] = RowTransform(order, all_factors if has_factors else None)
            return changes
        for name, norm_name, part, factor in zip(self.qkv, (self.q_norm, self.k_norm), parts, factors, strict=False):
            order, own = part.ravel() - part.min(), factor.ravel()
            is_normed = self.qk_norm is not QueryKeyNorm.NONE
            rows = order
            if self.output_gate and name == self.qkv[0]:
                rows, own = self._with_gates(order), np.concatenate([np.ones_like(own), own])
            changes[f"{layer}.{name}"] = RowTransform(rows, own if has_factors and not is_normed else None)
            if is_normed:
                width = len(order) if self.qk_norm is QueryKeyNorm.WHOLE else self.head_dim
                changes[f"{layer}.{norm_name}"] = RowTransform(order[:width])
        return changes

    def norm_scale(self, heads: int) -> np.ndarray | float:
        """The factors on a norm of ``heads`` heads: those of the rotation, which before the norm would cancel out."""
        of_head = self.rotary.head_transform(self.head_dim) if self.rotary else None
        if of_head is None or of_head.factors is None:
            return 1.0
        assert not self.norm_after_rope, "a factor on a part of a head, before the norm"
        return np.tile(of_head.factors, heads if self.qk_norm is QueryKeyNorm.WHOLE else 1)

    def _with_gates(self, queries: np.ndarray) -> np.ndarray:
        """The rows of the matrix of queries and gates, as stored: all gates, and then the rows ``queries``."""
        stored = np.arange(2 * self.features[0]).reshape(self.heads, 2, self.head_dim)
        return np.concatenate([stored[:, 1].ravel(), stored[:, 0].ravel()[queries]])

    # -- the layer ----------------------------------------------------------------------------------------------------

    def share(self, shared: SharedValues) -> None:
        shared.rope(self.rotary, self.head_dim)
        shared.linear_bias(self.slopes)
        shared.relative_bias(self.relative)

    def build(self, source: LayerSource) -> Attention:
        ops = source.ops
        weights: Weights = source.weights
        if self.input_multiplier != 1:
            factor = RowTransform(factors=self.input_multiplier)
            weights = TransformedWeights(weights, dict.fromkeys(weights_of(*source.named(self.projections)), factor))
        weights = TransformedWeights(weights, self.row_transforms(source.name))
        norms = None
        if self.qk_norm is QueryKeyNorm.PLAIN_HEAD:
            weight = np.ones(self.head_dim, np.float32) * self.norm_scale(1)
            norms = [Norm(ops.vector(weight.astype(np.float32)), self.norm_eps)] * 2
        elif self.qk_norm is not QueryKeyNorm.NONE:
            names = source.named((self.q_norm, self.k_norm))
            norms = [
                rms_norm(ops, weights, name, self.norm_eps, self.norm_scale(heads), self.norm_offset).norm
                for name, heads in zip(names, (self.heads, self.kv_heads), strict=True)
            ]
        of_head = None if self.qk_norm is QueryKeyNorm.WHOLE else norms
        int8_norms = None
        if self.qk_norm is QueryKeyNorm.HEAD:
            scale = self.norm_scale(1)
            gains = (
                norm_gain(weights, name, scale, self.norm_offset) for name in source.named((self.q_norm, self.k_norm))
            )
            query, key = (Norm(ops.array(gain), self.norm_eps) for gain in balanced_gains(*gains))
            int8_norms = query, key
        spec = AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim**-0.5 if self.score_scale is None else self.score_scale,
            window=self.window,
            rope=source.shared.rope(self.rotary, self.head_dim),
            q_norm=of_head[0] if of_head else None,
            k_norm=of_head[1] if of_head else None,
            bias=source.shared.linear_bias(self.slopes) or source.shared.relative_bias(self.relative),
            softcap=self.softcap,
            sinks=self._sinks(source),
            output_gate=self.has_gate,
            int8_norms=int8_norms,
            v_norm=Norm(ops.vector(np.ones(self.head_dim, np.float32)), self.norm_eps) if self.value_norm else None,
            norm_after_rope=self.norm_after_rope,
            gate_function=self.gate_function,
            gate_by_head=self.gate_by_head,
        ).shard(ops.communicator.tp_size)
        out = RowParallelLinear(ops, weights, f"{source.name}.{self.out}", self.out_bias)
        q, kv = self.features[0], KeyValueHeads(self.kv_heads, self.head_dim)
        sections: list[Any] = [(q, q) if self.output_gate else q, kv, kv]
        sections = sections if self.gate is None else [self.gates, *sections]
        qkv = ColumnParallelLinear(ops, weights, source.named(self.projections), sections, self.qkv_bias)
        if norms and self.qk_norm is QueryKeyNorm.WHOLE:
            return AttentionWithWholeNorms(ops, spec, qkv, out, *norms)
        return Attention(ops, spec, qkv, out)

    def _sinks(self, source: LayerSource) -> Array | None:
        """The sinks of the rank's heads."""
        if self.sinks is None:
            return None
        values = np.asarray(source.weights.vector(f"{source.name}.{self.sinks}")).astype(np.float32)
        return source.ops.vector(values[shard(self.heads, source.ops.communicator)])


def grouped_rows(part: AttentionPart) -> np.ndarray:
    """Rows of a fused matrix that holds, for each key-value head, its query heads, the key and the value."""
    group = part.heads // part.kv_heads
    rows = np.arange(sum(part.features)).reshape(part.kv_heads, group + 2, part.head_dim)
    return np.concatenate([rows[:, :group].ravel(), rows[:, group].ravel(), rows[:, group + 1].ravel()])


@dataclass(frozen=True)
class Attention:
    """``out(attend(qkv(x)))``. ``qkv`` computes query, key and value side by side."""

    ops: Backend
    spec: AttentionSpec
    qkv: Linear
    out: RowParallelLinear

    def project(self, x: Array) -> Array:
        """Query, key and value of ``x``, side by side."""
        return self.qkv(x)

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool = False) -> Array:
        """The heads' outputs ``[T, heads * head_dim]``, which ``out`` reads: with ``only_last`` of last tokens."""
        attention = self.ops.last_token_attention if only_last else self.ops.attention
        return attention(self.project(x), self.spec, cache, batch)

    def fp32(self, hidden: Array) -> Array:
        return self.out.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.out.add_to(residual, hidden)


@dataclass(frozen=True)
class AttentionWithWholeNorms(Attention):
    """``out(attend(norm_qk(qkv(x))))``: queries and keys are each normalised over all heads together (OLMo 2)."""

    q_norm: Norm
    k_norm: Norm

    def project(self, x: Array) -> Array:
        norm = self.ops.norm_qk if self.ops.communicator.tp_size == 1 else self.ops.norm_qk_of_rank
        return norm(self.qkv.fp32(x), self.q_norm, self.k_norm)
