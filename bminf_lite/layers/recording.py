"""Hooks that observe the input of every matrix product; the layers need no change.

Calibration and comparison need the input of each linear layer. Layers built with the backend and the weights of
:class:`LinearHooks` compute the same, and an observer is called before each product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from ..backend.adapter_slots import Bank
from ..backend.base import Backend
from ..backend.expert_values import ExpertActivation, ExpertBiases, RouterSpec
from ..backend.mixture import (
    Mixture,
    SharedExpert,
    choose_experts,
    expert_result,
    input_factors,
    make_mixture,
    mix,
    result_weights,
    shared_result,
    with_expert_banks,
)
from ..backend.quantization import HostWeight
from ..backend.side_products import Adapter
from ..backend.values import Array, LatentSpec
from .loading import Weights

T = TypeVar("T")

PRODUCTS = {"product", "linear", "linear_add", "linear_add_of_ranks", "gated_linear", "activated_linear"}
"""The backend's operations that multiply an activation ``x`` by a ``weight``."""


@dataclass(frozen=True)
class LinearCall:
    """An activation ``x`` ``[T, in]`` that is about to be multiplied by ``weight`` ``[out, in]``, both on the device.

    ``tensors`` are the checkpoint's names of the matrices that ``weight`` was stacked from, along ``out``.
    ``operation`` is one of :data:`PRODUCTS`. ``rows`` int ``[n]``, for an expert, says which of a step's tokens ``x``
    has, in ascending order.
    """

    tensors: tuple[str, ...]
    operation: str
    x: Array
    weight: Any
    rows: np.ndarray | None = None


Observer = Callable[[LinearCall], Any]
"""Called before a product. It returns None, or the weight to multiply by instead of ``weight``."""


LEAST_ROWS = 64
"""An observed expert gets at least ``LEAST_ROWS`` tokens of a step, or all tokens of a shorter step."""


class LinearHooks:
    """``ops`` and ``weights`` for layers whose products are observed.

    ``ops`` passes each call on to the given backend, and calls ``observe`` before each product. The observer may
    compute with the given backend, and must not change ``x``. It may replace the product's weight. An expert that fewer
    than ``LEAST_ROWS`` of a step's tokens chose is shown others too, whose results are dropped. ``on_weight`` is
    called for each weight that is made, with the names of its matrices and the matrices on the host.
    """

    def __init__(
        self,
        ops: Backend,
        weights: Weights,
        observe: Observer,
        on_weight: Callable[[tuple[str, ...], Sequence[HostWeight]], None] | None = None,
    ):
        hooked = _HookedBackend(ops, observe, on_weight)
        self.ops = cast(Backend, hooked)
        self.weights: Weights = _TrackedWeights(weights, hooked)


