"""Gated DeltaNet (https://arxiv.org/abs/2412.06464): linear attention that corrects what it remembers, and forgets."""

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
from ...layers.loading import RowTransform, TransformedWeights
from ..spec import Fold, Parameter, Role, Tensors, linear, router, weights_of
from .part import LayerSource, Part, PartTensors


@dataclass(frozen=True)
class DeltaNetPart(Part):
    """``out(delta_net(qkvz(x), gates(x)))``: see :mod:`bminf_lite.backend.delta_net`.

    ``qkvz`` has two names, of queries, keys and values, and of the output's gate, or four; ``gates`` names the
    matrices of the rates of learning, which are below ``max_rate``, and of the decays. With one name each, the matrix
    has for each key head its query and key, and then the values and gates of its value heads; or their rates, and
    then their decays. ``taps`` are those of the convolution of queries, keys and values, whose kernel the file holds
    as ``[channels, 1, taps]``, the oldest token first, under one name or three. ``norm_eps`` is that of the norm of a
    head's output.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float
    qkvz: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    gates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    kernel: tuple[str, ...] = ("linear_attn.conv1d",)
    decay_rates: str = "linear_attn.A_log"
    decay_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"
    max_rate: float = 1.0

    @property
    def sections(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def layout(self) -> State:
        channels = sum(self.sections)
        return State(state_arrays(self.key_heads, self.value_heads, self.key_dim, self.value_dim, channels, self.taps))

    @property
    def divided(self) -> Mapping[str, int]:
        return {"key heads of a delta rule": self.key_heads, "value heads of a delta rule": self.value_heads}

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    def stated(self, layer: str) -> PartTensors:
        """Factors move from the norm of heads to ``out``; none from the norm before, which the float gates read too."""
        qkvz, gates, kernels, (norm, out) = (
            [f"{layer}.{name}" for name in names]
            for names in (self.qkvz, self.gates, self.kernel, (self.norm, self.out))
        )
        values, heads = self.sections[2], self.value_heads
        channels = sum(self.sections)
        widths = {1: [channels + values], 2: [channels, values], 4: [*self.sections, values]}[len(qkvz)]
        tensors: Tensors = {}
        for name, width in zip(qkvz, widths, strict=True):
            tensors |= linear(name, (width, self.hidden_size))
        for name in gates:
            tensors |= router(name, (2 * heads // len(gates), self.hidden_size))
        for kernel, width in zip(kernels, self.sections if len(kernels) == 3 else [channels], strict=True):
            tensors[f"{kernel}.weight"] = Parameter((width, 1, self.taps), Role.VECTOR)
        for name in (self.decay_rates, self.decay_bias):
            tensors[f"{layer}.{name}"] = Parameter((heads,), Role.VECTOR)
        tensors[f"{norm}.weight"] = Parameter((self.value_dim,), Role.VECTOR)
        after = linear(out, (self.hidden_size, values))
        fold = Fold(weights_of(norm), weights_of(out), self.value_dim, heads)
        return PartTensors(tensors | after, weights_of(*qkvz, *gates), tuple(after), folds=(fold,), foldable=False)

    def _by_key_head(self, *widths: int) -> np.ndarray:
        """The rows of a matrix of groups, one for each key head, of parts of these ``widths``: part by part."""
        rows = np.arange(self.key_heads * sum(widths)).reshape(self.key_heads, -1)
        return np.concatenate([part.ravel() for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)])

    # -- the layer ----------------------------------------------------------------------------------------------------

    def build(self, source: LayerSource) -> DeltaNet:
        ops, weights, name = source.ops, source.weights, source.name
        queries, keys, values = self.sections
        sections: list[Any] = [(queries, keys, values), values]
        if len(self.qkvz) == 4:
            sections = [queries, keys, values, values]
        if len(self.qkvz) == 1:
            of_values = values // self.key_heads
            order = self._by_key_head(self.key_dim, self.key_dim, of_values, of_values)
            weights = TransformedWeights(weights, {f"{name}.{self.qkvz[0]}": RowTransform(order)})
            sections = [queries, keys, values, values]
        return DeltaNet(
            ops,
            self._spec(source),
            ColumnParallelLinear(ops, weights, source.named(self.qkvz), sections),
            ops.weight([self._gates(source)]),
            RowParallelLinear(ops, weights, f"{name}.{self.out}"),
        )

    def _spec(self, source: LayerSource) -> DeltaNetSpec:
        ops, ranks = source.ops, source.ops.communicator
        channels, heads = rows_of_sections(self.sections, ranks), shard(self.value_heads, ranks)

        def vector(name: str) -> np.ndarray:
            return np.asarray(source.weights.vector(f"{source.name}.{name}")).astype(np.float32)

        kernels = np.concatenate([vector(f"{name}.weight") for name in self.kernel])
        taps = np.ascontiguousarray(kernels[channels, 0, ::-1].T)
        spec = DeltaNetSpec(
            self.key_heads // ranks.tp_size,
            self.value_heads // ranks.tp_size,
            self.key_dim,
            self.value_dim,
            ShortConvolution(taps),
            -np.exp(vector(self.decay_rates)[heads]),
            vector(self.decay_bias)[heads],
            Norm(vector(f"{self.norm}.weight"), self.norm_eps),
            self.max_rate,
        )
        return ops.delta_net_spec(spec)

    def _gates(self, source: LayerSource) -> np.ndarray:
        """The matrices of rates and of decays of a rank's value heads, fp32 ``[2 * heads, hidden_size]``."""
        stored = [np.asarray(source.weights.vector(name)) for name in weights_of(*source.named(self.gates))]
        rows = np.concatenate(stored).astype(np.float32)
        if len(stored) == 1:
            of_key_head = self.value_heads // self.key_heads
            rows = rows[self._by_key_head(of_key_head, of_key_head)]
        own: np.ndarray = rows[rows_of_sections((self.value_heads, self.value_heads), source.ops.communicator)]
        return own


@dataclass(frozen=True)
class DeltaNet:
    """Computes :class:`DeltaNetPart`."""

    ops: Backend
    spec: DeltaNetSpec
    qkvz: Linear
    gates: Any
    out: RowParallelLinear

    def hidden(self, x: Array, cache: AnyCache, batch: ForwardBatch, only_last: bool) -> Array:
        """The heads' gated outputs ``[T, value_features]``, which ``out`` reads: with ``only_last`` of last tokens."""
        assert isinstance(cache, StateCache)
        qkvz = self.qkvz(self.ops.shared(x))
        gates = self.ops.float_linear(x, self.gates)
        mixed = self.ops.gated_delta_net(qkvz, gates, self.spec, cache, batch)
        return self.ops.last_tokens(mixed, batch) if only_last else mixed

    def fp32(self, hidden: Array) -> Array:
        return self.out.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.out.add_to(residual, hidden)
