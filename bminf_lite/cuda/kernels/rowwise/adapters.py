"""Adapters that the rows of a step choose: the launchers of ``adapters.cu``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import PAD, address, ceil_div, nbytes_of, pitch_of, round_up
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

RANKS = 16
"""The ranks of slots are padded to a multiple of it."""
HEADER = 128
"""Bytes of a slot before its scales; the first four are the rank."""
PARTS = 8
"""Parts of the columns whose sums are added: those of a cluster's blocks, where the GPU has clusters."""
GROUPS = (1, 2, 3)
"""Groups of ``RANKS`` columns that a block of ``shrink_many_rows`` computes."""
SHRINK_ROWS = FEW_ROWS = 64
"""The most rows of ``shrink_rows``, and the rows of a tile."""
QUANTIZED_ROWS = 8
"""The most rows whose codes are counted row by row, so that a product begins before ``shrink_rows`` has waited.

A step of 8B with one row took 2.27 ms that way instead of 2.34, one with 32 rows of 8 adapters 3.16 instead of 3.09, in
different runs; numbers of rows between were not measured.
"""
QUANTIZED_COLUMNS = 16384
"""The most columns of rows that ``shrink_rows_and_quantize`` quantizes."""
MANY_ROWS = 512
"""Above ``MANY_ROWS`` rows, which are prompts, most tiles of :data:`SHRINK_ROWS` rows have one slot."""
CHUNK, QUEUE_BYTES, ROW_THREADS = 32, 32 << 10, 128
STATIC_SHARED = 512
"""Static shared memory of a block of ``shrink_many_rows``, at most."""
PRODUCTS = 1024
"""Counters of products that start beside the kernel of their side inputs: more than ever run at the same time."""
EXPAND_ROWS = 8
MAX_SECTIONS = 4


def shrink_shared(groups: int, features: int) -> int:
    """Bytes of dynamic shared memory of ``shrink_many_rows``: the queue, the sums, and a part of ``down``."""
    columns, chunks = groups * RANKS, ceil_div(features, CHUNK)
    part = columns * (ceil_div(chunks, PARTS) | 1) * CHUNK * 2
    return QUEUE_BYTES + SHRINK_ROWS * (columns + 8) * 4 + part


def slot_bytes(rank: int, sections: int, features: int, outputs: int) -> int:
    """Bytes of an adapter of a padded ``rank``, as ``common/adapters.cuh`` lays it out, and of a slot for it."""
    return round_up(HEADER + sections * rank * (4 + 2 * round_up(features, PAD)) + 2 * rank * outputs, HEADER)


@dataclass(frozen=True)
class SavedArrays:
    """Matrices fp16 ``[slots, rows, pitch]`` of ``columns``, and int32 ``[slots]``, which is 1 where there is one."""

    matrices: cp.ndarray
    present: cp.ndarray
    columns: int


@dataclass(frozen=True)
class AdapterArrays:
    """The slots of one weight, uint8 ``[slots, bytes]``, as ``common/adapters.cuh`` describes them.

    Each has room for ``rank_pitch`` ranks of ``features`` inputs; ``ends`` are the outputs at which sections end.
    """

    memory: cp.ndarray
    rank_pitch: int
    ends: Sequence[int]
    features: int

    @property
    def columns(self) -> int:
        """Ranks of all sections."""
        return len(self.ends) * self.rank_pitch

    @property
    def nbytes_of_slot(self) -> int:
        return int(self.memory.shape[1])


