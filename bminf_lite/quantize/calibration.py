"""Running the float model on calibration tokens, to see what enters each weight matrix.

The model is built from its own layers, with a backend that makes a weight when an operation needs it and drops it
afterwards. All tokens go through the model in one step, so every matrix is read once, and beside the activations of the
tokens only one product's weights are in memory: the model need not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .. import models
from ..backend.base import Backend
from ..backend.quantization import HostWeight
from ..backend.values import Array, Step
from ..checkpoint.reader import Checkpoint
from ..layers.cache import CacheShape, KVCache, SourceCache
from ..layers.recording import Product, Recorder
from ..models.spec import Spec

HEAD_TOKENS = 1024
"""The output head sees so many tokens at most: its logits for all of them would not fit in memory."""

Progress = Callable[[int, int, str], None]
"""Called with the products that are done, all of them, and the name of the matrix at work."""


@dataclass(frozen=True)
class Observation:
    """The float input of a product, fp32 ``[T, in]`` on the host, and the names of the matrices that it goes into."""

    tensors: tuple[str, ...]
    inputs: np.ndarray


def observe(
    checkpoint: Checkpoint,
    spec: Spec,
    samples: Sequence[np.ndarray],
    ops: Backend,
    observer: Callable[[Observation], None],
    progress: Progress | None = None,
) -> None:
    """Run the model of ``checkpoint`` on ``samples``, int32 token ids ``[n]`` each, and show each product's input.

    The samples are sequences of their own. Products come in the order in which the model computes them.
    """
    late = LateBackend(ops)
    done = 0

    def show(product: Product) -> None:
        nonlocal done
        inputs = np.asarray(ops.host(product.x), np.float32)
        observer(Observation(product.tensors, inputs))
        done += 1
        if progress:
            progress(done, late.weights, product.tensors[0])

    recorder = Recorder(cast(Backend, late), checkpoint.weights(spec), show)
    architecture = models.find(checkpoint.config)
    config = architecture.parse(checkpoint.config)
    network = architecture.Model(config, recorder.weights, recorder.ops)
    if start := getattr(config, "decoder_start", None):
        _run_encoder_decoder(network, config.cache_shape, start, samples, recorder.ops, ops)
    else:
        network(_step(ops, samples), _cache(recorder.ops, config.cache_shape, samples))


def _run_encoder_decoder(
    network: Any, shape: CacheShape, start: Sequence[int], samples: Sequence[np.ndarray], late: Backend, ops: Backend
) -> None:
    """The encoder reads the first half of each sample, and the decoder continues with the second."""
    sources = [sample[: -(-len(sample) // 2)] for sample in samples]
    targets = [np.concatenate([start, sample[len(source) :]]) for sample, source in zip(samples, sources, strict=True)]
    longest = max(map(len, sources))
    source = SourceCache(ops, shape, len(sources), longest, longest)  # written by one operation, read by another
    source.set_lengths({slot: len(tokens) for slot, tokens in enumerate(sources)})
    cache = _cache(late, shape, targets)
    cache.source = source
    network.read(_step(ops, sources), source)
    network(_step(ops, targets), cache)


def _cache(ops: Backend, shape: CacheShape, samples: Sequence[np.ndarray]) -> KVCache:
    longest = max(map(len, samples))
    return KVCache(ops, shape, len(samples), longest, longest)


def _step(ops: Backend, samples: Sequence[np.ndarray]) -> Step:
    """All samples from their start, packed."""
    lengths = [len(sample) for sample in samples]
    return Step(
        tokens=ops.array(np.concatenate(samples).astype(np.int32)),
        starts=ops.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        past=ops.array(np.zeros(len(samples), np.int32)),
        slots=ops.array(np.arange(len(samples), dtype=np.int32)),
        count=len(samples),
        longest=max(lengths),
        reach=max(lengths),
    )


class Late:
    """Something on the device that is made when an operation needs it."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make


class LateBackend:
    """``ops``, but weights, tables and caches exist only while an operation uses them.

    A cache is lost between two operations, so only those can be late that one operation writes and reads: those of
    self-attention, where nothing is decoded. ``weights`` counts the weights that were asked for.
    """

    def __init__(self, ops: Backend):
        self._ops = ops
        self.weights = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def operation(*args: Any, **kwargs: Any) -> Any:
            return value(*map(_made, args), **{key: _made(arg) for key, arg in kwargs.items()})

        return operation

    def weight(self, parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None] = ()) -> Late:
        self.weights += 1
        return Late(lambda: self._ops.weight(parts, biases))

    def blocks(self, build: Callable[[int], Any], count: int) -> Sequence[Any]:
        return [build(index) for index in range(count)]

    def table(self, values: np.ndarray) -> Late:
        return Late(lambda: self._ops.table(values))

    def layer_cache(self, *args: Any, **kwargs: Any) -> Late:
        return Late(lambda: self._ops.layer_cache(*args, **kwargs))

    def last_tokens(self, x: Array, step: Step) -> Array:
        """Not each sequence's last token but tokens from everywhere: what the output head is calibrated on."""
        rows = 1 + spread_rows(x.shape[0], HEAD_TOKENS)
        starts = self._ops.array(np.concatenate([[0], rows]).astype(np.int32))
        return self._ops.last_tokens(x, Step(step.tokens, starts, step.past, step.slots, len(rows), 2, step.reach))


def _made(value: Any) -> Any:
    return value.make() if isinstance(value, Late) else value


def spread_rows(count: int, limit: int) -> np.ndarray:
    """At most ``limit`` of the row numbers below ``count``, in order, drawn once and for all: no period is favoured."""
    if count <= limit:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, limit, replace=False))
