"""Matrices in a file, which a backend reads straight into the memory where it needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredMatrix:
    """A row-major matrix of ``dtype`` in a file.

    ``read(buffer, offset)`` fills a buffer with the matrix's bytes from ``offset`` on, from any thread, and raises
    ``CheckpointError`` if the file has changed or is too short. Converting a stored matrix to a NumPy array reads it. A
    slice of its rows is a stored matrix; any other part is an array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[memoryview, int], None]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def converted(self, dtype: np.dtype) -> StoredMatrix:
        """The same matrix in another ``dtype``, converted when it is read, by whole elements."""

        def read(buffer: memoryview, offset: int) -> None:
            found = np.frombuffer(buffer, dtype)
            values = np.empty(len(found), self.dtype)
            self.read(values.view(np.uint8).data, offset // dtype.itemsize * self.dtype.itemsize)
            found[...] = values

        return StoredMatrix(self.shape, dtype, read)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        if values.size:
            self.read(values.reshape(-1).view(np.uint8).data, 0)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> StoredMatrix | np.ndarray:
        if not isinstance(index, slice) or index.step not in (None, 1):
            part: np.ndarray = np.asarray(self)[index]
            return part
        first, end, _ = index.indices(self.shape[0])
        before = first * (self.nbytes // max(self.shape[0], 1))

        def read(buffer: memoryview, offset: int) -> None:
            self.read(buffer, before + offset)

        return StoredMatrix((max(end - first, 0), *self.shape[1:]), self.dtype, read)
