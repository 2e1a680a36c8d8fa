"""Sums over the GPUs of a host: the launcher of ``all_reduce.cu``, and the memory that its kernels exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.values import Norm
from ..arrays import PAD, address, ceil_div, nbytes_of, pitch_of, round_up
from ..constants import ALL_REDUCE_MAX_BLOCKS as MAX_BLOCKS
from ..constants import ALL_REDUCE_NORM_THREADS as NORM_THREADS
from ..constants import ALL_REDUCE_PAIRS as PAIRS
from ..constants import ALL_REDUCE_THREADS as THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext
from ..rowwise.rows import norm_arguments

if TYPE_CHECKING:
    import cupy as cp

SMALL = 1 << 18
"""Values that are pushed to the peers of a rank in one shot, each beside the call's number; more go in two shots."""
FEW = 1 << 14
"""The same if the GPUs reach each other by NVLink: more go in lines."""
LINED = 1 << 20
"""Values that are pushed to the peers of a rank in lines; more go in two shots."""
LINE_VALUES, LINE_BYTES = 28, 128
LINES_AT_ONCE = (1, 2, 4)
"""Lines that a thread has a part of at a time."""
NORM_ROWS, NORM_VECTORS = 64, (1, 2)
"""The most rows that are added and normalised by one kernel, and vectors of eight elements of each of its threads."""
LARGE = 1 << 22
"""Values of one launch in two shots; more take several launches. The memory of a rank is 8 bytes for each, or less."""
BLOCKS_PER_SM = 2


