"""Tensors that are computed from others of a checkpoint while they are read."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..models.spec import FusedExperts
from .tensor_file import DTYPES, TensorInfo

Rows = Callable[[int, int], np.ndarray]
"""The rows from the first number up to the second of a tensor, fp32. A vector is one row."""


@dataclass(frozen=True)
class DerivedTensor:
    """A computed tensor. ``info`` has its type and shape, and the file and offset of the tensor it is made from."""

    info: TensorInfo
    rows: Rows

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the tensor's bytes from ``offset`` on."""
        dtype, columns = DTYPES[self.info.dtype], self.info.shape[-1]
        row_bytes = max(columns * dtype.itemsize, 1)
        first, end = offset // row_bytes, -(-(offset + len(buffer)) // row_bytes)
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(self.rows(first, end).astype(dtype, copy=False))
        begin = offset - first * row_bytes
        buffer[:] = values.reshape(-1).view(np.uint8)[begin : begin + len(buffer)].data


def info_as(info: TensorInfo, dtype: str) -> TensorInfo:
    """``info`` with another type of values."""
    nbytes = int(np.prod(info.shape)) * DTYPES[dtype].itemsize
    stored_bytes = info.stored_bytes or info.nbytes
    return replace(info, dtype=dtype, nbytes=nbytes, stored_as=info.stored_as or info.dtype, stored_bytes=stored_bytes)


def joined(infos: Sequence[TensorInfo], matrices: Sequence[np.ndarray], order: np.ndarray | None) -> DerivedTensor:
    """The rows of several matrices one after another, or in ``order``; ``infos`` are those of the matrices."""
    dtype = infos[0].dtype if len({info.dtype for info in infos}) == 1 else "F32"
    ends = list(itertools.accumulate(info.shape[0] for info in infos))
    shape = (ends[-1], *infos[0].shape[1:])
    stored_bytes = sum(info.stored_bytes or info.nbytes for info in infos)
    stored_as = infos[0].stored_as or infos[0].dtype
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize

    def rows(first: int, end: int) -> np.ndarray:
        found = []
        for matrix, high in zip(matrices, ends, strict=True):
            low = high - matrix.shape[0]
            if first < high and end > low:
                part = np.asarray(matrix[max(first - low, 0) : min(end, high) - low])
                found.append(part.astype(np.float32, copy=False))
        return np.concatenate(found)

    def ordered(first: int, end: int) -> np.ndarray:
        """Rows that lie side by side are read together."""
        assert order is not None
        wanted = order[first:end]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([rows(int(run[0]), int(run[-1]) + 1) for run in runs])

    return DerivedTensor(
        TensorInfo(dtype, shape, infos[0].file, infos[0].offset, nbytes, stored_as, stored_bytes),
        rows if order is None else ordered,
    )


@dataclass
class WholeMatrices:
    """Matrices that are computed whole and kept while their rows are read; threads that read wait for the first."""

    make: Mapping[str, Callable[[], np.ndarray]]
    kept: int = 2
    _made: dict[str, np.ndarray] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self, name: str, first: int, end: int) -> np.ndarray:
        """Rows of the matrix ``name``."""
        with self._lock:
            if name not in self._made:
                while len(self._made) >= self.kept:
                    del self._made[next(iter(self._made))]
                self._made[name] = self.make[name]()
            return self._made[name][first:end]


class RecentExperts:
    """The tensors of the ``kept`` experts that were read last, of all fused tensors of a checkpoint.

    Gate and up are read together, and each in blocks of rows, by several threads that are at different experts. An
    expert is made once meanwhile, and threads that need it wait.
    """

    def __init__(self, kept: int):
        self._kept = kept
        self._entries: dict[tuple[str, int], _Expert] = {}  # the last one is the newest
        self._lock = threading.Lock()

    def parts(self, tensor: str, expert: int, make: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """The tensors of a fused tensor's expert, which ``make`` makes."""
        with self._lock:
            entry = self._entries.pop((tensor, expert), None) or _Expert()
            self._entries[tensor, expert] = entry
            while len(self._entries) > self._kept:
                del self._entries[next(iter(self._entries))]
        with entry.lock:
            if entry.parts is None:
                entry.parts = make()
            return entry.parts


@dataclass
class _Expert:
    """The tensors of an expert, if they are made already."""

    parts: list[np.ndarray] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def experts_of(
    tensor: str, fused: FusedExperts, infos: Mapping[str, TensorInfo], whole: np.ndarray, recent: RecentExperts
) -> dict[str, DerivedTensor]:
    """The tensors of experts that lie in the fused ``tensor``, read when they are used; ``infos`` are theirs.

    ``whole`` has its values.
    """

    def rows(expert: int, part: int, first: int, end: int) -> np.ndarray:
        """Rows of a matrix, or the only row of a bias, of an expert."""
        values = recent.parts(tensor, expert, lambda: fused.parts(np.asarray(whole[expert : expert + 1])[0]))[part]
        return values[first:end] if values.ndim > 1 else values[None][first:end]

    return {
        name: DerivedTensor(infos[name], functools.partial(rows, expert, part))
        for expert, names in enumerate(fused.experts)
        for part, name in enumerate(names)
    }
