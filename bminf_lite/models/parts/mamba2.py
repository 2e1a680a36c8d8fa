"""Mamba 2 (https://arxiv.org/abs/2405.21060): a state space whose decay, input and output depend on the token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...backend.base import Backend
from ...backend.cache_values import AnyCache, StateCache
from ...backend.chunked_state import state_arrays
from ...backend.communicator import shard
from ...backend.values import Array, ForwardBatch, GatedNorm, Mamba2Spec, Norm, ShortConvolution
from ...layers.cache import State
from ...layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, rows_of_sections
from ...layers.loading import RowTransform, TransformedWeights
from ..spec import Fold, Parameter, Role, Tensors, linear, weights_of
from .part import LayerSource, Part, PartTensors


@dataclass(frozen=True)
class HeadNorm:
    """The norm of the outputs of all heads: see :class:`bminf_lite.backend.values.GatedNorm`."""

    eps: float
    groups: int = 1
    norm_first: bool = False


@dataclass(frozen=True)
class Mamba2Part(Part):
    """``out(mamba2(inner(x)))``: see :mod:`bminf_lite.backend.mamba2`.

    ``inner`` is one matrix with the rows of the output's gate, x, B, C and the time steps, in this order.
    ``section_multipliers`` multiply the outputs of each, and ``input_multiplier`` its input. ``taps`` are those of the
    convolution of x, B and C, whose kernel the file holds as ``[channels, 1, taps]``, the oldest token first.
    ``step_limits`` bound the time steps. Without a ``norm`` the gate alone multiplies the heads' outputs, and
    ``multiplier`` the part's output. The names are those below ``prefix``.
    """

    hidden_size: int
    groups: int
    heads: int
    head_dim: int
    state_dim: int
    taps: int
    norm: HeadNorm | None = None
    prefix: str = "mamba"
    conv_bias: bool = True
    inner_bias: bool = False
    out_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    input_multiplier: float = 1.0
    section_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    multiplier: float = 1.0

    @property
    def features(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def sections(self) -> tuple[int, int, int, int, int]:
        """Widths of the gate, x, B, C and the time steps."""
        shared = self.groups * self.state_dim
        return self.features, self.features, shared, shared, self.heads

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.sections[1:4])

    @property
    def layout(self) -> State:
        sizes = self.groups, self.heads, self.state_dim, self.head_dim
        return State(state_arrays(*sizes, self.channels, self.taps, corrects=False))

    @property
    def divided(self) -> Mapping[str, int]:
        found = {"groups of a state space": self.groups, "heads of a state space": self.heads}
        return found if self.norm is None else found | {"groups of a norm": self.norm.groups}

    def _names(self, layer: str) -> tuple[str, str, str, str]:
        """The full names of the first matrix, the convolution, the norm and the last matrix."""
        inner, kernel, norm, out = (f"{layer}.{self.prefix}.{x}" for x in ("in_proj", "conv1d", "norm", "out_proj"))
        return inner, kernel, norm, out

    def stated(self, layer: str) -> PartTensors:
        """Factors move from the norm of the heads to ``out``."""
        inner, kernel, norm, out = self._names(layer)
        after = linear(out, (self.hidden_size, self.features), self.out_bias)
        tensors: Tensors = linear(inner, (sum(self.sections), self.hidden_size), self.inner_bias) | after
        tensors[f"{kernel}.weight"] = Parameter((self.channels, 1, self.taps), Role.VECTOR)
        if self.conv_bias:
            tensors[f"{kernel}.bias"] = Parameter((self.channels,), Role.VECTOR)
        for name in ("A_log", "dt_bias", "D"):
            tensors[f"{layer}.{self.prefix}.{name}"] = Parameter((self.heads,), Role.VECTOR)
        folds: tuple[Fold, ...] = ()
        if self.norm is not None:
            tensors[f"{norm}.weight"] = Parameter((self.features,), Role.VECTOR)
            folds = (Fold(weights_of(norm), weights_of(out)),)
        return PartTensors(tensors, weights_of(inner), tuple(after), folds)

    def build(self, source: LayerSource) -> Mamba2:
        ops = source.ops
        inner, _, _, out = self._names(source.name)
        of_sections = np.repeat(np.array(self.section_multipliers, np.float32), self.sections)
        changes: dict[str, RowTransform] = {}
        if self.input_multiplier != 1 or set(self.section_multipliers) != {1.0}:
            changes[f"{inner}.weight"] = RowTransform(factors=of_sections * np.float32(self.input_multiplier))
            changes[f"{inner}.bias"] = RowTransform(factors=of_sections)
        if self.multiplier != 1:
            changes[out] = RowTransform(factors=self.multiplier)
        weights = TransformedWeights(source.weights, changes)
        return Mamba2(
            ops,
            self._spec(source),
            ColumnParallelLinear(ops, weights, [inner], self.sections, self.inner_bias),
            RowParallelLinear(ops, weights, out, self.out_bias),
        )

    def _spec(self, source: LayerSource) -> Mamba2Spec:
        ranks = source.ops.communicator
        _, kernel, norm, _ = self._names(source.name)
        channels, heads = rows_of_sections(self.sections[1:4], ranks), shard(self.heads, ranks)

        def vector(name: str) -> np.ndarray:
            return np.asarray(source.weights.vector(name)).astype(np.float32)

        def of_heads(name: str) -> np.ndarray:
            return vector(f"{source.name}.{self.prefix}.{name}")[heads]

        taps = np.ascontiguousarray(vector(f"{kernel}.weight")[channels, 0, ::-1].T)
        bias = vector(f"{kernel}.bias")[channels] if self.conv_bias else None
        of_norm = None
        if self.norm is not None:
            weight = vector(f"{norm}.weight")[shard(self.features, ranks)]
            of_norm = GatedNorm(Norm(weight, self.norm.eps), self.norm.groups // ranks.tp_size, self.norm.norm_first)
        return source.ops.mamba2_spec(
            Mamba2Spec(
                self.groups // ranks.tp_size,
                self.heads // ranks.tp_size,
                self.head_dim,
                self.state_dim,
                ShortConvolution(taps, bias),
                -np.exp(of_heads("A_log")),
                of_heads("dt_bias"),
                of_heads("D"),
                self.step_limits,
                of_norm,
            )
        )


@dataclass(frozen=True)
class Mamba2:
    """Computes :class:`Mamba2Part`."""

    ops: Backend
    spec: Mamba2Spec
    inner: Linear
    out: RowParallelLinear

    def hidden(self, x: Array, cache: AnyCache, batch: ForwardBatch, only_last: bool) -> Array:
        """The heads' gated outputs ``[T, features]``, which ``out`` reads: with ``only_last`` of last tokens."""
        assert isinstance(cache, StateCache)
        mixed = self.ops.mamba2(self.inner(x), self.spec, cache, batch)
        return self.ops.last_tokens(mixed, batch) if only_last else mixed

    def fp32(self, hidden: Array) -> Array:
        return self.out.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.out.add_to(residual, hidden)
