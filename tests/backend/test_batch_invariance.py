"""A row's result on a GPU is a function of that row: the same bits in every batch, at every place of it.

Everything but attention: docs/numerics.md, "One order of sums". Float values are compared as the integers that their
bits are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from checked import repeats
from random_values import norm_on, random_int8, random_norm, random_rows

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight, OutlierColumns
from bminf_lite.backend.side_products import Adapter
from bminf_lite.backend.values import Norm

pytestmark = pytest.mark.gpu

BATCHES = (1, 2, 3, 8, 16, 17, 64, 65, 256)
"""Sizes of batches that are compared with the batch of all ``ROWS``: decoding, mixed steps and prefill."""
ROWS, WIDE_ROWS = 2048, 600
"""Rows in all, and of more than 4,096 elements: enough for the kernels that many rows have."""
WIDTHS = (40, 200, 1000, 1024, 2048, 4096, 5120, 8192, 16384)
"""Widths for 8 to 1,024 threads a row, for one to four vectors a thread, and with a last vector that is not full."""
KINDS = ("rms", "layer")
SOME_WIDTHS = [40, 5120, *repeats(*(width for width in WIDTHS if width not in (40, 5120)))]
"""``WIDTHS``, of which a checker gets two."""

Operation = Callable[[Backend, Any, np.ndarray], list[Any]]


@dataclass(frozen=True)
class Case:
    """An operation over rows: ``run(backend, weights, rows)`` gives arrays with a row for each of ``rows``."""

    rows: np.ndarray
    weights: Any
    run: Operation

    def results(self, backend: Backend, first: int, count: int) -> list[np.ndarray]:
        """The bits of the results for ``count`` rows from ``first`` on."""
        arrays = self.run(backend, self.weights, self.rows[first : first + count])
        return [bits_of(np.array(backend.host(x))) for x in arrays]


def bits_of(x: np.ndarray) -> np.ndarray:
    """A float array as the integers of its bits."""
    return x.view(f"i{x.itemsize}") if x.dtype.kind == "f" else x


def differences(backend: Backend, case: Case, batches: tuple[int, ...] = BATCHES) -> Iterator[tuple[int, int]]:
    """For each size of batch: how many values of its results differ from those of the same rows among all rows."""
    total = len(case.rows)
    everything = case.results(backend, 0, total)
    places = np.random.default_rng(0)
    for count in batches:
        firsts = {0, total - count, *places.integers(0, total - count, 8 if count < 17 else 1)}
        wrong = 0
        for first in map(int, sorted(firsts)):
            parts = case.results(backend, first, count)
            wrong += sum(
                int(np.count_nonzero(part != whole[first : first + count]))
                for part, whole in zip(parts, everything, strict=True)
            )
        yield count, wrong


def check(backend: Backend, case: Case, batches: tuple[int, ...] = BATCHES) -> None:
    wrong = {count: wrong for count, wrong in differences(backend, case, batches) if wrong}
    assert not wrong, f"values that differ from those among {len(case.rows)} rows, by the size of the batch: {wrong}"


# -- sums over a row ---------------------------------------------------------------------------------------------------


def rows_near_ties(rng: np.random.Generator, rows: int, width: int, center: bool) -> np.ndarray:
    """Rows whose mean, or mean square, is so near to a tie of fp32 that the last bit shows the order of an fp64 sum.

    A row holds ``b``, half a unit of ``b`` in the last place of fp32, and terms of 0.3 to 0.5 units in the last place
    of fp64, in vectors that are a power of two apart. An fp64 sum loses such a term alone, but not two that were added
    first.
    """
    x, vectors = np.zeros((rows, width), np.float32), width // 8
    for row in x:
        step = 2 ** int(rng.integers(0, max(1, vectors.bit_length() - 2)))
        first = int(rng.integers(0, step))
        count = min(int(rng.integers(2, 6)), vectors - 2, (vectors - 1 - first) // step)
        places = np.array([first + step * i for i in range(count + 1)]) * 8
        tiny = rng.uniform(0.3, 0.5, count) * 2.0**-52
        if center:
            big, half = 1 + 2 * rng.integers(0, 2**21) * 2.0**-23, 2.0**-24
            row[places] = [big, *tiny]
        else:
            big, half = 1 + rng.integers(0, 800) * 2.0**-11, 2.0**-12
            beside = rng.integers(1, 800, 16) * 2.0**-14
            is_even = np.float32(big**2 + beside**2).view(np.int32) % 2 == 0  # a tie rounds down
            row[places] = [big, *np.sqrt(tiny)]
            row[places[0] + 1] = beside[is_even.argmax()]
        other = int(rng.choice(np.setdiff1d(np.arange(vectors), places // 8)))
        row[8 * other] = half
    return x * np.where(rng.random((rows, 1)) < 0.5, np.float32(1), np.float32(-1))


def mixed_rows(rng: np.random.Generator, width: int, center: bool) -> np.ndarray:
    """Random rows and rows near ties, by turns."""
    rows = ROWS if width <= 4096 else WIDE_ROWS
    x = random_rows(rng, rows, width, np.float32)
    x[::2] = rows_near_ties(rng, rows // 2, width, center)
    return x


def norm_case(backend: Backend, kind: str, width: int, run: Operation, weight: Any = None) -> Case:
    rng, center = np.random.default_rng(width), kind == "layer"
    norm = norm_on(backend, replace(random_norm(rng, width, center), eps=1e-12))
    return Case(mixed_rows(rng, width, center), (norm, weight), run)


def plain_norm(ops: Backend, weights: Any, x: np.ndarray) -> list[Any]:
    return [ops.norm(ops.array(x), weights[0])]


def quantized_norm(ops: Backend, weights: Any, x: np.ndarray) -> list[Any]:
    return list(ops.quantize(ops.norm(ops.array(x), weights[0])))


def norm_and_products(ops: Backend, weights: Any, x: np.ndarray) -> list[Any]:
    """What a layer makes of a norm: a projection, logits, and a product that is added and normalised again."""
    norm, weight = weights
    first = ops.linear(ops.norm(ops.array(x), norm), weight)
    logits = ops.linear(ops.norm(ops.array(x), norm), weight, fp32=True)
    residual = ops.linear_add(ops.norm(ops.array(x), norm), weight, ops.array(x))
    return [first, logits, ops.norm(residual, norm)]


@pytest.mark.parametrize("width", SOME_WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_norms(cuda_backend, kind, width):
    check(cuda_backend, norm_case(cuda_backend, kind, width, plain_norm))


@pytest.mark.parametrize("width", SOME_WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_norms(cuda_backend, kind, width):
    check(cuda_backend, norm_case(cuda_backend, kind, width, quantized_norm))


@pytest.mark.parametrize("width", [40, *repeats(1024, 4096)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "float"])
def test_norms_and_products(cuda_backend, recipe, kind, width):
    rng = np.random.default_rng(width)
    bias = rng.standard_normal(width).astype(np.float32) if kind == "layer" else None
    weight = cuda_backend.weight([random_weight(rng, recipe, width, width)], [bias])
    check(cuda_backend, norm_case(cuda_backend, kind, width, norm_and_products, weight))


def ordered_sum(parts: np.ndarray) -> np.ndarray:
    """The sum of vectors ``[rows, vectors]`` in fp64, as docs/numerics.md orders it."""
    x = np.zeros((len(parts), -(-parts.shape[1] // 2048), 64, 32))
    x.reshape(len(parts), -1)[:, : parts.shape[1]] = parts
    total = x[:, 0]
    for period in range(1, x.shape[1]):
        total = total + x[:, period]
    for axis in (2, 1):
        while (half := total.shape[axis] // 2) > 0:
            low, high = np.split(total, [half], axis)
            total = low + high
    return total[:, 0, 0]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("width", [*SOME_WIDTHS, 40_008])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_of_a_norm_have_the_documented_order(cuda_backend, request, kind, width, aligned):
    """Bit for bit, in the kernel for padded rows and in the one for any rows."""
    if request.config.getoption("--fake-gpu"):
        pytest.skip("NumPy's own order on a GPU made of NumPy")
    rng, center, k = np.random.default_rng(width), kind == "layer", np.float64(1.0 / width)
    rows = 300
    x = random_rows(rng, rows, width, np.float32)
    x[::2] = rows_near_ties(rng, rows // 2, width, center)
    norm = replace(random_norm(rng, width, center), eps=1e-12)

    def vectors(values: np.ndarray) -> np.ndarray:
        return np.pad(values, ((0, 0), (0, -width % 8))).reshape(rows, -1, 8)

    centered = x
    if center:
        part = np.zeros((rows, -(-width // 8)), np.float32)
        for j in range(8):
            part += vectors(x)[..., j]
        centered = x - np.float32(ordered_sum(part) * k)[:, None]
    part = np.zeros((rows, -(-width // 8)), np.float32)
    for j in range(8):  # fma: the product is exact in 64 bits of mantissa
        wide = vectors(centered)[..., j].astype(np.longdouble)
        part = (wide * wide + part).astype(np.float32)
    inverse = 1 / np.sqrt(np.float32(ordered_sum(part) * k) + np.float32(norm.eps))
    expected = centered * norm.weight * inverse[:, None]
    expected = expected if norm.bias is None else expected + norm.bias
    if aligned:
        residual = cuda_backend.arrays.padded(cuda_backend.array(x))
    else:
        residual = cuda_backend.array(np.pad(x, ((0, 0), (0, 3))))[:, :width]
    out = cuda_backend.norm(residual, norm_on(cuda_backend, norm), out=residual)
    np.testing.assert_array_equal(bits_of(np.array(cuda_backend.host(out))), bits_of(expected))


# -- products ----------------------------------------------------------------------------------------------------------


def products(ops: Backend, weight: Any, x: np.ndarray) -> list[Any]:
    """Every operation with a product; rows of the residual stream are made of those of ``x``."""
    before = np.repeat(x[:, :1].astype(np.float32) * np.float32(0.7), weight.shape[0], axis=1)
    gate = [] if weight.shape[0] % 2 else [ops.gated_linear(ops.array(x), weight, "silu")]
    return [
        ops.linear(ops.array(x), weight),
        ops.linear(ops.array(x), weight, fp32=True),
        ops.linear_add(ops.array(x), weight, ops.array(before)),
        ops.activated_linear(ops.array(x), weight, "gelu_tanh"),
        *gate,
    ]


def random_weight(rng: np.random.Generator, recipe: str, outputs: int, width: int) -> Any:
    """A host's weight: ``w8a8``, ``w8a16`` or ``float``."""
    if recipe == "float":
        return (rng.standard_normal((outputs, width)) * 0.1).astype(np.float16)
    return random_int8(rng, outputs, width, recipe == "w8a8")


