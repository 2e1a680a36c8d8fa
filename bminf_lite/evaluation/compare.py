"""Compare a model with a reference, usually its float original: their predictions, and their outputs layer by layer.

Both models process the same tokens side by side with one layer of each in memory, so neither model has to fit. Each
layer and each product has two errors. The *accumulated* error is that of its output when the model's own activations
go in. The *own* error is that of its output when the reference's activations go in; it shows which layer causes the
error that later layers inherit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..backend.base import Backend
from ..backend.host_threads import map_in_threads
from ..backend.quantization import HostWeight
from ..checkpoint.opened_model import ModelSource
from ..errors import CheckpointError, UsageError, listed
from ..layers.recording import LinearCall, Observer
from ..quantize.stages import HiddenState, LayerFn
from ..text.checkpoint_files import load_tokenizer
from .blockwise import Batch, LayerwiseCheckpoint, batch_windows
from .channel_factors import NO_FACTORS, ChannelFactors, find_channel_factors
from .corpus import Window
from .divergence import Divergence, DivergenceAccumulator
from .fidelity import (
    ActivationStats,
    ActivationStatsAccumulator,
    Fidelity,
    FidelityAccumulator,
)

LOGIT_ROWS = 256
"""Rows whose logits are in memory at once."""

Progress = Callable[[int, int, str], None]
"""Called with the number of parts that are done, the number of all parts, and the name of the current part."""

FindFactors = Callable[[tuple[str, ...], np.ndarray, np.ndarray], ChannelFactors]
"""Called with the names of a product's matrices, and an input of the model's product and of the reference's."""


@dataclass(frozen=True)
class LinearReport:
    """One product: the matrices stacked in it, how they are quantized, its errors, and its input.

    ``input`` describes the activations that the model multiplies, ``reference_input`` those of the reference; smoothing
    makes them differ.
    """

    tensors: tuple[str, ...]
    scheme: str
    own: Fidelity
    accumulated: Fidelity
    input: ActivationStats
    reference_input: ActivationStats

    @property
    def name(self) -> str:
        """The matrices' names in short: ``model.layers.0.self_attn.{q,k,v}_proj``."""
        return brace_join([tensor.removesuffix(".weight") for tensor in self.tensors])


