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
from ..layers.recording import Product
from ..quantize.stages import State
from ..text.tokenizer import Tokenizer
from .blockwise import Batch, Blockwise, batches
from .comparison import BlockReport, Comparison, LinearReport
from .corpus import Window
from .divergence import Divergence, DivergenceSum
from .fidelity import FidelitySum, ProfileSum, folded_factors, unfolded

LOGIT_ROWS = 256

Progress = Callable[[int, int, str], None]
"""Called with the parts of the model that are done, all of them, and the one at work."""


def check_pair(model: Path, reference: Path, texts: Sequence[str]) -> None:
    """Raise ``UsageError`` unless the two models read ``texts`` alike and have the same shape; reads no weights."""
    with closing(backend.create("cpu")) as ops, Blockwise(model, ops) as ours, Blockwise(reference, ops) as theirs:
        problems = [
            f"{what} is {mine!r}, but the reference's is {other!r}"
            for what, mine, other in (
                ("model_type", ours.checkpoint.config["model_type"], theirs.checkpoint.config["model_type"]),
                ("the vocabulary's size", ours.config.vocab_size, theirs.config.vocab_size),
                ("the number of layers", len(ours.stages.names), len(theirs.stages.names)),
                ("hidden_size", ours.config.hidden_size, theirs.config.hidden_size),
            )
            if mine != other
        ]
        if not problems:
            tokenizers = [Tokenizer.load(p, ours.config.vocab_size) for p in (model, reference)]
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
    groups = batches(windows)
    with (
        closing(backend.create(device, memory_limit)) as ops,
        Blockwise(model, ops) as ours,
        Blockwise(reference, ops) as theirs,
    ):
        run = _Run(ours, theirs, groups, layers)
        parts = [*ours.stages.names, "output head"]
        blocks = []
        for layer, part in enumerate(parts):
            if progress:
                progress(layer, len(parts), part)
            if layer < len(ours.stages.names):
                blocks.append(run.block(layer))
        divergence, head = run.head()
        if progress:
            progress(len(parts), len(parts), "done")
        return Comparison(divergence, tuple(b for b in blocks if b is not None), head, ops.name)


class _Run:
    """Two models on their way through the same batches; holds both residual streams."""

    def __init__(self, model: Blockwise, reference: Blockwise, groups: Sequence[Batch], layers: bool):
        self.model = model
        self.reference = reference
        self.groups = groups
        self.layers = layers
        self.theirs = reference.start(groups)
        self.ours = model.start(groups)
        (_, x), (_, y) = (states[0].residual.shape for states in (self.ours, self.theirs))
        if x != y:
            raise CheckpointError(f"{model.path}: {x} features, but the reference has {y}")

    def block(self, layer: int) -> BlockReport | None:
        """Take both streams through a layer."""
        if not self.layers:
            self._advance(self.reference, self.theirs, layer)
            self._advance(self.model, self.ours, layer)
            return None
        ours, theirs = self.model.stages.build(layer), self.reference.stages.build(layer)
        own, accumulated = FidelitySum(), FidelitySum()
        watch = _Watch(self.model, self.reference)
        for i, batch in enumerate(self.groups):
            given = self.theirs[i]
            with watch.reference_run():
                self.theirs[i] = self.reference.run(theirs, given, batch)
            with watch.own_run():
                own.add(self.theirs[i].residual, self.model.run(ours, given, batch).residual)
            with watch.accumulated_run():
                self.ours[i] = self.model.run(ours, self.ours[i], batch)
            accumulated.add(self.theirs[i].residual, self.ours[i].residual)
        return BlockReport(layer, own.result(), accumulated.result(), watch.result())

    def head(self) -> tuple[Divergence, tuple[LinearReport, ...]]:
        """What both predict from their streams, and the products of the output."""
        theirs, ours = self.reference.stages.output(), self.model.stages.output()
        watch = _Watch(self.model, self.reference)
        total = DivergenceSum()
        for i, batch in enumerate(self.groups):
            for first in range(0, len(batch.rows), LOGIT_ROWS):
                rows = batch.rows[first : first + LOGIT_ROWS]
                given = self.theirs[i].residual[rows]
                with watch.reference_run(self.layers):
                    expected = self.reference.rows(theirs, given)
                if self.layers:
                    with watch.own_run():
                        self.model.rows(ours, given)
                with watch.accumulated_run(self.layers):
                    got = self.model.rows(ours, self.ours[i].residual[rows])
                total.add(expected, got, batch.tokens[rows + 1])
        return total.result(), watch.result()

    def _advance(self, model: Blockwise, states: list[State], layer: int) -> None:
        stage = model.stages.build(layer)
        for i, batch in enumerate(self.groups):
            states[i] = model.run(stage, states[i], batch)


