"""The slots of adapters beside a weight in the GPU's memory, and adapters in pinned memory of the host.

See :mod:`..adapter_slots`, and ``rowwise/adapters.cu`` for how the slots are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import PAD, round_up
from ...cuda.kernels.rowwise.adapters import MAX_SECTIONS, RANKS, AdapterArrays, SavedArrays
from ...errors import UsageError
from ..adapter_slots import AdapterSlots, Sections
from .arrays import Arrays


@dataclass(frozen=True)
class PinnedAdapter:
    """An adapter of one weight in pinned host memory, padded to a ``rank`` that is a multiple of ``RANKS``.

    ``down`` is fp16 ``[sections, rank, pitch]``, ``scales`` fp32 ``[sections, rank]``, ``up`` fp16 ``[rank, pitch]``,
    and ``used`` int32 ``[1]`` the largest rank of a section.
    """

    down: np.ndarray
    scales: np.ndarray
    up: np.ndarray
    used: np.ndarray

    @property
    def rank(self) -> int:
        return int(self.up.shape[0])


class AdapterBank:
    """The slots of a weight whose sections have ``widths`` rows of ``features`` columns."""

    def __init__(self, arrays: Arrays, slots: AdapterSlots, widths: Sequence[int], features: int):
        if len(widths) > MAX_SECTIONS:
            raise UsageError(f"a GPU computes adapters of up to {MAX_SECTIONS} matrices in one, not of {len(widths)}")
        self.slots = slots
        self._arrays = arrays
        self._widths = tuple(widths)
        ends, rank, sections = np.cumsum(widths).tolist(), round_up(slots.max_rank, RANKS), len(widths)
        self.adapters = AdapterArrays(
            down=arrays.zeros((slots.count, sections * rank, round_up(features, PAD)), np.float16),
            scales=arrays.zeros((slots.count, sections * rank), np.float32),
            up=arrays.zeros((slots.count, rank, round_up(ends[-1], PAD)), np.float16),
            ranks=arrays.zeros((slots.count,), np.int32),
            ends=ends,
            features=features,
        )

    @property
    def nbytes(self) -> int:
        of = self.adapters
        return int(of.down.nbytes + of.scales.nbytes + of.up.nbytes + of.ranks.nbytes)

    def prepare(self, sections: Sections) -> PinnedAdapter:
        """A copy in pinned memory; values beyond fp16 become infinities."""
        of = self.adapters
        used = max(part.a.shape[0] for part in sections if part is not None)
        rank = round_up(used, RANKS)
        down = _pinned(self._arrays, (len(sections), rank, of.down.shape[2]), np.float16)
        scales = _pinned(self._arrays, (len(sections), rank), np.float32)
        up = _pinned(self._arrays, (rank, of.up.shape[2]), np.float16)
        first = 0
        with np.errstate(over="ignore"):
            for place, (part, width) in enumerate(zip(sections, self._widths, strict=True)):
                if part is not None:
                    own = part.a.shape[0]
                    down[place, :own, : part.a.shape[1]] = part.a
                    scales[place, :own] = part.scale
                    up[:own, first : first + width] = part.b.T
                first += width
        count = _pinned(self._arrays, (1,), np.int32)
        count[0] = used
        return PinnedAdapter(down, scales, up, count)

    def put(self, slot: int, prepared: PinnedAdapter | None) -> None:
        """Copies behind the steps that were started before, and ahead of later ones."""
        of, place = self.adapters, slot - 1
        if prepared is None:
            of.ranks[place : place + 1].data.memset_async(0, 4, self._arrays.stream)
            return
        for section in range(len(self._widths)):
            first = section * of.rank_pitch
            rows = slice(first, first + prepared.rank)
            self._copy(of.down[place, rows], prepared.down[section])
            self._copy(of.scales[place, rows], prepared.scales[section])
        self._copy(of.up[place, : prepared.rank], prepared.up)
        self._copy(of.ranks[place : place + 1], prepared.used)
        self._arrays.hold(prepared)

    def _copy(self, target: cp.ndarray, source: np.ndarray) -> None:
        _copy(self._arrays, target, source)


class SavedBank:
    """Room for a matrix ``[rows, columns]`` in each slot."""

    def __init__(self, arrays: Arrays, slots: AdapterSlots, rows: int, columns: int):
        self.slots = slots
        self._arrays = arrays
        self.saved = SavedArrays(
            arrays.zeros((slots.count, rows, round_up(columns, PAD)), np.float16),
            arrays.zeros((slots.count,), np.int32),
            columns,
        )
        self._one = _pinned(arrays, (1,), np.int32)
        self._one[0] = 1

    def prepare(self, sections: Sections) -> np.ndarray:
        """A copy in pinned memory; values beyond fp16 become infinities."""
        (matrix,) = sections
        values = _pinned(self._arrays, self.saved.matrices.shape[1:], np.float16)
        with np.errstate(over="ignore"):
            values[:, : self.saved.columns] = matrix.values
        return values

    def put(self, slot: int, prepared: np.ndarray | None) -> None:
        """As :meth:`AdapterBank.put`."""
        place = slot - 1
        if prepared is None:
            self.saved.present[place : place + 1].data.memset_async(0, 4, self._arrays.stream)
            return
        _copy(self._arrays, self.saved.matrices[place], prepared)
        _copy(self._arrays, self.saved.present[place : place + 1], self._one)
        self._arrays.hold((prepared, self._one))


def _copy(arrays: Arrays, target: cp.ndarray, source: np.ndarray) -> None:
    """Start a copy from pinned memory, as work of the stream; see :meth:`Arrays.hold`."""
    assert target.shape == source.shape and target.nbytes == source.nbytes
    runtime, stream = cp.cuda.runtime, arrays.stream.ptr
    runtime.memcpyAsync(target.data.ptr, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, stream)


def _pinned(arrays: Arrays, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros in pinned host memory, which lives as long as the array. Any thread may call this."""
    count = int(np.prod(shape))
    with cp.cuda.Device(arrays.device):  # else a thread that has no device would take memory of the first one
        memory = cp.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    array = np.frombuffer(memory, dtype, count).reshape(shape)
    array[...] = 0
    return array
