"""Adapters beside a weight: what they add, against float64, and that an adapter of zeros leaves every bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import float64_operations as model
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import ROWS, SEEDS, WIDTHS, norm_on, random_int8, random_norm, random_rows
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import HostWeight, OutlierColumns
from bminf_lite.backend.side_products import Adapter
from bminf_lite.backend.values import Array
from bminf_lite.cuda.runtime.kernel import Kernel

RANK = 8
KINDS = ("w8a8", "w8a16", "float", "outliers", "rotated")


def random_part(rng: np.random.Generator, kind: str, outputs: int, width: int) -> HostWeight:
    """A weight; the block of a rotation is the largest that divides the width."""
    if kind == "float":
        return rng.standard_normal((outputs, width)).astype(np.float16)
    part = random_int8(rng, outputs, width, kind != "w8a16")
    if kind == "rotated":
        return replace(part, rotation=min(width & -width, 32))
    if kind == "outliers":
        part.codes[:, width // 2] = 0
        values = rng.standard_normal((outputs, 1)).astype(np.float16)
        return replace(part, outliers=OutlierColumns(np.array([width // 2], np.int32), values))
    return part


def random_adapter(rng: np.random.Generator, outputs: int, width: int, rank: int = RANK) -> Adapter:
    """Matrices that fp16 holds exactly, and a scale that it does not."""
    a, b = rng.standard_normal((rank, width)), rng.standard_normal((outputs, rank))
    return Adapter((a / np.sqrt(width)).astype(np.float16), b.astype(np.float16), 1.7)


def low_rank(x: np.ndarray, adapter: Adapter, activation: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """What an adapter adds, in float64 but for the roundings of its inputs, and the magnitudes that decide its error.

    An input is wrong by the error of its sum, and by half a unit in the last place where that decides a rounding.
    """
    kept, scale = model.rounded(x, activation), np.float64(np.float32(adapter.scale))
    a, b = (np.asarray(matrix, np.float64) for matrix in (adapter.a, adapter.b))
    inputs = model.rounded(scale * (kept @ a.T), activation)
    return inputs @ b.T, (np.abs(inputs) + scale * (np.abs(kept) @ np.abs(a).T)) @ np.abs(b).T


@given(SEEDS, ROWS, WIDTHS, st.sampled_from([1, 3, 31, 64]), st.sampled_from([1, 3, RANK, 40]), st.sampled_from(KINDS))
def test_what_an_adapter_adds(
    backend: Backend, seed: int, rows: int, width: int, outputs: int, rank: int, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    part, adapter = random_part(rng, kind, outputs, width), random_adapter(rng, outputs, width, rank)
    bias = rng.standard_normal(outputs).astype(np.float32)
    x = random_rows(rng, rows, width, backend.activation_dtype.type)
    alone = backend.weight([part])
    base = np.array(backend.host(backend.linear(backend.array(x), alone, fp32=True)), np.float64)
    side, terms = low_rank(x.astype(np.float64), adapter, backend.activation_dtype)
    weight = backend.adapted(backend.weight([part], [bias]), adapter)
    assert weight.shape == alone.shape
    got = backend.host(backend.linear(backend.array(x), weight, fp32=True))
    size = np.abs(base) + terms + np.abs(bias)
    assert_close(got, base + side + bias, "adapter", backend.activation_dtype, size)
    stored = backend.host(backend.linear(backend.array(x), weight))
    assert stored.dtype == backend.activation_dtype
    if kind not in ("w8a16", "float"):  # the sums of the others may have an order for each type of the result
        np.testing.assert_array_equal(stored, got.astype(backend.activation_dtype))


@given(SEEDS, st.sampled_from([1, 3, 5, 70]), st.sampled_from(KINDS))
def test_epilogues(backend: Backend, seed: int, rows: int, kind: str) -> None:
    """Added to the residual stream, gated or activated is what the stored product becomes."""
    rng = np.random.default_rng(seed)
    weight = backend.adapted(backend.weight([random_part(rng, kind, 34, 64)]), random_adapter(rng, 34, 64))
    x = random_rows(rng, rows, 64, backend.activation_dtype.type) / backend.activation_dtype.type(8)
    linear = backend.host(backend.linear(backend.array(x), weight)).astype(np.float32)
    residual = rng.standard_normal(linear.shape).astype(np.float32)
    added = backend.host(backend.linear_add(backend.array(x), weight, backend.array(residual)))
    np.testing.assert_array_equal(added, residual + linear)
    gate, up = np.split(linear, 2, axis=1)
    gated = backend.host(backend.gated_linear(backend.array(x), weight, "relu"))
    np.testing.assert_array_equal(gated, (np.maximum(gate, 0) * up).astype(backend.activation_dtype))
    activated = backend.host(backend.activated_linear(backend.array(x), weight, "relu"))
    np.testing.assert_array_equal(activated, np.maximum(linear, 0).astype(backend.activation_dtype))


def test_adapters_add_up(backend: Backend) -> None:
    """One after another, each rounded in fp32; that of zeros changes nothing in any place."""
    rng = np.random.default_rng(5)
    part, x = random_int8(rng, 40, 64, True), random_rows(rng, 6, 64, backend.activation_dtype.type)
    adapters = [random_adapter(rng, 40, 64) for _ in range(2)]
    nothing = zeros(rng, 40, 64)[0]

    def product(*adapters: Adapter) -> np.ndarray:
        weight = backend.weight([part])
        for adapter in adapters:
            weight = backend.adapted(weight, adapter)
        return np.array(backend.host(backend.linear(backend.array(x), weight, fp32=True)))

    both = product(*adapters)
    first, second = (product(adapter) for adapter in adapters)
    size = np.abs(first) + np.abs(second)
    expected = first.astype(np.float64) + second - product()
    assert_close(both, expected, "adapter", backend.activation_dtype, size)
    for place in range(3):
        np.testing.assert_array_equal(bits(product(*adapters[:place], nothing, *adapters[place:])), bits(both))


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"i{x.itemsize}")


def zeros(rng: np.random.Generator, outputs: int, width: int) -> list[Adapter]:
    """Adapters that add nothing: a new one, whose ``b`` is zero as LoRA begins, and one whose ``a`` is."""
    adapter = random_adapter(rng, outputs, width)
    return [replace(adapter, b=np.zeros_like(adapter.b)), replace(adapter, a=np.zeros_like(adapter.a))]


def sources(backend: Backend, rng: np.random.Generator, rows: int, width: int) -> dict[str, Callable[[], Array]]:
    """The inputs that a layer's products have, each made anew: on a GPU most of them are deferred."""
    half, other = (random_rows(rng, rows, width, backend.activation_dtype.type) for _ in range(2))
    stream = random_rows(rng, rows, width, np.float32)
    norm, post = (norm_on(backend, random_norm(rng, width, center)) for center in (False, False))
    square, double = (backend.weight([random_int8(rng, n * width, width, True)]) for n in (1, 2))
    return {
        "values": lambda: backend.array(half),
        "norm": lambda: backend.norm(backend.array(stream), norm),
        "norm behind an addition": lambda: backend.norm(
            backend.linear_add(backend.array(half), square, backend.array(stream)), norm
        ),
        "stream": lambda: backend.norm_add(backend.array(other.astype(np.float32)), post, backend.array(stream)),
        "norm of it": lambda: backend.norm(
            backend.norm_add(backend.array(other.astype(np.float32)), post, backend.array(stream)), norm
        ),
        "gate": lambda: backend.gated_linear(backend.array(half), double, "silu"),
        "product": lambda: backend.linear(backend.array(half), square),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 70, *(pytest.param(rows, marks=pytest.mark.gpu) for rows in (2, 4, 17))])
