"""Running the float model on calibration tokens, to observe the input of each weight matrix.

The model is built and run one layer at a time, and all tokens pass through a layer in batches of some thousand. So
every matrix is read once, and memory holds one layer's weights, the residual stream of all tokens and the activations
of one batch. Inputs stay on the device; an observer keeps what it needs of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array
from ..checkpoint.opened_model import OpenedModel
from ..layers.recording import LinearCall, LinearHooks
from .stages import HiddenState, LayerwiseModel, SequenceBatch, split_for_encoder_decoder

MAX_BATCH_TOKENS = 4096
"""The most tokens of a batch."""

HEAD_TOKENS = 1024
"""The most tokens that the output head gets: logits for all of them would not fit in memory."""

Progress = Callable[[int, int, str], None]
"""Called with the number of steps done, their total and a layer's name; a step is one batch in one layer."""


@dataclass(frozen=True)
class Observation:
    """The float input ``x`` ``[T, in]`` of a product for one batch, on the device, and the names of its matrices.

    ``batch_index`` counts the product's ``num_batches`` batches from 0.
    """

    tensors: tuple[str, ...]
    x: Array
    batch_index: int
    num_batches: int

    @property
    def is_last(self) -> bool:
        return self.batch_index == self.num_batches - 1


def run_calibration(
    model: OpenedModel,
    samples: Sequence[np.ndarray],
    ops: Backend,
    observer: Callable[[Observation], None],
    progress: Progress | None = None,
) -> None:
    """Run ``model`` on ``samples``, int32 token ids ``[n]`` each, and pass each product's input to ``observer``.

    The samples are separate sequences. An encoder reads the first half of each, and the decoder continues with the
    second. Products come in the order of computation; those of a layer come once for each batch.
    """
    config = model.config
    batches = make_batches(samples, config.decoder_start_token_ids)
    position = 0, 1

    def show(call: LinearCall) -> None:
        observer(Observation(call.tensors, call.x, *position))

    hooks = LinearHooks(ops, model.weights(), show)
    layerwise = LayerwiseModel(model.architecture.ModelBuilder(config, hooks.weights, hooks.ops), config, ops)
    states, steps = layerwise.start(batches), len(layerwise.names) * len(batches) + 1
    for index, name in enumerate(layerwise.names):
        layer_fn = None  # frees one layer before the next one is built
        layer_fn = layerwise.build(index)
        for number, batch in enumerate(batches):
            position = number, len(batches)
            states[number] = layer_fn(states[number], batch)
            if progress:
                progress(index * len(batches) + number + 1, steps, name)
    layer_fn = None
    position = 0, 1
    layerwise.output()(_sample_residual(ops, states, HEAD_TOKENS))
    if progress:
        progress(steps, steps, "output head")


def make_batches(samples: Sequence[np.ndarray], start: Sequence[int] = ()) -> list[SequenceBatch]:
    """Batches of about equally many samples, each of one sample or of at most ``MAX_BATCH_TOKENS`` tokens.

    ``start`` are the tokens from which a decoder with an encoder starts.
    """
    tokens = sum(map(len, samples))
    count = min(-(-tokens // MAX_BATCH_TOKENS), len(samples))
    bounds = [len(samples) * i // count for i in range(count + 1)]
    parts = [samples[first:last] for first, last in itertools.pairwise(bounds)]
    if not start:
        return [SequenceBatch(tuple(part)) for part in parts]
    return [
        SequenceBatch(*map(tuple, zip(*(split_for_encoder_decoder(sample, start) for sample in part), strict=True)))
        for part in parts
    ]


def _sample_residual(ops: Backend, states: Sequence[HiddenState], limit: int) -> Array:
    """At most ``limit`` rows of the residual stream, drawn from all batches."""
    calibration_ops = ops.calibration_ops()
    ends = np.cumsum([state.residual.shape[0] for state in states])
    chosen_rows = sample_rows(int(ends[-1]), limit)
    chosen = np.split(chosen_rows, np.searchsorted(chosen_rows, ends[:-1]))
    firsts = [0, *ends[:-1]]
    return calibration_ops.joined(
        [calibration_ops.rows(s.residual, rows - first) for s, rows, first in zip(states, chosen, firsts, strict=True)]
    )


def sample_rows(count: int, limit: int, seed: int = 0) -> np.ndarray:
    """At most ``limit`` row numbers below ``count``, ascending: a random sample that depends on the arguments alone."""
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, limit, replace=False))
