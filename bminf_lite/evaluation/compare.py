"""Comparing a model with a reference, its float original as a rule: in what they predict, and layer by layer.

Both go through the same tokens side by side, one layer of each in memory at a time, so neither has to fit. Two
questions are asked of a layer. *Accumulated*: how far is its output from the reference's, after everything before it?
*Own*: how far is it if its input is the reference's? The second finds the layer that spoils the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import backend
from ..backend.base import Backend
from ..errors import CheckpointError, UsageError, listed
from ..layers.recording import LinearCall
from ..quantize.stages import HiddenState
from ..text.checkpoint_files import load_tokenizer
from .blockwise import Batch, LayerwiseCheckpoint, batch_windows
from .comparison import BlockReport, Comparison, LinearReport
from .corpus import Window
from .divergence import Divergence, DivergenceAccumulator
from .fidelity import ActivationStatsAccumulator, FidelityAccumulator, estimate_channel_factors, undo_channel_factors

LOGIT_ROWS = 256

Progress = Callable[[int, int, str], None]
"""Called with the parts of the model that are done, all of them, and the one at work."""


def check_pair(model: Path, reference: Path, texts: Sequence[str]) -> None:
    """Raise ``UsageError`` unless the two models read ``texts`` alike and have the same shape; reads no weights."""
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
            tokenizers = [load_tokenizer(p, ours.config.vocab_size) for p in (model, reference)]
            for text in texts:
                if tokenizers[0].encode(text) != tokenizers[1].encode(text):
                    problems.append("the tokenizers read the text differently: another vocabulary, or other settings")
                    break
    if problems:
        title = f"{model} cannot be compared with {reference}; give the checkpoint that it was made from"
        raise UsageError(listed(title, problems))


def compare(
    model: Path,
    reference: Path,
    windows: Sequence[Window],
    device: str = "auto",
    memory_limit: int | str | None = None,
    layers: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the checkpoint in the folder ``model`` with ``reference`` on ``windows`` of tokens.

    Without ``layers`` only the predictions are compared. Raises ``CheckpointError``, ``DeviceError``, ``OutOfMemory``.
    """
    batches = batch_windows(windows)
    with (
        closing(backend.create(device, memory_limit)) as ops,
        LayerwiseCheckpoint(model, ops) as ours,
        LayerwiseCheckpoint(reference, ops) as theirs,
    ):
        run = _ModelPair(ours, theirs, batches, layers)
        parts = [*ours.layerwise.names, "output head"]
        blocks = []
        for layer, part in enumerate(parts):
            if progress:
                progress(layer, len(parts), part)
            if layer < len(ours.layerwise.names):
                blocks.append(run.block(layer))
        divergence, head = run.head()
        if progress:
            progress(len(parts), len(parts), "done")
        return Comparison(divergence, tuple(b for b in blocks if b is not None), head, ops.name)


class _ModelPair:
    """Two models on their way through the same batches; holds both residual streams."""

    def __init__(
        self, model: LayerwiseCheckpoint, reference: LayerwiseCheckpoint, batches: Sequence[Batch], layers: bool
    ):
        self.model = model
        self.reference = reference
        self.batches = batches
        self.layers = layers
        self.theirs = reference.start(batches)
        self.ours = model.start(batches)
        (_, x), (_, y) = (states[0].residual.shape for states in (self.ours, self.theirs))
        if x != y:
            raise CheckpointError(f"{model.path}: {x} features, but the reference has {y}")

    def block(self, layer: int) -> BlockReport | None:
        """Take both streams through a layer."""
        if not self.layers:
            self._advance(self.reference, self.theirs, layer)
            self._advance(self.model, self.ours, layer)
            return None
        ours, theirs = self.model.layerwise.build(layer), self.reference.layerwise.build(layer)
        own, accumulated = FidelityAccumulator(), FidelityAccumulator()
        comparator = _LinearComparator(self.model, self.reference)
        for i, batch in enumerate(self.batches):
            reference_input = self.theirs[i]
            with comparator.reference_run():
                self.theirs[i] = self.reference.run(theirs, reference_input, batch)
            with comparator.own_run():
                own.add(self.theirs[i].residual, self.model.run(ours, reference_input, batch).residual)
            with comparator.accumulated_run():
                self.ours[i] = self.model.run(ours, self.ours[i], batch)
            accumulated.add(self.theirs[i].residual, self.ours[i].residual)
        return BlockReport(layer, own.result(), accumulated.result(), comparator.result())

    def head(self) -> tuple[Divergence, tuple[LinearReport, ...]]:
        """What both predict from their streams, and the products of the output."""
        theirs, ours = self.reference.layerwise.output(), self.model.layerwise.output()
        comparator = _LinearComparator(self.model, self.reference)
        total = DivergenceAccumulator()
        for i, batch in enumerate(self.batches):
            for first in range(0, len(batch.rows), LOGIT_ROWS):
                rows = batch.rows[first : first + LOGIT_ROWS]
                reference_input = self.theirs[i].residual[rows]
                with comparator.reference_run(self.layers):
                    expected = self.reference.rows(theirs, reference_input)
                if self.layers:
                    with comparator.own_run():
                        self.model.rows(ours, reference_input)
                with comparator.accumulated_run(self.layers):
                    got = self.model.rows(ours, self.ours[i].residual[rows])
                total.add(expected, got, batch.tokens[rows + 1])
        return total.result(), comparator.result()

    def _advance(self, model: LayerwiseCheckpoint, states: list[HiddenState], layer: int) -> None:
        layer_fn = model.layerwise.build(layer)
        for i, batch in enumerate(self.batches):
            states[i] = model.run(layer_fn, states[i], batch)