@pytest.mark.parametrize("with_bias", [True, *repeats(False)])
@pytest.mark.parametrize(("outputs", "width"), [(64, 96), *repeats((512, 1000), (270, 256), (1056, 4096))])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "float"])
def test_products(cuda_backend, recipe, outputs, width, with_bias):
    rng = np.random.default_rng(outputs)
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    weight = cuda_backend.weight([random_weight(rng, recipe, outputs, width)], [bias])
    check(cuda_backend, Case(random_rows(rng, ROWS, width, np.float16), weight, products), (1, 2, 8, 17, 64, 256))


@pytest.mark.parametrize("dtype", [np.float16, *repeats(np.float32)])
def test_products_with_outlier_columns(cuda_backend, dtype):
    rng, width, columns = np.random.default_rng(3), 512, np.array([3, 77, 200, 511], np.int32)
    part = random_int8(rng, 256, width, True)
    part.codes[:, columns] = 0
    part = replace(part, outliers=OutlierColumns(columns, rng.standard_normal((256, 4)).astype(np.float16)))
    weight = cuda_backend.weight([part], [rng.standard_normal(256).astype(np.float32)])

    def run(ops: Backend, weight: Any, x: np.ndarray) -> list[Any]:
        norm = Norm(ops.vector(np.ones(width, np.float32)), 1e-6)
        y = ops.array(x) if dtype == np.float16 else ops.norm(ops.array(x), norm)
        before = np.repeat(x[:, :1].astype(np.float32), 256, axis=1)
        return [ops.linear(y, weight), ops.linear_add(y, weight, ops.array(before))]

    check(cuda_backend, Case(random_rows(rng, ROWS, width, dtype), weight, run))


