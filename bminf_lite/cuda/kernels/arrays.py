"""The memory layout of matrices that the kernels require: rows are padded and aligned for vector loads.

This module does not import CuPy, so that kernels can be compiled without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import cupy as cp

PAD = 32
"""Rows of matrices, and vectors, are padded to a multiple of this many elements: whole column groups of COL32."""
HEAD_PAD = 16
"""Heads in the key-value cache are padded to a multiple of this many elements, with zeros, for the tensor cores."""


class WeightRows(Protocol):
    """A weight ``[out_features, in_features]`` in rows of ``pitch`` int8 or fp16 numbers, its scales, and a bias fp32.

    Scales are fp32 ``[out_features]``. If ``group_size`` columns share one, they are fp16 or fp32 ``[groups,
    out_features]`` in padded rows. ``group_size`` is 0 or a size that the kernels support.
    """

    @property
    def matrix(self) -> cp.ndarray: ...
    @property
    def scale(self) -> cp.ndarray | None: ...
    @property
    def bias(self) -> cp.ndarray | None: ...
    @property
    def group_size(self) -> int: ...
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


def is_aligned(x: cp.ndarray) -> bool:
    """Whether the rows of ``x`` need no padding and are aligned, at any pitch: columns of wider rows may be so."""
    at_vectors = x.data.ptr % 16 == 0 and x.strides[0] % 16 == 0
    return bool(at_vectors and x.shape[1] % PAD == 0 and x.strides[1] == x.itemsize)


def nbytes_of(*arrays: cp.ndarray | None) -> int:
    """The sum of the arrays' bytes."""
    return sum(0 if x is None else x.nbytes for x in arrays)
