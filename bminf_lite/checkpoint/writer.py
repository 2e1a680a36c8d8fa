"""Writing safetensors piece by piece, so that no tensor has to be in memory at once.

The ``safetensors`` library writes a file from tensors that are all in memory. Here they are declared first, which fixes
their places; then their bytes are written in any order, from any thread, and the header comes last. So an unfinished
file has no valid header and cannot be mistaken for a complete one.

The type of some small tensors is known only when everything else is written: the scales of a weight are fp16, or fp32
if one of them does not fit fp16. They are declared as *late*, with their widest possible type, and follow the others.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files import write_file
from .tensor_file import DTYPES

SHARD_BYTES = 5_000_000_000
"""The usual size of a shard on hubs."""

_METADATA = {"format": "pt"}  # transformers refuses a file without it
_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorDeclaration:
    """The type name and the shape of a tensor to be written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class SafetensorsWriter:
    """One file. ``write`` may be called from several threads; then ``complete`` and ``sync``, or ``close``, once.

    ``data_bytes`` is the size of all tensors, known when the file is finished.

    Tensors lie in the order of their element sizes, the widest first: this aligns them for readers that map the file,
    and the format allows no gap.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorDeclaration], late: Mapping[str, TensorDeclaration]):
        self.path = path
        self._tensors = dict(sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype].itemsize))
        self._late = dict(late)
        self._offsets = {}
        # The header may turn out shorter, never longer: it is padded with spaces, as the format allows.
        self._data_start = 8 + math.ceil(len(_header(self._tensors | self._late)) / 8) * 8
        end = self._data_start
        for name, declared in self._tensors.items():
            self._offsets[name] = end
            end += declared.nbytes
        self._late_start = end
        self.data_bytes = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, name: str, data: np.ndarray, at: int = 0) -> None:
        """Write ``data`` (C-contiguous) into the tensor ``name``, ``at`` bytes after its start."""
        assert at + data.nbytes <= self._tensors[name].nbytes, name
        _write_all(self._fd, data, self._offsets[name] + at)

    def start_writeback(self, name: str, at: int, nbytes: int) -> None:
        """Begin to move written bytes of a tensor to the disk, so that :meth:`sync` has less to wait for.

        Linux does so for bytes that are said to be no longer needed. It drops them from memory only if they are on the
        disk already.
        """
        if nbytes and hasattr(os, "posix_fadvise"):  # 0 would be all up to the end of the file
            os.posix_fadvise(self._fd, self._offsets[name] + at, nbytes, os.POSIX_FADV_DONTNEED)

    def complete(self, late: Mapping[str, np.ndarray]) -> None:
        """Write the late tensors and the header."""
        assert late.keys() == self._late.keys()
        header = self._settled_header(dict(sorted(late.items(), key=lambda item: -item[1].itemsize)))
        if len(header) > self._data_start - 8:  # in the declared order every offset is as declared or smaller
            header = self._settled_header({name: late[name] for name in self._late})
        header = header.ljust(self._data_start - 8)
        assert len(header) == self._data_start - 8
        _write_all(self._fd, np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8), 0)

    def sync(self) -> None:
        """Wait until the complete file is on the disk, and close it."""
        os.fsync(self._fd)
        self.close()

    def _settled_header(self, late: Mapping[str, np.ndarray]) -> bytes:
        """Write the late tensors in this order, and return the header for it."""
        end, settled = self._late_start, {}
        for name, array in late.items():
            assert array.nbytes <= self._late[name].nbytes, name
            settled[name] = TensorDeclaration(_TYPE_NAMES[array.dtype], array.shape)
            _write_all(self._fd, array, end)
            end += array.nbytes
        self.data_bytes = end - self._data_start
        return _header(self._tensors | settled)

    def close(self) -> None:
        """Close the file; without :meth:`complete` it stays incomplete."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class CheckpointWriter:
    """``model.safetensors`` in ``folder``, or shards of at most ``shard_bytes`` with their index.

    A larger tensor has a shard of its own. ``late`` names the late ones of ``tensors``.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorDeclaration], late: set[str], shard_bytes: int = SHARD_BYTES
    ):
        self.folder = folder
        shards = _shards(tensors, shard_bytes)
        count = len(shards)
        self._files: list[SafetensorsWriter] = []
        self._file_of: dict[str, SafetensorsWriter] = {}
        self._late: dict[str, np.ndarray] = {}
        try:
            for i, shard in enumerate(shards):
                name = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
                fixed = {k: v for k, v in shard.items() if k not in late}
                file = SafetensorsWriter(folder / name, fixed, {k: v for k, v in shard.items() if k in late})
                self._files.append(file)
                self._file_of |= dict.fromkeys(shard, file)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, data: np.ndarray, at: int = 0) -> None:
        """Write ``data`` into the tensor ``name``, ``at`` bytes after its start. Safe from any thread."""
        self._file_of[name].write(name, data, at)

    def start_writeback(self, name: str, at: int, nbytes: int) -> None:
        """See :meth:`SafetensorsWriter.start_writeback`. Safe from any thread."""
        self._file_of[name].start_writeback(name, at, nbytes)

    def write_late(self, name: str, data: np.ndarray) -> None:
        """Keep a late tensor until its file is finished."""
        self._late[name] = data

    def finish(self) -> None:
        """Complete every file, and wait until they are on the disk."""
        self.complete()
        self.sync()

    def complete(self) -> None:
        """Complete every file, and write the index if there are several."""
        for file in self._files:
            file.complete({name: data for name, data in self._late.items() if self._file_of[name] is file})
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": sum(file.data_bytes for file in self._files)},
                "weight_map": {name: file.path.name for name, file in sorted(self._file_of.items())},
            }
            write_json(self.folder / "model.safetensors.index.json", index)

    def sync(self) -> None:
        """Wait until every complete file is on the disk, and close them."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close every file; without :meth:`complete` they stay incomplete."""
        for file in self._files:
            file.close()


def write_json(path: Path, value: object) -> None:
    """Write a JSON file and wait until it is on the disk.

    A source's ``config.json`` may hold what strict JSON does not, such as NaN. It is written as it was read.
    """
    write_file(path, f"{json.dumps(value, indent=2)}\n".encode("ascii"))


def write_text(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    write_file(path, text.encode())


def _shards(tensors: Mapping[str, TensorDeclaration], limit: int) -> list[dict[str, TensorDeclaration]]:
    """Split the tensors, in their order, into runs of at most ``limit`` bytes."""
    shards: list[dict[str, TensorDeclaration]] = [{}]
    size = 0
    for name, declared in tensors.items():
        if shards[-1] and size + declared.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = declared
        size += declared.nbytes
    return shards


def _header(tensors: Mapping[str, TensorDeclaration]) -> bytes:
    entries: dict[str, object] = {"__metadata__": _METADATA}
    end = 0
    for name, declared in tensors.items():
        offsets = [end, end + declared.nbytes]
        entries[name] = {"dtype": declared.dtype, "shape": list(declared.shape), "data_offsets": offsets}
        end = offsets[1]
    return json.dumps(entries, separators=(",", ":")).encode()


def _write_all(fd: int, data: np.ndarray, offset: int) -> None:
    view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
