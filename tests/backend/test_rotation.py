"""Products that rotate their input: the transform is Sylvester's, and codes are equal wherever they are computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from float64_operations import rotation_of_heads
from hypothesis import given
from hypothesis import strategies as st
from random_values import SEEDS, norm_on, random_int8, random_norm, random_rows

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight, OutlierColumns, int8_parts
from bminf_lite.backend.rotation import (
    MAX_ROTATION,
    is_rotation,
    pairs_of_rotation,
    rotated,
    rotated_heads,
    rotation_of,
)
from bminf_lite.backend.values import Array
from bminf_lite.cuda.runtime.kernel import Kernel

BLOCKS = [2, 4, 8, 16, 32, 64, 128, 256]


def hadamard(block: int) -> np.ndarray:
    """Sylvester's matrix ``[block, block]`` of ones and minus ones, fp64."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix


def rotated_weight(rng: np.random.Generator, rows: int, width: int, block: int, dynamic: bool = True) -> Int8Weight:
    return replace(random_int8(rng, rows, width, dynamic), rotation=block)


@given(SEEDS, st.one_of(st.integers(1, 150).map(lambda half: 2 * half), st.sampled_from([32, 64, 80, 96, 128, 256])))
def test_heads_of_an_int8_cache_keep_their_scores(seed: int, head_dim: int) -> None:
    """An orthogonal matrix on queries and keys; a head of a power of two is one block."""
    q, k = np.random.default_rng(seed).standard_normal((2, 3, 5, head_dim)).astype(np.float32)
    matrix = rotation_of_heads(head_dim)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-12)
    np.testing.assert_allclose(rotated_heads(k), k.astype(np.float64) @ matrix, atol=3e-5)
    np.testing.assert_allclose((rotated_heads(q) * rotated_heads(k)).sum(-1), (q * k).sum(-1), atol=1e-3)
    if head_dim & (head_dim - 1) == 0:
        np.testing.assert_array_equal(rotated_heads(k), rotated(k, head_dim))


def test_heads_of_an_odd_size_stay_as_they_are() -> None:
    x = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float16)
    assert pairs_of_rotation(7) == 0
    np.testing.assert_array_equal(rotated_heads(x), x.astype(np.float32))


def test_an_element_that_is_large_in_every_key_is_spread_over_the_head() -> None:
    k = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
    k[:, 5] += 60
    assert np.abs(rotated_heads(k)).max() < 15


@given(SEEDS, st.sampled_from([1, *BLOCKS]), st.integers(1, 5))
def test_the_transform_is_a_hadamard_matrix_in_blocks_and_its_own_inverse(seed: int, block: int, count: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, count * block)).astype(np.float32)
    expected = x.astype(np.float64).reshape(3, count, block) @ hadamard(block) / np.sqrt(block)
    np.testing.assert_allclose(rotated(x, block), expected.reshape(x.shape), rtol=0, atol=2e-6 * np.sqrt(block))
    np.testing.assert_allclose(rotated(rotated(x, block), block), x, rtol=0, atol=1e-5)


@given(SEEDS, st.sampled_from(BLOCKS))
def test_sums_are_rounded_in_the_stated_order(seed: int, block: int) -> None:
    """One element at a time, as the docstring has it."""
    x = np.random.default_rng(seed).standard_normal(block).astype(np.float32)
    y, h = list(x), 1
    while h < block:
        for i in range(block):
            if not i & h:
                y[i], y[i + h] = y[i] + y[i + h], y[i] - y[i + h]
        h *= 2
    np.testing.assert_array_equal(rotated(x, block), np.array(y) * np.float32(block**-0.5))


def test_blocks() -> None:
    assert all(map(is_rotation, [1, *BLOCKS])) and BLOCKS[-1] == MAX_ROTATION
    assert not any(map(is_rotation, [0, -2, 3, 512, 2.0, True, None, "4"]))
    assert [rotation_of(n, 64) for n in (14336, 8192, 640, 11008, 172, 7)] == [64, 64, 64, 64, 4, 1]
    with pytest.raises(ValueError, match="power of two"):
        rotated(np.zeros((1, 24), np.float32), 16)
    with pytest.raises(ValueError, match="power of two"):
        rotated(np.zeros((1, 24), np.float32), 3)


def test_stacked_weights_rotate_alike_and_keep_no_columns() -> None:
    rng = np.random.default_rng(0)
    one, other = rotated_weight(rng, 4, 64, 16), rotated_weight(rng, 4, 64, 64)
    with pytest.raises(ValueError, match="rotate their input alike"):
        int8_parts([one, other])
    columns = OutlierColumns(np.array([0], np.int32), np.zeros((4, 1), np.float16))
    with pytest.raises(ValueError, match="keeps no columns"):
        int8_parts([replace(one, outliers=columns)])


