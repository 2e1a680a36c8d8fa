"""The tensors of a checkpoint, as an architecture file declares them: name, shape and role.

Reading a checkpoint lists every missing, unexpected or misshapen tensor in one error; migration quantizes exactly the
tensors whose role is ``LINEAR`` or ``HEAD``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np


class Role(str, Enum):
    """The use of a tensor, which decides whether migration quantizes it."""

    LINEAR = "linear"  # [out, in], multiplied by activations: int8 after migration
    HEAD = "head"  # the output projection [vocab, hidden]: int8 too unless the recipe says otherwise
    EMBEDDING = "embedding"  # looked up, stays float
    ROUTER = "router"  # [experts, in], chooses experts: stays float
    ABSORBED = "absorbed"  # [out, in], whose product with queries replaces that with activations: stays float
    CLASSIFIER = "classifier"  # [out, in] of a head that classifies: small, stays float
    VECTOR = "vector"  # weights and biases of norms, biases of matrices, other small tensors: stay float


@dataclass(frozen=True)
class Parameter:
    """One tensor of a checkpoint: its shape and role.

    ``transposed`` marks GPT-2's ``Conv1D`` weights, which are stored ``[in, out]``; ``shape`` is the shape as stored.
    A matrix with several ``inputs`` reads as many activations of the same width, side by side, each by a product of its
    own.
    """

    shape: tuple[int, ...]
    role: Role
    transposed: bool = False
    inputs: int = 1

    @property
    def input_width(self) -> int:
        """The width of an activation that the matrix reads."""
        return self.shape[0 if self.transposed else -1] // self.inputs


@dataclass(frozen=True)
class Fold:
    """A place where factors per channel can move from an activation into the matrices that read it.

    The model stays the same: dividing the ``producers`` (a norm's weight and bias, or a matrix, whose outputs are the
    channels, and its bias) cancels out with multiplying the inputs of the ``consumers``, all matrices that read the
    activation. The function between them must commute with positive factors per channel: a product, a ReLU,
    attention's mean of values.

    A producer's channels come in blocks of ``block``, and a consumer reads every block ``repeat`` times in a row,
    because several query heads share a value head.
    """

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    block: int = 1
    repeat: int = 1


@dataclass(frozen=True)
class StreamNorm:
    """An RMSNorm of the residual stream: ``weight``, to which ``offset`` is added, and all matrices that read it."""

    weight: str
    readers: tuple[str, ...]
    offset: float = 0.0


@dataclass(frozen=True)
class StreamTensors:
    """The tensors around a residual stream that can be rotated by an orthogonal matrix without changing the model.

    The stream starts as rows of ``tables``. ``writers`` are the matrices, and their biases, whose output is added to
    it. Only ``norms`` read it.
    """

    tables: tuple[str, ...]
    norms: tuple[StreamNorm, ...]
    writers: tuple[str, ...]


@dataclass(frozen=True)
class KeyHeads:
    """Query and key heads whose scores stay the same if keys are divided by what queries are multiplied by.

    ``query`` and ``key`` are a matrix and its bias, if any. Each key head serves ``group`` query heads in a row.
    ``pairs`` has a number for each element of a head, as it is stored: elements with equal numbers are rotated against
    each other and need the same factor.
    """

    query: tuple[str, ...]
    key: tuple[str, ...]
    pairs: tuple[int, ...]
    group: int = 1


@dataclass(frozen=True)
class GatedProduct:
    """``f(gate) * up``, the input of the matrix ``down``, with ``|f(y)| <= |y|`` and without biases.

    ``gate`` and ``up`` are matrices, or one with gate in its first half. They read an RMSNorm, or a LayerNorm without a
    bias, with the weight ``norm``, to which ``offset`` is added; a ``norm`` of None is one without a weight.
    """

    gate: str
    up: str
    down: str
    norm: str | None
    offset: float = 0.0


@dataclass(frozen=True)
class FusedExperts:
    """A tensor that may hold the matrices of all experts ``[experts, rows, in]``, or the biases ``[experts, rows]``.

    ``experts`` are the names of each expert's tensors, whose rows are stacked, or with ``interleaved`` alternate: the
    first row of each, then the second of each. ``transposed``: the matrices of the tensor are ``[in, rows]``.
    """

    experts: tuple[tuple[str, ...], ...]
    transposed: bool = False
    interleaved: bool = False

    @property
    def is_stacked(self) -> bool:
        """Whether the tensors of the experts lie one behind the other."""
        return not self.transposed and (not self.interleaved or len(self.experts[0]) == 1)

    def shape(self, parameters: Mapping[str, Parameter]) -> tuple[int, ...]:
        """The shape of the tensor."""
        shapes = [parameters[name].shape for name in self.experts[0]]
        expert = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (len(self.experts), *(expert[::-1] if self.transposed else expert))

    def parts(self, expert: np.ndarray) -> list[np.ndarray]:
        """One expert's tensors of the values that the fused tensor has of it."""
        rows, count = expert.T if self.transposed else expert, len(self.experts[0])
        return [rows[i::count] for i in range(count)] if self.interleaved else np.split(rows, count)

    def joined(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The fused tensor of its experts' ``tensors``."""
        found = []
        for names in self.experts:
            parts = [tensors[name] for name in names]
            rows = (
                np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]) if self.interleaved else np.concatenate(parts)
            )
            found.append(rows.T if self.transposed else rows)
        return np.ascontiguousarray(np.stack(found))


