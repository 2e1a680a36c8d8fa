"""What layers read of a token beside the residual stream (Gemma 3n's and 4's per-layer embeddings).

Before the first layer each token gets a row with a part for each layer. A layer multiplies an activated product of its
residual stream by its part, and adds a product of that to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...backend.base import Backend
from ...backend.cache_values import LayerCache
from ...backend.values import Array, ForwardBatch, Norm
from ...layers.linear import Linear
from ...layers.loading import RowTransform, TransformedWeights, Weights
from ..spec import Tensors, embedding, linear, weights_of
from .norms import NormPart
from .part import LayerSource, Part, PartTensors


@dataclass(frozen=True)
class LayerInputsPart:
    """The rows of ``layers * size`` elements: ``(norm(project(r) * project_scale) + table * table_scale) * scale``.

    ``r`` is the residual stream at its start, and ``table`` the token's row of a table of ``vocab_size`` rows. ``norm``
    normalises each ``size`` elements.
    """

    vocab_size: int
    layers: int
    size: int
    norm: NormPart
    project_scale: float
    table_scale: float
    scale: float
    table: str = "model.embed_tokens_per_layer"
    project: str = "model.per_layer_model_projection"

    @property
    def features(self) -> int:
        """Elements of a row."""
        return self.layers * self.size

    def tensors(self, hidden_size: int) -> Tensors:
        """The table, the projection and the norm."""
        found = embedding(self.table, (self.vocab_size, self.features)) | self.norm.tensors()
        return found | linear(self.project, (self.features, hidden_size))

    def build(self, ops: Backend, weights: Weights) -> LayerInputs:
        scaled = TransformedWeights(weights, {self.project: RowTransform(factors=self.project_scale)})
        return LayerInputs(
            ops,
            ops.table(weights.vector(f"{self.table}.weight")),
            Linear(ops, scaled, [self.project]),
            self.norm.build(ops, weights).norm,
            self.table_scale,
            self.scale,
        )


@dataclass(frozen=True)
class LayerInputs:
    """Computes :class:`LayerInputsPart`."""

    ops: Backend
    table: Array
    project: Linear
    norm: Norm
    table_scale: float
    scale: float

    def __call__(self, residual: Array, batch: ForwardBatch) -> Array:
        """``[T, layers * size]`` of the residual stream at its start, fp32 ``[T, features]``."""
        projected = self.project.fp32(residual)
        return self.ops.layer_inputs(batch.tokens, self.table, projected, self.norm, self.table_scale, self.scale)


@dataclass(frozen=True)
class LayerInputPart(Part):
    """``project(f(gate(x)) * part)``, where ``part`` has the ``size`` elements that the layer number ``layer`` reads.

    ``activation`` is one of ``backend.functions.ACTIVATIONS``. ``multiplier`` multiplies the input. Every rank computes
    all of it.
    """

    hidden_size: int
    size: int
    layer: int
    activation: str
    gate: str = "per_layer_input_gate"
    project: str = "per_layer_projection"
    multiplier: float = 1.0

    def stated(self, layer: str) -> PartTensors:
        gate, project = f"{layer}.{self.gate}", f"{layer}.{self.project}"
        tensors = linear(gate, (self.size, self.hidden_size)) | linear(project, (self.hidden_size, self.size))
        return PartTensors(tensors, weights_of(gate), weights_of(project))

    def build(self, source: LayerSource) -> LayerInput:
        names = source.named((self.gate, self.project))
        changes = {} if self.multiplier == 1 else {names[0]: RowTransform(factors=self.multiplier)}
        gate, project = (Linear(source.ops, TransformedWeights(source.weights, changes), [name]) for name in names)
        return LayerInput(source.ops, gate, project, self.activation, self.layer * self.size)


@dataclass(frozen=True)
class LayerInput:
    """Computes :class:`LayerInputPart`; the layer's part begins at element ``first``."""

    ops: Backend
    gate: Linear
    project: Linear
    activation: str
    first: int

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool) -> Array:
        """What ``project`` reads."""
        gated = self.ops.activated_linear(x, self.gate.weight, self.activation)
        return self.ops.multiply_columns(gated, batch.layer_inputs, self.first)

    def fp32(self, hidden: Array) -> Array:
        return self.project.fp32(hidden)

    def add_to(self, residual: Array, hidden: Array) -> Array:
        return self.project.add_to(residual, hidden)
