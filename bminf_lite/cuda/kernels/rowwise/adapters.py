"""Adapters that the rows of a step choose: the launchers of ``adapters.cu``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

RANKS = 16
"""Ranks that a block computes; the ranks of slots are padded to a multiple of it."""
TILES = (1, 4)
"""Tiles of 8 rows that a block of ``shrink_rows`` computes: the first for up to :data:`FEW_ROWS` rows."""
FEW_ROWS = 64
EXPAND_ROWS = 8
MAX_SECTIONS = 4


@dataclass(frozen=True)
class SavedArrays:
    """Matrices fp16 ``[slots, rows, pitch]`` of ``columns``, and int32 ``[slots]``, which is 1 where there is one."""

    matrices: cp.ndarray
    present: cp.ndarray
    columns: int


@dataclass(frozen=True)
class AdapterArrays:
    """The slots of one weight, as ``adapters.cu`` describes them; ``ends`` are the outputs at which sections end."""

    down: cp.ndarray
    scales: cp.ndarray
    up: cp.ndarray
    ranks: cp.ndarray
    ends: Sequence[int]
    features: int

    @property
    def columns(self) -> int:
        """Ranks of all sections."""
        return int(self.scales.shape[1])

    @property
    def rank_pitch(self) -> int:
        return int(self.up.shape[1])


class AdapterKernels:
    """The side product of a step's rows with the adapters of their slots."""

    source = "rowwise/adapters.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "shrink_rows", (TILES,))
        yield KernelFamily(cls.source, "expand_rows", (("__half", "float"),))
        yield KernelFamily(cls.source, "saved_products")
        yield KernelFamily(cls.source, "saved_embed")

    def shrink(
        self, step: StepContext, x: cp.ndarray, slots: cp.ndarray, adapters: AdapterArrays, inputs: cp.ndarray
    ) -> None:
        """The inputs of the side product, fp16 ``[rows, columns]``, of padded fp16 rows ``x``.

        Rows without a slot, and columns behind the rank of a row's slot, are not written.
        """
        rows, columns = inputs.shape
        tiles = TILES[0] if rows <= FEW_ROWS else TILES[1]
        self._launcher.launch(
            step,
            self.source,
            f"shrink_rows<{tiles}>",
            (columns // RANKS, ceil_div(rows, 8 * tiles), min(rows, 8 * tiles)),
            256,
            (
                x.data.ptr,
                pitch_of(x),
                slots.data.ptr,
                adapters.down.data.ptr,
                adapters.down.shape[2],
                adapters.scales.data.ptr,
                adapters.ranks.data.ptr,
                inputs.data.ptr,
                rows,
                adapters.features,
                columns,
                adapters.rank_pitch,
            ),
            bytes_moved=nbytes_of(x, inputs) + adapters.down.nbytes // len(adapters.down),
        )

    def expand(
        self,
        step: StepContext,
        sums: cp.ndarray,
        slots: cp.ndarray,
        inputs: cp.ndarray,
        adapters: AdapterArrays,
        bias: cp.ndarray | None,
        out: cp.ndarray,
    ) -> None:
        """``sums`` fp32 ``[rows, n]`` plus the side product and the bias, in ``out``: fp16 or fp32, also ``sums``."""
        kind, (rows, n) = "__half" if out.itemsize == 2 else "float", out.shape
        ends = [*adapters.ends[:-1], *(n for _ in range(MAX_SECTIONS - len(adapters.ends)))]
        self._launcher.launch(
            step,
            self.source,
            f"expand_rows<{kind}>",
            (ceil_div(n, 128), ceil_div(rows, EXPAND_ROWS)),
            128,
            (
                sums.data.ptr,
                pitch_of(sums),
                slots.data.ptr,
                inputs.data.ptr,
                inputs.shape[1],
                adapters.ranks.data.ptr,
                adapters.up.data.ptr,
                adapters.up.shape[2],
                address(bias),
                out.data.ptr,
                pitch_of(out),
                rows,
                n,
                adapters.rank_pitch,
                *ends,
            ),
            bytes_moved=nbytes_of(sums, inputs, out) + adapters.up.nbytes // len(adapters.up),
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
