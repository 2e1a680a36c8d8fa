"""The residual stream of a step with many rows, of which each rank has some.

A rank owns some of the rows. Its parts of the others go to their owners over the link, piece by piece, while it still
multiplies. An owner adds the parts of a row up in the order of the ranks and adds the sum to the stream, and what all
ranks get is the row's norm, in codes: a byte for each value. Elsewhere the row is missing until something reads the
stream itself, which gathers it (:meth:`DividedRows.gather`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import PAD
from ...cuda.kernels.collective.divided_rows import DividedSizes, Meeting
from ...cuda.kernels.gemm.gemm_hopper import MIN_ROWS as GEMM_MIN_ROWS
from ...cuda.kernels.gemm.layouts import Layout
from ..values import Norm
from .arrays import Arrays
from .deferred import OwnedRows, QuantizedActivations, ResidualStream
from .kernels import Kernels

MIN_ROWS = 256
"""Rows that each rank must own. Steps with fewer have sums on every rank, which fewer kernels compute."""


PIECE_VALUES = 1 << 22
"""Values of a piece of a product, which is copied while the next one is computed: about a tile for each of 128 SMs."""


class MeetingThread(Protocol):
    """The thread that launches a rank's kernels."""

    @property
    def is_captured(self) -> bool:
        """Whether the present step is captured."""

    @property
    def patience(self) -> int:
        """Nanoseconds after which a kernel that is launched now gives a peer up."""

    def meet(self) -> None:
        """Wait for the threads of all ranks, around a launch of a kernel that waits for peers."""


