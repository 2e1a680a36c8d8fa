"""Matrix layouts of cublasLt, defined twice over NumPy: by an index formula, and by a permutation that is fast.

A :class:`Layout` says where element (row, column) of a matrix lies in a buffer. Plain layouts are row-major with a
leading dimension. The tensor-core layouts cut the matrix into groups of 32 columns, one after the other, ``ld``
elements apart; inside a group

- ``COL32`` holds row after row of 32 columns;
- ``COL4_4R2_8C`` holds tiles of 8 rows: 4 even rows, then 4 odd ones, each as 8 blocks of 4 columns;
- ``COL32_2R_4R4`` holds tiles of 32 rows, in which row r is line ``((r % 8) // 2 * 4 + r // 8) * 2 + r % 2``.

Offsets count elements, so the same formulas serve int8 operands and int32 results. ``common/layout.cuh`` has the same
index formulas for kernels. :meth:`Layout.pack` and :meth:`Layout.unpack` use only methods that NumPy and CuPy arrays
share: they work on either, and this module imports no CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...runtime.cublaslt import Order
from ..arrays import round_up

GROUP = 32
"""Columns in one group of a tensor-core layout."""

TILE_ROWS: Mapping[Order, int] = {Order.ROW: 1, Order.COL32: 1, Order.COL4_4R2_8C: 8, Order.COL32_2R_4R4: 32}
"""Rows in one tile; a group of columns always holds whole tiles."""


@dataclass(frozen=True)
class Layout:
    """Where the elements of a matrix ``[rows, cols]`` lie: ``ld`` and offsets count elements, ``nbytes`` bytes.

    Made by :meth:`of`, which finds ``ld``. For ``ROW``, ``ld`` is the distance between rows, otherwise that between
    groups of 32 columns.
    """

    order: Order
    rows: int
    cols: int
    ld: int
    itemsize: int = 1

    @classmethod
    def of(cls, order: Order, rows: int, cols: int, itemsize: int = 1) -> Layout:
        """The densest layout of a matrix ``[rows, cols]``, both at least 1, with elements of ``itemsize`` bytes."""
        if order not in TILE_ROWS:
            raise ValueError(f"order {order!r} is not one of {', '.join(known.name for known in TILE_ROWS)}")
        if rows < 1 or cols < 1:
            raise ValueError(f"a layout of {rows} rows and {cols} columns; both must be 1 or more")
        ld = cols if order is Order.ROW else GROUP * round_up(rows, TILE_ROWS[order])
        return cls(order, rows, cols, ld, itemsize)

    @cached_property
    def size(self) -> int:
        """Elements in the buffer, padding included."""
        return self.rows * self.ld if self.order is Order.ROW else round_up(self.cols, GROUP) // GROUP * self.ld

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer, padding included."""
        return self.size * self.itemsize

    def offset(self, row: Any, col: Any) -> Any:
        """The offset of element (row, col) in elements; integers, or integer arrays that broadcast."""
        if self.order is Order.ROW:
            return row * self.ld + col
        inside = _INSIDE_GROUP[self.order](row, col % GROUP)
        return col // GROUP * self.ld + inside

    def pack(self, matrix: Any) -> Any:
        """A matrix ``[..., rows, cols]`` -> its buffers ``[..., size]``, padding filled with zeros.

        Takes a NumPy or a CuPy array of any dtype, and returns a new one of the same kind.
        """
        if matrix.shape[-2:] != (self.rows, self.cols):
            raise ValueError(f"a matrix {list(matrix.shape[-2:])} does not fit a layout [{self.rows}, {self.cols}]")
        batch = matrix.shape[:-2]
        rows, cols = self._padded_shape()
        padded = np.zeros_like(matrix, shape=(*batch, rows, cols))
        padded[..., : self.rows, : self.cols] = matrix
        if self.order is Order.ROW:
            return padded.reshape(*batch, self.size)
        split, forward = _PERMUTATION[self.order]
        parts = padded.reshape(*batch, *split(rows, cols))
        return parts.transpose(*range(len(batch)), *(len(batch) + axis for axis in forward)).reshape(*batch, self.size)

    def unpack(self, buffer: Any) -> Any:
        """Buffers ``[..., size]`` -> matrices ``[..., rows, cols]``; the inverse of :meth:`pack`."""
        batch = buffer.shape[:-1]
        rows, cols = self._padded_shape()
        if self.order is Order.ROW:
            padded = buffer.reshape(*batch, rows, cols)
        else:
            split, forward = _PERMUTATION[self.order]
            sizes = split(rows, cols)
            parts = buffer.reshape(*batch, *(sizes[axis] for axis in forward))
            backward = sorted(range(len(forward)), key=forward.__getitem__)
            padded = parts.transpose(*range(len(batch)), *(len(batch) + axis for axis in backward))
            padded = padded.reshape(*batch, rows, cols)
        return padded[..., : self.rows, : self.cols].copy()

    def _padded_shape(self) -> tuple[int, int]:
        if self.order is Order.ROW:
            return self.rows, self.ld
        return self.ld // GROUP, round_up(self.cols, GROUP)


_INSIDE_GROUP = {
    Order.COL32: lambda row, col: row * GROUP + col,
    Order.COL4_4R2_8C: lambda row, col: (
        row // 8 * 256 + row % 2 * 128 + col // 4 * 16 + row % 8 // 2 * 4 + col % 4
    ),
    Order.COL32_2R_4R4: lambda row, col: (
        row // 32 * 1024 + ((row % 8 // 2 * 4 + row % 32 // 8) * 2 + row % 2) * GROUP + col
    ),
}  # fmt: skip
"""The offset inside a group of 32 columns."""

_PERMUTATION = {
    Order.COL32: (lambda rows, cols: (rows, cols // 32, 32), (1, 0, 2)),
    Order.COL4_4R2_8C: (lambda rows, cols: (rows // 8, 4, 2, cols // 32, 8, 4), (3, 0, 2, 4, 1, 5)),
    Order.COL32_2R_4R4: (lambda rows, cols: (rows // 32, 4, 4, 2, cols // 32, 32), (4, 0, 2, 1, 3, 5)),
}
"""How a padded matrix is cut into axes, and the order in which the buffer holds those axes."""
