"""Observing a backend's operations: which are called in a step, with which arguments, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.cache_values import LayerCache
from ..backend.expert_values import RouterSpec
from ..backend.mixture import SharedExpert
from ..backend.operations.weights import NumpyWeight
from ..backend.values import Array

OPERATIONS = (
    "embed",
    "add_positions",
    "add_token_types",
    "norm",
    "product",
    "linear",
    "linear_add",
    "gated_linear",
    "activated_linear",
    "experts",
    "last_tokens",
    "attention",
    "last_token_attention",
    "encoder_attention",
    "store_source",
    "cross_attention",
    "norm_add",
    "norm_qk",
    "soft_cap",
    "all_reduce_add",
    "linear_add_of_ranks",
    "all_gather_columns",
    "sample",
)
"""The operations of a forward pass, of ranks and of sampling."""
LEAST_BALANCE = 0.9
"""Routing is balanced if a step reads at least this share of the experts that random tokens would read."""
LINEAR_OPERATIONS = ("product", "linear", "linear_add", "linear_add_of_ranks", "gated_linear", "activated_linear")


@dataclass(frozen=True)
class OpCall:
    """One call of an operation; ``start`` and ``end`` are seconds by the host's clock."""

    name: str
    args: tuple[Any, ...]
    result: Any
    start: float
    end: float


@contextmanager
def trace_calls(ops: Backend, callback: Callable[[OpCall], object]) -> Iterator[None]:
    """Pass each call of an operation of ``ops`` to ``callback`` after it returns; calls inside of calls are left out.

    An :class:`OpCall` refers to its arrays, so keeping it keeps their memory.
    """
    inside = False

    def watched(name: str) -> Callable[..., Any]:
        operation = getattr(ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return operation(*args, **kwargs)
            inside = True
            try:
                start = time.perf_counter()
                result = operation(*args, **kwargs)
                end = time.perf_counter()
            finally:
                inside = False
            callback(OpCall(name, (*args, *kwargs.values()), result, start, end))
            return result

        return call

    for name in OPERATIONS:
        setattr(ops, name, watched(name))
    try:
        yield
    finally:
        for name in OPERATIONS:
            delattr(ops, name)


@dataclass(frozen=True)
class ExpertUse:
    """How many of its experts a layer reads in a step, the mean over layers and steps.

    ``counted`` are those that the tokens chose, and ``expected`` what they would choose on average if each chose at
    random and alone.
    """

    num_experts: float
    counted: float
    expected: float

    @property
    def is_balanced(self) -> bool:
        """Whether the choices are nearly those of such tokens."""
        return self.counted >= LEAST_BALANCE * self.expected


@dataclass(frozen=True)
class MixtureCost:
    """A call of a layer of experts by ``tokens`` tokens: the bytes of all experts, and how they are chosen."""

    nbytes: int
    spec: RouterSpec
    tokens: int

    @property
    def expected(self) -> float:
        """The experts that are read if each token chooses at random."""
        return share_of_chosen(self.spec, self.tokens) * self.spec.num_experts

    def read(self, experts: float) -> float:
        """The bytes of as many experts."""
        return self.nbytes * experts / self.spec.num_experts


@dataclass
class LinearCosts:
    """The costs of products: bytes of weights read, and operations, two for each element of a weight and row.

    Of a layer of experts, as many count as random tokens choose on average, until :meth:`count` gets those that the
    tokens of steps chose.
    """

    nbytes: float = 0
    operations: int = 0
    mixtures: list[MixtureCost] = field(default_factory=list)
    experts: ExpertUse | None = None

    def add(self, call: OpCall) -> None:
        """Count the call if it is a product."""
        if call.name in LINEAR_OPERATIONS:
            x, weight = call.args[:2]
            self.nbytes += weight.nbytes
            self.operations += 2 * x.shape[0] * weight.shape[0] * weight.shape[1]
        elif call.name == "experts":
            x, mixture = call.args[:2]
            spec, nbytes, elements = router_of(mixture), 0, 0
            for matrices in (mixture.hidden, mixture.down):
                nbytes += bytes_of_all(matrices)
                elements += elements_of_one(matrices)
            self.mixtures.append(mixture_cost := MixtureCost(nbytes, spec, x.shape[0]))
            self.nbytes += mixture_cost.read(mixture_cost.expected)
            self.operations += 2 * x.shape[0] * spec.top_k * elements
            for shared in (value for value in call.args if isinstance(value, SharedExpert)):
                for weight in (shared.hidden, shared.down):
                    self.nbytes += weight.nbytes
                    self.operations += 2 * x.shape[0] * weight.shape[0] * weight.shape[1]

    def count(self, steps: Sequence[Sequence[np.ndarray]]) -> None:
        """Count the experts that tokens chose: of each step, int ``[T, top_k]`` of each layer of experts."""
        if not self.mixtures:
            return
        counted = np.mean([[len(np.unique(ids)) for ids in layers] for layers in steps], axis=0)
        for cost, experts in zip(self.mixtures, counted, strict=True):
            self.nbytes += cost.read(experts - cost.expected)
        of_layers = [(cost.spec.num_experts, cost.expected) for cost in self.mixtures]
        num_experts, expected = np.mean(of_layers, axis=0).tolist()
        self.experts = ExpertUse(num_experts, float(counted.mean()), expected)


@contextmanager
def recorded_choices(ops: Backend) -> Iterator[list[Array]]:
    """What each layer of experts chooses meanwhile, int32 ``[T, top_k]`` on the device; no step may be replayed."""
    found: list[Array] = []
    ops.choices = found
    try:
        yield found
    finally:
        ops.choices = None


def router_of(mixture: Any) -> RouterSpec:
    """How a layer of experts chooses, as the reference or a GPU has it."""
    spec: RouterSpec = mixture.spec if hasattr(mixture, "spec") else mixture.router.spec
    return spec


def bytes_of_all(matrices: Any) -> int:
    """Bytes of a matrix of every expert."""
    if isinstance(matrices, Sequence):
        return sum(int(weight.nbytes) for weight in matrices)
    return int(matrices.bytes_of(matrices.num_experts))


def elements_of_one(matrices: Any) -> int:
    """Elements of a matrix of one expert."""
    rows, columns = matrices[0].shape if isinstance(matrices, Sequence) else matrices.shape
    return int(rows * columns)


def share_of_chosen(spec: RouterSpec, tokens: int) -> float:
    """The share of the experts that any of some tokens chooses, on average, if each chooses at random."""
    return float(1 - (1 - spec.top_k / spec.num_experts) ** tokens)


def moved_bytes(call: OpCall) -> int:
    """Bytes that an operation of the CPU's backend must read and write, by its arguments and result."""
    if call.name in ("embed", "add_positions", "add_token_types"):
        return 2 * int(call.result.nbytes)
    total = 0
    for value in (*call.args, call.result):
        if isinstance(value, LayerCache) and call.name == "attention":
            tokens = int((call.args[-1].context_lens + 1).sum())
            total += 2 * tokens * int(value.keys[0, :, 0].nbytes)
        elif isinstance(value, NumpyWeight):
            total += int(value.nbytes)
        else:
            total += int(getattr(value, "nbytes", 0))
    return total


def describe(call: OpCall) -> str:
    """An operation's name with the shapes of its first array and of its result."""
    first = next((list(a.shape) for a in call.args if hasattr(a, "shape")), [])
    return f"{call.name} {first} -> {list(getattr(call.result, 'shape', ()))}"
