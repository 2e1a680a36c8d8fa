"""How the kernels expect matrices in memory: rows padded and aligned, so that whole vectors may be read anywhere.

Nothing here imports CuPy, so that what can be compiled is known where CuPy is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import cupy as cp

PAD = 32
"""Rows of matrices, and vectors, are padded to a multiple of this many elements: whole groups of COL32's columns."""
HEAD_PAD = 16
"""Heads in the key-value cache are padded to a multiple of this many elements, with zeros, for the tensor cores."""


class WeightRows(Protocol):
    """A weight ``[out_features, in_features]`` in rows of ``pitch`` int8 or fp16 numbers, scales and bias fp32."""

    @property
    def matrix(self) -> cp.ndarray: ...
    @property
    def scale(self) -> cp.ndarray | None: ...
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
    """The address of an array, 0 for none."""
    if x is None:
        return 0
    found: int = x.data.ptr
    return found


def pitch_of(x: cp.ndarray) -> int:
    """Elements from one row of a padded matrix to the next."""
    pitch: int = x.strides[0] // x.itemsize
    return pitch


def pointer_and_pitch(x: cp.ndarray | None) -> tuple[int, int]:
    """The address and the pitch of a padded matrix, zeros for none."""
    return (0, 0) if x is None else (x.data.ptr, x.strides[0] // x.itemsize)


def is_padded(x: cp.ndarray) -> bool:
    """Whether the rows of ``x`` are padded and aligned as every kernel expects."""
    pitch = round_up(x.shape[1], PAD)
    return bool(x.strides == (pitch * x.itemsize, x.itemsize) and x.data.ptr % 16 == 0)


def nbytes_of(*arrays: cp.ndarray | None) -> int:
    """Bytes of what a kernel reads and writes."""
    return sum(0 if x is None else x.nbytes for x in arrays)