SHAPES = st.tuples(st.sampled_from(BLOCKS), st.integers(1, 5), st.sampled_from([1, 2, 5, 17, 33, 70]))


@given(SEEDS, SHAPES)
def test_an_int8_product_is_equal_everywhere(backend: Backend, seed: int, shape: tuple[int, int, int]) -> None:
    block, count, rows = shape
    check_product(backend, np.random.default_rng(seed), rows, block * count, block)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(
    ("width", "block"), [(640, 64), (1032, 8), (4096, 256), (14336, 64), (14336, 2), (20480, 128), (40960, 64)]
)
def test_wide_products_are_equal_everywhere(backend: Backend, rows: int, width: int, block: int) -> None:
    check_product(backend, np.random.default_rng(width), rows, width, block)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "block"),
    [(600, 14336, 256), (1500, 4096, 256), (2400, 4096, 64), (9000, 1024, 32), (9000, 576, 64), (300, 11008, 256)],
)
def test_more_rows_than_a_gpu_has_blocks_for(cuda_backend: Backend, rows: int, width: int, block: int) -> None:
    """A block rotates one while the next one comes."""
    check_product(cuda_backend, np.random.default_rng(rows), rows, width, block)


def check_product(backend: Backend, rng: np.random.Generator, rows: int, width: int, block: int) -> None:
    """fp32 results, sums added to the residual stream, and a bias."""
    reference, weight = Backend(backend.activation_dtype.type), rotated_weight(rng, 24, width, block)
    bias = rng.standard_normal(24).astype(np.float32)
    x = random_rows(rng, rows, width, backend.activation_dtype.type)
    residual = rng.standard_normal((rows, 24)).astype(np.float32)
    expected = reference.linear(x, reference.weight([weight], [bias]), fp32=True)
    on_device = backend.weight([weight], [bias])
    got = backend.host(backend.linear(backend.array(x), on_device, fp32=True))
    np.testing.assert_array_equal(got, expected)
    added = backend.host(backend.linear_add(backend.array(x), on_device, backend.array(residual)))
    np.testing.assert_array_equal(added, residual + expected.astype(backend.activation_dtype))


@given(SEEDS, SHAPES, st.sampled_from(["gated", "activated", "gated, float", "gated, outliers"]))
def test_a_feed_forward_layer(backend: Backend, seed: int, shape: tuple[int, int, int], kind: str) -> None:
    """The input may still be int32 sums, or gate and up, when it is rotated. ReLU is exact on every device."""
    (block, count, rows), rng, features = shape, np.random.default_rng(seed), 48
    inner = block * count
    x = random_rows(rng, rows, features, backend.activation_dtype.type)
    first = random_int8(rng, inner if kind == "activated" else 2 * inner, features, kind != "gated, float")
    if kind == "gated, outliers":
        values = np.zeros((2 * inner, 1), np.float16)
        first = replace(first, outliers=OutlierColumns(np.array([5], np.int32), values))
        first.codes[:, 5] = 0
    second = rotated_weight(rng, 40, inner, block)
    residual = rng.standard_normal((rows, 40)).astype(np.float32)

    def layer(ops: Backend) -> np.ndarray:
        weight = ops.weight([first])
        run = ops.activated_linear if kind == "activated" else ops.gated_linear
        return np.array(
            ops.host(ops.linear_add(run(ops.array(x), weight, "relu"), ops.weight([second]), ops.array(residual)))
        )

    got, expected = layer(backend), layer(Backend(backend.activation_dtype.type))
    if kind == "gated, float":  # float sums have no one order
        np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.05 * np.abs(expected).max())
    else:
        np.testing.assert_array_equal(got, expected)


