"""Kimi Delta Attention (https://arxiv.org/abs/2510.26692): a gated DeltaNet whose channels of a key decay apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...backend.base import Backend
from ...backend.cache_values import AnyCache, StateCache
from ...backend.chunked_state import state_arrays
from ...backend.communicator import shard
from ...backend.values import Array, DeltaNetSpec, ForwardBatch, Norm, ShortConvolution
from ...layers.cache import State
from ...layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, rows_of_sections
from ..spec import Fold, Parameter, Role, Tensors, linear, router, weights_of
from .part import LayerSource, Part, PartTensors


@dataclass(frozen=True)
class KimiDeltaPart(Part):
    """``o_proj(kimi_delta(q, k, v, b, f, g))``: see :mod:`bminf_lite.backend.delta_net`.

    ``q``, ``k`` and ``v`` have ``heads`` heads of ``head_dim`` elements each, and a convolution of ``taps`` tokens,
    whose kernels the file holds as ``[channels, 1, taps]``, the oldest token first. ``b`` becomes the rates of
    learning. ``f`` becomes the decays and ``g`` the output's gate, each through ``head_dim`` elements. ``norm_eps`` is
    that of the norm of a head's output.
    """

    hidden_size: int
    heads: int
    head_dim: int
    taps: int
    norm_eps: float
    prefix: str = "self_attn"

    @property
    def features(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def layout(self) -> State:
        sizes = self.heads, self.heads, self.head_dim, self.head_dim
        return State(state_arrays(*sizes, 3 * self.features, self.taps, per_channel=True))

    @property
    def divided(self) -> Mapping[str, int]:
        return {"heads of a delta rule": self.heads}

    def _named(self, layer: str, *names: str) -> list[str]:
        return [f"{layer}.{self.prefix}.{name}" for name in names]

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    def stated(self, layer: str) -> PartTensors:
        """Factors move from the norm of heads to ``o_proj``; none from the norm before, which float gates read too."""
        qkv = self._named(layer, "q_proj", "k_proj", "v_proj")
        g_a, g_b, b, f_a, f_b = self._named(layer, "g_a_proj", "g_b_proj", "b_proj", "f_a_proj", "f_b_proj")
        norm, out, rates, bias = self._named(layer, "o_norm", "o_proj", "A_log", "dt_bias")
        hidden, wide, narrow = self.hidden_size, self.features, self.head_dim
        tensors: Tensors = {}
        for name in qkv:
            tensors |= linear(name, (wide, hidden))
        for name in self._named(layer, "q_conv1d", "k_conv1d", "v_conv1d"):
            tensors[f"{name}.weight"] = Parameter((wide, 1, self.taps), Role.VECTOR)
        tensors |= router(b, (self.heads, hidden)) | router(f_a, (narrow, hidden)) | router(f_b, (wide, narrow))
        tensors |= linear(g_a, (narrow, hidden)) | linear(g_b, (wide, narrow))
        tensors[rates] = Parameter((1, 1, self.heads, 1), Role.VECTOR)
        tensors[bias] = Parameter((wide,), Role.VECTOR)
        tensors[f"{norm}.weight"] = Parameter((narrow,), Role.VECTOR)
        after = linear(out, (hidden, wide))
        fold = Fold(weights_of(norm), weights_of(out), narrow, self.heads)
        readers = weights_of(*qkv, b, f_a, g_a)
        return PartTensors(tensors | after, readers, tuple(after), folds=(fold,), foldable=False)

    # -- the layer ----------------------------------------------------------------------------------------------------

    def build(self, source: LayerSource) -> KimiDelta:
        ops, weights = source.ops, source.weights
        qkv = self._named(source.name, "q_proj", "k_proj", "v_proj")
        g_a, g_b, b, f_a, f_b = self._named(source.name, "g_a_proj", "g_b_proj", "b_proj", "f_a_proj", "f_b_proj")
        (out,) = self._named(source.name, "o_proj")

        def floats(name: str, own: Any = slice(None)) -> Any:
            matrix = np.asarray(weights.vector(f"{name}.weight")).astype(np.float32)[own]
            return ops.weight([np.ascontiguousarray(matrix)])

        return KimiDelta(
            ops,
            self._spec(source),
            ColumnParallelLinear(ops, weights, qkv, [self.features] * 3),
            floats(b, shard(self.heads, ops.communicator)),
            floats(f_a),
            floats(f_b, shard(self.features, ops.communicator)),
            Linear(ops, weights, [g_a]),
            ColumnParallelLinear(ops, weights, [g_b], [self.features]),
            RowParallelLinear(ops, weights, out),
        )

    def _spec(self, source: LayerSource) -> DeltaNetSpec:
        ranks = source.ops.communicator
        channels = rows_of_sections((self.features,) * 3, ranks)

        def vector(name: str) -> np.ndarray:
            found = source.weights.vector(self._named(source.name, name)[0])
            return np.asarray(found).astype(np.float32)

        kernels = np.concatenate([vector(f"{name}_conv1d.weight") for name in "qkv"])
        taps = np.ascontiguousarray(kernels[channels, 0, ::-1].T)
        heads = self.heads // ranks.tp_size
        spec = DeltaNetSpec(
            heads,
            heads,
            self.head_dim,
            self.head_dim,
            ShortConvolution(taps),
            -np.exp(vector("A_log").ravel()[shard(self.heads, ranks)]),
            vector("dt_bias")[shard(self.features, ranks)],
            Norm(vector("o_norm.weight"), self.norm_eps),
            per_channel=True,
        )
        return source.ops.delta_net_spec(spec)


@dataclass(frozen=True)
class KimiDelta:
    """Computes :class:`KimiDeltaPart`."""

    ops: Backend
    spec: DeltaNetSpec
    qkv: Linear
    rates: Any
    narrow_decays: Any
    decays: Any
    narrow_gate: Linear
    gate: Linear
    out: RowParallelLinear

    def hidden(self, x: Array, cache: AnyCache, batch: ForwardBatch, only_last: bool) -> Array:
        """The heads' gated outputs ``[T, features]``, which ``o_proj`` reads: with ``only_last`` of last tokens."""
        assert isinstance(cache, StateCache)
        ops = self.ops
        rates = ops.float_linear(x, self.rates)
        decays = ops.float_linear(ops.float_linear(x, self.narrow_decays), self.decays)
        gate = self.gate(self.narrow_gate(x))
        mixed = ops.kimi_delta(self.qkv(x), rates, decays, gate, self.spec, cache, batch)
        return ops.last_tokens(mixed, batch) if only_last else mixed

    def fp32(self, hidden: Array) -> Array:
        return self.out.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.out.add_to(residual, hidden)
