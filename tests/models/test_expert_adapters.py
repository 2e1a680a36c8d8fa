"""Adapters of the experts of a mixture: each pair of a token and an expert gets what the token's adapter has for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.adapter_slots import AdapterSlots, Bank
from bminf_lite.backend.base import Backend
from bminf_lite.backend.expert_values import ExpertActivation, ExpertBiases, RouterSpec, Score
from bminf_lite.backend.meta import expert_bank_bytes, expert_matrix_bytes
from bminf_lite.backend.mixture import choose_experts
from bminf_lite.backend.quantization import HostWeight, quantize_weight
from bminf_lite.backend.rotation import rotated, rotation_of
from bminf_lite.backend.side_products import Adapter
from bminf_lite.backend.values import ExpertSlots, ForwardBatch, Norm, Placement

KINDS = {
    "w8a8": (True, True, 1), "w8a8-rotate-all": (True, True, 256), "w8a16": (True, False, 1),
    "w8a16, rotated": (True, False, 256), "float": (False, False, 1),
}  # fmt: skip
"""Whether the matrices are quantized, and their inputs, and the largest block of a rotation."""
SHAPES: dict[str, tuple[ExpertActivation, bool, dict[str, Any]]] = {
    "gated": (ExpertActivation("relu"), False, {"renormalise": True}),
    "plain": (ExpertActivation("relu_squared", gated=False), False, {}),
    "gpt-oss": (ExpertActivation(limit=1.0), True, {"score": Score.SOFTMAX_OF_CHOSEN}),
    "scaled inputs": (ExpertActivation("relu"), False, {"score": Score.SIGMOID, "scales_input": True}),
}
"""The activation, whether there are biases, and options of the router."""
EXPERTS, TOP_K, FEATURES, INNER, SLOTS, RANK = 6, 3, 40, 52, 3, 20
PLAIN_INNER = 56
"""A GPU computes experts without a gate whose width is a multiple of 8."""
IDS = [1, 0, 2, 3, 1, 1, 0, 2, 2, 3, 0, 1] * 2


@dataclass(frozen=True)
class Layer:
    """A mixture alone, and the same with adapters: slot 1 changes all matrices, slot 2 some, and slot 3 is empty."""

    ops: Backend
    plain: Any
    adapted: Any
    bank: Bank
    norm: Norm
    x: np.ndarray
    adapters: Sequence[list[Adapter | None]]

    @classmethod
    def random(cls, ops: Backend, kind: str, shape: str, are_copied: bool = False) -> Layer:
        """Widths of no whole vector, whose blocks are 8 and 4. ``are_copied``: the experts lie on the host."""
        rng, (activation, has_bias, options) = np.random.default_rng(7), SHAPES[shape]
        halves = 2 if activation.gated else 1
        inner = INNER if activation.gated else PLAIN_INNER
        router = rng.standard_normal((EXPERTS, FEATURES)).astype(np.float32)
        hidden = [[matrix(rng, kind, inner, FEATURES) for _ in range(halves)] for _ in range(EXPERTS)]
        down = [[matrix(rng, kind, FEATURES, inner)] for _ in range(EXPERTS)]
        biases = None
        if has_bias:
            sizes = (EXPERTS,), (EXPERTS, halves * inner), (EXPERTS, FEATURES)
            of_router, of_hidden, of_down = (rng.standard_normal(size).astype(np.float32) for size in sizes)
            biases = ExpertBiases(of_router, of_hidden, of_down)
        spec = RouterSpec(EXPERTS, TOP_K, **options)
        if are_copied:
            size = expert_matrix_bytes(hidden[0], halves), expert_matrix_bytes(down[0], 1)
            ops.placement = Placement(experts=(ExpertSlots(size, EXPERTS + 1, (EXPERTS,)),))
        plain = ops.mixture(spec, router, hidden, down, activation, None, biases)
        widths = [inner] * halves + [FEATURES]
        adapted, bank = ops.with_expert_adapters(plain, widths, FEATURES)
        shapes = [(inner, FEATURES)] * halves + [(FEATURES, inner)]
        adapters: list[list[Adapter | None]] = [
            [random_adapter(rng, *own, rank) for _ in range(EXPERTS) for own in shapes] for rank in (RANK, 3)
        ]
        adapters[1] = [None if place % 3 == 0 else part for place, part in enumerate(adapters[1])]
        for slot, sections in enumerate(adapters, start=1):
            bank.put(slot, bank.prepare(sections))
        norm = Norm(ops.vector(rng.uniform(0.5, 1.5, FEATURES).astype(np.float32)), 1e-6)
        x = rng.standard_normal((len(IDS), FEATURES)).astype(np.float32)
        return cls(ops, plain, adapted, bank, norm, x, adapters)

    def run(self, ids: Sequence[int] | None, rows: slice = slice(None)) -> np.ndarray:
        """What some tokens get, added to their stream; without ``ids`` of the mixture that has no adapters."""
        ops, stream = self.ops, self.ops.array(self.x[rows])
        with ops.step(step_of(ops, None if ids is None else ids[rows], len(self.x[rows]))):
            mixture = self.plain if ids is None else self.adapted
            return np.array(ops.host(ops.experts(ops.norm(stream, self.norm), mixture, stream)))


def matrix(rng: np.random.Generator, kind: str, *shape: int) -> HostWeight:
    """A random matrix of a kind."""
    values = (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
    quantized, dynamic, rotation = KINDS[kind]
    if not quantized:
        return values
    block = rotation_of(shape[1], rotation)
    return replace(quantize_weight(rotated(values, block), dynamic), rotation=block)


def random_adapter(rng: np.random.Generator, width: int, features: int, rank: int) -> Adapter:
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rank, features), (width, rank)))
    return Adapter(a / 6, b / 6, float(rng.uniform(0.5, 2)))


def step_of(ops: Backend, ids: Sequence[int] | None, count: int) -> ForwardBatch:
    """A step of one token for each id."""
    batch = ForwardBatch.packed(ops.array, np.zeros((count, 1), np.int32))
    return replace(batch, lora_ids=None if ids is None else ops.array(np.array(ids, np.int32)))


@pytest.fixture
def slots(backend: Backend) -> Iterator[AdapterSlots]:
    backend.adapter_slots = AdapterSlots(SLOTS, RANK)
    yield backend.adapter_slots
    backend.adapter_slots = None


def can(backend: Backend, kind: str, shape: str) -> bool:
    """Whether a backend computes such a layer."""
    return not backend.has_one_order or shape != "scaled inputs" or kind.startswith("w8a8")


def another_order(backend: Backend) -> float:
    """How far results of BLAS may be from each other, of another number of rows: a rounding to fp16 may fall away."""
    return 1e-5 if backend.activation_dtype == np.float32 else 1e-2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_other_token_and_no_other_adapter_changes_the_bits(
    backend: Backend, slots: AdapterSlots, kind: str, shape: str
) -> None:
    """Tokens without an adapter have the bits of the mixture alone. One and few tokens take other kernels than many.

    On a CPU, where BLAS sums by shape, this holds for integers only.
    """
    if not can(backend, kind, shape):
        pytest.skip("a GPU does not compute such a layer")
    layer = Layer.random(backend, kind, shape)
    together, plain = layer.run(IDS), layer.run(None)
    is_exact = backend.has_one_order or kind.startswith("w8a8")
    none, changed = np.array(IDS) % 3 == 0, np.array(IDS) % 3 != 0
    equal = np.testing.assert_array_equal if is_exact else np.testing.assert_allclose
    options = {} if is_exact else {"atol": another_order(backend)}
    equal(together[none], plain[none], **options)
    assert (together[changed] != plain[changed]).any(axis=1).all()
    for rows in (slice(1), slice(1, 2), slice(3, 6), slice(20, 24)):
        equal(layer.run(IDS, rows), together[rows], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "plain"])
@pytest.mark.parametrize("kind", ["w8a8", "w8a8-rotate-all"])
def test_a_few_tokens_have_the_bits_of_many(
    cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch, kind: str, shape: str
) -> None:
    """Also where a few tokens have experts in common."""
    from bminf_lite.cuda.kernels.experts import few_tokens

    cuda_backend.adapter_slots = AdapterSlots(SLOTS, RANK)
    try:
        layer = Layer.random(cuda_backend, kind, shape)
        together = layer.run(IDS)
        monkeypatch.setattr(few_tokens, "PAIRS_OF_EXPERTS", TOP_K)
        for rows in (slice(0, 4), slice(2, 5), slice(20, 24)):
            np.testing.assert_array_equal(layer.run(IDS, rows), together[rows])
    finally:
        cuda_backend.adapter_slots = None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_zeros_change_no_bit(backend: Backend, slots: AdapterSlots, kind: str, shape: str) -> None:
    """Also if one of the factors has numbers, and the slot had other adapters before."""
    if not can(backend, kind, shape):
        pytest.skip("a GPU does not compute such a layer")
    layer = Layer.random(backend, kind, shape)
    plain = layer.run(None)
    is_exact = backend.has_one_order or kind.startswith("w8a8")
    for zero in ({"a": 0}, {"b": 0}):
        sections = [
            replace(part, **{name: 0 * getattr(part, name) for name in zero}) if part is not None else None
            for part in layer.adapters[0]
        ]
        layer.bank.put(1, layer.bank.prepare(sections))
        layer.bank.put(2, layer.bank.prepare([None] * len(sections)))
        found = layer.run([1, 2, 3] * (len(IDS) // 3))
        if is_exact:
            np.testing.assert_array_equal(found.view(np.int32), plain.view(np.int32))
        else:
            np.testing.assert_allclose(found, plain, atol=another_order(backend))
    layer.bank.put(1, None)
    assert layer.run(IDS).shape == plain.shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_float_layer_is_that_of_merged_matrices(shape: str, dtype: type) -> None:
    """Of each token its adapter's, in one order of operations of its own."""
    ops = Backend(dtype)
    ops.adapter_slots = AdapterSlots(SLOTS, RANK)
    layer = Layer.random(ops, "float", shape)
    found = layer.run(IDS)
    merged = [layer.run(None)]
    for sections in layer.adapters:
        size, changed = len(sections) // EXPERTS, []
        for weights, own in ((layer.plain.hidden, slice(size - 1)), (layer.plain.down, slice(size - 1, size))):
            parts = [sections[expert * size : (expert + 1) * size][own] for expert in range(EXPERTS)]
            deltas = [
                np.concatenate(
                    [
                        np.zeros((weight.shape[0] // len(of), weight.shape[1]), np.float32)
                        if part is None
                        else np.float32(part.scale) * part.b @ part.a
                        for part in of
                    ]
                )
                for weight, of in zip(weights, parts, strict=True)
            ]
            changed.append([replace(w, values=w.values + delta) for w, delta in zip(weights, deltas, strict=True)])
        hidden, down = changed
        merged.append(replace(layer, plain=replace(layer.plain, hidden=hidden, down=down)).run(None))
    merged.append(merged[0])
    expected = np.stack([merged[slot][row] for row, slot in enumerate(IDS)])
    tolerance = 1e-5 if dtype is np.float32 else 1e-2
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["w8a8", "w8a8-rotate-all", "w8a16"])
def test_a_pair_is_a_product_with_a_side_product(kind: str) -> None:
    """Of one token and one expert: :meth:`Backend.adapted` of the expert's weights."""
    ops = Backend(np.float16)
    ops.adapter_slots = AdapterSlots(SLOTS, RANK)
    layer = Layer.random(ops, kind, "gated")
    for row in (0, 2):
        normed = ops.norm(layer.x[row : row + 1], layer.norm)
        ids, weights = choose_experts(normed, layer.plain)
        sections, total = layer.adapters[IDS[row] - 1], np.zeros((1, FEATURES), np.float32)
        for place, (expert, factor) in enumerate(zip(ids[0], weights[0], strict=True)):
            own = sections[3 * expert : 3 * expert + 3]
            gate, up, down = (part or empty(*shape) for part, shape in zip(own, PLACES, strict=True))
            both = replace(stacked(gate, up), scale=1.0)
            wide = ops.adapted(layer.plain.hidden[expert], both)
            result = ops.linear(ops.gated_linear(normed, wide, "relu"), ops.adapted(layer.plain.down[expert], down))
            part = factor * result.astype(np.float32)
            total = part if place == 0 else total + part
        found = layer.run(IDS, slice(row, row + 1))
        np.testing.assert_allclose(found, layer.x[row] + total[0][None], rtol=2e-3, atol=2e-2)


PLACES = (INNER, FEATURES), (INNER, FEATURES), (FEATURES, INNER)


def empty(width: int, features: int) -> Adapter:
    return Adapter(np.zeros((1, features), np.float32), np.zeros((width, 1), np.float32))


def stacked(gate: Adapter, up: Adapter) -> Adapter:
    """One adapter of both matrices."""
    a = np.concatenate([np.float32(part.scale) * part.a for part in (gate, up)])
    b = np.zeros((2 * INNER, len(a)), np.float32)
    b[:INNER, : len(gate.a)], b[INNER:, len(gate.a) :] = gate.b, up.b
    return Adapter(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_what_the_reference_gives(cuda_backend: Backend, kind: str, shape: str) -> None:
    if not can(cuda_backend, kind, shape):
        pytest.skip("a GPU does not compute such a layer")
    results = []
    for ops in (cuda_backend, Backend(np.float16)):
        ops.adapter_slots = AdapterSlots(SLOTS, RANK)
        try:
            layer = Layer.random(ops, kind, shape)
            results.append(layer.run(IDS) - layer.x)
        finally:
            ops.adapter_slots = None
    found, expected = results
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()  # a code next to a tie moves by one


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_are_copied_give_the_bits_of_those_on_the_gpu(cuda_backend: Backend, kind: str) -> None:
    """A token, and then others, so that slots have experts in another order."""
    from bminf_lite.backend.cuda.backend import CudaBackend

    results = []
    for are_copied in (False, True):
        ops: Any = CudaBackend(0)
        ops.adapter_slots = AdapterSlots(SLOTS, RANK)
        try:
            layer = Layer.random(ops, kind, "gated", are_copied)
            results.append([layer.run(IDS, rows) for rows in (slice(3, 5), slice(None), slice(20, 23))])
        finally:
            ops.close()
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "widths", "features", "rank"), [(4, (40, 40, 96), 96, 8), (3, (56, 33), 40, 17)])
def test_a_plan_counts_the_slots_to_the_byte(
    cuda_backend: Backend, experts: int, widths: tuple[int, ...], features: int, rank: int
) -> None:
    slots = AdapterSlots(3, rank)
    inner, out = widths[0], widths[-1]
    hidden = [[np.ones((inner, features), np.float16)] * (len(widths) - 1)] * experts
    base = cuda_backend.mixture(
        RouterSpec(experts, 2), np.ones((experts, features), np.float32), hidden,
        [[np.ones((-(-out // 8) * 8, inner), np.float16)]] * experts,
        ExpertActivation("relu", gated=len(widths) == 3),
    )  # fmt: skip
    cuda_backend.adapter_slots, before = slots, cuda_backend.memory()["used"]
    try:
        kept = cuda_backend.with_expert_adapters(base, widths, features)
    finally:
        cuda_backend.adapter_slots = None
    assert kept and expert_bank_bytes(slots, experts, widths, features) == cuda_backend.memory()["used"] - before
