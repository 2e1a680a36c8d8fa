"""The slots of adapters beside a weight in the GPU's memory, and adapters in pinned memory of the host.

See :mod:`..adapter_slots`, and ``common/adapters.cuh`` for how the slots are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import PAD, round_up
from ...cuda.kernels.experts.adapters import ExpertAdapterArrays, ExpertAdapters, expert_slot_bytes
from ...cuda.kernels.rowwise.adapters import HEADER, MAX_SECTIONS, RANKS, AdapterArrays, SavedArrays, slot_bytes
from ...errors import UsageError
from ..adapter_slots import AdapterSlots, Sections
from .arrays import Arrays


class AdapterBank:
    """The slots of a weight whose sections have ``widths`` rows of ``features`` columns."""

    def __init__(self, arrays: Arrays, slots: AdapterSlots, widths: Sequence[int], features: int):
        if len(widths) > MAX_SECTIONS:
            raise UsageError(f"a GPU computes adapters of up to {MAX_SECTIONS} matrices in one, not of {len(widths)}")
        self.slots = slots
        self._arrays = arrays
        self._widths = tuple(widths)
        ends, rank = np.cumsum(widths).tolist(), round_up(slots.max_rank, RANKS)
        nbytes = slot_bytes(rank, len(widths), features, ends[-1])
        self.adapters = AdapterArrays(arrays.zeros((slots.count, nbytes), np.uint8), rank, ends, features)

    @property
    def nbytes(self) -> int:
        return int(self.adapters.memory.nbytes)

    def prepare(self, sections: Sections) -> np.ndarray:
        """A slot's contents in pinned memory, uint8, for the ranks that are used; values beyond fp16 become infinities.

        An adapter of a weight is one copy to the device, whatever its sections.
        """
        of, count = self.adapters, len(sections)
        rank = round_up(max(part.a.shape[0] for part in sections if part is not None), RANKS)
        pitch, outputs = round_up(of.features, PAD), of.ends[-1]
        block = _pinned(self._arrays, (slot_bytes(rank, count, of.features, outputs),), np.uint8)
        block[:4].view(np.int32)[0] = rank
        rest = block[HEADER:]
        scales, rest = _split(rest, (count, rank), np.float32)
        down, rest = _split(rest, (count, rank, pitch), np.float16)
        up, _ = _split(rest, (outputs, rank), np.float16)
        first = 0
        with np.errstate(over="ignore"):
            for place, (part, width) in enumerate(zip(sections, self._widths, strict=True)):
                if part is not None:
                    own = part.a.shape[0]
                    down[place, :own, : part.a.shape[1]] = part.a
                    scales[place, :own] = part.scale
                    up[first : first + width, :own] = part.b
                first += width
        return block

    def put(self, slot: int, prepared: np.ndarray | None) -> None:
        """A copy behind the steps that were started before, and ahead of later ones."""
        _put(self._arrays, self.adapters.memory[slot - 1], prepared)


class ExpertBank:
    """The slots of all experts of a layer, whose matrices have ``widths`` rows, down's last, of ``features`` columns.

    Down has ``widths[0]`` columns. The sections are the matrices of one expert after another.
    """

    def __init__(self, arrays: Arrays, slots: AdapterSlots, experts: int, widths: Sequence[int], features: int):
        self.slots = slots
        self._arrays = arrays
        self._experts, self._widths = experts, tuple(widths)
        self._rank = round_up(slots.max_rank, RANKS)
        self.adapters = ExpertAdapters(self._room(widths[:-1], features), self._room(widths[-1:], widths[0]))

    def _room(self, widths: Sequence[int], features: int) -> ExpertAdapterArrays:
        nbytes = expert_slot_bytes(self._rank, self._experts, widths, features)
        memory = self._arrays.zeros((self.slots.count, nbytes), np.uint8)
        return ExpertAdapterArrays(memory, self._rank, len(widths), widths[0], features)

    def prepare(self, sections: Sections) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The contents of a slot of both weights in pinned memory, for the ranks that are used."""
        size = len(self._widths)
        experts = [sections[first : first + size] for first in range(0, len(sections), size)]
        hidden, down = ([expert[half] for expert in experts] for half in (slice(-1), slice(-1, None)))
        return self._block(self.adapters.hidden, hidden), self._block(self.adapters.down, down)

    def _block(self, of: ExpertAdapterArrays, experts: Sequence[Sections]) -> np.ndarray | None:
        """One of both; None if there is no adapter. Values beyond fp16 become infinities."""
        used = [part.a.shape[0] for parts in experts for part in parts if part is not None]
        if not used:
            return None
        rank, widths = round_up(max(used), RANKS), [of.width] * of.sections
        block = _pinned(self._arrays, (expert_slot_bytes(rank, self._experts, widths, of.features),), np.uint8)
        block[:4].view(np.int32)[0] = rank
        rest, pitch = block[HEADER:], round_up(of.features, PAD)
        for parts in experts:
            scales, rest = _split(rest, (of.sections, rank), np.float32)
            down, rest = _split(rest, (of.sections, rank, pitch), np.float16)
            up, rest = _split(rest, (of.sections, of.width, rank), np.float16)
            with np.errstate(over="ignore"):
                for section, part in enumerate(parts):
                    if part is not None:
                        own = part.a.shape[0]
                        down[section, :own, : of.features] = part.a
                        scales[section, :own] = part.scale
                        up[section, :, :own] = part.b
        return block

    def put(self, slot: int, prepared: tuple[np.ndarray | None, np.ndarray | None] | None) -> None:
        """As :meth:`AdapterBank.put`."""
        for of, block in zip((self.adapters.hidden, self.adapters.down), prepared or (None, None), strict=True):
            _put(self._arrays, of.memory[slot - 1], block)


def _put(arrays: Arrays, place: cp.ndarray, block: np.ndarray | None) -> None:
    """Overwrite a slot with the beginning of its contents, or empty it."""
    if block is None:
        place.data.memset_async(0, 4, arrays.stream)
        return
    _copy(arrays, place[: len(block)], block)
    arrays.hold(block)


def _split(block: np.ndarray, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The array at the beginning of a block of bytes, and the rest of the block."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return block[:nbytes].view(dtype).reshape(shape), block[nbytes:]


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