class DividedRows:
    """One rank's part of it. ``memories`` are those of all ranks, as ``sizes`` lays them out.

    All ranks call the same methods in the same order.
    """

    def __init__(
        self,
        thread: MeetingThread,
        kernels: Kernels,
        arrays: Arrays,
        sizes: DividedSizes,
        memories: Sequence[Any],
        meeting: Meeting,
    ):
        self.thread = thread
        self.kernels = kernels
        self.arrays = arrays
        self.sizes = sizes
        self.meeting = meeting
        self._memories = memories
        self._pending: weakref.ref[ResidualStream] | None = None
        self._clock = self._used = self._met = 0
        self._copies = cp.cuda.Stream(non_blocking=True)
        self._computed, self._copied = (cp.cuda.Event(disable_timing=True) for _ in range(2))
        self._copied_from: list[cp.ndarray] = []
        self.forget_uses()

    def supports(self, rows: int, width: int) -> bool:
        """Whether a stream fp32 ``[rows, width]`` may be divided."""
        return rows >= MIN_ROWS * self.sizes.ranks and width % PAD == 0 and self.sizes.fit(rows, width)

    def rows_of(self, rank: int, rows: int) -> slice:
        """The rows that a rank owns, of ``rows``."""
        return slice(rank * rows // self.sizes.ranks, (rank + 1) * rows // self.sizes.ranks)

    def forget_uses(self) -> None:
        """Begin a step, which knows nothing of the one before: ranks meet before its first parts are stored."""
        self._pending = None
        self._copied_from.clear()
        self._use()

    def reset(self) -> None:
        """Begin anew after a failure."""
        self._copies.synchronize()
        self.forget_uses()

    def end_step(self) -> None:
        """Complete the stream that outlives its step, if one does."""
        if (stream := self._of_pending()) is not None:
            self.gather(stream)
        if self._copied_from:
            self.meet()
        self.forget_uses()

    # -- sums ----------------------------------------------------------------------------------------------------------

    def store(self, rows: int, width: int, multiply: Callable[[slice, cp.ndarray], None]) -> None:
        """Bring this rank's parts of ``rows`` to their owners.

        ``multiply`` computes some of them into padded fp32 rows: pieces of the peers' rows first, which are copied
        while the next are computed, then its own.
        """
        self._claim()
        ranks, own, arrays = self.sizes.ranks, self.meeting.rank, self.arrays
        for hop in range(1, ranks):
            owner = (own + hop) % ranks
            owned = self.rows_of(owner, rows)
            for piece in pieces(owned, width):
                values = arrays.rows(piece.stop - piece.start, width, np.float32)
                multiply(piece, values)
                self._computed.record(self.arrays.stream)
                self._copies.wait_event(self._computed)
                place = self._memories[owner].ptr + self.sizes.part(own) + 4 * width * (piece.start - owned.start)
                self._copy(place, values, self._copies)
                self._copied_from.append(values)
        owned = self.rows_of(own, rows)
        multiply(owned, self._array(own, self.sizes.part(own), (owned.stop - owned.start, width)))
        self._use()

    def stream(self, target: ResidualStream, bias: cp.ndarray | None) -> ResidualStream:
        """``target`` plus the sum of the parts, stored by all ranks, and ``bias``: ``target`` is overwritten."""
        owned = OwnedRows(self, self.rows_of(self.meeting.rank, target.shape[0]), bias)
        found = ResidualStream(target.values, divided=owned)
        self._pending = weakref.ref(found)
        return found

    def codes(self, stream: ResidualStream, norm: Norm, layout: Layout, rotation: int) -> QuantizedActivations:
        """The codes of a norm of the stream, of all rows; they are valid until ranks meet again."""
        owned, (rows, width) = stream.divided, stream.shape
        assert owned is not None and layout.ld == width
        self.meet()
        codes, kernels = self.sizes.codes, self.kernels
        scales, first = codes + rows * width, owned.rows.start
        kernels.divided_rows.send_norm(
            kernels.step,
            self.sizes,
            self._parts if owned.is_pending else 0,
            owned.bias,
            stream.values[owned.rows],
            norm,
            rotation,
            self.meeting.bases,
            codes + first * width,
            scales + 4 * first,
        )
        self._added(owned)
        self.meet()
        own = self.meeting.rank
        return QuantizedActivations(layout, self._pointer(own, codes), self._pointer(own, scales))

    def gather(self, stream: ResidualStream) -> None:
        """Complete the stream: all ranks get all rows."""
        owned, values, own = stream.divided, stream.values, self.meeting.rank
        assert owned is not None
        if owned.is_pending:
            self._add(stream)
        self._claim()
        for rank in range(self.sizes.ranks):
            if rank != own:
                self._copy(self._memories[rank].ptr + self.sizes.part(own), values[owned.rows])
        self._use()
        self.meet()
        for rank in range(self.sizes.ranks):
            if rank != own:
                rows = values[self.rows_of(rank, len(values))]
                self._copy(rows.data.ptr, self._array(own, self.sizes.part(rank), rows.shape))
        self._use()
        stream.divided = None

    # -- meetings ------------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Let the work behind this begin once all ranks have done what is before it."""
        kernels, is_captured = self.kernels, self.thread.is_captured
        has_copies = bool(self._copied_from)
        if has_copies:
            self._copied.record(self._copies)
            self.arrays.stream.wait_event(self._copied)
            self._copied_from.clear()
        if not is_captured:
            self.thread.meet()
        kernels.divided_rows.meet(kernels.step, self.meeting, self.thread.patience, dependent=not has_copies)
        if not is_captured:
            self.thread.meet()
        self._clock += 1
        self._met = self._clock

    def _use(self) -> None:
        """Note that work before this stores or reads parts."""
        self._clock += 1
        self._used = self._clock

    def _claim(self) -> None:
        """Before parts are stored: no rank needs those that are there."""
        if (stream := self._of_pending()) is not None:
            self._add(stream)
        if self._used > self._met:
            self.meet()

    def _add(self, stream: ResidualStream) -> None:
        """Add the parts to the rows that this rank owns."""
        owned, kernels = stream.divided, self.kernels
        assert owned is not None
        self.meet()
        kernels.divided_rows.add(kernels.step, self.sizes, self._parts, owned.bias, stream.values[owned.rows])
        self._added(owned)

    def _added(self, owned: OwnedRows) -> None:
        owned.is_pending, owned.bias, self._pending = False, None, None
        self._use()

    def _of_pending(self) -> ResidualStream | None:
        """The stream whose parts have not been added, if anything still refers to it."""
        return None if self._pending is None else self._pending()

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> int:
        """The address of the parts of the rows that this rank owns."""
        return int(self._memories[self.meeting.rank].ptr) + self.sizes.part(0)

    def _pointer(self, rank: int, offset: int) -> cp.cuda.MemoryPointer:
        """A place in a rank's memory. Kernels of this rank get it, so it counts as memory of this GPU."""
        memory, nbytes = self._memories[rank], self.sizes.nbytes - offset
        return cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(memory.ptr + offset, nbytes, memory, self.arrays.device), 0)

    def _array(self, rank: int, offset: int, shape: tuple[int, int]) -> cp.ndarray:
        """fp32 rows in a rank's memory."""
        return cp.ndarray(shape, np.float32, self._pointer(rank, offset))

    def _copy(self, to: int, rows: cp.ndarray, stream: cp.cuda.Stream | None = None) -> None:
        runtime, stream = cp.cuda.runtime, stream or self.arrays.stream
        runtime.memcpyAsync(to, rows.data.ptr, rows.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)


def pieces(rows: slice, width: int) -> Iterator[slice]:
    """``rows`` of ``width`` values in equal pieces of about ``PIECE_VALUES``, of as many rows as the kernel takes."""
    total = rows.stop - rows.start
    count = max(1, min(total * width // PIECE_VALUES, total // GEMM_MIN_ROWS))
    for i in range(count):
        yield slice(rows.start + i * total // count, rows.start + (i + 1) * total // count)
