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
    slice of its rows is a stored matrix, and so is one of its columns; any other part is an array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[memoryview, int], None]
    whole: StoredMatrix | None = None
    """The matrix with whole rows whose columns from ``first`` on these are, if they are not all of them."""
    first: int = 0

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

    def columns(self, columns: slice) -> StoredMatrix:
        """Neighbouring columns of a matrix ``[rows, columns]``. Whole rows are read, because that takes fewer calls.

        Who can copy columns of a buffer reads :attr:`whole` instead, which needs no other memory.
        """
        if self.whole is not None:
            first, end, _ = columns.indices(self.shape[1])
            return self.whole.columns(slice(self.first + first, self.first + max(first, end)))
        first, end, step = columns.indices(self.shape[1])
        assert step == 1 and len(self.shape) == 2
        itemsize, wide, narrow = self.dtype.itemsize, self.shape[1] * self.dtype.itemsize, max(end - first, 0)

        def read(buffer: memoryview, offset: int) -> None:
            pitch, target = narrow * itemsize, np.frombuffer(buffer, np.uint8)
            before, behind = offset // pitch, -(-(offset + len(target)) // pitch)
            rows = np.empty((behind - before, wide), np.uint8)
            self.read(rows.reshape(-1).data, before * wide)
            own = rows[:, first * itemsize : end * itemsize]
            start = offset - before * pitch
            if start == 0 and len(target) % pitch == 0:
                target.reshape(-1, pitch)[...] = own
            else:
                target[...] = np.ascontiguousarray(own).reshape(-1)[start : start + len(target)]

        return StoredMatrix((self.shape[0], narrow), self.dtype, read, self, first)

    def __getitem__(self, index: Any) -> StoredMatrix | np.ndarray:
        if isinstance(index, tuple) and len(index) == len(self.shape) == 2 and all(isinstance(x, slice) for x in index):
            rows, columns = index
            if (columns.step or 1) == 1 and (rows.step or 1) == 1:
                found = self[rows]
                assert isinstance(found, StoredMatrix)
                return found.columns(columns)
        if not isinstance(index, slice) or index.step not in (None, 1):
            part: np.ndarray = np.asarray(self)[index]
            return part
        if self.whole is not None:
            rows = self.whole[index]
            assert isinstance(rows, StoredMatrix)
            return rows.columns(slice(self.first, self.first + self.shape[1]))
        first, end, _ = index.indices(self.shape[0])
        before = first * (self.nbytes // max(self.shape[0], 1))

        def read(buffer: memoryview, offset: int) -> None:
            self.read(buffer, before + offset)

        return StoredMatrix((max(end - first, 0), *self.shape[1:]), self.dtype, read)
