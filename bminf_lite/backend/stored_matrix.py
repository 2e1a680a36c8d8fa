"""Matrices that are still in a file, for a backend to read into memory of its own choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredMatrix:
    """A row-major matrix of ``dtype`` in a file.

    ``read(buffer, offset)`` fills a buffer with its bytes from ``offset`` on, from any thread, and raises
    ``CheckpointError`` if the file has changed or is too short. It converts to a NumPy array, which is read then.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[memoryview, int], None]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def rows(self, first: int, last: int) -> StoredMatrix:
        """Some of its rows, still in the file."""
        start = first * self.shape[1] * self.dtype.itemsize
        return StoredMatrix(
            (last - first, self.shape[1]), self.dtype, lambda buffer, offset: self.read(buffer, start + offset)
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        if values.size:
            self.read(values.reshape(-1).view(np.uint8).data, 0)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]