@dataclass(frozen=True)
class BlockReport:
    """One layer of the model: the errors of the residual stream after it, and the products in it."""

    layer: int
    own: Fidelity
    accumulated: Fidelity
    linears: tuple[LinearReport, ...]


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`. ``blocks`` and ``head`` are empty if layers were not compared."""

    divergence: Divergence
    blocks: tuple[BlockReport, ...]
    head: tuple[LinearReport, ...]
    device: str

    def __str__(self) -> str:
        return self.divergence.summary()

    @property
    def linears(self) -> list[LinearReport]:
        """All products, in the order in which the model computes them."""
        return [linear for block in self.blocks for linear in block.linears] + list(self.head)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; the infinite signal to noise of equal outputs is None."""
        blocks = [{"layer": b.layer, "own": asdict(b.own), "accumulated": asdict(b.accumulated)} for b in self.blocks]
        linears = [{"name": linear.name, **asdict(linear)} for linear in self.linears]
        found: dict[str, Any] = {"device": self.device, **self.divergence.to_dict()}
        return {key: nan_to_none(value) for key, value in (found | {"blocks": blocks, "linears": linears}).items()}


def check_pair(model: Path, reference: Path, texts: Sequence[str]) -> None:
    """Raise ``UsageError`` unless both models have the same shape and tokenize ``texts`` alike; reads no weights."""
    with (
        closing(backend.create("cpu")) as ops,
        LayerwiseCheckpoint(model, ops) as ours,
        LayerwiseCheckpoint(reference, ops) as theirs,
    ):
        problems = [
            f"{what} is {mine!r}, but the reference's is {other!r}"
            for what, mine, other in (
                ("model_type", ours.checkpoint.config["model_type"], theirs.checkpoint.config["model_type"]),
                ("the vocabulary's size", ours.config.vocab_size, theirs.config.vocab_size),
                ("the number of layers", len(ours.layerwise.names), len(theirs.layerwise.names)),
                ("hidden_size", ours.config.hidden_size, theirs.config.hidden_size),
            )
            if mine != other
        ]
        if not problems:
            one, other = (load_tokenizer(p, ours.config.vocab_size) for p in (model, reference))
            if any(one.encode(text) != other.encode(text) for text in texts):
                problems.append("the tokenizers read the text differently: their vocabularies or settings differ")
    if problems:
        title = f"{model} cannot be compared with {reference}; give the checkpoint that it was made from"
        raise UsageError(listed(title, problems))


def compare(
    model: Path,
    reference: Path | ModelSource,
    windows: Sequence[Window],
    device: str = "auto",
    memory_limit: int | str | None = None,
    layers: bool = True,
    progress: Progress | None = None,
    int8_cache: bool = False,
    known: Sequence[tuple[Batch, np.ndarray]] = (),
) -> Comparison:
    """Compare the checkpoint in the folder ``model`` with the one in ``reference`` on ``windows`` of tokens.

    Without ``layers`` only the predictions are compared. With ``int8_cache`` the model, not the reference, stores keys
    and values in int8. ``known``, without ``layers``, are batches that hold the first of ``windows``, and the
    reference's residual stream of each after the last layer, fp32 ``[T, features]``, which is not computed again.
    Raises ``CheckpointError``, ``DeviceError``, ``OutOfMemory``.
    """
    assert not (known and layers)
    rest = windows[sum(len(batch.windows) for batch, _ in known) :]
    batches = [*(batch for batch, _ in known), *batch_windows(rest)]
    progress = progress or (lambda done, total, part: None)
    with (
        closing(backend.create(device, memory_limit)) as ops,
        Pair.open(model, reference, ops, layers, int8_cache) as pair,
    ):
        ours, theirs = pair.model, pair.reference
        their_states, our_states = theirs.start(batches), ours.start(batches)
        (_, x), (_, y) = (states[0].residual.shape for states in (our_states, their_states))
        del their_states[: len(known)]
        if x != y:
            raise CheckpointError(f"{model}: {x} features, but the reference has {y}")
        parts = [*ours.layerwise.names, "output head"]
        blocks = []
        for layer, part in enumerate(parts[:-1]):
            progress(layer, len(parts), part)
            if layers:
                blocks.append(_compare_layer(layer, pair, batches, our_states, their_states))
            else:
                if not their_states:
                    our_states = _advanced(layer, (ours, batches, our_states), is_alone=True)
                    continue
                runs = (theirs, batches[len(known) :], their_states), (ours, batches, our_states)
                their_states, our_states = map_in_threads(ops, partial(_advanced, layer), runs)
        progress(len(parts) - 1, len(parts), parts[-1])
        their_states = [*(HiddenState(residual) for _, residual in known), *their_states]
        divergence, head = _compare_head(pair, batches, our_states, their_states, layers)
        progress(len(parts), len(parts), "done")
        return Comparison(divergence, tuple(blocks), head, ops.name)


Matrices = dict[tuple[str, ...], Sequence[HostWeight]]
"""The matrices of products, by their names, stacked along their outputs."""


class Pair:
    """A model and its reference, and the matrices of the layer of each that was built last."""

    def __init__(self, model: LayerwiseCheckpoint, reference: LayerwiseCheckpoint, matrices: tuple[Matrices, Matrices]):
        self.model = model
        self.reference = reference
        self._matrices = matrices

    @classmethod
    @contextmanager
    def open(
        cls, model: Path, reference: Path | ModelSource, ops: Backend, layers: bool, int8_cache: bool
    ) -> Iterator[Pair]:
        """Open both, and close them at the end.

        If ``layers`` are compared, a float reference is rotated as the model was, so that the values between two layers
        mean the same.
        """
        ours: Matrices = {}
        theirs: Matrices = {}
        with LayerwiseCheckpoint(model, ops, on_weight=ours.__setitem__, int8_cache=int8_cache) as opened:
            rotated = False
            if layers and opened.checkpoint.manifest.get("rotated_offline"):
                with LayerwiseCheckpoint(reference, ops) as plain:
                    rotated = plain.checkpoint.quantization is None
            with LayerwiseCheckpoint(reference, ops, rotated, theirs.__setitem__) as other:
                yield cls(opened, other, (ours, theirs))

    def build(self, layer: int) -> tuple[LayerFn, LayerFn]:
        """A layer of the model, and of the reference."""
        for matrices in self._matrices:
            matrices.clear()
        return self.model.layerwise.build(layer), self.reference.layerwise.build(layer)

    def channel_factors(self, tensors: tuple[str, ...], x: np.ndarray, reference_x: np.ndarray) -> ChannelFactors:
        """The factors of a product with an input fp32 ``[T, in]`` of both."""
        ours, theirs = (matrices.get(tensors) for matrices in self._matrices)
        return find_channel_factors(ours, theirs, x, reference_x) if ours and theirs else NO_FACTORS


def _advanced(
    layer: int,
    run: tuple[LayerwiseCheckpoint, Sequence[Batch], Sequence[HiddenState]],
    is_alone: bool = False,
) -> list[HiddenState]:
    """The states of a checkpoint's batches after one layer. Batches of a run that ``is_alone`` share the threads."""
    checkpoint, batches, states = run
    layer_fn = checkpoint.layerwise.build(layer)

    def advance(pair: tuple[HiddenState, Batch]) -> HiddenState:
        return checkpoint.run(layer_fn, *pair)

    pairs = zip(states, batches, strict=True)
    return map_in_threads(checkpoint.ops, advance, pairs) if is_alone else list(map(advance, pairs))


def _compare_layer(
    layer: int,
    pair: Pair,
    batches: Sequence[Batch],
    ours: list[HiddenState],
    theirs: list[HiddenState],
) -> BlockReport:
    """Advance both models' states by one layer, and measure its errors."""
    model, reference = pair.model, pair.reference
    layer_fn, reference_fn = pair.build(layer)
    own, accumulated = FidelityAccumulator(), FidelityAccumulator()
    linears: list[LinearAccumulator] = []
    for i, batch in enumerate(batches):
        reference_input = theirs[i]
        theirs[i] = reference.run(reference_fn, reference_input, batch, reference_observer(linears, pair))
        own_output = model.run(layer_fn, reference_input, batch, observer(linears, LinearAccumulator.add_own))
        own.add(theirs[i].residual, own_output.residual)
        ours[i] = model.run(layer_fn, ours[i], batch, observer(linears, LinearAccumulator.add_accumulated))
        accumulated.add(theirs[i].residual, ours[i].residual)
    reports = tuple(linear.result(model.schemes) for linear in linears)
    return BlockReport(layer, own.result(), accumulated.result(), reports)


def _compare_head(
    pair: Pair,
    batches: Sequence[Batch],
    ours: Sequence[HiddenState],
    theirs: Sequence[HiddenState],
    layers: bool,
) -> tuple[Divergence, tuple[LinearReport, ...]]:
    """Compare the predictions, and with ``layers`` the errors of the head's products."""
    model, reference = pair.model, pair.reference
    reference_fn, head_fn = reference.layerwise.output(), model.layerwise.output()
    total = DivergenceAccumulator()
    linears: list[LinearAccumulator] = []
    for batch, our_state, their_state in zip(batches, ours, theirs, strict=True):
        for first in range(0, len(batch.rows), LOGIT_ROWS):
            rows = batch.rows[first : first + LOGIT_ROWS]
            x, reference_input = our_state.residual[rows], their_state.residual[rows]
            if layers:
                expected = reference.rows(reference_fn, reference_input, reference_observer(linears, pair))
                model.rows(head_fn, reference_input, observer(linears, LinearAccumulator.add_own))
                got = model.rows(head_fn, x, observer(linears, LinearAccumulator.add_accumulated))
            else:
                expected, got = reference.rows(reference_fn, reference_input), model.rows(head_fn, x)
            total.add(expected, got, batch.tokens[rows + 1])
    return total.result(), tuple(linear.result(model.schemes) for linear in linears)


class LinearAccumulator:
    """Collects the errors and inputs of one product, batch by batch: first the reference's call, then the model's."""

    def __init__(self, ops: Backend, tensors: tuple[str, ...], find_factors: FindFactors):
        self.ops = ops
        self.tensors = tensors
        self._find_factors = find_factors
        self._factors: ChannelFactors | None = None
        self._own, self._accumulated = FidelityAccumulator(), FidelityAccumulator()
        self._input, self._reference_input = ActivationStatsAccumulator(), ActivationStatsAccumulator()

    def add_reference(self, call: LinearCall) -> None:
        """The reference's product, with whose input and output the model's calls are compared."""
        self._x, self._y, self._rows = self._host(call.x), self._output(call), call.rows
        self._reference_input.add(self._x)

    def add_own(self, call: LinearCall) -> None:
        """The model's product in a layer that was given the reference's input.

        ``call.x`` already has the errors of earlier products. So the product is computed for the reference's input
        instead, scaled by channel as the model's weights say.
        """
        if self._factors is None:
            ours, theirs = self._common(call)
            self._factors = self._find_factors(self.tensors, self._host(call.x)[ours], self._x[theirs])
        x = self.ops.array(self._factors.to_model(self._x))
        y = self.ops.host(self.ops.linear(x, call.weight, fp32=True))
        self._own.add(self._y, self._factors.to_reference(y))

    def add_accumulated(self, call: LinearCall) -> None:
        """The model's product in a layer that was given the model's own input.

        Of an expert, only tokens count that both models gave to it.
        """
        self._input.add(self._host(call.x))
        assert self._factors is not None
        ours, theirs = self._common(call)
        self._accumulated.add(self._y[theirs], self._factors.to_reference(self._output(call))[ours])

    def _common(self, call: LinearCall) -> tuple[Any, Any]:
        """The rows of the call, and of the reference's call, that are of the same tokens."""
        if call.rows is None or self._rows is None:
            return slice(None), slice(None)
        _, ours, theirs = np.intersect1d(call.rows, self._rows, assume_unique=True, return_indices=True)
        return ours, theirs

    def result(self, schemes: dict[str, str]) -> LinearReport:
        """The report of everything that was added; ``schemes`` are those of the model's matrices."""
        scheme = ", ".join(sorted({schemes[name] for name in self.tensors}))
        return LinearReport(
            self.tensors,
            scheme,
            self._own.result(),
            self._accumulated.result(),
            self._input.result(),
            self._reference_input.result(),
        )

    def _host(self, x: Any) -> np.ndarray:
        return np.array(self.ops.host(x), np.float32)

    def _output(self, call: LinearCall) -> np.ndarray:
        """fp32 ``[T, out]``, whatever type the model stores it in."""
        return np.asarray(self.ops.host(self.ops.linear(call.x, call.weight, fp32=True)))


def reference_observer(linears: list[LinearAccumulator], pair: Pair) -> Observer:
    """An observer of one run of the reference: the first run appends an accumulator for each product."""
    count = 0

    def observe(call: LinearCall) -> None:
        nonlocal count
        if count == len(linears):
            linears.append(LinearAccumulator(pair.model.ops, call.tensors, pair.channel_factors))
        linears[count].add_reference(call)
        count += 1

    return observe


def observer(linears: Sequence[LinearAccumulator], add: Callable[[LinearAccumulator, LinearCall], None]) -> Observer:
    """An observer of one run of the model: both models have the same products in the same order."""
    remaining = iter(linears)
    return lambda call: add(next(remaining), call)


def brace_join(names: Sequence[str], separators: str = "._") -> str:
    """Names that differ in places, as one: ``a.q_proj``, ``a.k_proj`` -> ``a.{q,k}_proj``."""
    if len(set(names)) == 1:
        return names[0]
    cut = [name.split(separators[0]) for name in names] if separators else []
    if len({len(parts) for parts in cut}) != 1:
        return f"{{{','.join(names)}}}"
    return separators[0].join(brace_join(parts, separators[1:]) for parts in zip(*cut, strict=True))


def nan_to_none(value: Any) -> Any:
    """``value`` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