def test_products_with_an_adapter(cuda_backend):
    rng, width = np.random.default_rng(4), 1024
    a, b = rng.standard_normal((8, width)).astype(np.float16), rng.standard_normal((256, 8)).astype(np.float16)
    weight = cuda_backend.adapted(cuda_backend.weight([random_int8(rng, 256, width, True)]), Adapter(a, b, 0.25))
    check(cuda_backend, Case(random_rows(rng, ROWS, width, np.float16), weight, products))


@pytest.mark.repeats
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_activations_of_every_fp16_number(cuda_backend, activation):
    """A weight's scale is the number: the product of codes 127 and 1 is 127, and the input's scale is 1/127."""
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)].astype(np.float32)
    codes = np.zeros((len(numbers), 16), np.int8)
    codes[:, 0] = 1
    gate = Int8Weight(codes, numbers, True)
    up = Int8Weight(codes, np.full(len(numbers), 0.7, np.float32), True)
    weights = cuda_backend.weight([gate]), cuda_backend.weight([gate, up])

    def run(ops: Backend, weights: Any, x: np.ndarray) -> list[Any]:
        return [
            ops.activated_linear(ops.array(x), weights[0], activation),
            ops.gated_linear(ops.array(x), weights[1], activation),
        ]

    x = np.zeros((65, 16), np.float16)
    x[:, 0] = np.linspace(0.5, 2, 65)
    check(cuda_backend, Case(x, weights, run), (1, 2, 17, 33, 64))


@pytest.mark.parametrize("rows", [1, 2, 17, 65])
def test_products_that_round_to_zero_keep_its_sign(cuda_backend, rows):
    """Without a bias nothing is added: the product of tiny scales and a negative sum is -0."""
    weight = cuda_backend.weight([Int8Weight(np.full((32, 16), -1, np.int8), np.full(32, 1e-40, np.float32), True)])
    y = cuda_backend.linear(cuda_backend.array(np.full((rows, 16), 6e-8, np.float16)), weight, fp32=True)
    zeros = np.full((rows, 32), -0.0, np.float32)
    np.testing.assert_array_equal(bits_of(np.array(cuda_backend.host(y))), bits_of(zeros))


@pytest.mark.repeats
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("outputs", [5003, 8192])
@pytest.mark.parametrize("recipe", ["w8a16", "float"])
def test_logits(cuda_backend, recipe, outputs, with_bias):
    """The head of a model in int8 may be float."""
    rng, width = np.random.default_rng(outputs), 1024
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    weight = cuda_backend.weight([random_weight(rng, recipe, outputs, width)], [bias])

    def run(ops: Backend, weights: Any, x: np.ndarray) -> list[Any]:
        return [ops.linear(ops.norm(ops.array(x), weights[0]), weights[1], fp32=True)]

    check(cuda_backend, norm_case(cuda_backend, "rms", width, run, weight))