def test_an_adapter_of_zeros_leaves_every_bit(backend: Backend, kind: str, rows: int) -> None:
    """Whatever the product reads and whatever becomes of it; also the sign of a zero."""
    rng, width, outputs = np.random.default_rng(rows), 96, 64
    part = random_part(rng, kind, outputs, width)
    if kind in ("w8a8", "w8a16"):
        part = replace(part, scale=np.where(rng.random(outputs) < 0.2, np.float32(1e-42), part.scale))
    bias = rng.standard_normal(outputs).astype(np.float32)
    residual = rng.standard_normal((rows, outputs)).astype(np.float32)
    operations: tuple[Callable[[Array, object], Array], ...] = (
        lambda x, weight: backend.linear(x, weight),
        lambda x, weight: backend.linear(x, weight, fp32=True),
        lambda x, weight: backend.linear_add(x, weight, backend.array(residual)),
        lambda x, weight: backend.gated_linear(x, weight, "silu"),
        lambda x, weight: backend.activated_linear(x, weight, "gelu"),
    )
    made = sources(backend, rng, rows, width)
    for biases in ([None], [bias]):
        base = backend.weight([part], biases)
        adapted = [backend.adapted(base, adapter) for adapter in zeros(rng, outputs, width)]
        for name, source in made.items():
            for i, operation in enumerate(operations):
                expected = np.array(backend.host(operation(source(), base)))
                for weight in adapted:
                    got = np.array(backend.host(operation(source(), weight)))
                    np.testing.assert_array_equal(bits(got), bits(expected), f"{name}, operation {i}")


