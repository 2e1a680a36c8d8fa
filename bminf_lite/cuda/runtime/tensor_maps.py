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
    buffer = ctypes.create_string_buffer(NBYTES + _ALIGNMENT)
    place = -ctypes.addressof(buffer) % _ALIGNMENT
    sizes, strides = (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(pitch * element.itemsize)
    box, steps = (c_uint32 * 2)(row_bytes // element.itemsize, box_rows), (c_uint32 * 2)(1, 1)
    functions().cuTensorMapEncodeTiled(
        ctypes.addressof(buffer) + place,
        element,
        2,
        address,
        sizes,
        strides,
        box,
        steps,
        _NO_INTERLEAVE,
        _SWIZZLES[row_bytes],
        _PROMOTE_256B if promote_256b else _PROMOTE_128B,
        _ZEROS_OUTSIDE,
    )
    return buffer.raw[place : place + NBYTES]