@dataclass(frozen=True)
class _ReferenceCall:
    """One product of the reference in the present batch: fp32 ``[T, in]`` and ``[T, out]``."""

    tensors: tuple[str, ...]
    x: np.ndarray
    y: np.ndarray


class _LinearStats:
    """What is known of one product."""

    def __init__(self, tensors: tuple[str, ...]):
        self.tensors = tensors
        self.own, self.accumulated = FidelityAccumulator(), FidelityAccumulator()
        self.input, self.reference_input = ActivationStatsAccumulator(), ActivationStatsAccumulator()


class _LinearComparator:
    """Pairs the products of the two models, in the order in which they come, and measures them."""

    def __init__(self, model: LayerwiseCheckpoint, reference: LayerwiseCheckpoint):
        self.model = model
        self.reference = reference
        self.ops: Backend = model.ops
        self._stats: list[_LinearStats] = []
        self._reference_calls: list[_ReferenceCall] = []

    def result(self) -> tuple[LinearReport, ...]:
        """All linear layers that were compared."""
        return tuple(
            LinearReport(
                w.tensors, self._scheme(w.tensors), w.own.result(), w.accumulated.result(), w.input.result(),
                w.reference_input.result(),
            )
            for w in self._stats
        )  # fmt: skip

    @contextmanager
    def reference_run(self, watch: bool = True) -> Iterator[None]:
        """While the reference computes: remember its inputs and outputs."""
        self._reference_calls.clear()

        def record(call: LinearCall) -> None:
            x, y = self._values(call)
            if len(self._reference_calls) == len(self._stats):
                self._stats.append(_LinearStats(call.tensors))
            self._stats[len(self._reference_calls)].reference_input.add(x)
            self._reference_calls.append(_ReferenceCall(call.tensors, x, y))

        with self._observing(self.reference, record if watch else None):
            yield

    @contextmanager
    def own_run(self) -> Iterator[None]:
        """While the model computes from the reference's stream: the error of each product alone.

        What the product gets in this run has other errors in it already. So it is given the reference's input, in the
        units that this run shows.
        """
        pairs = self._pairs()

        def record(call: LinearCall) -> None:
            stats, reference = next(pairs)
            x = np.array(self.ops.host(call.x), np.float32)
            factors = estimate_channel_factors(x, reference.x)
            reference_input = reference.x if factors is None else (reference.x * factors).astype(np.float32)
            y = self.ops.host(self.ops.linear(self.ops.array(reference_input), call.weight, fp32=True))
            stats.own.add(reference.y, undo_channel_factors(reference.y, y))

        with self._observing(self.model, record):
            yield

    @contextmanager
    def accumulated_run(self, watch: bool = True) -> Iterator[None]:
        """While the model computes from its own stream: the error of each product after all before it."""
        pairs = self._pairs()

        def record(call: LinearCall) -> None:
            stats, reference = next(pairs)
            x, y = self._values(call)
            stats.input.add(x)
            stats.accumulated.add(reference.y, undo_channel_factors(reference.y, y))

        with self._observing(self.model, record if watch else None):
            yield

    def _pairs(self) -> Iterator[tuple[_LinearStats, _ReferenceCall]]:
        yield from zip(self._stats, self._reference_calls, strict=True)

    def _values(self, call: LinearCall) -> tuple[np.ndarray, np.ndarray]:
        """A product's input and output, fp32 on the host."""
        x = np.array(self.ops.host(call.x), np.float32)
        return x, np.asarray(self.ops.host(self.ops.linear(call.x, call.weight, fp32=True)))

    def _scheme(self, tensors: tuple[str, ...]) -> str:
        return ", ".join(sorted({self.model.schemes[name] for name in tensors}))

    @contextmanager
    def _observing(self, model: LayerwiseCheckpoint, record: Callable[[LinearCall], None] | None) -> Iterator[None]:
        model.observer = record
        try:
            yield
        finally:
            model.observer = None
