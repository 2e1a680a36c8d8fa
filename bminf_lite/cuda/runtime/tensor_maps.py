"""Tensor maps: descriptions of matrices for TMA copies, on compute capability 9.0 and later."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from types import SimpleNamespace

from . import driver, libraries
from .bindings import bind

NBYTES = 128
"""Bytes of a ``CUtensorMap``, which is aligned to 64 bytes in memory and among a kernel's parameters."""
ROW_BYTES = 128
"""Bytes of each row in a box, if nothing else is said."""
_ALIGNMENT = 64
_NO_INTERLEAVE, _PROMOTE_128B, _PROMOTE_256B, _ZEROS_OUTSIDE = 0, 2, 3, 0
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuTensorMapEncodeTiled": (
        c_void_p,
        c_int,
        c_uint32,
        c_void_p,
        POINTER(c_uint64),
        POINTER(c_uint64),
        POINTER(c_uint32),
        POINTER(c_uint32),
        c_int,
        c_int,
        c_int,
        c_int,
    )
}


class TensorMapDataType(IntEnum):
    """``CUtensorMapDataType``."""

    INT8 = 0
    FLOAT16 = 6
    FLOAT32 = 7

    @property
    def itemsize(self) -> int:
        return {TensorMapDataType.INT8: 1, TensorMapDataType.FLOAT16: 2, TensorMapDataType.FLOAT32: 4}[self]


@functools.cache
def functions() -> SimpleNamespace:
    """The driver functions for tensor maps, which CUDA 12 introduced."""
    return bind(libraries.load("cuda").dll, _PROTOTYPES, driver.describe)


@functools.lru_cache(4096)
def tensor_map_2d(
    address: int,
    element: TensorMapDataType,
    rows: int,
    columns: int,
    pitch: int,
    box_rows: int,
    promote_256b: bool = True,
    row_bytes: int = ROW_BYTES,
) -> bytes:
    """A ``CUtensorMap`` of ``[rows, columns]`` at ``address``, with ``pitch`` elements from row to row.

    The address and the bytes of a row are multiples of 16. A copy moves a box of ``box_rows`` rows (256 at most) of
    ``row_bytes`` each: 32, 64 or 128. A load fills elements outside the matrix with zeros; a store skips them. In
    shared memory the box has the swizzle of that width. ``promote_256b`` is the L2 promotion: 256 bytes rather than
    128. It is faster if the neighbouring bytes are needed much later, and slower if they are needed soon.
    """
    box = row_bytes // element.itemsize, box_rows
    return tensor_map(address, element, (columns, rows), (pitch,), box, promote_256b)


@functools.lru_cache(4096)
def tensor_map(
    address: int,
    element: TensorMapDataType,
    sizes: tuple[int, ...],
    pitches: tuple[int, ...],
    box: tuple[int, ...],
    promote_256b: bool = False,
    swizzled: bool = True,
) -> bytes:
    """A ``CUtensorMap`` of up to five dimensions of ``sizes``, the innermost first, and the sizes of its ``box``.

    ``pitches`` are the elements from one index to the next in each dimension but the first, whose elements follow each
    other. The address and the bytes of a pitch are multiples of 16, a box has at most 256 elements in each dimension.
    With ``swizzled`` the box's rows have 32, 64 or 128 bytes, and in shared memory the swizzle of that width. The rest
    as in :func:`tensor_map_2d`.
    """
    buffer = ctypes.create_string_buffer(NBYTES + _ALIGNMENT)
    place, rank = -ctypes.addressof(buffer) % _ALIGNMENT, len(sizes)
    strides = [pitch * element.itemsize for pitch in pitches]
    functions().cuTensorMapEncodeTiled(
        ctypes.addressof(buffer) + place,
        element,
        rank,
        address,
        (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*strides),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE,
        _SWIZZLES[box[0] * element.itemsize] if swizzled else 0,
        _PROMOTE_256B if promote_256b else _PROMOTE_128B,
        _ZEROS_OUTSIDE,
    )
    return buffer.raw[place : place + NBYTES]
