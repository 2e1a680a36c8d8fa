"""Watching what goes into every product, without the layers knowing.

Calibration and comparison need the input of each linear layer. Layers get a backend and weights when they are built;
given the :class:`LinearHooks`'s instead, they compute what they always do, and an observer is told of each product just
before it is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import HostWeight
from ..backend.values import Array
from .loading import Weights

T = TypeVar("T")


@dataclass(frozen=True)
class LinearCall:
    """An activation ``x`` ``[T, in]`` that is about to be multiplied by ``weight`` ``[out, in]``, both on the device.

    ``tensors`` are the checkpoint's names of the matrices that ``weight`` was stacked from, along ``out``.
    ``operation`` is the backend's operation that multiplies.
    """

    tensors: tuple[str, ...]
    operation: str
    x: Array
    weight: Any


Observer = Callable[[LinearCall], None]


class LinearHooks:
    """``ops`` and ``weights`` for layers whose products are to be watched.

    ``ops`` does what the given backend does. Each operation with parameters ``x`` and ``weight`` is a product, and
    calls ``observe`` first. The observer may compute with the given backend, and must not change ``x``.
    """

    def __init__(self, ops: Backend, weights: Weights, observe: Observer):
        hooked = _HookedBackend(ops, observe)
        self.ops = cast(Backend, hooked)
        self.weights: Weights = _TrackedWeights(weights, hooked)


class _HookedBackend:
    """Passes everything on to ``ops``; an operation's own use of other operations stays unobserved."""

    def __init__(self, ops: Backend, observe: Observer):
        self._ops = ops
        self._observe = observe
        self.requested: list[str] = []
        self._tensors: dict[int, tuple[str, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not callable(value) or not {"x", "weight"} <= inspect.signature(value).parameters.keys():
            return value
        signature = inspect.signature(value)

        def product(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            weight = given["weight"]
            self._observe(LinearCall(self._tensors[id(weight)], name, given["x"], weight))
            return value(*args, **kwargs)

        return product

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """``work`` as it is: the observer would not be told of what a recording replays."""
        return work

    def weight(self, *args: Any, **kwargs: Any) -> Any:
        """The backend's weight, remembered with the tensors that were read for it: those since the one before."""
        weight = self._ops.weight(*args, **kwargs)
        self._tensors[id(weight)] = tuple(self.requested)  # an id in use is that of the newest weight that has it
        self.requested.clear()
        return weight


class _TrackedWeights:
    """Tells the backend which matrices it gets."""

    def __init__(self, weights: Weights, ops: _HookedBackend):
        self._weights = weights
        self._ops = ops

    def weight(self, name: str) -> HostWeight:
        self._ops.requested.append(name)
        return self._weights.weight(name)

    def vector(self, name: str) -> np.ndarray:
        return self._weights.vector(name)