@dataclass(frozen=True)
class _Seen:
    """One product of the reference in the present batch: fp32 ``[T, in]`` and ``[T, out]``."""

    tensors: tuple[str, ...]
    x: np.ndarray
    y: np.ndarray


class _Watched:
    """What is known of one product."""

    def __init__(self, tensors: tuple[str, ...]):
        self.tensors = tensors
        self.own, self.accumulated = FidelitySum(), FidelitySum()
        self.input, self.reference_input = ProfileSum(), ProfileSum()


class _Watch:
    """Pairs the products of the two models, in the order in which they come, and measures them."""

    def __init__(self, model: Blockwise, reference: Blockwise):
        self.model = model
        self.reference = reference
        self.ops: Backend = model.ops
        self._watched: list[_Watched] = []
        self._seen: list[_Seen] = []

    def result(self) -> tuple[LinearReport, ...]:
        """All products that were watched."""
        return tuple(
            LinearReport(
                w.tensors, self._scheme(w.tensors), w.own.result(), w.accumulated.result(), w.input.result(),
                w.reference_input.result(),
            )
            for w in self._watched
        )  # fmt: skip

    @contextmanager
    def reference_run(self, watch: bool = True) -> Iterator[None]:
        """While the reference computes: remember its inputs and outputs."""
        self._seen.clear()

        def see(product: Product) -> None:
            x, y = self._values(product)
            if len(self._seen) == len(self._watched):
                self._watched.append(_Watched(product.tensors))
            self._watched[len(self._seen)].reference_input.add(x)
            self._seen.append(_Seen(product.tensors, x, y))

        with self._observing(self.reference, see if watch else None):
            yield

    @contextmanager
    def own_run(self) -> Iterator[None]:
        """While the model computes from the reference's stream: the error of each product alone.

        What the product gets in this run has other errors in it already. So it is given the reference's input, in the
        units that this run shows.
        """
        place = self._places()

        def see(product: Product) -> None:
            watched, seen = next(place)
            x = np.array(self.ops.host(product.x), np.float32)
            factors = folded_factors(x, seen.x)
            given = seen.x if factors is None else (seen.x * factors).astype(np.float32)
            y = self.ops.host(self.ops.linear(self.ops.array(given), product.weight, fp32=True))
            watched.own.add(seen.y, unfolded(seen.y, y))

        with self._observing(self.model, see):
            yield

    @contextmanager
    def accumulated_run(self, watch: bool = True) -> Iterator[None]:
        """While the model computes from its own stream: the error of each product after all before it."""
        place = self._places()

        def see(product: Product) -> None:
            watched, seen = next(place)
            x, y = self._values(product)
            watched.input.add(x)
            watched.accumulated.add(seen.y, unfolded(seen.y, y))

        with self._observing(self.model, see if watch else None):
            yield

    def _places(self) -> Iterator[tuple[_Watched, _Seen]]:
        yield from zip(self._watched, self._seen, strict=True)

    def _values(self, product: Product) -> tuple[np.ndarray, np.ndarray]:
        """A product's input and output, fp32 on the host."""
        x = np.array(self.ops.host(product.x), np.float32)
        return x, np.asarray(self.ops.host(self.ops.linear(product.x, product.weight, fp32=True)))

    def _scheme(self, tensors: tuple[str, ...]) -> str:
        return ", ".join(sorted({self.model.schemes[name] for name in tensors}))

    @contextmanager
    def _observing(self, model: Blockwise, see: Callable[[Product], None] | None) -> Iterator[None]:
        model.observer = see
        try:
            yield
        finally:
            model.observer = None
