"""Quantizations of one float model, made in memory and compared with it on the same tokens, a layer at a time.

The divergence is that of the model that a migration would write, and nothing is written. All candidates of a call pass
through a layer before the next one is built. The float model runs once: its residual stream after the last layer is
kept for later calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.host_threads import map_in_threads
from ..checkpoint.migrate import narrowed_tables
from ..checkpoint.opened_model import OpenedModel
from ..checkpoint.recipe import Recipe
from ..checkpoint.weight_rewrite import WeightRewrite
from ..layers.loading import Weights
from ..quantize.calibration import Progress
from ..quantize.rewritten_weights import RewrittenWeights, SharedWeights
from ..quantize.stages import HiddenState, LayerwiseModel
from .blockwise import Batch, batch_windows
from .corpus import Window
from .outputs import Accumulator, Result, outputs_of

COMPARED_BATCH_TOKENS = 1024
"""The most tokens of a batch: a search measures most candidates alone, and then each core of a CPU takes a batch."""


@dataclass(frozen=True)
class Candidate:
    """A quantization of a float model: a recipe's schemes, and the rewrites of tensors by name."""

    recipe: Recipe
    rewrites: Mapping[str, WeightRewrite]


class CandidateComparison:
    """Compares quantizations of the open float ``model`` with it on ``windows`` of tokens, on ``ops``.

    With ``reference`` they are compared with that model, of which ``model`` may be a rotated form: its rotated
    embedding is rounded, which is a part of what the quantization costs.
    """

    def __init__(
        self, model: OpenedModel, windows: Sequence[Window], ops: Backend, reference: OpenedModel | None = None
    ):
        self.model = model
        self.reference = reference or model
        self.ops = ops
        self.batches = batch_windows(windows, COMPARED_BATCH_TOKENS)
        self.outputs = outputs_of(self.reference)
        self._shared = SharedWeights(model.weights())
        self._narrowed = narrowed_tables(model)
        self._expected: list[np.ndarray] = []

    def known(self) -> list[tuple[Batch, np.ndarray]]:
        """Each batch, and the float model's residual stream after the last layer, as far as it was computed."""
        return list(zip(self.batches, self._expected, strict=bool(self._expected)))

    def divergences(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[Result]:
        """The divergence of each candidate. ``progress`` is called with layers."""
        is_same = self.reference is self.model
        float_model = self._layerwise(self._shared if is_same else self.reference.weights())
        runs = [self._layerwise(self._weights(candidate)) for candidate in candidates]
        needs_reference = not self._expected
        advancing = ([float_model] if needs_reference else []) + runs
        states = [self._start(run) for run in advancing]
        parts = [*float_model.names, "output head"]
        for layer, part in enumerate(parts[:-1]):
            if progress:
                progress(layer, len(parts), part)
            if len(advancing) == 1:
                states = [self._advanced(layer, (advancing[0], states[0]), is_alone=True)]
            else:
                states = map_in_threads(self.ops, partial(self._advanced, layer), zip(advancing, states, strict=True))
            self._shared.clear()
        if progress:
            progress(len(parts) - 1, len(parts), parts[-1])
        residuals = [[state.residual for state in found] for found in states]
        if needs_reference:
            self._expected, *residuals = residuals
        totals = self._compare_heads(float_model, runs, residuals)
        if progress:
            progress(len(parts), len(parts), "done")
        return [total.result() for total in totals]

    def _weights(self, candidate: Candidate) -> Weights:
        return RewrittenWeights(self._shared, self.model.spec, candidate.recipe, candidate.rewrites, self._narrowed)

    def _layerwise(self, weights: Weights) -> LayerwiseModel:
        config = self.model.config
        return LayerwiseModel(self.model.architecture.ModelBuilder(config, weights, self.ops), config, self.ops)

    def _start(self, run: LayerwiseModel) -> list[HiddenState]:
        return [state.on_host(self.ops) for state in run.start([batch.sequences for batch in self.batches])]

    def _advanced(
        self, layer: int, run_and_states: tuple[LayerwiseModel, Sequence[HiddenState]], is_alone: bool = False
    ) -> list[HiddenState]:
        """The state of each batch after one layer, on the host. Batches of a run that ``is_alone`` share threads."""
        run, states = run_and_states
        layer_fn = run.build(layer)

        def advance(state_and_batch: tuple[HiddenState, Batch]) -> HiddenState:
            state, batch = state_and_batch
            return layer_fn(state.on_device(self.ops), batch.sequences).on_host(self.ops)

        pairs = zip(states, self.batches, strict=True)
        return map_in_threads(self.ops, advance, pairs) if is_alone else list(map(advance, pairs))

    def _compare_heads(
        self, float_model: LayerwiseModel, runs: Sequence[LayerwiseModel], residuals: Sequence[Sequence[np.ndarray]]
    ) -> list[Accumulator]:
        """The divergences from residual streams ``[T, features]`` after the last layer, by candidate and batch."""
        outputs = self.outputs
        totals = [outputs.accumulator() for _ in runs]
        heads, float_head = [run.output() for run in runs], float_model.output()
        for number, batch in enumerate(self.batches):
            for rows in outputs.parts(batch):
                targets, expected = outputs.targets(batch, rows), self._output(float_head, self._expected[number][rows])
                for total, head, residual in zip(totals, heads, residuals, strict=True):
                    total.add(expected, self._output(head, residual[number][rows]), targets)
        return totals

    def _output(self, head: Any, residual: np.ndarray) -> np.ndarray:
        return self.outputs.finished(np.array(self.ops.host(head(self.ops.array(residual))), np.float32))
