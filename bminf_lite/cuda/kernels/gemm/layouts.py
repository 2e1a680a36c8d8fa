"""The layouts of a product's matrices in their buffers.

Matrices are row-major with a leading dimension. Compute capabilities 7.5 to 8.9 also have those of
:mod:`.tensor_core_layouts`. This module does not import CuPy; its functions take NumPy's and CuPy's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...runtime.cublaslt import Order
from ..arrays import round_up
from . import tensor_core_layouts as tensor_core


@dataclass(frozen=True)
class Layout:
    """A matrix ``[rows, cols]`` in memory: ``ld`` and offsets count elements, ``nbytes`` bytes.

    For ``Order.ROW``, ``ld`` is the distance between rows, otherwise that between groups of 32 columns.
    """

    order: Order
    rows: int
    cols: int
    ld: int
    itemsize: int = 1

    @classmethod
    def of(cls, order: Order, rows: int, cols: int, itemsize: int = 1) -> Layout:
        """The densest layout of a matrix ``[rows, cols]``, both at least 1, with elements of ``itemsize`` bytes."""
        if rows < 1 or cols < 1:
            raise ValueError(f"a layout of {rows} rows and {cols} columns; both must be 1 or more")
        ld = cols if order is Order.ROW else tensor_core.leading_dimension(order, rows)
        return cls(order, rows, cols, ld, itemsize)

    @cached_property
    def size(self) -> int:
        """Elements in the buffer, padding included."""
        rows, cols = self._padded_shape
        return rows * cols

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer, padding included."""
        return self.size * self.itemsize

    def offset(self, row: Any, col: Any) -> Any:
        """The offset of element (row, col) in elements; integers, or integer arrays that broadcast."""
        if self.order is Order.ROW:
            return row * self.ld + col
        return tensor_core.offset(self.order, row, col, self.ld)

    def pack(self, matrix: Any) -> Any:
        """A matrix ``[..., rows, cols]`` -> its buffers ``[..., size]``, padding filled with zeros.

        Takes a NumPy or a CuPy array of any dtype, and returns a new one of the same kind. Raises ``ValueError`` for
        another shape.
        """
        if matrix.shape[-2:] != (self.rows, self.cols):
            raise ValueError(f"a matrix {list(matrix.shape[-2:])} does not fit a layout [{self.rows}, {self.cols}]")
        batch = matrix.shape[:-2]
        padded = np.zeros_like(matrix, shape=(*batch, *self._padded_shape))
        padded[..., : self.rows, : self.cols] = matrix
        return padded.reshape(*batch, self.size) if self.order is Order.ROW else tensor_core.permute(self.order, padded)

    def unpack(self, buffer: Any) -> Any:
        """Buffers ``[..., size]`` -> matrices ``[..., rows, cols]``; the inverse of :meth:`pack`."""
        if self.order is Order.ROW:
            padded = buffer.reshape(*buffer.shape[:-1], *self._padded_shape)
        else:
            padded = tensor_core.restore(self.order, buffer, *self._padded_shape)
        return padded[..., : self.rows, : self.cols].copy()

    @property
    def _padded_shape(self) -> tuple[int, int]:
        if self.order is Order.ROW:
            return self.rows, self.ld
        return self.ld // tensor_core.GROUP, round_up(self.cols, tensor_core.GROUP)
