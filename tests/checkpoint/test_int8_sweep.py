"""Every fp16 row maximum, for activations and for weights: no code outside ±127, no NaN, no lost precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from bminf_lite.backend import quantization
from bminf_lite.backend.quantization import quantize_rows, quantize_weight, weight_scales

FINITE = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
"""All fp16 numbers from 0 to 65504."""
FRACTIONS = np.array([1, -1, 0.5, -0.25, 0.9999, 0.004, -0.0039, 0], np.float32)


def rows_with_maximum(maxima: np.ndarray) -> np.ndarray:
    """A row for each maximum, with other values below it that are fp16 too."""
    return (maxima.astype(np.float32)[:, None] * FRACTIONS).astype(np.float16).astype(np.float32)


def test_activations_of_every_maximum() -> None:
    x = rows_with_maximum(FINITE)
    codes, scale = quantize_rows(x)
    assert codes.dtype == np.int8 and scale.dtype == np.float32
    assert np.abs(codes.astype(int)).max() <= 127 and np.isfinite(scale).all()
    np.testing.assert_array_equal(codes[0], 0)
    assert scale[0] == 0 and (scale[1:] > 0).all()
    np.testing.assert_array_equal(codes[1:, 0], 127)
    np.testing.assert_array_equal(codes[1:, 1], -127)
    # Half a code, and what x * (127 / a) rounds away: 127 times two roundings of fp32.
    error = np.abs(scale[:, None] * codes - x)
    assert (error <= scale[:, None] * (0.5 + 127 * 2**-22)).all()


def test_weights_of_every_maximum() -> None:
    """Row by row, so that each maximum decides alone about its scale's type."""
    w = rows_with_maximum(FINITE)
    for maximum, row in zip(FINITE[::7].tolist(), w[::7], strict=True):
        result = quantize_weight(row[None])
        subnormal = 0 < maximum < 127 * 2**-14
        assert result.scale.dtype == (np.float32 if subnormal else np.float16)
        assert np.abs(result.codes.astype(int)).max() <= 127
    scale = weight_scales(FINITE[np.float16(0.008) <= FINITE].astype(np.float32))
    assert scale.dtype == np.float16 and (scale > 0).all()
    both = [quantize_weight(part) for part in (w[FINITE >= 0.008], w)]
    assert [result.scale.dtype for result in both] == [np.float16, np.float32]
    for part, result in zip((w[FINITE >= 0.008], w), both, strict=True):
        assert np.abs(result.codes.astype(int)).max() <= 127 and np.isfinite(result.scale).all()
        # Half a code; where the scale was rounded down the largest value is clipped by 127 * 2^-11 of a code.
        error = np.abs(result.dequantize() - part) / result.scale.astype(np.float32)[:, None]
        assert error.max() <= 0.5 + 127 * 2**-22


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block", [1, 7, 1 << 18])
@given(st.integers(0, 2**32), array_shapes(min_dims=2, max_dims=2, max_side=9))
def test_blocks_give_the_formula_bit_for_bit(dtype: type, block: int, seed: int, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(seed)
    weight = (random.standard_normal(shape) * 10.0 ** random.uniform(-6, 4, (shape[0], 1))).astype(dtype)
    weight[random.random(shape[0]) < 0.2] = 0
    w = weight.astype(np.float32)
    a = np.abs(w).max(axis=1)
    exact = a / np.float32(127)
    wide = ((a > 0) & (exact < 2.0**-14)).any() or (exact > 65504).any()
    scale = np.where(a > 0, exact, 1).astype(np.float32 if wide else np.float16)
    codes = np.clip(np.rint(w / scale.astype(np.float32)[:, None]), -127, 127).astype(np.int8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "BLOCK_ELEMENTS", block)
        result = quantize_weight(weight)
    assert result.scale.dtype == scale.dtype
    np.testing.assert_array_equal(result.scale, scale)
    np.testing.assert_array_equal(result.codes, codes)


@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.floats(width=32)))
def test_any_float_at_all(weight: np.ndarray) -> None:
    """Subnormals, the largest numbers, NaN: codes in range and finite scales, or an error."""
    if not np.isfinite(weight).all():
        with pytest.raises(ValueError, match="NaN or an infinity"):
            quantize_weight(weight)
        return
    result = quantize_weight(weight)
    assert np.isfinite(result.scale).all() and (result.scale > 0).all()
    assert np.abs(result.codes.astype(int)).max(initial=0) <= 127
    tiny = np.abs(weight).max(axis=1) < 127 * np.finfo(np.float32).tiny
    scale = result.scale.astype(np.float64)[:, None]  # in fp32, 127 times the largest scale would overflow
    error = np.abs(scale * result.codes - weight) / scale
    assert error[~tiny].max(initial=0) <= 0.5 + 127 * 2**-11