@given(SEEDS, SHAPES, st.booleans())
def test_behind_a_norm_and_with_float_activations(
    backend: Backend, seed: int, shape: tuple[int, int, int], dynamic: bool
) -> None:
    (block, count, rows), rng = shape, np.random.default_rng(seed)
    width = block * count
    residual, norm = random_rows(rng, rows, width, np.float32), random_norm(rng, width, False)
    x = random_rows(rng, rows, width, backend.activation_dtype.type)
    weight = rotated_weight(rng, 24, width, block, dynamic)

    def products(ops: Backend) -> list[np.ndarray]:
        on_device = ops.weight([weight])
        inputs = ops.norm(ops.array(residual), norm_on(ops, norm)), ops.array(x)
        return [np.array(ops.host(ops.linear(y, on_device, fp32=True))) for y in inputs]

    for got, expected in zip(products(backend), products(Backend(backend.activation_dtype.type)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * max(np.abs(expected).max(), 1e-6))


@given(SEEDS, SHAPES, st.booleans(), st.booleans())
def test_a_rotation_behind_a_norm_is_equal_everywhere(
    backend: Backend, seed: int, shape: tuple[int, int, int], center: bool, gated: bool
) -> None:
    """Norms of a stream as it is, behind a product and behind a norm that is added to it.

    Each is read by two products that rotate it and one that does not.
    """
    (block, count, rows), rng = shape, np.random.default_rng(seed)
    check_behind_norms(backend, rng, rows, block * count, block, center, gated)


@pytest.mark.parametrize(
    ("rows", "width", "block"),
    [
        (150, 4096, 256),
        (150, 5120, 128),
        (150, 14336, 256),
        (150, 576, 64),
        (1, 576, 64),
        (1, 4096, 256),
        (1, 6144, 64),
        (1, 14336, 256),
        (1, 20480, 128),
        (3, 4096, 32),
        (150, 640, 128),
    ],
)
def test_norms_of_any_width_are_rotated_alike_everywhere(backend: Backend, rows: int, width: int, block: int) -> None:
    check_behind_norms(backend, np.random.default_rng(width), rows, width, block, width in (5120, 6144), False)


def check_behind_norms(
    backend: Backend, rng: np.random.Generator, rows: int, width: int, block: int, center: bool, gated: bool
) -> None:
    stream, addend = (random_rows(rng, rows, width, np.float32) for _ in range(2))
    x = random_rows(rng, rows, 40, backend.activation_dtype.type)
    norms = [random_norm(rng, width, center), random_norm(rng, width, False)]
    before, weight = random_int8(rng, width, 40, True), rotated_weight(rng, 32, width, block)
    bias = rng.standard_normal(32).astype(np.float32)
    other = rotated_weight(rng, 24, width, 1)

    norm, post_norm = (norm_on(backend, each) for each in norms)
    weights = [backend.weight([weight], [bias]), backend.weight([other]), backend.weight([weight], [bias])]
    first = backend.weight([before])

    def streams() -> list[Array]:
        return [
            backend.array(stream.copy()),
            backend.linear_add(backend.array(x), first, backend.array(stream.copy())),
            backend.norm_add(backend.array(addend), post_norm, backend.array(stream.copy())),
        ]

    reference = Backend(backend.activation_dtype.type)
    definitions = [reference.weight([weight], [bias]), reference.weight([other]), reference.weight([weight], [bias])]
    for fused, alone in zip(streams(), streams(), strict=True):
        values = np.array(backend.host(backend.norm(alone, norm)))  # a norm's last bit is a device's own
        y = backend.norm(fused, norm)
        if gated:
            got = backend.host(backend.gated_linear(y, weights[0], "relu"))
            np.testing.assert_array_equal(got, reference.gated_linear(values, definitions[0], "relu"))
        for on_device, definition in zip(weights, definitions, strict=True):
            got = backend.host(backend.linear(y, on_device, fp32=True))
            np.testing.assert_array_equal(got, reference.linear(values, definition, fp32=True))
        np.testing.assert_array_equal(backend.host(fused), backend.host(alone))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 150])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_rotation_behind_a_norm_takes_no_kernel_of_its_own(
    cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch, rows: int, dynamic: bool
) -> None:
    rng, launched, launch = np.random.default_rng(0), list[str](), Kernel.__call__

    def count(called: Kernel, *arguments: object, **options: object) -> None:
        launched.append(called.name.partition("<")[0])
        launch(called, *arguments, **options)  # type: ignore[arg-type]

    def kernels(block: int) -> list[str]:
        weight = cuda_backend.weight([rotated_weight(rng, 64, 512, block, dynamic)])
        norm = norm_on(cuda_backend, random_norm(rng, 512, False))
        stream = cuda_backend.array(random_rows(rng, rows, 512, np.float32))
        launched.clear()
        cuda_backend.host(cuda_backend.linear(cuda_backend.norm(stream, norm), weight))
        return list(launched)

    kernels(1)  # loads what is loaded once
    monkeypatch.setattr(Kernel, "__call__", count)
    plain = kernels(1)
    # one row with float activations: the product's kernel computes a norm, where there is one for that, but no rotation
    alone = rows == 1 and not dynamic and "transform" not in plain
    assert kernels(64) == (["transform", *plain] if alone else plain)


def test_a_row_does_not_depend_on_its_batch(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    weight = backend.weight([rotated_weight(rng, 64, 1024, 64)])
    x = random_rows(rng, 130, 1024, backend.activation_dtype.type)
    everything = backend.host(backend.linear(backend.array(x), weight, fp32=True))
    for rows in (1, 2, 16, 33):
        part = backend.host(backend.linear(backend.array(x[:rows]), weight, fp32=True))
        np.testing.assert_array_equal(part, everything[:rows])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_an_input_that_is_not_finite_shows(backend: Backend, bad: float, rows: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, 128)).astype(backend.activation_dtype)
    x[0, 77] = bad
    got = backend.host(backend.linear(backend.array(x), backend.weight([rotated_weight(rng, 8, 128, 64)])))
    assert np.isnan(got[0]).all() and np.isfinite(got[1:]).all()
