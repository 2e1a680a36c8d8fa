"""A gated short convolution (LFM2, https://arxiv.org/abs/2511.23404): a mixer that sees the last few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...backend.base import Backend
from ...backend.cache_values import AnyCache, StateArray, StateCache
from ...backend.communicator import shard
from ...backend.values import Array, ForwardBatch, ShortConvolution
from ...layers.cache import State
from ...layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ..spec import Parameter, Role, Tensors, linear, weights_of
from .part import LayerSource, Part, PartTensors


@dataclass(frozen=True)
class ShortConvolutionPart(Part):
    """``out(c * convolution(b * x))``, where ``[b, c, x]`` is one product with the input, of ``hidden_size`` each.

    The convolution weighs the last ``taps`` tokens of each channel. The file holds its kernel as ``[hidden_size, 1,
    taps]``, the oldest token first.
    """

    hidden_size: int
    taps: int
    bias: bool = False
    inner: str = "conv.in_proj"
    kernel: str = "conv.conv"
    out: str = "conv.out_proj"

    @property
    def layout(self) -> State:
        inputs = StateArray("inputs", (self.hidden_size,), dtype=None, ring=self.taps, is_sharded=True)
        return State((inputs,))

    @property
    def divided(self) -> Mapping[str, int]:
        return {"channels of a convolution": self.hidden_size}

    def stated(self, layer: str) -> PartTensors:
        inner, kernel, out = (f"{layer}.{name}" for name in (self.inner, self.kernel, self.out))
        width = self.hidden_size
        after = linear(out, (width, width), self.bias)
        tensors: Tensors = linear(inner, (3 * width, width), self.bias) | after
        tensors[f"{kernel}.weight"] = Parameter((width, 1, self.taps), Role.VECTOR)
        if self.bias:
            tensors[f"{kernel}.bias"] = Parameter((width,), Role.VECTOR)
        return PartTensors(tensors, weights_of(inner), tuple(after))

    def build(self, source: LayerSource) -> GatedConvolution:
        ops, weights, width = source.ops, source.weights, self.hidden_size
        inner, kernel, out = source.named((self.inner, self.kernel, self.out))
        own = shard(width, ops.communicator)
        taps = np.asarray(weights.vector(f"{kernel}.weight"))[own, 0, ::-1].astype(np.float32)
        bias = ops.vector(np.asarray(weights.vector(f"{kernel}.bias"))[own]) if self.bias else None
        convolution = ShortConvolution(ops.array(np.ascontiguousarray(taps.T)), bias)
        return GatedConvolution(
            ops,
            convolution,
            ColumnParallelLinear(ops, weights, [inner], [width] * 3, self.bias),
            RowParallelLinear(ops, weights, out, self.bias),
        )


@dataclass(frozen=True)
class GatedConvolution:
    """Computes :class:`ShortConvolutionPart`."""

    ops: Backend
    convolution: ShortConvolution
    inner: Linear
    out: RowParallelLinear

    def hidden(self, x: Array, cache: AnyCache, batch: ForwardBatch, only_last: bool) -> Array:
        """``c * convolution(b * x)``, which ``out`` reads; with ``only_last`` that of last tokens."""
        assert isinstance(cache, StateCache)
        mixed = self.ops.short_convolution(self.inner(x), self.convolution, cache, batch)
        return self.ops.last_tokens(mixed, batch) if only_last else mixed

    def fp32(self, hidden: Array) -> Array:
        return self.out.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.out.add_to(residual, hidden)