@dataclass(frozen=True)
class SideInputs:
    """What the kernel of a product needs of a side product: the rows' ``slots``, the adapters, and their inputs.

    ``values`` is fp16 ``[rows, columns]``. Rows without a slot, and columns behind the rank of a row's slot, are not
    written. ``ready`` is the address of a counter, 0 before and after, for a product that starts beside the kernel of
    these inputs, or 0; for that kernel, 0 if another one counts.
    """

    slots: cp.ndarray
    adapters: AdapterArrays
    values: cp.ndarray
    ready: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ``SideProduct`` of a kernel."""
        of, (*ends, n) = self.adapters, self.adapters.ends
        ends += [n] * (MAX_SECTIONS - 1 - len(ends))
        return (
            self.slots.data.ptr,
            of.memory.data.ptr,
            of.memory.shape[1],
            self.values.data.ptr,
            self.ready,
            of.columns,
            of.rank_pitch,
            round_up(of.features, PAD),
            len(of.ends),
            *ends,
            n,
        )


class AdapterKernels:
    """The side product of a step's rows with the adapters of their slots."""

    source = "rowwise/adapters.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        cluster = PARTS if capability >= (9, 0) else 1
        yield KernelFamily(cls.source, "shrink_rows", ((cluster,),))
        yield KernelFamily(cls.source, "shrink_many_rows", (GROUPS, (cluster,)))
        if capability >= (9, 0):
            yield KernelFamily(cls.source, "shrink_rows_and_quantize", ((cluster,),))
        yield KernelFamily(cls.source, "expand_rows", (("__half", "float"),))
        yield KernelFamily(cls.source, "saved_products")
        yield KernelFamily(cls.source, "saved_embed")

    def quantizes(self, rows: int, adapters: AdapterArrays) -> bool:
        """Whether :meth:`shrink` can also write the codes of ``rows`` rows."""
        return self._launcher.has_clusters and rows <= QUANTIZED_ROWS and adapters.features <= QUANTIZED_COLUMNS

    def shrink(
        self, step: StepContext, x: cp.ndarray, side: SideInputs, codes: tuple[int, int, int] | None = None
    ) -> None:
        """Write the inputs of the side product, of padded fp16 rows ``x``.

        If :meth:`quantizes` says so, also the int8 codes of ``x`` and their scales fp32: ``codes`` are the address of
        the codes, the elements from one row to the next, and the address of the scales.
        """
        of, rows = side.adapters, len(side.values)
        ranks, cluster = of.columns // RANKS, PARTS if self._launcher.has_clusters else 1
        groups = self._groups(ranks, of.features) if rows > FEW_ROWS else None
        slots = min(len(of.memory), rows, SHRINK_ROWS if rows <= MANY_ROWS else 2)
        blocks, more = cluster * ranks // (groups or 1), ceil_div(rows, SHRINK_ROWS)
        arguments: tuple[int, ...] = codes or ()
        name = "shrink_rows<" if groups is None else f"shrink_many_rows<{groups}, "
        if codes is not None:
            assert groups is None and more == 1
            name, arguments, slots = "shrink_rows_and_quantize<", (slots, *codes), slots + ceil_div(rows, blocks)
        self._launcher.launch(
            step,
            self.source,
            f"{name}{cluster}>",
            (blocks, more, slots),
            256 if groups is None else ROW_THREADS,
            (*side.arguments, x.data.ptr, pitch_of(x), rows, of.features, *arguments),
            shared=0 if groups is None else shrink_shared(groups, of.features),
            cluster=cluster if cluster > 1 else None,
            bytes_moved=nbytes_of(x, side.values) + of.nbytes_of_slot,
        )

    def _groups(self, ranks: int, features: int) -> int | None:
        """How many groups a block of ``shrink_many_rows`` computes: two blocks fit an SM, if not with one group.

        None if not even one block with one group does.
        """
        room = self._launcher.max_shared
        for groups in reversed(GROUPS):
            if ranks % groups == 0 and shrink_shared(groups, features) + STATIC_SHARED <= (
                room if groups == 1 else self._launcher.half_shared
            ):
                return groups
        return None

    def expand(
        self, step: StepContext, sums: cp.ndarray, side: SideInputs, bias: cp.ndarray | None, out: cp.ndarray
    ) -> None:
        """``sums`` fp32 ``[rows, n]`` plus the side product and the bias, in ``out``: fp16 or fp32, also ``sums``."""
        kind, (rows, n) = "__half" if out.itemsize == 2 else "float", out.shape
        self._launcher.launch(
            step,
            self.source,
            f"expand_rows<{kind}>",
            (ceil_div(n, 128), ceil_div(rows, EXPAND_ROWS)),
            256,
            (*side.arguments, sums.data.ptr, pitch_of(sums), address(bias), out.data.ptr, pitch_of(out), rows),
            bytes_moved=nbytes_of(sums, side.values, out) + side.adapters.nbytes_of_slot,
        )

    def saved_products(
        self, step: StepContext, x: cp.ndarray, slots: cp.ndarray, saved: SavedArrays, y: cp.ndarray
    ) -> None:
        """The rows of ``y`` fp32 ``[rows, n]`` whose slot has a matrix: ``x`` fp16, padded, times that matrix."""
        rows, n = y.shape
        self._launcher.launch(
            step,
            self.source,
            "saved_products",
            (ceil_div(n, 8), ceil_div(rows, EXPAND_ROWS)),
            256,
            (
                x.data.ptr,
                pitch_of(x),
                slots.data.ptr,
                saved.matrices.data.ptr,
                saved.matrices.shape[2],
                saved.present.data.ptr,
                y.data.ptr,
                pitch_of(y),
                rows,
                n,
                saved.columns,
            ),
            bytes_moved=nbytes_of(x, y) + saved.matrices.nbytes // len(saved.matrices),
        )

    def saved_embed(
        self,
        step: StepContext,
        tokens: cp.ndarray,
        slots: cp.ndarray,
        saved: SavedArrays,
        residual: cp.ndarray,
        scale: float,
    ) -> None:
        """The rows of ``residual`` fp32 ``[rows, features]`` whose slot has a table: that of their token."""
        self._launcher.launch(
            step,
            self.source,
            "saved_embed",
            len(residual),
            256,
            (
                tokens.data.ptr,
                slots.data.ptr,
                saved.matrices.data.ptr,
                saved.matrices.shape[2],
                saved.present.data.ptr,
                saved.matrices.shape[1],
                residual.data.ptr,
                pitch_of(residual),
                residual.shape[1],
                scale,
            ),
            bytes_moved=2 * nbytes_of(residual),
        )
