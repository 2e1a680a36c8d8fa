"""Softmax, norms and square projections into an array that is given, which may be their input."""

from __future__ import annotations

from dataclasses import replace

import float64_operations as model
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import ROWS, SEEDS, WIDTHS, norm_on, random_int8, random_norm, random_rows
from tolerances import assert_close

from bminf_lite.backend.quantization import OutlierColumns
from bminf_lite.backend.values import Norm

EVERY_WIDTH = [1, 31, 1024, 1025, 4097, 16392, 128256, 131_073]
"""Widths of one vector and less, of a warp, a block and a cluster, with a rest and without, and wider ones."""
FORMS = st.sampled_from(["none", "one for all", "each row"])


def extra(rng: np.random.Generator, form: str, rows: int, width: int, dtype: type) -> np.ndarray | None:
    """A bias, or what is mask, in one of the forms that the operation takes."""
    if form == "none":
        return None
    shape = (width,) if form == "one for all" else (rows, width)
    return rng.random(shape) > 0.4 if dtype is bool else rng.standard_normal(shape).astype(np.float32)


def check_softmax(backend, x: np.ndarray, scale: float, bias, mask) -> None:
    """Against the model; in place, into another array and into a new one are the same bits."""
    expected, terms = model.softmax(x, scale, bias, mask)
    more = [None if v is None else backend.array(v) for v in (bias, mask)]
    y = backend.host(backend.softmax(backend.array(x), scale, *more)).copy()
    assert y.dtype == x.dtype
    assert_close(y, expected, "softmax", x.dtype, terms)
    if mask is not None:
        np.testing.assert_array_equal(y[~np.broadcast_to(mask, x.shape)], 0)
    place = backend.array(x)
    assert backend.softmax(place, scale, *more, out=place) is place
    np.testing.assert_array_equal(backend.host(place), y)


@given(SEEDS, ROWS, WIDTHS, st.sampled_from([np.float16, np.float32]), FORMS, FORMS)
def test_softmax(backend, seed, rows, width, dtype, bias, mask):
    rng = np.random.default_rng(seed)
    x, scale = random_rows(rng, rows, width, dtype), float(np.float32(rng.uniform(0.1, 2)))
    check_softmax(backend, x, scale, extra(rng, bias, rows, width, np.float32), extra(rng, mask, rows, width, bool))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("width", EVERY_WIDTH)
def test_softmax_of_every_width(backend, width, dtype):
    rng = np.random.default_rng(width)
    x = random_rows(rng, 3, width, dtype)
    check_softmax(backend, x, 0.7, extra(rng, "each row", 3, width, np.float32), extra(rng, "each row", 3, width, bool))
    check_softmax(backend, x, 1.0, None, None)