class _HookedBackend:
    """Passes every call on to ``ops``. Products inside an operation of ``ops`` are not observed.

    No step is captured, and so none is padded: an observer would see the padding's values.
    """

    decode_sizes: tuple[int, ...] = ()
    mixed_sizes: tuple[tuple[int, int], ...] = ()
    text_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        ops: Backend,
        observe: Observer,
        on_weight: Callable[[tuple[str, ...], Sequence[HostWeight]], None] | None,
    ):
        self._ops = ops
        self._observe = observe
        self._on_weight = on_weight
        self.requested: list[str] = []
        self._tensors: dict[int, tuple[str, ...]] = {}
        self._local = threading.local()  # rows: those that the running operation shows of an expert's input

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if name not in PRODUCTS:
            return value

        def product(x: Array, weight: Any, *args: Any, **kwargs: Any) -> Any:
            rows = getattr(self._local, "rows", None)
            other = self._observe(LinearCall(self._tensors[id(weight)], name, x, weight, rows))
            return value(x, weight if other is None else other, *args, **kwargs)

        return product

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """``work`` itself: replaying a graph would not call the observer."""
        return work

    def mixture(
        self,
        spec: RouterSpec,
        router: np.ndarray,
        hidden: Iterable[Sequence[HostWeight]],
        down: Iterable[Sequence[HostWeight]],
        activation: ExpertActivation,
        correction_bias: np.ndarray | None = None,
        biases: ExpertBiases | None = None,
    ) -> Mixture:
        """A mixture whose experts have weights of their own, each remembered with its tensors."""
        return make_mixture(self.weight, spec, router, hidden, down, activation, correction_bias, biases)

    def experts(
        self,
        x: Array,
        mixture: Mixture,
        residual: Array = None,
        addend: Array = None,
        gate: Array = None,
        routed: Array = None,
        shared: SharedExpert | None = None,
    ) -> Array:
        """The backend's operation, in which every expert is observed, a shared one first, in order of their numbers."""
        if shared is not None:
            addend, gate = shared_result(self, x, shared)
        rows = np.asarray(self._ops.host(x))
        chooser = rows if routed is None else np.asarray(self._ops.host(routed))
        choices = topk_ids, topk_weights = choose_experts(chooser, mixture)
        results: dict[int, np.ndarray] = {}
        for expert in range(mixture.spec.num_experts):
            chosen = np.flatnonzero((topk_ids == expert).any(axis=1))
            self._local.rows = shown = _with_others(chosen, len(rows))
            inputs = self._ops.array(_inputs(rows, shown, mixture, expert, choices))
            with mixture.of_tokens(shown):
                found = expert_result(self, inputs, mixture, expert)
            results[expert] = np.asarray(self._ops.host(found))[np.searchsorted(shown, chosen)]
        self._local.rows = None
        found = self._ops.array(mix(topk_ids, result_weights(topk_weights, mixture), lambda expert, _: results[expert]))
        return self._ops.add_experts(found, residual, addend, gate)

    def adapted(self, base: Any, adapter: Adapter) -> Any:
        """The backend's weight, which is made of the tensors of ``base``."""
        weight = self._ops.adapted(base, adapter)
        self._tensors[id(weight)] = self._tensors[id(base)]
        return weight

    def with_adapters(self, base: Any, widths: Sequence[int], features: int) -> tuple[Any, Bank]:
        """The backend's weight, which is made of the tensors of ``base``, and its bank."""
        weight, bank = self._ops.with_adapters(base, widths, features)
        self._tensors[id(weight)] = self._tensors[id(base)]
        return weight, bank

    def with_expert_adapters(self, base: Mixture, widths: Sequence[int], features: int) -> tuple[Mixture, Bank]:
        """A mixture with adapters whose experts have weights of their own, and its bank."""
        mixture, bank = with_expert_banks(self._ops, base, widths, features)
        for weight, before in zip((*mixture.hidden, *mixture.down), (*base.hidden, *base.down), strict=True):
            self._tensors[id(weight)] = self._tensors[id(before)]
        return mixture, bank

    def latent_weight(self, matrix: HostWeight, spec: LatentSpec) -> Any:
        """The backend's weight, whose products are not observed: they are inside of an operation."""
        self.requested.clear()
        return self._ops.latent_weight(matrix, spec)

    def weight(self, parts: Sequence[HostWeight], *args: Any, **kwargs: Any) -> Any:
        """The backend's weight, remembered with the tensors that were read since the weight before it.

        A tensor that is stacked twice is there once.
        """
        tensors = tuple(dict.fromkeys(self.requested))
        self.requested.clear()
        weight = self._ops.weight(parts, *args, **kwargs)
        self._tensors[id(weight)] = tensors  # a later weight with the same id replaces the entry
        if self._on_weight is not None:
            self._on_weight(tensors, parts)
        return weight


def _inputs(
    rows: np.ndarray, shown: np.ndarray, mixture: Mixture, expert: int, routed: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """What an expert reads of the tokens ``shown``, of which some may not have chosen it."""
    factors = input_factors(*routed, mixture, expert, shown)
    if factors is None:
        chosen: np.ndarray = rows[shown]
        return chosen
    scaled = rows[shown].astype(np.float32) * np.where(factors > 0, factors, 1)[:, None]
    inputs: np.ndarray = scaled.astype(rows.dtype)
    return inputs


def _with_others(chosen: np.ndarray, count: int) -> np.ndarray:
    """``chosen`` of ``count`` tokens, ascending, and the first others if they are fewer than ``LEAST_ROWS``."""
    if len(chosen) >= min(LEAST_ROWS, count):
        return chosen
    others = np.setdiff1d(np.arange(min(count, 2 * LEAST_ROWS)), chosen)
    return np.sort(np.concatenate([chosen, others[: LEAST_ROWS - len(chosen)]]))


class _TrackedWeights:
    """Tells the hooked backend which matrices are read."""

    def __init__(self, weights: Weights, ops: _HookedBackend):
        self._weights = weights
        self._ops = ops

    def weight(self, name: str) -> HostWeight:
        self._ops.requested.append(name)
        return self._weights.weight(name)

    def vector(self, name: str) -> np.ndarray:
        return self._weights.vector(name)
