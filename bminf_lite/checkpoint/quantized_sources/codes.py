"""The values of quantized weights, over NumPy: every format is codes, and scales of groups of columns.

    weight[r, c] = (code[r, c] - zero[r, group(c)]) * scale[r, group(c)]

Products are fp32. They are exact for MXFP4 and for int4 codes with fp16 or bf16 scales, and rounded once otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""FP4 by its bits (OCP Microscaling Formats 1.0, 5.3.3): a sign, two bits of exponent, one of mantissa."""
E2M1_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1).view(np.uint64)[:, 0]
"""The two values of each byte, the first in the low bits, side by side in 8 bytes: uint64 ``[256]``."""
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""FP8 by its bits. A table is five times as fast as a conversion."""
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)
"""The scales of MX formats by their bits (the same, 5.4.1): ``2 ** (byte - 127)``, and NaN."""

RowsOf = Callable[[int, int], np.ndarray]
"""Rows from the first number up to the second, ``[rows, columns]``."""


@dataclass(frozen=True)
class ScaledCodes:
    """A matrix, or matrices one behind the other: ``codes`` fp32 ``[rows, in]``, ``scales`` fp32 ``[rows, groups]``.

    ``zeros`` are like scales. ``group`` is the number of columns that share a scale, or the group of each column
    ``[in]``, made when it is needed.
    """

    codes: RowsOf
    scales: RowsOf
    group: int | Callable[[], np.ndarray]
    zeros: RowsOf | None = None

    def rows(self, first: int, end: int) -> np.ndarray:
        """Rows of the weight, fp32 ``[rows, in]``."""
        values = self.codes(first, end)
        factors = [self.scales(first, end), *([] if self.zeros is None else [self.zeros(first, end)])]
        grouped = values
        if not isinstance(self.group, int):
            group_of = self.group()
            factors = [by_group[:, group_of] for by_group in factors]
        elif values.shape[1] == factors[0].shape[1] * self.group:
            grouped = values.reshape(len(values), -1, self.group)
            factors = [by_group[..., None] for by_group in factors]
        elif factors[0].shape[1] > 1:  # the last group is shorter
            factors = [np.repeat(by_group, self.group, axis=1)[:, : values.shape[1]] for by_group in factors]
        scales, *zeros = factors
        for zero in zeros:
            grouped -= zero
        with np.errstate(all="ignore"):  # who reads values that are not finite says so
            grouped *= scales
        return grouped.reshape(values.shape)


def fp4(packed: np.ndarray) -> np.ndarray:
    """Two values in a byte, uint8 ``[rows, n]`` -> fp32 ``[rows, 2 * n]``."""
    pairs: np.ndarray = E2M1_PAIRS[packed]
    return pairs.view(np.float32)


def e8m0(scales: np.ndarray) -> np.ndarray:
    """Scales of MX formats, uint8 -> fp32 of the same shape."""
    values: np.ndarray = E8M0[scales]
    return values


def unsigned(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 2, 4 or 8 ``bits``, the first in the low bits of a word.

    int32 ``[rows, n]`` -> uint8 ``[rows, n * 32 / bits]``.
    """
    values = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return values
    codes = np.empty((*values.shape, 8 // bits), np.uint8)
    for place in range(8 // bits):
        np.right_shift(values, place * bits, out=codes[..., place])
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(*values.shape[:-1], -1)


def unsigned_along_rows(words: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """The same where a word holds codes of neighbouring rows.

    int32 ``[n, columns]`` -> uint8 ``[n * 32 / bits, columns]``. ``order`` is the place in a word of each
    row, if it is not their order.
    """
    codes = unsigned(words[..., None], bits)
    return np.moveaxis(codes if order is None else codes[..., list(order)], 2, 1).reshape(-1, words.shape[1])
