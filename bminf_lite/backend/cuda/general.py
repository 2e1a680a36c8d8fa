"""Launches of the kernels that some architectures need beside the common ones: activations, learned positions."""

from __future__ import annotations

import cupy as cp

from ..values import ForwardBatch
from .arrays import pitch_of
from .deferred import DeferredMatmul, Outliers, Weight
from .launches import FROM_INT32, address, ceil_div, nbytes_of, read_arguments
from .rows import RowKernels


class GeneralKernels(RowKernels):
    """Adds to :class:`RowKernels` what some architectures need."""

    def activate(self, source: cp.ndarray | DeferredMatmul, out: cp.ndarray, activation: int) -> None:
        """A function of each value, fp16 ``[rows, n]``. ``activation`` is one of ``launches.ACTIVATIONS``."""
        data, kind, order = read_arguments(source)
        expression = f"activate_rows<{'true' if kind == FROM_INT32 else 'false'}, {order}, {activation}>"
        rows, n = source.shape
        self._launch(
            "rowwise/pointwise.cu", expression, "ppppqpqii", ceil_div(rows * n, 256), 256,
            (*data, out.data.ptr, pitch_of(out), rows, n), bytes_moved=nbytes_of(source, out),
        )  # fmt: skip

    def add_positions(self, batch: ForwardBatch, table: cp.ndarray, residual: cp.ndarray) -> None:
        """Add to each token's row, fp32, the row of an fp16 table at its position."""
        self._launch(
            "rowwise/pointwise.cu", "add_positions", "ppipqpqi", len(residual), 256,
            (address(batch.cu_seqlens), address(batch.context_lens), batch.batch_size, table.data.ptr, pitch_of(table),
             residual.data.ptr, pitch_of(residual), residual.shape[1]),
            bytes_moved=2 * nbytes_of(residual),
        )  # fmt: skip

    def split_columns(self, x: cp.ndarray, outliers: Outliers, rest: cp.ndarray, kept: cp.ndarray) -> None:
        """Rows of ``x`` to ``rest`` with zeros in some columns, and those to ``kept``, fp16 ``[rows, n]``, dense."""
        kind = "__half" if x.dtype == cp.float16 else "float"
        self._launch(
            "rowwise/outliers.cu", f"split_columns<{kind}>", "pqpipqpi", len(x), 256,
            (x.data.ptr, pitch_of(x), outliers.index.data.ptr, kept.shape[1], rest.data.ptr, pitch_of(rest),
             kept.data.ptr, x.shape[1]),
            bytes_moved=nbytes_of(x, rest, kept),
        )  # fmt: skip

    def add_columns(self, sums: cp.ndarray, kept: cp.ndarray, weight: Weight, out: cp.ndarray) -> None:
        """``sums`` fp32 plus the product of ``kept`` with the weight's outlier columns, plus its bias."""
        outliers = weight.outliers
        assert outliers is not None
        kind, (rows, n), columns = "__half" if out.dtype == cp.float16 else "float", out.shape, kept.shape[1]
        self._launch(
            "rowwise/outliers.cu", f"add_columns<{kind}>", "pqpipqppqi", (rows, ceil_div(n, 256)), 256,
            (sums.data.ptr, pitch_of(sums), kept.data.ptr, columns, outliers.values.data.ptr,
             pitch_of(outliers.values), address(weight.bias), out.data.ptr, pitch_of(out), n),
            shared=4 * columns, bytes_moved=nbytes_of(sums, kept, outliers.values, out),
        )  # fmt: skip
