"""Running the float model on calibration tokens, to see what enters each weight matrix.

The model is built from its own layers, one at a time, and all tokens go through a layer before the next one is made, in
batches of some thousand. So every matrix is read once, and memory holds a layer's weights, the residual stream of all
tokens and the activations of one batch, whatever the size of the model. What enters a product stays on the device:
an observer keeps of it what it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .. import models
from ..backend.base import Backend
from ..backend.values import Array
from ..checkpoint.reader import Checkpoint
from ..layers.recording import LinearCall, LinearHooks
from ..models.spec import Spec
from .stages import HiddenState, LayerwiseModel, SequenceBatch

MAX_BATCH_TOKENS = 4096
"""So many tokens at most go through a layer at once."""

HEAD_TOKENS = 1024
"""The output head sees so many tokens at most: its logits for all of them would not fit in memory."""

Progress = Callable[[int, int, str], None]
"""Called with the steps that are done, all of them, and the layer at work; a step is a batch in a layer."""


@dataclass(frozen=True)
class Observation:
    """The float input ``[T, in]`` of a product for one batch, on the device, and the matrices that it goes into.

    ``batch_index`` counts the batches from 0, and there are ``num_batches`` of them for this product.
    """

    tensors: tuple[str, ...]
    x: Array
    batch_index: int
    num_batches: int

    @property
    def is_last(self) -> bool:
        """Whether all of the product's input has been seen with this."""
        return self.batch_index == self.num_batches - 1


def run_calibration(
    checkpoint: Checkpoint,
    spec: Spec,
    samples: Sequence[np.ndarray],
    ops: Backend,
    observer: Callable[[Observation], None],
    progress: Progress | None = None,
) -> None:
    """Run the model of ``checkpoint`` on ``samples``, int32 token ids ``[n]`` each, and show each product's input.

    The samples are sequences of their own. An encoder reads the first half of each, and the decoder continues with the
    second. Products come in the order in which the model computes them, but those of a layer once for each batch.
    """
    architecture = models.find(checkpoint.config)
    config = architecture.parse(checkpoint.config)
    batches = make_batches(samples, getattr(config, "decoder_start_token_ids", ()))
    position = 0, 1

    def show(call: LinearCall) -> None:
        observer(Observation(call.tensors, call.x, *position))

    hooks = LinearHooks(ops, checkpoint.weights(spec, stored=True), show)
    layerwise = LayerwiseModel(architecture.ModelBuilder(config, hooks.weights, hooks.ops), config, ops)
    states, steps = layerwise.start(batches), len(layerwise.names) * len(batches) + 1
    for index, name in enumerate(layerwise.names):
        layer_fn = None  # the layer before goes first
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
    """Batches of about equally many samples, of ``MAX_BATCH_TOKENS`` at most, but of one sample at least.

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


def split_for_encoder_decoder(sample: np.ndarray, start: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What a decoder is given, from its ``start`` on, and the source before it: the first half, rounded up."""
    middle = -(-len(sample) // 2)
    return np.concatenate([start, sample[middle:]]).astype(np.int32), sample[:middle]


def _sample_residual(ops: Backend, states: Sequence[HiddenState], limit: int) -> Array:
    """Rows of the residual stream from everywhere, ``limit`` at most."""
    calibration_ops = ops.calibration_ops()
    ends = np.cumsum([state.residual.shape[0] for state in states])
    chosen = np.split(chosen_rows := sample_rows(int(ends[-1]), limit), np.searchsorted(chosen_rows, ends[:-1]))
    firsts = [0, *ends[:-1]]
    return calibration_ops.joined(
        [calibration_ops.rows(s.residual, rows - first) for s, rows, first in zip(states, chosen, firsts, strict=True)]
    )


def sample_rows(count: int, limit: int, seed: int = 0) -> np.ndarray:
    """At most ``limit`` of the row numbers below ``count``, in order, drawn once and for all: no period is favoured."""
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, limit, replace=False))
