"""A file of tensors, whatever its format.

Tensors are read into the caller's memory, never through a memory map that outlives the call. Every read compares the
file's size and modification time with those at its opening, so a file that was overwritten or cut short is an error.
"""

from __future__ import annotations

import os
import stat
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
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
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
"""The types of unquantized weights."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: ``nbytes`` is the size of its values, which begin ``offset`` bytes into ``file``.

    ``stored_as`` names the type in the file if values are converted to ``dtype`` while they are read, and then
    ``stored_bytes`` is their size there.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    stored_as: str = ""
    stored_bytes: int = 0


class TensorFile(ABC):
    """An open file. Raises :class:`CheckpointError` if it cannot be opened or is not of its format."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
        except FileNotFoundError as error:
            what = f"is a link to {path.readlink()}, which" if path.is_symlink() else "the file"
            raise CheckpointError(f"{path}: {what} does not exist; copy that file too") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise CheckpointError(f"{path}: is a device, a pipe or a folder, not a file of weights")
            self._state = self._stat()
            if self._read_bytes(0, 32).startswith(b"version https://git-lfs"):
                raise CheckpointError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` there")
            self.tensors: Mapping[str, TensorInfo] = self._read_header()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _read_header(self) -> Mapping[str, TensorInfo]:
        """The file's tensors by name."""

    @property
    def nbytes(self) -> int:
        return self._state[0]

    def read(self, name: str) -> np.ndarray:
        """A tensor in new memory; bf16 comes as ``ml_dtypes.bfloat16``."""
        info = self.tensors[name]
        values = np.empty(info.shape, DTYPES[info.dtype])
        if values.size:
            self.read_tensor(name, values.reshape(-1).view(np.uint8).data)
        return values

    def read_tensor(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill ``buffer`` with a tensor's bytes in row-major order, from ``offset`` on."""
        info = self.tensors[name]
        assert offset + len(buffer) <= info.nbytes
        self._read_into(buffer, info.offset + offset)

    def is_verbatim(self, name: str) -> bool:
        """Whether a tensor's bytes, as they are read, are those of the file from its offset on."""
        return True

    def check_unchanged(self) -> None:
        """Raise :class:`CheckpointError` if the file was written to since it was opened."""
        if self._stat() != self._state:
            raise self._changed()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: changed since it was opened; nothing else may write to it meanwhile")

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def _read_bytes(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, or fewer if the file ends before."""
        content = bytearray(max(min(size, self.nbytes - offset), 0))
        self._read_into(memoryview(content), offset)
        return bytes(content)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes after the start of the file."""
        self.check_unchanged()
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise self._changed()
            done += count