def test_softmax_of_rows_without_anything_visible(backend):
    x = backend.array(np.array([[3e38, np.nan, 1], [5, 5, np.inf], [1, 1, 1]], np.float32))
    mask = backend.array(np.array([[0, 0, 0], [1, 1, 0], [0, 1, 0]], bool))
    expected = [[0, 0, 0], [0.5, 0.5, 0], [0, 1, 0]]
    np.testing.assert_array_equal(backend.host(backend.softmax(x, mask=mask)), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_softmax_of_what_is_not_a_number(backend):
    x = np.zeros((5, 40), np.float32)
    x[1, 7], x[2, 39], x[3] = np.nan, np.inf, -np.inf
    y = backend.host(backend.softmax(backend.array(x)))
    assert np.isnan(y[1:3]).all()
    np.testing.assert_array_equal(y[3], 0)
    np.testing.assert_array_equal(y[[0, 4]], np.float32(1 / 40))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("width", EVERY_WIDTH)
def test_norms_of_every_width(backend, width, center):
    rng = np.random.default_rng(width)
    x, norm = random_rows(rng, 3, width, np.float32) + np.float32(center), random_norm(rng, width, center)
    given_norm = norm_on(backend, norm)
    lazy = backend.host(backend.norm(backend.array(x), given_norm)).copy()
    assert_close(lazy, model.norm(x, norm), "norm", np.float32, model.norm_terms(x, norm))
    place, other = backend.array(x), backend.array(np.full_like(x, 7))
    assert backend.norm(place, given_norm, out=place) is place
    assert backend.norm(backend.array(x), given_norm, out=other) is other
    np.testing.assert_array_equal(backend.host(place), backend.host(other))
    assert_close(backend.host(place), model.norm(x, norm), "norm", np.float32, model.norm_terms(x, norm))


def test_a_norm_of_wide_rows_is_quantized(backend):
    """Norm and quantization are one kernel only up to some width."""
    rng = np.random.default_rng(0)
    x, norm = random_rows(rng, 3, 20_000, np.float32), random_norm(rng, 20_000, False)
    codes, scale = (backend.host(v) for v in backend.quantize(backend.norm(backend.array(x), norm_on(backend, norm))))
    expected, expected_scale = model.quantize(model.norm(x, norm).astype(np.float32))
    assert np.abs(codes.astype(int) - expected).max() <= 1
    assert_close(scale, expected_scale, "norm", np.float32, expected_scale)


@given(SEEDS, ROWS, WIDTHS, st.sampled_from(["w8a8", "w8a16", "float", "outliers"]), st.booleans())
def test_a_square_projection_over_its_input(backend, seed, rows, width, kind, with_bias):
    rng = np.random.default_rng(seed)
    part = rng.standard_normal((width, width)).astype(np.float16)
    if kind != "float":
        part = random_int8(rng, width, width, kind != "w8a16")
    if kind == "outliers":
        part.codes[:, width // 2] = 0
        values = rng.standard_normal((width, 1)).astype(np.float16)
        part = replace(part, outliers=OutlierColumns(np.array([width // 2], np.int32), values))
    weight = backend.weight([part], [rng.standard_normal(width).astype(np.float32) if with_bias else None])
    x = random_rows(rng, rows, width, backend.activation_dtype.type)
    expected = backend.host(backend.linear(backend.array(x), weight)).copy()
    place = backend.array(x)
    assert backend.linear(place, weight, out=place) is place
    np.testing.assert_array_equal(backend.host(place), expected)
    wide = backend.array(np.zeros(x.shape, np.float32))
    backend.linear(backend.array(x), weight, fp32=True, out=wide)
    np.testing.assert_array_equal(backend.host(wide), backend.host(backend.linear(backend.array(x), weight, fp32=True)))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 200, 256, 1000, 4096, 4097, 8192, 16384, 40_000])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_softmax_of_many_rows(cuda_backend, width, dtype):
    """More than there are multiprocessors, which take other instantiations."""
    rng = np.random.default_rng(width)
    x = random_rows(rng, 301, width, dtype)
    check_softmax(cuda_backend, x, 0.3, extra(rng, "one for all", 301, width, np.float32), None)


@pytest.mark.gpu
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("width", [4100, 8192, 10_000, 16384])
def test_norms_of_many_wide_rows(cuda_backend, width, center):
    """Enough rows that each block takes several, one after another."""
    rng = np.random.default_rng(width)
    x, norm = random_rows(rng, 700, width, np.float32) + np.float32(center), random_norm(rng, width, center)
    given_norm, residual = norm_on(cuda_backend, norm), cuda_backend.arrays.padded(cuda_backend.array(x))
    results = []
    for out in (*(cuda_backend.arrays.rows(*x.shape, t) for t in (np.float32, np.float16)), residual):
        cuda_backend.materializer.write_rows(None, out, residual, given_norm)
        results.append(cuda_backend.host(out))
    assert_close(results[0], model.norm(x, norm), "norm", np.float32, model.norm_terms(x, norm))
    np.testing.assert_array_equal(results[1], results[0].astype(np.float16))
    np.testing.assert_array_equal(results[2], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_softmax_without_clusters(cuda_backend, monkeypatch, dtype):
    monkeypatch.setattr(cuda_backend.kernels.softmax._launcher, "has_clusters", False)
    check_softmax(cuda_backend, random_rows(np.random.default_rng(5), 5, 40_001, dtype), 1.5, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [31, 1024, 4097, 128256])
def test_nothing_is_allocated_in_place(cuda_backend, width):
    x = cuda_backend.array(np.ones((4, width), np.float32))
    norm = Norm(cuda_backend.vector(np.ones(width, np.float32)), 1e-5)
    with cuda_backend.arena.measure() as meter:
        cuda_backend.softmax(x, out=x)
        cuda_backend.norm(x, norm, out=x)
    assert meter.peak == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "float"])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_square_projection_in_place_takes_less(cuda_backend, rows, kind):
    """No more than out of place at any rate; of many rows in w8a8, which are quantized first, less by the result."""
    rng = np.random.default_rng(0)
    part = rng.standard_normal((256, 256)).astype(np.float16)
    weight = cuda_backend.weight([part if kind == "float" else random_int8(rng, 256, 256, kind == "w8a8")])
    x, residual = (cuda_backend.array(np.ones((rows, 256), dtype)) for dtype in (np.float16, np.float32))
    peaks = {}
    for name, work in {
        "apart": lambda: cuda_backend.host(cuda_backend.linear(x, weight)),
        "in place": lambda: cuda_backend.linear(x, weight, out=x),
        "added": lambda: cuda_backend.host(cuda_backend.linear_add(x, weight, residual)),
    }.items():
        work()
        with cuda_backend.arena.measure() as meter:
            work()
        peaks[name] = meter.peak
    assert peaks["in place"] <= peaks["apart"] - (rows * 512 if rows == 64 and kind == "w8a8" else 0)
    assert peaks["added"] <= peaks["in place"] or kind == "w8a8" or rows < 64