@dataclass(frozen=True)
class Spec:
    """All tensors of one model.

    ``parameters`` maps checkpoint names to parameters. ``tied`` maps a name that the checkpoint may omit to the name
    whose values it shares (the tied output head); a tensor of that name in the file is ignored. ``ignored`` are regular
    expressions (full match) for tensors that some writers include and no reader needs. ``foldable`` says where
    calibrated migration may move factors; each matrix is a consumer of one fold at most. ``aliases`` are regular
    expressions (full match) for names that some files use, each with the replacement that makes it the one used here.
    ``copies`` lists, for the name of a tensor, other names under which a file may hold the same values; a file that
    lacks the tensor may hold it under one of them alone. A tied tensor is always a copy. ``tied_if_absent`` is like
    ``tied``, but for tensors that a file may also hold with values of their own.
    ``rotatable`` are the matrices whose input ``w8a8-rotate`` rotates, the second of each feed-forward layer;
    the default recipe rotates every product's, without a statement.
    ``stream`` is the residual stream if it may be rotated, and ``value_heads`` are the folds of value heads, of
    ``block`` channels each, whose channels may be rotated. ``gated`` are the gated products with a known bound,
    and ``key_heads`` the heads whose keys may be scaled. ``fused`` maps the name of a tensor under which a file may
    hold the matrices of experts to what it holds. ``source_readers`` are the matrices of layers that decode that read
    an encoder's output: once for a source, and not in each step. ``drafting`` has the tensors of a layer that guesses
    the next tokens, which a file may have; of a file without it is None, and of others its tensors are among the
    ``parameters``.
    """

    parameters: Mapping[str, Parameter]
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    foldable: tuple[Fold, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied_if_absent: Mapping[str, str] = field(default_factory=dict)
    rotatable: tuple[str, ...] = ()
    stream: StreamTensors | None = None
    value_heads: tuple[Fold, ...] = ()
    gated: tuple[GatedProduct, ...] = ()
    key_heads: tuple[KeyHeads, ...] = ()
    fused: Mapping[str, FusedExperts] = field(default_factory=dict)
    source_readers: tuple[str, ...] = ()
    drafting: Spec | None = None

    def with_drafting(self) -> Spec:
        """The same for a file that has the tensors of :attr:`drafting`."""
        if self.drafting is None:
            return self
        parameters, fused = {**self.parameters, **self.drafting.parameters}, {**self.fused, **self.drafting.fused}
        return replace(self, parameters=parameters, fused=fused)


Tensors = dict[str, Parameter]


def linear(name: str, shape: tuple[int, int], bias: bool = False, transposed: bool = False) -> Tensors:
    """The matrix ``{name}.weight`` ``[out, in]``, or stored ``[in, out]`` if ``transposed``, and its bias if any."""
    stored = shape[::-1] if transposed else shape
    tensors = {f"{name}.weight": Parameter(stored, Role.LINEAR, transposed)}
    return tensors | {f"{name}.bias": Parameter(shape[:1], Role.VECTOR)} if bias else tensors


def norm(name: str, features: int, bias: bool = False) -> Tensors:
    """The weight ``{name}.weight`` ``[features]`` of a norm, and its bias if any."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{name}.{part}": Parameter((features,), Role.VECTOR) for part in parts}


def bias(name: str, features: int) -> Tensors:
    """The bias ``{name}.bias`` ``[features]``."""
    return {f"{name}.bias": Parameter((features,), Role.VECTOR)}


def router(name: str, shape: tuple[int, int], bias: bool = False) -> Tensors:
    """The matrix ``{name}.weight`` ``[experts, in]`` that chooses experts, and its bias if any."""
    tensors = {f"{name}.weight": Parameter(shape, Role.ROUTER)}
    return tensors | {f"{name}.bias": Parameter(shape[:1], Role.VECTOR)} if bias else tensors


def classifier(name: str, shape: tuple[int, int], bias: bool = False) -> Tensors:
    """The matrix ``{name}.weight`` ``[out, in]`` of a head that classifies, and its bias if any."""
    tensors = {f"{name}.weight": Parameter(shape, Role.CLASSIFIER)}
    return tensors | {f"{name}.bias": Parameter(shape[:1], Role.VECTOR)} if bias else tensors


def embedding(name: str, shape: tuple[int, int]) -> Tensors:
    """The table ``{name}.weight`` ``[rows, features]``."""
    return {f"{name}.weight": Parameter(shape, Role.EMBEDDING)}


def head(name: str, shape: tuple[int, int]) -> Tensors:
    """The output projection ``{name}.weight`` ``[vocab, features]``."""
    return {f"{name}.weight": Parameter(shape, Role.HEAD)}


def weights_of(*names: str) -> tuple[str, ...]:
    """The tensors' names of several matrices or norms."""
    return tuple(f"{name}.weight" for name in names)