@dataclass(frozen=True)
class ExchangeSizes:
    """How much the memory has room for that the peers of a rank write: values of a sum in one shot, in lines, in two.

    ``for_sums`` gives sizes for sums of up to ``most`` values at a time, with ``lined`` if lines may be used.
    """

    ranks: int
    small: int
    large: int
    lined: int = 0

    @classmethod
    def for_sums(cls, ranks: int, most: int, has_lines: bool = False) -> ExchangeSizes:
        most, peers = round_up(most, 4), max(ranks - 1, 1)
        small, lined = (FEW, LINED // peers) if has_lines else (SMALL // peers, 0)
        return cls(ranks, min(most, small), min(most, LARGE), min(most, lined))

    @property
    def lines(self) -> int:
        """Lines of a rank in a slot."""
        return ceil_div(self.lined, LINE_VALUES)

    @property
    def lines_begin(self) -> int:
        """The byte at which the lines begin."""
        vectors = self.ranks * self.small + 2 * self.ranks * self.share + 2 * (self.large // 4)
        return round_up(16 * vectors + 4 * 2 * self.ranks * MAX_BLOCKS, LINE_BYTES)

    @property
    def share(self) -> int:
        """Vectors of four values that a rank sums in two shots."""
        return ceil_div(self.large // 4, self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's memory; its layout is stated in ``all_reduce.cu``."""
        return self.lines_begin + 2 * self.ranks * self.lines * LINE_BYTES


@dataclass(frozen=True)
class Exchange:
    """What the kernels of one rank work with.

    ``bases`` is uint64 ``[ranks]`` on the rank's GPU: the addresses of all ranks' memory, which is zeroed at first.
    ``calls`` is int32 ``[3]`` there: the numbers of calls, 1 at first, and whether a peer was given up. ``failure`` is
    the address of an int32 in pinned memory of the host. ``max_blocks`` is the same on all ranks.
    """

    rank: int
    sizes: ExchangeSizes
    bases: cp.ndarray
    calls: cp.ndarray
    failure: int
    max_blocks: int


class AllReduce:
    """:meth:`.Backend.all_reduce_add` of fp32 rows."""

    source = "collective/all_reduce.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.max_blocks = min(MAX_BLOCKS, BLOCKS_PER_SM * launcher.num_sms)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "all_reduce_values", (BOOLEANS,))
        yield KernelFamily(cls.source, "all_reduce_shares", (BOOLEANS,))
        yield KernelFamily(cls.source, "all_reduce_lines", (BOOLEANS, LINES_AT_ONCE))
        yield KernelFamily(cls.source, "all_reduce_norm", (BOOLEANS, NORM_VECTORS, BOOLEANS))
        yield KernelFamily(cls.source, "end_odd_step")

    def launch(
        self,
        step: StepContext,
        exchange: Exchange,
        partial: cp.ndarray,
        bias: cp.ndarray | None,
        out: cp.ndarray,
        add: bool,
        parity: int,
        patience: int,
    ) -> None:
        """``out`` = the sum of all ranks' ``partial``, plus ``bias``; or with ``add``, that rounded to fp16 is added.

        Both are fp32 ``[rows, n]`` with padded rows, of at most :meth:`rows_at_once` rows, and ``bias`` is fp32
        ``[n]``, padded. ``parity`` counts the calls of a step modulo 2, from 0. A kernel that has waited for a peer for
        ``patience`` nanoseconds gives it up.
        """
        (rows, n), sizes = partial.shape, exchange.sizes
        vectors = rows * ceil_div(n, 4)
        adds = "true" if add else "false"
        memory: tuple[int, ...] = (sizes.small, sizes.share, sizes.large // 4)
        path = self.path(sizes, 4 * vectors)
        if path == "values":
            expression, threads = f"all_reduce_values<{adds}>", ceil_div(2 * vectors, PAIRS)
        elif path == "lines":
            threads = 8 * ceil_div(4 * vectors, LINE_VALUES)
            fitting = (each for each in LINES_AT_ONCE if ceil_div(threads, each * THREADS) <= exchange.max_blocks)
            at_once = next(fitting, LINES_AT_ONCE[-1])
            expression, threads = f"all_reduce_lines<{adds}, {at_once}>", ceil_div(threads, at_once)
            memory = sizes.lines_begin, sizes.lines
        else:
            expression, threads = f"all_reduce_shares<{adds}>", ceil_div(vectors, sizes.ranks)
        self._launcher.launch(
            step,
            self.source,
            expression,
            min(exchange.max_blocks, ceil_div(threads, THREADS)),
            THREADS,
            (
                partial.data.ptr,
                pitch_of(partial),
                address(bias),
                out.data.ptr,
                pitch_of(out),
                rows,
                n,
                exchange.bases.data.ptr,
                exchange.calls.data.ptr,
                exchange.failure,
                exchange.rank,
                sizes.ranks,
                parity,
                *memory,
                patience,
            ),
            bytes_moved=nbytes_of(partial, out),
        )

    @staticmethod
    def normalises(sizes: ExchangeSizes, rows: int, k: int) -> bool:
        """Whether :meth:`launch_norm` takes ``rows`` of ``k`` values: some that go in lines."""
        lines = rows * ceil_div(k, LINE_VALUES)
        fits = k % PAD == 0 and k <= 8 * NORM_THREADS * NORM_VECTORS[-1] and lines <= sizes.lines
        return fits and 1 < rows <= NORM_ROWS

    def launch_norm(
        self,
        step: StepContext,
        exchange: Exchange,
        partial: cp.ndarray,
        bias: cp.ndarray | None,
        residual: cp.ndarray,
        norm: Norm,
        rotation: int,
        codes: tuple[int, int, int],
        parity: int,
        patience: int,
    ) -> None:
        """:meth:`launch` with ``add`` to ``residual``, and then the codes of its rows' norm.

        ``codes`` are the addresses of the codes and of the rows' scales, and the pitch of the codes. The norm is
        rotated in blocks of ``rotation`` before it is quantized.
        """
        (rows, k), sizes = partial.shape, exchange.sizes
        vectors = next(vectors for vectors in NORM_VECTORS if k <= 8 * NORM_THREADS * vectors)
        self._launcher.launch(
            step,
            self.source,
            f"all_reduce_norm<{BOOLEANS[norm.center]}, {vectors}, {BOOLEANS[rotation > 1]}>",
            rows,
            NORM_THREADS,
            (
                partial.data.ptr,
                pitch_of(partial),
                address(bias),
                residual.data.ptr,
                pitch_of(residual),
                k,
                exchange.bases.data.ptr,
                exchange.calls.data.ptr,
                exchange.failure,
                exchange.rank,
                sizes.ranks,
                parity,
                sizes.lines_begin,
                sizes.lines,
                patience,
                *norm_arguments(norm),
                *codes,
                rotation,
                rotation**-0.5,
            ),
            bytes_moved=nbytes_of(partial, residual, residual) + rows * k,
        )

    @staticmethod
    def path(sizes: ExchangeSizes, count: int) -> str:
        """The kernel of a sum of ``count`` values: ``values``, ``lines`` or ``shares``, which give the same bits."""
        if count <= sizes.small:
            return "values"
        assert count <= max(sizes.lined, sizes.large), (count, sizes)
        return "lines" if count <= sizes.lined else "shares"

    @staticmethod
    def rows_at_once(sizes: ExchangeSizes, n: int) -> int:
        """How many rows of ``n`` values one launch takes."""
        return max(sizes.large // 4, sizes.small // 4) // ceil_div(n, 4)

    def end_odd_step(self, step: StepContext, exchange: Exchange) -> None:
        """After an odd number of calls: the next call has parity 0 again."""
        self._launcher.launch(step, self.source, "end_odd_step", 1, 1, (exchange.calls.data.ptr,))
