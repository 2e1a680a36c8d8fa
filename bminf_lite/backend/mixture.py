"""Mixtures of experts over a backend's products: each token is computed by the experts that a router chooses.

:mod:`.routing` defines the choice, and :mod:`.experts` the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from .adapter_slots import AdapterSlots, Bank, ExpertBank
from .expert_values import ExpertActivation, ExpertBiases, RouterSpec
from .experts import activated, rounded, rows_by_expert, weighted_sum
from .functions import product_by_row
from .quantization import HostWeight
from .routing import route
from .values import Array


@dataclass(frozen=True)
class Mixture:
    """A router and its experts on a device.

    ``router`` is fp32 ``[in, experts]``. ``hidden`` and ``down`` have a weight of the backend for each expert: the
    matrices before the ``activation``, gate and up stacked, and the one behind it; both may have biases.
    ``router_bias`` fp32 ``[experts]`` is added to the logits. ``correction_bias`` is that of :func:`.routing.route`.
    ``adapters`` are those of all experts that the tokens of a step choose among.
    """

    spec: RouterSpec
    router: np.ndarray
    hidden: Sequence[Any]
    down: Sequence[Any]
    activation: ExpertActivation
    correction_bias: np.ndarray | None = None
    router_bias: np.ndarray | None = None
    adapters: ExpertBank | None = None

    def of_tokens(self, tokens: np.ndarray) -> AbstractContextManager[None]:
        """The rows of the experts' products that follow are the tokens with these numbers."""
        return nullcontext() if self.adapters is None else self.adapters.of_tokens(tokens)


@dataclass(frozen=True)
class SharedExpert:
    """A feed-forward layer for every token beside the experts of a mixture. The router does not choose it.

    ``hidden`` and ``down`` are weights of the backend: gate and up stacked, and the matrix behind the ``activation``,
    which has no ``limit``. The result is multiplied by :meth:`Backend.scalar_gate` of ``gate`` fp32 ``[in]``, or by 1.
    """

    hidden: Any
    down: Any
    activation: ExpertActivation
    gate: Array | None = None


def make_mixture(
    weight: Callable[[Sequence[HostWeight], Sequence[np.ndarray | None]], Any],
    spec: RouterSpec,
    router: np.ndarray,
    hidden: Iterable[Sequence[HostWeight]],
    down: Iterable[Sequence[HostWeight]],
    activation: ExpertActivation,
    correction_bias: np.ndarray | None,
    biases: ExpertBiases | None,
) -> Mixture:
    """What :meth:`Backend.mixture` returns, of weights that ``weight`` makes of an expert's matrices and biases."""

    def weights(experts: Iterable[Sequence[HostWeight]], of_experts: Sequence[np.ndarray] | None) -> list[Any]:
        found = []
        for expert, parts in enumerate(experts):
            ends = np.cumsum([part.shape[0] for part in parts])[:-1]
            own = [None] * len(parts) if of_experts is None else np.split(of_experts[expert], ends)
            found.append(weight(parts, own))
        return found

    before = weights(hidden, None if biases is None else biases.hidden)
    behind = weights(down, None if biases is None else biases.down)
    matrix = np.ascontiguousarray(router.astype(np.float32).T)
    return Mixture(spec, matrix, before, behind, activation, correction_bias, None if biases is None else biases.router)


class AdapterOperations(Protocol):
    """The operations of a backend that give weights adapters."""

    adapter_slots: AdapterSlots | None

    def array(self, values: np.ndarray) -> Array: ...

    def host(self, x: Array) -> np.ndarray: ...

    def with_adapters(self, base: Any, widths: Sequence[int], features: int) -> tuple[Any, Bank]: ...


def with_expert_banks(
    ops: AdapterOperations, base: Mixture, widths: Sequence[int], features: int
) -> tuple[Mixture, ExpertBank]:
    """What :meth:`Backend.with_expert_adapters` returns, of a bank for each weight of each expert."""
    slots = ops.adapter_slots
    assert slots is not None

    def take(rows: Array, tokens: np.ndarray) -> Array:
        return ops.array(np.asarray(ops.host(rows))[tokens])

    ops.adapter_slots = pairs = slots.empty()
    try:
        hidden = [ops.with_adapters(weight, widths[:-1], features) for weight in base.hidden]
        down = [ops.with_adapters(weight, widths[-1:], widths[0]) for weight in base.down]
    finally:
        ops.adapter_slots = slots
    bank = ExpertBank(slots, pairs, [own for _, own in hidden], [own for _, own in down], take)
    return replace(base, hidden=[w for w, _ in hidden], down=[w for w, _ in down], adapters=bank), bank


