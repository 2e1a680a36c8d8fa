"""What is measured: a network on its device, from a checkpoint or of random weights, and how large it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from .. import models
from ..backend.base import Backend
from ..backend.quantization import HostWeight, Int8Weight
from ..backend.random_matrix import RandomMatrix
from ..checkpoint.reader import open_checkpoint
from ..engine.generation import Limits, Network
from ..errors import UsageError
from ..layers.loading import Weights
from ..models.spec import Role, Spec


@dataclass(frozen=True)
class Subject:
    """A model that is ready to run.

    ``parameters`` counts elements, tied ones once; ``nbytes`` is what they take in a checkpoint. ``step_bytes`` is what
    one decoded token must read of them: every matrix once, as this backend keeps it, and one row of the embedding.
    ``product_elements`` counts the elements of the matrices, the output head's included, and ``hidden`` is the width
    of the residual stream.
    """

    name: str
    network: Network
    limits: Limits
    parameters: int
    nbytes: int
    step_bytes: int
    product_elements: int
    hidden: int

    @property
    def ops(self) -> Backend:
        """The backend."""
        return self.network.ops

    def cache_bytes(self, tokens: float) -> float:
        """Bytes of the keys and values of ``tokens`` tokens of one sequence."""
        return tokens * self.limits.cache_shape.bytes_per_token(self.ops.activation_dtype.itemsize)


def random_subject(name: str, config: Mapping[str, Any], ops: Backend, seed: int = 0) -> Subject:
    """A model of the shape ``config`` with random int8 weights, made on the device."""
    architecture = models.find(dict(config))
    parsed = architecture.parse(dict(config))
    spec = architecture.spec(parsed)
    return _build(name, architecture, parsed, spec, RandomWeights(spec, seed), ops)


def checkpoint_subject(path: Path, ops: Backend) -> Subject:
    """The model in the folder ``path``. Raises ``CheckpointError``, ``OutOfMemory``."""
    with open_checkpoint(path) as checkpoint:
        architecture = models.find(checkpoint.config)
        parsed = architecture.parse(checkpoint.config)
        spec = architecture.spec(parsed)
        checkpoint.validate(spec)
        return _build(path.resolve().name, architecture, parsed, spec, checkpoint.weights(spec), ops)


def _build(name: str, architecture: Any, config: Any, spec: Spec, weights: Weights, ops: Backend) -> Subject:
    if not hasattr(config, "cache_shape"):
        raise UsageError(f"{name}: the benchmark runs decoders, and this model is none")
    counted = CountedWeights(weights, ops)
    network = architecture.Model(config, counted, ops)
    limits = Limits(config.context_length, config.vocab_size, config.cache_shape)
    embedding = max((p.shape[1] for p in spec.parameters.values() if p.role is Role.EMBEDDING), default=0)
    parameters = sum(math.prod(p.shape) for n, p in spec.parameters.items() if n not in spec.tied)
    step_bytes = counted.read + embedding * ops.activation_dtype.itemsize
    products = sum(math.prod(p.shape) for p in spec.parameters.values() if p.role in (Role.LINEAR, Role.HEAD))
    return Subject(name, network, limits, parameters, counted.stored, step_bytes, products, embedding)


class CountedWeights:
    """Passes ``weights`` on and counts the bytes that are ``stored``, and those that products with them ``read``."""

    def __init__(self, weights: Weights, ops: Backend):
        self._weights = weights
        self._ops = ops
        self.stored = self.read = 0

    def weight(self, name: str) -> HostWeight:
        found = self._weights.weight(name)
        elements = math.prod(found.shape)
        if isinstance(found, Int8Weight):
            self.stored += elements + found.scale.nbytes
            self.read += elements * self._ops.code_bytes + 4 * found.shape[0]
        else:
            self.stored += elements * found.dtype.itemsize
            self.read += elements * self._ops.activation_dtype.itemsize
        return found

    def vector(self, name: str) -> np.ndarray:
        found = self._weights.vector(name)
        self.stored += math.prod(found.shape) * np.dtype(found.dtype).itemsize
        return found


class RandomWeights:
    """Random w8a8 weights for ``spec``, of sizes that keep activations about as large as they come in."""

    def __init__(self, spec: Spec, seed: int = 0):
        self._spec = spec
        self._seeds = {name: seed * 1_000_003 + i for i, name in enumerate(spec.parameters)}

    def weight(self, name: str) -> HostWeight:
        rows, columns = self._spec.parameters[name].shape
        codes = RandomMatrix((rows, columns), np.int8, self._seeds[name])
        spread = np.random.default_rng(self._seeds[name]).uniform(0.5, 1.5, rows)
        return Int8Weight(cast(np.ndarray, codes), (spread / (73.3 * columns**0.5)).astype(np.float32))

    def vector(self, name: str) -> np.ndarray:
        parameter = self._spec.parameters[name]
        if parameter.role is Role.EMBEDDING:
            rows, columns = parameter.shape
            return cast(np.ndarray, RandomMatrix((rows, columns), np.float16, self._seeds[name]))
        random = np.random.default_rng(self._seeds[name])
        if name.endswith(".bias"):
            return random.uniform(-0.1, 0.1, parameter.shape).astype(np.float32)
        return random.uniform(0.5, 1.5, parameter.shape).astype(np.float32)
