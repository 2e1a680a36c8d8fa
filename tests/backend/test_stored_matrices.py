"""Matrices that are still in a file give what they give as arrays, whatever their type and wherever they go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.backend.stored_matrix import StoredMatrix
from bminf_lite.backend.values import Placement

DTYPES = [np.dtype(d) for d in (np.float16, np.float32, ml_dtypes.bfloat16)]
SHAPES = [(40, 64), (33, 70), (70, 4096)]
"""The second has rows that are padded on a GPU."""


def stored(values: np.ndarray) -> StoredMatrix:
    """``values`` as a file would give them."""
    content = values.tobytes()

    def read(buffer: memoryview, offset: int) -> None:
        buffer[:] = content[offset : offset + len(buffer)]

    return StoredMatrix(values.shape, values.dtype, read)


def random(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    values[3, :6] = [0.0, -0.0, 65504.0, 1e-7, 65536.0, -1e30]  # the last two are too large for fp16
    with np.errstate(over="ignore"):
        return values.astype(dtype)


@pytest.fixture(params=[False, True], ids=["on the device", "on the host"])
def placed(backend: Backend, request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend with embedding tables on the device, and one with tables on the host."""
    backend.placement = Placement(host_tables=request.param)
    yield backend
    backend.placement = Placement()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tables(placed: Backend, shape: tuple[int, int], dtype: np.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if placed.name != "cpu":
        from bminf_lite.backend.cuda import weight_loader as loading

        monkeypatch.setattr(loading, "TABLE_BYTES", 7 * 2 * shape[1])
    values = random(shape, dtype)
    tokens = np.arange(shape[0], dtype=np.int32)
    rows = [placed.host(placed.embed(placed.array(tokens), placed.table(v))) for v in (stored(values), values)]
    np.testing.assert_array_equal(*rows)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rows[0], values.astype(placed.activation_dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float_weights(backend: Backend, shape: tuple[int, int], dtype: np.dtype) -> None:
    values = np.nan_to_num(random(shape, dtype).astype(np.float32), posinf=0, neginf=0).clip(-9, 9).astype(dtype)
    check(backend, [stored(values), stored(values)], [values, values])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_weights(backend: Backend, shape: tuple[int, int], dynamic: bool) -> None:
    codes = np.random.default_rng(1).integers(-127, 128, shape).astype(np.int8)
    scale = np.full(shape[0], 0.01, np.float16)
    check(backend, *([Int8Weight(c, scale, dynamic)] * 2 for c in (stored(codes), codes)))  # type: ignore[arg-type]


def check(backend: Backend, one: list[Any], other: list[Any]) -> None:
    """Equal products of two weights."""
    x = np.random.default_rng(2).standard_normal((3, one[0].shape[1])).astype(backend.activation_dtype)
    results = [backend.host(backend.linear(backend.array(x), backend.weight(w), fp32=True)) for w in (one, other)]
    np.testing.assert_array_equal(*results)
