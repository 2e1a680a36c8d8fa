"""Elementwise kernels: positions, soft-caps, side products, random matrices, a step's integers.

These are the launchers of ``pointwise.cu``, ``side_products.cu`` and ``random.cu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.values import AttentionSpec, ForwardBatch, Xielu
from ..arrays import address, ceil_div, nbytes_of, pitch_of, round_up
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp


class PointwiseKernels:
    """Kernels whose elements do not depend on each other."""

    source = "rowwise/pointwise.cu"
    side_products_source = "rowwise/side_products.cu"
    random_source = "rowwise/random.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "add_positions")
        yield KernelFamily(cls.source, "add_rows")
        yield KernelFamily(cls.source, "soft_cap")
        yield KernelFamily(cls.source, "gate_rows", (BOOLEANS, BOOLEANS))
        yield KernelFamily(cls.source, "xielu")
        yield KernelFamily(cls.source, "write_words")
        yield from (
            KernelFamily(cls.side_products_source, name, (("__half", "float"),))
            for name in ("split_columns", "add_side_product")
        )
        yield KernelFamily(cls.random_source, "fill_random", (("bminf::int8", "__half"),))

    def add_positions(self, step: StepContext, batch: ForwardBatch, table: cp.ndarray, residual: cp.ndarray) -> None:
        """Add to each token's row, fp32, the row of an fp16 table at its position."""
        self._launcher.launch(
            step,
            self.source,
            "add_positions",
            len(residual),
            threads_of_row(residual),
            (
                address(batch.cu_seqlens),
                address(batch.context_lens),
                batch.batch_size,
                table.data.ptr,
                pitch_of(table),
                residual.data.ptr,
                pitch_of(residual),
                residual.shape[1],
            ),
            bytes_moved=2 * nbytes_of(residual),
        )

    def add_rows(self, step: StepContext, rows: cp.ndarray | None, table: cp.ndarray, residual: cp.ndarray) -> None:
        """Add to each row of ``residual``, fp32, the row of an fp16 table that ``rows`` int32 names, or row 0."""
        self._launcher.launch(
            step,
            self.source,
            "add_rows",
            len(residual),
            threads_of_row(residual),
            (
                address(rows),
                table.data.ptr,
                pitch_of(table),
                residual.data.ptr,
                pitch_of(residual),
                residual.shape[1],
            ),
            bytes_moved=2 * nbytes_of(residual),
        )

    def soft_cap(self, step: StepContext, x: cp.ndarray, cap: float) -> None:
        """``cap * tanh(x / cap)`` in place, fp32 ``[rows, n]``."""
        rows, n = x.shape
        self._launcher.launch(
            step,
            self.source,
            "soft_cap",
            ceil_div(rows * n, 256),
            256,
            (x.data.ptr, pitch_of(x), rows, n, cap),
            bytes_moved=2 * nbytes_of(x),
        )

    def gate_rows(self, step: StepContext, x: cp.ndarray, gate: cp.ndarray, spec: AttentionSpec) -> None:
        """``x * f(gate)`` in place, fp16 ``[rows, n]`` at any pitch; a gate of each element or of each head."""
        rows, n = x.shape
        self._launcher.launch(
            step,
            self.source,
            f"gate_rows<{BOOLEANS[spec.gate_function == 'softplus']}, {BOOLEANS[spec.gate_by_head]}>",
            ceil_div(rows * n, 256),
            256,
            (x.data.ptr, pitch_of(x), gate.data.ptr, pitch_of(gate), rows, n, spec.head_dim),
            bytes_moved=2 * nbytes_of(x) + nbytes_of(gate),
        )

    def xielu(self, step: StepContext, x: cp.ndarray, values: Xielu) -> None:
        """:func:`backend.functions.xielu` in place, fp16 ``[rows, n]`` whose rows are aligned to 16 bytes."""
        rows, n = x.shape
        self._launcher.launch(
            step,
            self.source,
            "xielu",
            ceil_div(rows * ceil_div(n, 8), 256),
            256,
            (x.data.ptr, pitch_of(x), rows, n, values.positive, values.negative, values.beta, values.eps),
            bytes_moved=2 * nbytes_of(x),
        )

    def write_words(self, source: int, target: int, count: int) -> None:
        """Copy ``count`` 32-bit words from pinned host memory, which must not change until they are there."""
        self._launcher.launch(None, self.source, "write_words", ceil_div(count, 256), 256, (source, target, count))

    def split_columns(
        self, step: StepContext, x: cp.ndarray, index: cp.ndarray, rest: cp.ndarray, kept: cp.ndarray
    ) -> None:
        """Rows of ``x`` to ``rest`` with zeros in the columns ``index``, and those to ``kept``, fp16, dense."""
        kind = "__half" if x.itemsize == 2 else "float"
        self._launcher.launch(
            step,
            self.side_products_source,
            f"split_columns<{kind}>",
            len(x),
            256,
            (
                x.data.ptr,
                pitch_of(x),
                index.data.ptr,
                kept.shape[1],
                rest.data.ptr,
                pitch_of(rest),
                kept.data.ptr,
                x.shape[1],
            ),
            bytes_moved=nbytes_of(x, rest, kept),
        )

    def add_side_product(
        self,
        step: StepContext,
        sums: cp.ndarray,
        inputs: cp.ndarray,
        weight: cp.ndarray,
        bias: cp.ndarray | None,
        out: cp.ndarray,
    ) -> None:
        """``sums`` fp32 plus ``inputs`` fp16 ``[rows, columns]`` times ``weight`` fp16 ``[columns, n]``, plus the bias.

        Where the product is zero, it is not added. ``out``, fp16 or fp32, may be ``sums``.
        """
        kind, (rows, n), columns = "__half" if out.itemsize == 2 else "float", out.shape, inputs.shape[1]
        self._launcher.launch(
            step,
            self.side_products_source,
            f"add_side_product<{kind}>",
            (rows, ceil_div(n, 256)),
            256,
            (
                sums.data.ptr,
                pitch_of(sums),
                inputs.data.ptr,
                pitch_of(inputs),
                columns,
                weight.data.ptr,
                pitch_of(weight),
                address(bias),
                out.data.ptr,
                pitch_of(out),
                n,
            ),
            shared=4 * columns,
            bytes_moved=nbytes_of(sums, inputs, weight, out),
        )

    def fill_random(self, out: cp.ndarray, seed: int, row_words: int = 0, unit: float = 64.0) -> None:
        """The rows and columns of a ``RandomMatrix`` with that seed, int8 or fp16; see there for the others."""
        (rows, columns), kind = out.shape, "bminf::int8" if out.itemsize == 1 else "__half"
        self._launcher.launch(
            None,
            self.random_source,
            f"fill_random<{kind}>",
            ceil_div(rows * ceil_div(columns, 8), 256),
            256,
            (out.data.ptr, pitch_of(out), rows, columns, seed, row_words or ceil_div(columns, 8), unit),
            bytes_moved=nbytes_of(out),
        )


def threads_of_row(x: cp.ndarray) -> int:
    """Threads of a block that has a row of ``x``, each eight elements at a time."""
    return min(256, round_up(ceil_div(x.shape[1], 8), 32))
