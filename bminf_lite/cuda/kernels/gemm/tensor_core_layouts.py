"""cublasLt's tensor-core layouts, defined twice: by an index formula, and by a fast permutation.

Only GPUs of compute capability 7.5 to 8.9 multiply in them. They divide a matrix into groups of 32 columns, ``ld``
elements apart. Inside a group

- ``COL32`` holds row after row of 32 columns;
- ``COL4_4R2_8C`` holds tiles of 8 rows: 4 even rows, then 4 odd ones, each as 8 blocks of 4 columns;
- ``COL32_2R_4R4`` holds tiles of 32 rows, in which row r is line ``((r % 8) // 2 * 4 + r // 8) * 2 + r % 2``.

Offsets count elements, so the same formulas serve int8 operands and int32 results. ``common/layout.cuh`` has the same
index formulas for kernels. Arrays may be NumPy's or CuPy's: this module uses only methods that both have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.cublaslt import Order
from ..arrays import round_up

GROUP = 32
"""Columns in one group."""
TILE_ROWS: Mapping[Order, int] = {Order.COL32: 1, Order.COL4_4R2_8C: 8, Order.COL32_2R_4R4: 32}
"""Rows in one tile; a group of columns always holds whole tiles."""


def leading_dimension(order: Order, rows: int) -> int:
    """Elements from one group of columns to the next in the densest layout of ``rows`` rows."""
    return GROUP * round_up(rows, TILE_ROWS[order])


def offset(order: Order, row: Any, col: Any, ld: int) -> Any:
    """The offset of element (row, col) in elements; integers, or integer arrays that broadcast."""
    return col // GROUP * ld + _INSIDE_GROUP[order](row, col % GROUP)


def permute(order: Order, padded: Any) -> Any:
    """Matrices ``[..., rows, cols]`` of whole tiles and groups -> ``[..., rows * cols]`` as they lie in the buffer."""
    batch, (rows, cols) = padded.shape[:-2], padded.shape[-2:]
    split, forward = _PERMUTATION[order]
    parts = padded.reshape(*batch, *split(rows, cols))
    axes = (*range(len(batch)), *(len(batch) + axis for axis in forward))
    return parts.transpose(*axes).reshape(*batch, rows * cols)


def restore(order: Order, buffer: Any, rows: int, cols: int) -> Any:
    """The inverse of :func:`permute`."""
    batch = buffer.shape[:-1]
    split, forward = _PERMUTATION[order]
    sizes = split(rows, cols)
    parts = buffer.reshape(*batch, *(sizes[axis] for axis in forward))
    backward = sorted(range(len(forward)), key=forward.__getitem__)
    axes = (*range(len(batch)), *(len(batch) + axis for axis in backward))
    return parts.transpose(*axes).reshape(*batch, rows, cols)


_INSIDE_GROUP: Mapping[Order, Callable[[Any, Any], Any]] = {
    Order.COL32: lambda row, col: row * GROUP + col,
    Order.COL4_4R2_8C: lambda row, col: row // 8 * 256 + row % 2 * 128 + col // 4 * 16 + row % 8 // 2 * 4 + col % 4,
    Order.COL32_2R_4R4: lambda row, col: (
        row // 32 * 1024 + ((row % 8 // 2 * 4 + row % 32 // 8) * 2 + row % 2) * GROUP + col
    ),
}
"""The offset inside a group of 32 columns."""
_PERMUTATION: Mapping[Order, tuple[Callable[[int, int], tuple[int, ...]], tuple[int, ...]]] = {
    Order.COL32: (lambda rows, cols: (rows, cols // 32, 32), (1, 0, 2)),
    Order.COL4_4R2_8C: (lambda rows, cols: (rows // 8, 4, 2, cols // 32, 8, 4), (3, 0, 2, 4, 1, 5)),
    Order.COL32_2R_4R4: (lambda rows, cols: (rows // 32, 4, 4, 2, cols // 32, 32), (4, 0, 2, 1, 3, 5)),
}
"""How a padded matrix is cut into axes, and the order in which the buffer holds those axes."""
