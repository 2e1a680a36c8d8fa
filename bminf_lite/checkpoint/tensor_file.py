"""A file of tensors, whatever its format: what a checkpoint's reader asks of it.

Two ways to the data. :meth:`TensorFile.view` is a view of a memory map: nothing is copied, and the pages come when they
are touched. :meth:`TensorFile.read_tensor` reads a range of a tensor into the caller's memory. Both first compare the
file's size and modification time with what they were when it was opened, so a file that was overwritten or cut short
meanwhile is an error. A view that is already out cannot be guarded: who cuts the file under it kills the process, as
with any memory map.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from ..errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""The types that this package can read, by their names in safetensors."""

FLOAT_DTYPES = ("F32", "F16", "BF16")
"""What an unquantized weight may be."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: ``nbytes`` is the size of its values, ``offset`` where in ``file`` they begin (bytes)."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class TensorFile(ABC):
    """An open file. Raises :class:`CheckpointError` if it cannot be opened, or is no file of its format."""

    def __init__(self, path: Path):
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._state = self._stat()
            if self._read(0, 32).startswith(b"version https://git-lfs"):
                raise CheckpointError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` there")
            self.tensors: Mapping[str, TensorInfo] = self._read_header()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _read_header(self) -> Mapping[str, TensorInfo]:
        """The file's tensors by name."""

    @abstractmethod
    def view(self, name: str) -> np.ndarray:
        """The tensor, read-only; without a copy wherever the file holds it as an array."""

    @abstractmethod
    def read_tensor(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill ``buffer`` with a tensor's bytes, in row-major order, from ``offset`` on."""

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._state[0]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset`` bytes after the start of the file."""
        self.check_unchanged()
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: became shorter while it was read; nothing else may write to it")
            done += count

    def check_unchanged(self) -> None:
        """Raise :class:`CheckpointError` if the file was written to since it was opened."""
        if self._stat() != self._state:
            raise CheckpointError(f"{self.path}: changed since it was opened; nothing else may write to it meanwhile")

    def close(self) -> None:
        """Close the file. Views that were handed out stay valid: the memory map lives as long as they do."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._map = None

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def _read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, or as many as there are."""
        content = bytearray(max(min(size, self.nbytes - offset), 0))
        self.read_into(memoryview(content), offset)
        return bytes(content)

    def _memory_map(self) -> mmap.mmap:
        """The whole file, which must not be empty, read-only."""
        self.check_unchanged()
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        return self._map
