"""The values of quantized weights, over NumPy: every format is codes, and scales of groups of columns.

    weight[r, c] = (code[r, c] - zero[r, group(c)]) * scale[r, group(c)]

Products are fp32. They are exact for MXFP4 and for int4 codes with fp16 or bf16 scales, and rounded once otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""FP4 by its bits (OCP Microscaling Formats 1.0, 5.3.3): a sign, two bits of exponent, one of mantissa."""
E2M1_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1)
"""The two values of each byte, ``[256, 2]``; the first is in the low bits."""
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
        scales = self.scales(first, end)
        group_of = None if isinstance(self.group, int) else self.group()
        if self.zeros is not None:
            values -= self._of_columns(self.zeros(first, end), group_of, values.shape[1])
        with np.errstate(all="ignore"):  # who reads values that are not finite says so
            values *= self._of_columns(scales, group_of, values.shape[1])
        return values

    def _of_columns(self, by_group: np.ndarray, group_of: np.ndarray | None, columns: int) -> np.ndarray:
        """``[rows, groups]`` -> ``[rows, in]``, or ``[rows, 1]`` of one group."""
        if group_of is not None:
            return by_group[:, group_of]
        if by_group.shape[1] == 1:
            return by_group
        assert isinstance(self.group, int)
        return np.repeat(by_group, self.group, axis=1)[:, :columns]


def fp4(packed: np.ndarray) -> np.ndarray:
    """Two values in a byte, uint8 ``[rows, n]`` -> fp32 ``[rows, 2 * n]``."""
    values: np.ndarray = E2M1_PAIRS[packed].reshape(*packed.shape[:-1], -1)
    return values


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
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((values[..., None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(*values.shape[:-1], -1)


def unsigned_along_rows(words: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """The same where a word holds codes of neighbouring rows.

    int32 ``[n, columns]`` -> uint8 ``[n * 32 / bits, columns]``. ``order`` is the place in a word of each
    row, if it is not their order.
    """
    codes = unsigned(words[..., None], bits)
    return np.moveaxis(codes if order is None else codes[..., list(order)], 2, 1).reshape(-1, words.shape[1])
