"""Running the float model on calibration tokens, to see what enters each weight matrix.

The model is built from its own layers, one at a time, and all tokens go through a layer before the next one is made, in
groups of some thousand. So every matrix is read once, and memory holds a layer's weights, the residual stream of all
tokens and the activations of one group, whatever the size of the model. What enters a product stays on the device:
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
from ..layers.recording import Product, Recorder
from ..models.spec import Spec
from .stages import Group, Stages, State

GROUP_TOKENS = 4096
"""So many tokens at most go through a layer at once."""

HEAD_TOKENS = 1024
"""The output head sees so many tokens at most: its logits for all of them would not fit in memory."""

Progress = Callable[[int, int, str], None]
"""Called with the steps that are done, all of them, and the layer at work; a step is a group in a layer."""


@dataclass(frozen=True)
class Observation:
    """The float input ``[T, in]`` of a product for one group, on the device, and the matrices that it goes into.

    ``group`` counts the groups from 0, and there are ``groups`` of them for this product.
    """

    tensors: tuple[str, ...]
    x: Array
    group: int
    groups: int

    @property
    def is_last(self) -> bool:
        """Whether all of the product's input has been seen with this."""
        return self.group == self.groups - 1


def observe(
    checkpoint: Checkpoint,
    spec: Spec,
    samples: Sequence[np.ndarray],
    ops: Backend,
    observer: Callable[[Observation], None],
    progress: Progress | None = None,
) -> None:
    """Run the model of ``checkpoint`` on ``samples``, int32 token ids ``[n]`` each, and show each product's input.

    The samples are sequences of their own. An encoder reads the first half of each, and the decoder continues with the
    second. Products come in the order in which the model computes them, but those of a layer once for each group.
    """
    architecture = models.find(checkpoint.config)
    config = architecture.parse(checkpoint.config)
    groups = grouped(samples, getattr(config, "decoder_start", ()))
    place = 0, 1

    def show(product: Product) -> None:
        observer(Observation(product.tensors, product.x, *place))

    recorder = Recorder(ops, checkpoint.weights(spec, stored=True), show)
    stages = Stages(architecture.Pieces(config, recorder.weights, recorder.ops), config, ops)
    states, steps = stages.start(groups), len(stages.names) * len(groups) + 1
    for index, name in enumerate(stages.names):
        stage = None  # the layer before goes first
        stage = stages.build(index)
        for number, group in enumerate(groups):
            place = number, len(groups)
            states[number] = stage(states[number], group)
            if progress:
                progress(index * len(groups) + number + 1, steps, name)
    stage = None
    place = 0, 1
    stages.output()(_some_rows(ops, states, HEAD_TOKENS))
    if progress:
        progress(steps, steps, "output head")


def grouped(samples: Sequence[np.ndarray], start: Sequence[int] = ()) -> list[Group]:
    """Groups of about equally many samples, of ``GROUP_TOKENS`` at most, but of one sample at least.

    ``start`` are the tokens from which a decoder with an encoder starts.
    """
    tokens = sum(map(len, samples))
    count = min(-(-tokens // GROUP_TOKENS), len(samples))
    bounds = [len(samples) * i // count for i in range(count + 1)]
    parts = [samples[first:last] for first, last in itertools.pairwise(bounds)]
    if not start:
        return [Group(tuple(part)) for part in parts]
    return [Group(*map(tuple, zip(*(halves(sample, start) for sample in part), strict=True))) for part in parts]


def halves(sample: np.ndarray, start: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What a decoder is given, from its ``start`` on, and the source before it: the first half, rounded up."""
    middle = -(-len(sample) // 2)
    return np.concatenate([start, sample[middle:]]).astype(np.int32), sample[:middle]


def _some_rows(ops: Backend, states: Sequence[State], limit: int) -> Array:
    """Rows of the residual stream from everywhere, ``limit`` at most."""
    trials = ops.trials()
    ends = np.cumsum([state.residual.shape[0] for state in states])
    chosen = np.split(chosen_rows := spread_rows(int(ends[-1]), limit), np.searchsorted(chosen_rows, ends[:-1]))
    firsts = [0, *ends[:-1]]
    return trials.joined(
        [trials.rows(s.residual, rows - first) for s, rows, first in zip(states, chosen, firsts, strict=True)]
    )


def spread_rows(count: int, limit: int, seed: int = 0) -> np.ndarray:
    """At most ``limit`` of the row numbers below ``count``, in order, drawn once and for all: no period is favoured."""
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, limit, replace=False))
