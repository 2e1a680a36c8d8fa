"""What lies before the first layer of a decoder and behind the last: embeddings, positions, and the output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...backend.base import Backend
from ...backend.values import Array, ForwardBatch
from ...layers.embedding import Embedding, PositionEmbedding, TokenTypeEmbedding, saved_site
from ...layers.linear import Linear, VocabularyLinear
from ...layers.loading import Weights
from ...layers.norm import NormLayer
from ..spec import Tensors, bias, embedding, head, linear
from .layer_inputs import LayerInputs, LayerInputsPart
from .norms import NormPart


@dataclass(frozen=True)
class PositionsPart:
    """The table ``name`` of learned positions; position 0 has the row ``first``, behind which are ``count`` rows."""

    name: str
    count: int
    first: int = 0


@dataclass(frozen=True)
class TokenTypesPart:
    """The table ``name`` of ``count`` vectors, one for each segment of a pair of texts."""

    name: str
    count: int


@dataclass(frozen=True)
class InputPart:
    """Tokens to the residual stream: rows of the table ``name``, multiplied by ``multiplier``.

    The rows have ``features`` elements, which ``project`` brings to ``hidden_size`` if they differ. Learned
    ``positions`` and the vectors of ``token_types`` are added to them, and ``norm`` normalises them. ``layer_inputs``
    are what layers read beside the residual stream.
    """

    vocab_size: int
    hidden_size: int
    name: str = "model.embed_tokens"
    multiplier: float = 1.0
    norm: NormPart | None = None
    embedding_size: int | None = None
    project: str | None = None
    positions: PositionsPart | None = None
    token_types: TokenTypesPart | None = None
    layer_inputs: LayerInputsPart | None = None

    @property
    def features(self) -> int:
        """Elements of a row of the table."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def layer_input_features(self) -> int:
        """Values that layers read of a token beside the residual stream."""
        return 0 if self.layer_inputs is None else self.layer_inputs.features

    @property
    def is_only_a_table(self) -> bool:
        """Whether the residual stream starts as rows of the table, times a number."""
        return all(
            part is None for part in (self.norm, self.project, self.positions, self.token_types, self.layer_inputs)
        )

    def tensors(self) -> Tensors:
        found = embedding(self.name, (self.vocab_size, self.features))
        if self.positions is not None:
            rows = self.positions.first + self.positions.count
            found |= embedding(self.positions.name, (rows, self.hidden_size))
        if self.token_types is not None:
            found |= embedding(self.token_types.name, (self.token_types.count, self.hidden_size))
        if self.project is not None:
            found |= linear(self.project, (self.hidden_size, self.features))
        if self.layer_inputs is not None:
            found |= self.layer_inputs.tensors(self.hidden_size)
        return found | (self.norm.tensors() if self.norm else {})

    def build(self, ops: Backend, weights: Weights) -> InputLayer:
        positions = None
        if self.positions is not None:
            positions = PositionEmbedding(ops, weights, self.positions.name, self.positions.first)
        return InputLayer(
            Embedding(ops, weights, self.name, self.multiplier),
            Linear(ops, weights, [self.project]) if self.project is not None else None,
            positions,
            self.norm.build(ops, weights) if self.norm else None,
            TokenTypeEmbedding(ops, weights, self.token_types.name) if self.token_types is not None else None,
            self.layer_inputs.build(ops, weights) if self.layer_inputs is not None else None,
        )


@dataclass(frozen=True)
class InputLayer:
    """Computes :class:`InputPart`."""

    embedding: Embedding
    project: Linear | None
    positions: PositionEmbedding | None
    norm: NormLayer | None
    token_types: TokenTypeEmbedding | None = None
    layer_inputs: LayerInputs | None = None

    def __call__(self, batch: ForwardBatch) -> Array:
        """A step's tokens to the residual stream, fp32 ``[T, features]``."""
        residual = self.embedding(batch)
        if self.project is not None:
            residual = self.project.fp32(residual)
        if self.positions is not None:
            residual = self.positions.add_to(residual, batch)
        if self.token_types is not None:
            residual = self.token_types.add_to(residual, batch)
        return residual if self.norm is None else self.norm(residual)

    def with_layer_inputs(self, residual: Array, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` with what layers read beside the residual stream, which starts as ``residual``."""
        if self.layer_inputs is None:
            return batch
        return replace(batch, layer_inputs=self.layer_inputs(residual, batch))


@dataclass(frozen=True)
class OutputPart:
    """The residual stream to logits: ``head(project(norm(r))) * multiplier``, limited by ``softcap``.

    ``project`` brings ``hidden_size`` elements to ``embedding_size``, those that the head reads. A multiplier wants a
    norm, into which it is folded.
    """

    vocab_size: int
    hidden_size: int
    norm: NormPart | None
    name: str = "lm_head"
    bias: bool = False
    multiplier: float = 1.0
    softcap: float | None = None
    embedding_size: int | None = None
    project: str | None = None

    def __post_init__(self) -> None:
        assert self.norm is not None or self.multiplier == 1

    @property
    def features(self) -> int:
        """Elements that the head reads."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def reader(self) -> str:
        """The matrix that reads the norm."""
        return self.name if self.project is None else self.project

    def tensors(self) -> Tensors:
        found = self.norm.tensors() if self.norm else {}
        if self.project is not None:
            found |= linear(self.project, (self.features, self.hidden_size))
        found |= head(self.name, (self.vocab_size, self.features))
        return found | (bias(self.name, self.vocab_size) if self.bias else {})

    def build(self, ops: Backend, weights: Weights) -> OutputLayer:
        return OutputLayer(
            self.norm.build(ops, weights, scale=self.multiplier) if self.norm else None,
            Linear(ops, weights, [self.project]) if self.project is not None else None,
            VocabularyLinear(ops, weights, self.name, self.vocab_size, self.bias),
            self.softcap,
            None if self.bias else saved_site(ops, f"{self.name}.weight", self.vocab_size, self.features),
        )


@dataclass(frozen=True)
class OutputLayer:
    """The residual stream ``r`` to logits: ``head(project(norm(r)))``, fp32 ``[T, vocab]``, limited by ``softcap``."""

    norm: NormLayer | None
    project: Linear | None
    head: Linear
    softcap: float | None = None
    saved: Any = None

    def __call__(self, residual: Array) -> Array:
        x = self.norm(residual) if self.norm else residual
        x = self.project(x) if self.project else x
        logits = self.head.fp32(x)
        if self.saved is not None:
            logits = self.head.ops.saved_linear(x, self.saved, logits)
        return logits if self.softcap is None else self.head.ops.soft_cap(logits, self.softcap)
