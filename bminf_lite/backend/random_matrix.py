"""Random matrices that a backend generates on its device: a benchmark needs neither a checkpoint nor host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

GROUP = 8
"""Codes in a 64-bit random word, a byte each."""
FLOAT_UNIT = 64
"""A float element is a code over this by default, which fp16 holds exactly."""
WORDS_AT_ONCE = 1 << 20
STEP = 0x9E3779B97F4A7C15
"""The increment of the generator's state from one word to the next."""


@dataclass(frozen=True)
class RandomMatrix:
    """A matrix of random codes in -127..127 (int8), or of such codes over ``unit`` (fp16): the same on every backend.

    Row ``r`` and columns ``8 g`` to ``8 g + 7`` are the bytes, lowest first, of SplitMix64's output number
    ``r * ceil(columns / 8) + g`` after ``seed`` (https://doi.org/10.1145/2714064.2660195), with -127 for -128. A random
    matrix converts to a NumPy array, or a backend generates it on its device. A slice of its rows is a random matrix,
    and so is one of columns that begin at a multiple of 8; any other part is an array. ``row_words`` are the words from
    one row to the next, where that are more than the row has, which 0 stands for.
    """

    shape: tuple[int, int]
    dtype: type = np.int8
    seed: int = 0
    row_words: int = 0
    unit: float = FLOAT_UNIT

    @property
    def stride(self) -> int:
        """Words from one row to the next."""
        return self.row_words or -(-self.shape[1] // GROUP)

    def __getitem__(self, index: Any) -> RandomMatrix | np.ndarray:
        if isinstance(index, tuple) and index[0] == slice(None) and isinstance(index[1], slice):
            first, end, step = index[1].indices(self.shape[1])
            if step == 1 and first % GROUP == 0:
                shape, seed = (self.shape[0], max(end - first, 0)), self.seed + first // GROUP * STEP & (1 << 64) - 1
                return RandomMatrix(shape, self.dtype, seed, self.stride, self.unit)
        if not isinstance(index, slice) or index.step not in (None, 1):
            part: np.ndarray = np.asarray(self)[index]
            return part
        first, end, _ = index.indices(self.shape[0])
        shape, seed = (max(end - first, 0), self.shape[1]), self.seed + first * self.stride * STEP & (1 << 64) - 1
        return RandomMatrix(shape, self.dtype, seed, self.row_words, self.unit)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows, columns = self.shape
        groups = -(-columns // GROUP)
        values = np.empty(self.shape, dtype or self.dtype)
        step = max(1, WORDS_AT_ONCE // max(groups, 1))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            words = random_words(self.seed, first * self.stride, count * self.stride).astype("<u8")
            words = np.ascontiguousarray(words.reshape(count, self.stride)[:, :groups])
            codes = np.maximum(words.view(np.int8), -127).reshape(count, groups * GROUP)[:, :columns]
            values[first : first + count] = codes if self.dtype is np.int8 else codes / np.float32(self.unit)
        return values


def random_words(seed: int, first: int, count: int) -> np.ndarray:
    """SplitMix64's outputs number ``first`` to ``first + count - 1``, uint64 ``[count]``."""
    index = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + index * np.uint64(STEP)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
