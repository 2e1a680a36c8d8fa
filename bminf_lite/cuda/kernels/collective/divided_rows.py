"""Launchers of ``divided_rows.cu`` and ``meet_ranks.cu``: a residual stream of which each GPU has some rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.values import Norm
from ..arrays import PAD, address, ceil_div, nbytes_of, pitch_of, round_up
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from ..rowwise.rows import MAX_NORM_WIDTH, norm_arguments, row_shape, row_shapes

if TYPE_CHECKING:
    import cupy as cp

FLAG_BYTES = 1024
"""Bytes of the flags of meetings, before the parts: two words for each rank."""
VECTORS = 4
"""The most vectors per thread of a norm, see :func:`.row_shape`."""
THREADS = 256


@dataclass(frozen=True)
class DividedSizes:
    """How a rank's memory is laid out that all ranks write: flags; parts of the rows that it owns; codes of all rows.

    There is room for rows of up to ``most`` values in all, divided among ``ranks``; the parts of one rank that another
    owns are ``share`` fp32 values.
    """

    ranks: int
    most: int

    @property
    def share(self) -> int:
        return round_up(ceil_div(self.most, self.ranks) + 2 * MAX_NORM_WIDTH, 64)

    @property
    def codes(self) -> int:
        """The byte at which the codes begin, and behind them the rows' scales."""
        return FLAG_BYTES + 4 * self.ranks * self.share

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's memory."""
        return self.codes + round_up(self.most + 4 * ceil_div(self.most, PAD), 256)

    def fit(self, rows: int, width: int) -> bool:
        """Whether ``rows`` of ``width`` values can be divided."""
        return rows * width <= self.most and width <= MAX_NORM_WIDTH

    def part(self, source: int) -> int:
        """The byte at which the parts begin that rank ``source`` has of the owner's rows."""
        return FLAG_BYTES + 4 * source * self.share


@dataclass(frozen=True)
class Meeting:
    """What :meth:`DividedRowKernels.meet` works with on one rank.

    ``bases`` is uint64 ``[ranks]`` on the rank's GPU, the addresses of all ranks' memory, which is zeroed at first;
    ``count`` int32 ``[1]`` there, 1 at first. ``calls`` and ``failure`` are those of
    :class:`~bminf_lite.cuda.kernels.collective.all_reduce.Exchange`.
    """

    rank: int
    ranks: int
    bases: cp.ndarray
    count: cp.ndarray
    calls: cp.ndarray
    failure: int


class DividedRowKernels:
    """Meetings of ranks, and the sums and norms of the rows that a rank owns."""

    source = "collective/divided_rows.cu"
    meeting_source = "collective/meet_ranks.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        if capability != (9, 0):
            return
        sizes = {size for size in row_shapes(VECTORS) if 8 * size[0] * size[1] <= MAX_NORM_WIDTH}
        yield KernelFamily(cls.meeting_source, "meet_ranks")
        yield KernelFamily(cls.source, "add_owned_rows")
        values = BOOLEANS, BOOLEANS, tuple(map(Together, sorted(sizes))), BOOLEANS
        yield KernelFamily(cls.source, "send_norm_of_rows", values)

    def meet(self, step: StepContext, meeting: Meeting, patience: int, dependent: bool = True) -> None:
        """Wait until all ranks are here; give a peer up after ``patience`` nanoseconds.

        ``dependent``: see :meth:`.Launcher.launch`; not behind work of another stream.
        """
        self._launcher.launch(
            step,
            self.meeting_source,
            "meet_ranks",
            1,
            32,
            (
                meeting.bases.data.ptr,
                meeting.count.data.ptr,
                meeting.calls.data.ptr,
                meeting.failure,
                meeting.rank,
                meeting.ranks,
                patience,
            ),
            dependent=dependent,
        )

    def add(
        self, step: StepContext, sizes: DividedSizes, parts: int, bias: cp.ndarray | None, residual: cp.ndarray
    ) -> None:
        """Add the sum of the parts, and ``bias``, rounded to fp16, to owned rows ``residual``, fp32 ``[rows, k]``.

        ``parts`` is the address of those of rank 0; the width ``k`` is a multiple of 32.
        """
        rows, k = residual.shape
        self._launcher.launch(
            step,
            self.source,
            "add_owned_rows",
            ceil_div(rows * k // 8, THREADS),
            THREADS,
            (parts, k, sizes.share, address(bias), residual.data.ptr, pitch_of(residual), rows, k, sizes.ranks),
            bytes_moved=nbytes_of(residual) * (2 + sizes.ranks),
            cache=rows > self._launcher.num_sms,
        )

    def send_norm(
        self,
        step: StepContext,
        sizes: DividedSizes,
        parts: int,
        bias: cp.ndarray | None,
        residual: cp.ndarray,
        norm: Norm,
        rotation: int,
        bases: cp.ndarray,
        codes: int,
        scales: int,
    ) -> None:
        """:meth:`add`, unless ``parts`` is 0, and then the codes of the rows' norm for all ranks.

        Codes and scales of these rows begin ``codes`` and ``scales`` bytes behind each of ``bases``. The norm is
        rotated in blocks of ``rotation`` before it is quantized.
        """
        rows, k = residual.shape
        threads, vectors = row_shape(k, VECTORS, rotation)
        block = max(threads, 128)
        sums, center, rotated = (BOOLEANS[x] for x in (parts != 0, norm.center, rotation > 1))
        self._launcher.launch(
            step,
            self.source,
            f"send_norm_of_rows<{sums}, {center}, {threads}, {vectors}, {rotated}>",
            ceil_div(rows * threads, block),
            block,
            (
                parts,
                k,
                sizes.share,
                address(bias),
                residual.data.ptr,
                pitch_of(residual),
                *norm_arguments(norm),
                bases.data.ptr,
                codes,
                scales,
                rows,
                k,
                sizes.ranks,
                rotation,
                rotation**-0.5,
            ),
            bytes_moved=nbytes_of(residual) * (2 + sizes.ranks if parts else 1) + rows * k * sizes.ranks,
            cache=rows > self._launcher.num_sms,
        )
