"""The memory layout of matrices that the kernels require: rows are padded and aligned for vector loads.

This module does not import CuPy, so that kernels can be compiled without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import cupy as cp

PAD = 32
"""Rows of matrices, and vectors, are padded to a multiple of this many elements: whole column groups of COL32."""
MIN_GROUP = 16
"""The fewest columns that share a scale in a product with float activations: a thread reads so wide a vector of codes.
Their number is a power of two.
"""
HEAD_PAD = 16
"""Heads in the key-value cache are padded to a multiple of this many elements, with zeros, for the tensor cores."""


@dataclass(frozen=True)
class GroupScales:
    """Scales of ``1 << shift`` neighbouring columns each, of padded rows of codes: fp16 or fp32 ``[rows, groups]``."""

    values: cp.ndarray
    shift: int

    @property
    def is_half(self) -> int:
        """1 for fp16, as kernels take it."""
        return int(self.values.dtype == np.float16)

    @property
    def groups(self) -> int:
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


class WeightRows(Protocol):
    """A weight ``[out_features, in_features]`` in rows of ``pitch`` int8 or fp16 numbers, scales and bias fp32.

    An int8 weight has either scales of rows, or of groups of columns.
    """

    @property
    def matrix(self) -> cp.ndarray: ...
    @property
    def scale(self) -> cp.ndarray | None: ...
    @property
    def group_scales(self) -> GroupScales | None: ...
    @property
    def bias(self) -> cp.ndarray | None: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def pitch(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def address(x: cp.ndarray | None) -> int:
    """The address of an array, 0 for None."""
    if x is None:
        return 0
    found: int = x.data.ptr
    return found


def pitch_of(x: cp.ndarray) -> int:
    """Elements from one row of a padded matrix to the next."""
    pitch: int = x.strides[0] // x.itemsize
    return pitch


def pointer_and_pitch(x: cp.ndarray | None) -> tuple[int, int]:
    """The address and the pitch of a padded matrix, zeros for None."""
    return (0, 0) if x is None else (x.data.ptr, x.strides[0] // x.itemsize)


def is_padded(x: cp.ndarray) -> bool:
    """Whether the rows of ``x`` are padded and aligned as the kernels require."""
    pitch = round_up(x.shape[1], PAD)
    return bool(x.strides == (pitch * x.itemsize, x.itemsize) and x.data.ptr % 16 == 0)


def nbytes_of(*arrays: cp.ndarray | None) -> int:
    """The sum of the arrays' bytes."""
    return sum(0 if x is None else x.nbytes for x in arrays)
