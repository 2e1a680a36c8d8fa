"""Latent attention (https://arxiv.org/abs/2405.04434, section 2.1): one compressed row per token for all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...backend.base import Backend
from ...backend.cache_values import AnyCache, LatentCache
from ...backend.communicator import shard
from ...backend.values import Array, ForwardBatch, LatentSpec, PositionScale
from ...layers.cache import Latent
from ...layers.linear import ColumnParallelLinear, LinearParts, RowParallelLinear
from ...layers.loading import RowTransform, TransformedWeights
from ...layers.norm import NormLayer, rms_norm
from .._rotary import Rotary
from ..spec import Fold, Parameter, Role, Tensors, linear, norm, weights_of
from .part import LayerSource, Part, PartTensors, SharedValues

NORM_EPS = 1e-6
"""The epsilon of the norms inside of the part, which no configuration changes."""


@dataclass(frozen=True)
class LatentAttentionPart(Part):
    """Attention of ``heads`` heads to latents of ``rank`` elements and rotated keys of ``rotary.size`` elements.

    Queries have ``nope_dim`` elements that are not rotated and ``rotary.size`` that are, and values ``value_dim``. They
    are projected through ``q_rank`` elements and a norm of these, or at once if that is None. ``score_scale``
    multiplies the scores, and ``position_scale`` the queries. With ``bias``, the matrices that read the residual
    stream, or write to it, have biases, but for that of queries without a ``q_rank``. ``multiplier`` multiplies the
    output.
    """

    hidden_size: int
    heads: int
    nope_dim: int
    value_dim: int
    rank: int
    rotary: Rotary
    score_scale: float
    q_rank: int | None = None
    position_scale: PositionScale | None = None
    bias: bool = False
    multiplier: float = 1.0
    prefix: str = "self_attn"

    @property
    def layout(self) -> Latent:
        return Latent(self.rank, self.rotary.size)

    @property
    def divided(self) -> Mapping[str, int]:
        """The heads. The latents, which all heads read, and the compressed queries are the same on every rank."""
        return {"heads": self.heads}

    @property
    def query_features(self) -> int:
        """Width of the projected queries."""
        return self.heads * (self.nope_dim + self.rotary.size)

    def _named(self, layer: str, *names: str) -> list[str]:
        return [f"{layer}.{self.prefix}.{name}" for name in names]

    def stated(self, layer: str) -> PartTensors:
        """Factors move from the norm of compressed queries to the matrix that expands them.

        None move to ``kv_b_proj``, which stays float, nor from its values to the output, whose rows lie between keys.
        """
        q, q_a, q_norm, q_b = self._named(layer, "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")
        kv_a, kv_norm, kv_b, out = self._named(layer, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        hidden, width = self.hidden_size, self.query_features
        folds: tuple[Fold, ...] = ()
        if self.q_rank is None:
            tensors: Tensors = linear(q, (width, hidden))
        else:
            tensors = linear(q_a, (self.q_rank, hidden), self.bias) | norm(q_norm, self.q_rank)
            tensors |= linear(q_b, (width, self.q_rank))
            folds = (Fold(weights_of(q_norm), weights_of(q_b)),)
        after = linear(out, (hidden, self.heads * self.value_dim), self.bias)
        tensors |= linear(kv_a, (self.layout.row_dim, hidden), self.bias) | norm(kv_norm, self.rank) | after
        expanded = self.heads * (self.nope_dim + self.value_dim), self.rank
        tensors[f"{kv_b}.weight"] = Parameter(expanded, Role.ABSORBED)
        return PartTensors(tensors, weights_of(q if self.q_rank is None else q_a, kv_a), tuple(after), folds)

    def share(self, shared: SharedValues) -> None:
        shared.rope(self.rotary, self.rotary.size)

    def _row_transforms(self, layer: str) -> dict[str, RowTransform]:
        """The multiplier, and the order of rotated elements: each is rotated against that half of them away."""
        (out,) = self._named(layer, "o_proj")
        found = {} if self.multiplier == 1 else {out: RowTransform(factors=self.multiplier)}
        of_key = self.rotary.head_transform(self.rotary.size)
        if of_key is None:
            return found
        assert isinstance(of_key.order, np.ndarray) and of_key.factors is None
        of_head = np.concatenate([np.arange(self.nope_dim), self.nope_dim + of_key.order])
        of_queries = np.arange(self.query_features).reshape(self.heads, -1)[:, of_head].ravel()
        of_row = np.concatenate([np.arange(self.rank), self.rank + of_key.order])
        q, kv_a = self._named(layer, "q_proj" if self.q_rank is None else "q_b_proj", "kv_a_proj_with_mqa")
        return {**found, q: RowTransform(of_queries), kv_a: RowTransform(of_row)}

    def build(self, source: LayerSource) -> LatentAttention:
        ops, layer = source.ops, source.name
        weights = TransformedWeights(source.weights, self._row_transforms(layer))
        q_a, q_b, kv_a, kv_b, out = self._named(
            layer, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
        )
        (q,), (q_norm, kv_norm) = self._named(layer, "q_proj"), self._named(layer, "q_a_layernorm", "kv_a_layernorm")
        rope = source.shared.rope(self.rotary, self.rotary.size)
        assert rope is not None
        heads, width = self.heads // ops.communicator.tp_size, self.nope_dim + self.value_dim
        own_heads = RowTransform(shard(self.heads * width, ops.communicator))
        spec = LatentSpec(
            heads,
            self.nope_dim,
            self.rotary.size,
            self.value_dim,
            self.rank,
            self.score_scale,
            norm=rms_norm(ops, weights, kv_norm, NORM_EPS).norm,
            rope=rope,
            position_scale=self.position_scale,
        )
        is_compressed = self.q_rank is not None
        return LatentAttention(
            ops,
            spec,
            LinearParts(ops, weights, [q_a, kv_a] if is_compressed else [kv_a], self.bias),
            ColumnParallelLinear(ops, weights, [q_b if is_compressed else q], [self.query_features]),
            rms_norm(ops, weights, q_norm, NORM_EPS) if is_compressed else None,
            ops.latent_weight(own_heads.apply_to_matrix(weights.weight(f"{kv_b}.weight")), spec),
            RowParallelLinear(ops, weights, out, self.bias),
        )


@dataclass(frozen=True)
class LatentAttention:
    """Computes :class:`LatentAttentionPart`.

    ``compress`` makes the rows of latents, and before them what ``q_norm`` normalises and ``queries`` expands; without
    a ``q_norm`` that reads the input itself. ``expand`` is the matrix that expands latents.
    """

    ops: Backend
    spec: LatentSpec
    compress: LinearParts
    queries: ColumnParallelLinear
    q_norm: NormLayer | None
    expand: Any
    out: RowParallelLinear

    def hidden(self, x: Array, cache: AnyCache, batch: ForwardBatch, only_last: bool) -> Array:
        """The heads' outputs ``[T, heads * value_dim]``, which ``out`` reads; with ``only_last`` of last tokens."""
        assert isinstance(cache, LatentCache)
        *compressed, rows = self.compress.fp32(x)
        q = self.queries(x if self.q_norm is None else self.q_norm(compressed[0]))
        found = self.ops.latent_attention(q, rows, self.spec, self.expand, cache, batch)
        return self.ops.last_tokens(found, batch) if only_last else found

    def fp32(self, hidden: Array) -> Array:
        return self.out.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.out.add_to(residual, hidden)