class ExpertProducts(Protocol):
    """The operations of a backend that compute an expert."""

    activation_dtype: np.dtype

    def array(self, values: np.ndarray) -> Array: ...

    def host(self, x: Array) -> np.ndarray: ...

    def linear(self, x: Array, weight: Any, fp32: bool = False) -> Array: ...

    def gated_linear(self, x: Array, weight: Any, activation: str) -> Array: ...

    def activated_linear(self, x: Array, weight: Any, activation: str) -> Array: ...

    def scalar_gate(self, x: Array, vector: Array) -> Array: ...


def choose_experts(x: np.ndarray, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
    """``topk_ids`` int32 and ``topk_weights`` fp32 ``[T, top_k]`` of tokens ``[T, in]``.

    Logits are fp32 and computed row by row, so they do not depend on the other tokens of a step.
    """
    logits = product_by_row(x.astype(np.float32), mixture.router)
    if mixture.router_bias is not None:
        logits = logits + mixture.router_bias
    return route(logits, mixture.spec, mixture.correction_bias)


def result_weights(topk_weights: np.ndarray, mixture: Mixture) -> np.ndarray:
    """What multiplies the results of experts: the router's weights, or 1 if these multiply the inputs."""
    return np.ones_like(topk_weights) if mixture.spec.scales_input else topk_weights


def input_factors(
    topk_ids: np.ndarray, topk_weights: np.ndarray, mixture: Mixture, expert: int, tokens: np.ndarray
) -> np.ndarray | None:
    """What multiplies the inputs of an expert, fp32 ``[n]`` for the ``tokens`` that chose it; None for nothing."""
    if not mixture.spec.scales_input:
        return None
    weights: np.ndarray = np.where(topk_ids[tokens] == expert, topk_weights[tokens], np.float32(0)).sum(axis=1)
    return weights


def expert_result(ops: ExpertProducts, x: Array, mixture: Mixture, expert: int) -> Array:
    """What one expert makes of rows ``[n, in]``: ``[n, out]`` in the activation type."""
    weight, activation = mixture.hidden[expert], mixture.activation
    if activation.limit is not None:
        product = np.asarray(ops.host(ops.linear(x, weight)), np.float32)
        hidden = ops.array(rounded(activated(product, activation), ops.activation_dtype))
    elif activation.gated:
        hidden = ops.gated_linear(x, weight, activation.function)
    else:
        hidden = ops.activated_linear(x, weight, activation.function)
    return ops.linear(hidden, mixture.down[expert])


def shared_result(ops: ExpertProducts, x: Array, shared: SharedExpert) -> tuple[Array, Array | None]:
    """What a shared expert makes of rows, fp32 ``[T, out]``, and what multiplies it, fp32 ``[T, 1]``; None for 1."""
    gate = None if shared.gate is None else ops.scalar_gate(x, shared.gate)
    product = ops.gated_linear if shared.activation.gated else ops.activated_linear
    return ops.linear(product(x, shared.hidden, shared.activation.function), shared.down, fp32=True), gate


def mix(
    topk_ids: np.ndarray, topk_weights: np.ndarray, result_of: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """The sum of each token's experts in the order of their ranks, fp32 ``[T, out]``.

    ``result_of`` gives what an expert makes of the tokens with these numbers, ``[n, out]``. ``topk_weights`` are those
    of :func:`result_weights`.
    """
    (tokens, top_k), results = topk_ids.shape, None
    for expert, pairs in rows_by_expert(topk_ids.ravel()):
        found = result_of(expert, pairs // top_k)
        if results is None:
            results = np.empty((tokens * top_k, found.shape[1]), np.float32)
        results[pairs] = found
    assert results is not None
    return weighted_sum(results.reshape(tokens, top_k, -1), topk_weights)
