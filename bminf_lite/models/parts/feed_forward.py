"""Feed-forward layers: ``down(f(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202), or ``down(f(up(x)))``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...backend.base import Backend
from ...backend.cache_values import LayerCache
from ...backend.values import Array, ForwardBatch, Xielu
from ...layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ...layers.loading import RowTransform, TransformedWeights
from ..spec import Fold, Parameter, Role, Tensors, linear, weights_of
from .part import LayerSource, Part, PartTensors


@dataclass(frozen=True)
class FeedForwardPart(Part):
    """A feed-forward layer of ``inner_size`` hidden units; ``activation`` is one of ``backend.functions.ACTIVATIONS``.

    ``inner`` has the names of gate and up, one name for both where they are one matrix, or that of the only matrix of a
    layer that is not ``gated``. ``transposed``: matrices are stored ``[in, out]``. ``multiplier`` multiplies the
    output, and ``gate_multiplier`` that of a gate with a matrix of its own.
    """

    hidden_size: int
    inner_size: int
    activation: str
    gated: bool = True
    inner: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    bias: bool = False
    transposed: bool = False
    multiplier: float = 1.0
    gate_multiplier: float = 1.0

    @property
    def divided(self) -> Mapping[str, int]:
        return {"hidden units of a feed-forward layer": self.inner_size}

    @property
    def widths(self) -> list[int]:
        """The widths of gate and up, or of up."""
        return [self.inner_size] * (2 if self.gated else 1)

    def stated(self, layer: str) -> PartTensors:
        """Factors move to ``down`` from ``up``, or from the only matrix before it if a ReLU lies between."""
        inner, down = [f"{layer}.{name}" for name in self.inner], f"{layer}.{self.down}"
        width = sum(self.widths) // len(inner)
        before = [linear(name, (width, self.hidden_size), self.bias, self.transposed) for name in inner]
        after = linear(down, (self.hidden_size, self.inner_size), self.bias, self.transposed)
        tensors: Tensors = {}
        for matrix in before:
            tensors |= matrix
        is_separate = len(inner) == len(self.widths)
        folds = [Fold(tuple(before[-1]), weights_of(down))] if is_separate and self._commutes else []
        gate, up, output = weights_of(inner[0], inner[-1], down)
        return PartTensors(
            tensors | after,
            weights_of(*inner),
            tuple(after),
            tuple(folds),
            rotatable=(output,),
            bounded=((gate, up, output),) if self._is_bounded else (),
        )

    @property
    def _commutes(self) -> bool:
        """Whether a factor on the last matrix before ``down`` is a factor on the input of ``down``."""
        return self.gated or self.activation == "relu"

    @property
    def _is_bounded(self) -> bool:
        return self.gated and self.activation != "relu_squared" and not self.bias and self.gate_multiplier <= 1

    def build(self, source: LayerSource) -> FeedForward:
        down, ops, weights = f"{source.name}.{self.down}", source.ops, source.weights
        names = source.named(self.inner)
        changes = {down: self.multiplier, names[0]: self.gate_multiplier}
        assert self.gate_multiplier == 1 or len(names) == 2
        changed = TransformedWeights(weights, {name: RowTransform(factors=x) for name, x in changes.items() if x != 1})
        inner = ColumnParallelLinear(ops, changed, names, self.widths, self.bias)
        kind = GatedFeedForward if self.gated else FeedForward
        return kind(ops, self.activation, inner, RowParallelLinear(ops, changed, down, self.bias))


@dataclass(frozen=True)
class XieluPart(FeedForwardPart):
    """A feed-forward layer without a gate, whose activation is xIELU (see :class:`.values.Xielu`).

    ``numbers`` is the prefix of its tensors: ``beta`` and ``eps``, one number each, and ``alpha_p`` and ``alpha_n``
    ``[1]``, whose ``softplus`` are the slopes; to the negative one ``beta`` is added.
    """

    numbers: str = "mlp.act_fn"

    def __post_init__(self) -> None:
        assert not self.gated

    def stated(self, layer: str) -> PartTensors:
        own = super().stated(layer)
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        numbers = {f"{layer}.{self.numbers}.{name}": Parameter(shape, Role.VECTOR) for name, shape in shapes.items()}
        return replace(own, tensors={**own.tensors, **numbers})

    def build(self, source: LayerSource) -> XieluFeedForward:
        plain, numbers = super().build(source), f"{source.name}.{self.numbers}"
        positive, negative, beta, eps = (
            float(np.ravel(source.weights.vector(f"{numbers}.{name}"))[0])
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        positive, negative = (float(np.logaddexp(0.0, x)) for x in (positive, negative))
        values = Xielu(positive, beta + negative, beta, eps)
        return XieluFeedForward(plain.ops, self.activation, plain.inner, plain.down, values)


@dataclass(frozen=True)
class FeedForward:
    """``down(f(up(x)))``."""

    ops: Backend
    activation: str
    inner: Linear
    down: RowParallelLinear

    def hidden(
        self, x: Array, cache: LayerCache | None = None, batch: ForwardBatch | None = None, only_last: bool = False
    ) -> Array:
        """``f(up(x))``, which ``down`` reads."""
        return self.ops.activated_linear(x, self.inner.weight, self.activation)

    def fp32(self, hidden: Array) -> Array:
        return self.down.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.down.add_to(residual, hidden)


@dataclass(frozen=True)
class GatedFeedForward(FeedForward):
    """``down(f(gate(x)) * up(x))``; ``inner`` computes gate and up side by side."""

    def hidden(
        self, x: Array, cache: LayerCache | None = None, batch: ForwardBatch | None = None, only_last: bool = False
    ) -> Array:
        """``f(gate(x)) * up(x)``, which ``down`` reads."""
        return self.ops.gated_linear(x, self.inner.weight, self.activation)


@dataclass(frozen=True)
class XieluFeedForward(FeedForward):
    """``down(xielu(up(x)))``."""

    values: Xielu

    def hidden(
        self, x: Array, cache: LayerCache | None = None, batch: ForwardBatch | None = None, only_last: bool = False
    ) -> Array:
        """``xielu(up(x))``, which ``down`` reads."""
        return self.ops.xielu(self.ops.linear(x, self.inner.weight), self.values)
