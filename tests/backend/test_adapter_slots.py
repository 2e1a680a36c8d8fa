"""Adapters that the rows of a step choose: against float64, in any company, and next to rows without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from random_values import norm_on, random_int8, random_norm, random_rows
from tolerances import assert_close

from bminf_lite.backend.adapter_slots import AdapterSlots, SavedMatrix
from bminf_lite.backend.base import Backend
from bminf_lite.backend.meta import bank_bytes
from bminf_lite.backend.side_products import Adapter
from bminf_lite.backend.values import Array, ForwardBatch

WIDTHS, FEATURES, RANK = (40, 24, 24), 96, 8
WIDE = 64, 32, 96
"""Sections that end where kernels of compute capability 9.0 add adapters themselves."""
SLOTS = 3


@pytest.fixture
def slots(backend: Backend) -> Iterator[AdapterSlots]:
    backend.adapter_slots = AdapterSlots(SLOTS, RANK)
    yield backend.adapter_slots
    backend.adapter_slots = None


def random_adapter(rng: np.random.Generator, width: int, rank: int, features: int = FEATURES) -> Adapter:
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rank, features), (width, rank)))
    return Adapter(a, b, float(rng.uniform(0.1, 2)))


def step_of(backend: Backend, ids: list[int] | None) -> ForwardBatch:
    """A step of one token for each id."""
    count = 1 if ids is None else len(ids)
    batch = ForwardBatch.packed(backend.array, np.zeros((count, 1), np.int32))
    return replace(batch, lora_ids=None if ids is None else backend.array(np.array(ids, np.int32)))


def made(backend: Backend, rng: np.random.Generator, widths: tuple[int, ...] = WIDTHS) -> tuple[Array, Array, list]:
    """A weight without and with a bank, and the adapters of its slots, of different ranks; one has no first part."""
    base = backend.weight([random_int8(rng, width, FEATURES, True) for width in widths])
    weight, bank = backend.with_adapters(base, widths, FEATURES)
    adapters = [[random_adapter(rng, width, rank) for width in widths] for rank in (RANK, 3, 1)]
    adapters[1][0] = None
    for slot, sections in enumerate(adapters, start=1):
        bank.put(slot, bank.prepare(sections))
    return base, (weight, bank), adapters


def product(backend: Backend, x: np.ndarray, weight: Array, ids: list[int] | None) -> np.ndarray:
    with backend.step(step_of(backend, ids)):
        return np.array(backend.host(backend.linear(backend.array(x), weight, fp32=True)))


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"i{x.itemsize}")


@pytest.mark.parametrize("widths", [WIDTHS, WIDE])
@pytest.mark.parametrize("ids", [[1], [2, 0], [3, 3, 1], [0, 1, 2, 3, 1, 0, 2], [*range(4)] * 10])
def test_each_row_gets_what_its_adapter_adds(
    backend: Backend, slots: AdapterSlots, ids: list[int], widths: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(len(ids))
    base, (weight, _), adapters = made(backend, rng, widths)
    x = random_rows(rng, len(ids), FEATURES, backend.activation_dtype.type)
    found, plain = product(backend, x, weight, ids), product(backend, x, base, None)
    added, size = np.zeros_like(plain, np.float64), np.abs(plain).astype(np.float64)
    rounded = backend.activation_dtype.type
    for row, slot in enumerate(ids):
        for part, first, width in zip(adapters[slot - 1], np.cumsum((0, *widths)), widths, strict=False):
            if slot and part is not None:
                a, b = (values.astype(rounded).astype(np.float64) for values in (part.a, part.b))
                inputs = (np.float32(part.scale) * (a @ x[row].astype(np.float64))).astype(rounded)
                added[row, first : first + width] = b @ inputs.astype(np.float64)
                size[row, first : first + width] += np.abs(b) @ np.abs(inputs.astype(np.float64))
    assert_close(found, plain + added, "adapter", backend.activation_dtype, size)
    for row, slot in enumerate(ids):
        if slot == 0:
            np.testing.assert_array_equal(bits(found[row]), bits(plain[row]))


@pytest.mark.parametrize("count", [2, 7, 33])
def test_no_other_row_and_no_other_adapter_changes_the_bits(backend: Backend, slots: AdapterSlots, count: int) -> None:
    rng = np.random.default_rng(count)
    _, (weight, _), _ = made(backend, rng)
    x = random_rows(rng, count, FEATURES, backend.activation_dtype.type)
    ids = rng.integers(0, SLOTS + 1, count).tolist()
    together = product(backend, x, weight, ids)
    for row in range(count):
        alone = product(backend, x[row : row + 1], weight, [ids[row]])
        np.testing.assert_array_equal(bits(alone[0]), bits(together[row]))


@pytest.mark.parametrize("rotation", [1, 32])
@pytest.mark.parametrize("count", [1, 5])
def test_a_norm_is_read_in_the_coordinates_of_the_model(
    backend: Backend, slots: AdapterSlots, rotation: int, count: int
) -> None:
    """Of a weight whose inputs are rotated too: as of the values of the norm, which a kernel computes as it reads."""
    rng = np.random.default_rng(count)
    parts = [replace(random_int8(rng, width, FEATURES, True), rotation=rotation) for width in WIDE]
    weight, bank = backend.with_adapters(backend.weight(parts), WIDE, FEATURES)
    bank.put(2, bank.prepare([random_adapter(rng, width, RANK) for width in WIDE]))
    residual, norm = random_rows(rng, count, FEATURES, np.float32), norm_on(backend, random_norm(rng, FEATURES, False))
    ids = [2] * count
    with backend.step(step_of(backend, ids)):
        normed = backend.norm(backend.array(residual), norm)
        found = np.array(backend.host(backend.linear(normed, weight, fp32=True)))
    with backend.step(step_of(backend, ids)):
        values = np.array(backend.host(backend.norm(backend.array(residual), norm)))
    np.testing.assert_array_equal(bits(found), bits(product(backend, values, weight, ids)))


@pytest.mark.parametrize("count", [3, 70, 150])
def test_kernels_of_all_sizes_give_the_same_bits(backend: Backend, count: int) -> None:
    """Of several ranks, and of rows that are too few or too many for a tile."""
    rng, features, widths = np.random.default_rng(count), 1000, (64, 32)
    backend.adapter_slots = AdapterSlots(SLOTS, 40)
    try:
        base = backend.weight([random_int8(rng, width, features, True) for width in widths])
        weight, bank = backend.with_adapters(base, widths, features)
    finally:
        slots, backend.adapter_slots = backend.adapter_slots, None
    for slot, rank in enumerate((40, 3, 17), start=1):
        bank.put(slot, bank.prepare([random_adapter(rng, width, rank, features) for width in widths]))
    x = random_rows(rng, count, features, backend.activation_dtype.type)
    ids = rng.integers(0, SLOTS + 1, count).tolist()
    backend.adapter_slots = slots
    together, plain = product(backend, x, weight, ids), product(backend, x, base, None)
    for row in {0, 1, count // 2, count - 1}:
        alone = product(backend, x[row : row + 1], weight, [ids[row]])
        np.testing.assert_array_equal(bits(alone[0]), bits(together[row]))
        for first in {row - row % 16, row - row % 64}:
            few = product(backend, x[first : row + 1], weight, ids[first : row + 1])
            np.testing.assert_array_equal(bits(few[-1]), bits(together[row]))
    none = np.array(ids) == 0
    np.testing.assert_array_equal(bits(together[none]), bits(plain[none]))
    backend.adapter_slots = None


def test_a_slot_is_overwritten_and_emptied(backend: Backend, slots: AdapterSlots) -> None:
    rng = np.random.default_rng(0)
    base, (weight, bank), adapters = made(backend, rng)
    x = random_rows(rng, 3, FEATURES, backend.activation_dtype.type)
    before = product(backend, x, weight, [1, 2, 1])
    bank.put(1, bank.prepare(adapters[2]))
    after, third = product(backend, x, weight, [1, 2, 1]), product(backend, x, weight, [3, 2, 3])
    assert (before[[0, 2]] != after[[0, 2]]).any()
    np.testing.assert_array_equal(bits(after), bits(third))
    bank.put(1, None)
    np.testing.assert_array_equal(bits(product(backend, x, weight, [1, 0, 1])), bits(product(backend, x, base, None)))


def test_a_step_goes_on_with_its_last_tokens(backend: Backend, slots: AdapterSlots) -> None:
    """Two sequences of 3 and 2 tokens: behind ``last_tokens`` a product has two rows."""
    rng = np.random.default_rng(1)
    base, (weight, _), _ = made(backend, rng)
    residual = random_rows(rng, 5, FEATURES, np.float32)
    batch = ForwardBatch.packed(backend.array, [[1, 2, 3], [4, 5]])
    ids = np.array([1, 1, 1, 2, 2], np.int32)
    batch = replace(batch, lora_ids=backend.array(ids), logit_lora_ids=backend.array(ids[[2, 4]]))
    with backend.step(batch):
        every = np.array(backend.host(backend.linear(backend.array(residual), weight, fp32=True)))
        last = backend.last_tokens(backend.array(residual), batch)
        found = np.array(backend.host(backend.linear(last, weight, fp32=True)))
        with backend.step(step_of(backend, None)):  # of another model
            plain = np.array(backend.host(backend.linear(backend.array(residual), weight, fp32=True)))
        again = np.array(backend.host(backend.linear(last, weight, fp32=True)))
    np.testing.assert_array_equal(bits(found), bits(every[[2, 4]]))
    np.testing.assert_array_equal(bits(again), bits(found))
    np.testing.assert_array_equal(bits(plain), bits(product(backend, residual, base, None)))


@pytest.mark.gpu
@pytest.mark.parametrize(("widths", "features", "rank"), [((40, 24, 24), 96, 8), ((4096,), 1000, 17), ((33, 7), 5, 64)])
def test_a_plan_counts_the_slots_to_the_byte(
    cuda_backend: Backend, widths: tuple[int, ...], features: int, rank: int
) -> None:
    slots = AdapterSlots(3, rank)
    base = cuda_backend.weight([np.ones((width, features), np.float16) for width in widths])
    cuda_backend.adapter_slots, before = slots, cuda_backend.memory()["used"]
    try:
        kept = cuda_backend.with_adapters(base, widths, features)
    finally:
        cuda_backend.adapter_slots = None
    assert kept and bank_bytes(slots, widths, features) == cuda_backend.memory()["used"] - before


@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("operation", ["add", "gate", "activate", "half"])
def test_behind_every_epilogue(backend: Backend, slots: AdapterSlots, operation: str, width: int) -> None:
    """The epilogue of the sums, as without adapters."""
    rng = np.random.default_rng(2)
    base, (weight, _), _ = made(backend, rng, (width, width))
    x, ids = random_rows(rng, 5, FEATURES, backend.activation_dtype.type), [1, 0, 3, 2, 0]
    residual = random_rows(rng, 5, 2 * width, np.float32)
    sums = {None: product(backend, x, base, None), 1: product(backend, x, weight, ids)}

    def result(of: Array, ids: list[int] | None) -> np.ndarray:
        with backend.step(step_of(backend, ids)):
            given = backend.array(x)
            if operation == "add":
                return np.array(backend.host(backend.linear_add(given, of, backend.array(residual))))
            if operation == "gate":
                return np.array(backend.host(backend.gated_linear(given, of, "silu")))
            if operation == "activate":
                return np.array(backend.host(backend.activated_linear(given, of, "gelu")))
            return np.array(backend.host(backend.linear(given, of)))

    found, plain = result(weight, ids), result(base, None)
    np.testing.assert_array_equal(bits(found[[1, 4]]), bits(plain[[1, 4]]))
    rounded = sums[1].astype(backend.activation_dtype).astype(np.float32)
    if operation == "add":
        np.testing.assert_array_equal(found, residual + rounded)
    elif operation == "half":
        np.testing.assert_array_equal(found, rounded.astype(backend.activation_dtype))
    else:
        assert (found[[0, 2, 3]] != plain[[0, 2, 3]]).any(axis=1).all()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operation", ["add", "gate", "activate", "half", "float"])
def test_long_rows_of_slots_behind_every_epilogue(backend: Backend, operation: str, dynamic: bool) -> None:
    """Prompts of several requests: the rows of a tile have one slot, or several, or none, in every tile of columns.

    On a CPU, where BLAS sums by shape, this holds for integers only.
    """
    if not dynamic and not backend.has_one_order:
        pytest.skip("float products have no order of sums on a CPU")
    rng, features, widths = np.random.default_rng(3), 1000, (352, 352)
    backend.adapter_slots = AdapterSlots(SLOTS, 32)
    try:
        base = backend.weight([random_int8(rng, width, features, dynamic) for width in widths])
        weight, bank = backend.with_adapters(base, widths, features)
        for slot, rank in enumerate((32, 16, 5), start=1):
            bank.put(slot, bank.prepare([random_adapter(rng, width, rank, features) for width in widths]))
        ids = [1] * 70 + [0] * 41 + [2, 3, 0] * 11 + [2] * 150
        x = random_rows(rng, len(ids), features, backend.activation_dtype.type)
        residual = random_rows(rng, len(ids), sum(widths), np.float32)

        def result(rows: slice) -> np.ndarray:
            with backend.step(step_of(backend, ids[rows])):
                given = backend.array(x[rows])
                if operation == "add":
                    return np.array(backend.host(backend.linear_add(given, weight, backend.array(residual[rows]))))
                if operation == "gate":
                    return np.array(backend.host(backend.gated_linear(given, weight, "silu")))
                if operation == "activate":
                    return np.array(backend.host(backend.activated_linear(given, weight, "gelu")))
                return np.array(backend.host(backend.linear(given, weight, fp32=operation == "float")))

        together = result(slice(len(ids)))
        for row in (0, 75, 112, 113, len(ids) - 1):
            np.testing.assert_array_equal(bits(together[row]), bits(result(slice(row, row + 1))[0]))
        for first in range(0, len(ids), 60):
            np.testing.assert_array_equal(
                bits(together[first : first + 60]), bits(result(slice(first, min(first + 60, len(ids)))))
            )
    finally:
        backend.adapter_slots = None


@pytest.mark.parametrize("ids", [[1], [0, 2, 1, 1, 3], [*range(4)] * 5])
def test_rows_whose_slot_has_a_matrix_of_its_own(backend: Backend, slots: AdapterSlots, ids: list[int]) -> None:
    """Slot 2 has none. A row gets what it gets alone, and the others keep theirs."""
    rng, vocab, features = np.random.default_rng(4), 70, 100
    matrices = rng.standard_normal((SLOTS, vocab, features)).astype(np.float32)
    bank = backend.saved_bank(vocab, features)
    for slot in (1, 3):
        bank.put(slot, bank.prepare([SavedMatrix(matrices[slot - 1])]))
    x = random_rows(rng, len(ids), features, backend.activation_dtype.type)
    y, stream = (random_rows(rng, len(ids), width, np.float32) for width in (vocab, features))
    tokens = rng.integers(0, vocab, len(ids)).astype(np.int32)

    def found(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        with backend.step(step_of(backend, ids[rows])):
            logits = backend.saved_linear(backend.array(x[rows]), bank, backend.array(y[rows]))
            residual = backend.saved_embed(backend.array(tokens[rows]), bank, backend.array(stream[rows]), 1.5)
            return np.array(backend.host(logits)), np.array(backend.host(residual))

    logits, residual = found(slice(len(ids)))
    for row, slot in enumerate(ids):
        alone = found(slice(row, row + 1))
        np.testing.assert_array_equal(bits(alone[0][0]), bits(logits[row]))
        np.testing.assert_array_equal(bits(alone[1][0]), bits(residual[row]))
        if slot in (1, 3):
            matrix = matrices[slot - 1].astype(backend.activation_dtype).astype(np.float64)
            size = np.abs(matrix) @ np.abs(x[row].astype(np.float64))
            assert_close(logits[row], matrix @ x[row].astype(np.float64), "adapter", backend.activation_dtype, size)
            np.testing.assert_array_equal(residual[row], matrix[tokens[row]].astype(np.float32) * np.float32(1.5))
        else:
            np.testing.assert_array_equal(bits(logits[row]), bits(y[row]))
            np.testing.assert_array_equal(bits(residual[row]), bits(stream[row]))