def test_a_row_gets_what_it_gets_alone(backend: Backend, request: pytest.FixtureRequest) -> None:
    """With quantized activations: the sums of an adapter have one order, whatever shares the step."""
    if request.config.getoption("--fake-gpu"):
        pytest.skip("BLAS has its own order for each shape")
    rng = np.random.default_rng(8)
    weight = backend.adapted(backend.weight([random_int8(rng, 64, 96, True)]), random_adapter(rng, 64, 96))
    x = random_rows(rng, 9, 96, backend.activation_dtype.type)
    together = np.array(backend.host(backend.linear(backend.array(x), weight, fp32=True)))
    for row in range(9):
        alone = backend.host(backend.linear(backend.array(x[row : row + 1]), weight, fp32=True))
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_square_product_over_its_input(backend: Backend) -> None:
    rng = np.random.default_rng(3)
    weight = backend.adapted(backend.weight([random_int8(rng, 64, 64, True)]), random_adapter(rng, 64, 64))
    x = random_rows(rng, 5, 64, backend.activation_dtype.type)
    expected = np.array(backend.host(backend.linear(backend.array(x), weight)))
    place = backend.array(x)
    assert backend.linear(place, weight, out=place) is place
    np.testing.assert_array_equal(backend.host(place), expected)


@pytest.mark.parametrize(("a", "b"), [((8, 63), (24, 8)), ((8, 64), (23, 8)), ((8, 64), (24, 7))])
def test_an_adapter_of_another_weight_is_refused(backend: Backend, a: tuple[int, int], b: tuple[int, int]) -> None:
    weight = backend.weight([np.ones((24, 64), np.float16)])
    with pytest.raises(ValueError, match=r"does not fit a weight \[24, 64\]: give a \[rank, 64\] and b \[24, rank\]"):
        backend.adapted(weight, Adapter(np.ones(a, np.float16), np.ones(b, np.float16)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_input_that_is_not_finite_shows(backend: Backend, bad: float) -> None:
    rng = np.random.default_rng(1)
    weight = backend.adapted(backend.weight([random_int8(rng, 8, 32, True)]), random_adapter(rng, 8, 32))
    x = rng.standard_normal((3, 32)).astype(backend.activation_dtype)
    x[1, 7] = bad
    got = backend.host(backend.linear(backend.array(x), weight))
    assert not np.isfinite(got[1]).any() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "float"])
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_the_matrix_is_multiplied_by_the_kernel_that_multiplies_it_alone(
    cuda_backend: Backend, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its sums could have another order, and so other bits. cublasLt's products are no kernels here."""
    rng, launched, launch = np.random.default_rng(0), list[str](), Kernel.__call__

    def recording(called: Kernel, *arguments: object, **keywords: object) -> None:
        launched.append(called.name.partition("<")[0])
        launch(called, *arguments, **keywords)  # type: ignore[arg-type]

    def kernels(weight: Array) -> set[str]:
        launched.clear()
        cuda_backend.host(cuda_backend.linear(cuda_backend.array(x), weight))
        return {name for name in launched if "gem" in name}

    base = cuda_backend.weight([random_part(rng, kind, 64, 96)])
    adapted = cuda_backend.adapted(base, random_adapter(rng, 64, 96))
    x = random_rows(rng, rows, 96, np.float16)
    kernels(base)  # the first product of a shape is timed
    monkeypatch.setattr(Kernel, "__call__", recording)
    assert kernels(base) <= kernels(adapted)
