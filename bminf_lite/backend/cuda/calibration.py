"""CalibrationOps on a GPU: the operations of :mod:`..calibration` by the kernels of ``rowwise/calibration.cu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cupy as cp
import numpy as np

from ...cuda.kernels.gemm.layouts import round_up
from ..calibration import CalibrationOps
from ..values import Array
from .arrays import PAD, pitch_of
from .deferred import Outliers, Weight
from .general import GeneralKernels
from .launches import address, ceil_div, nbytes_of

if TYPE_CHECKING:
    from .backend import CudaBackend

THREADS = 256
STRIP = 64
"""Rows of which a thread of ``column_absmax`` takes a column."""


@dataclass(frozen=True)
class FloatMatrix:
    """A float matrix ``[out, in]`` as a file has it, dense. ``kind`` is the kernels' name for its type.

    bf16 numbers are held as uint16.
    """

    values: cp.ndarray
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape


KINDS = {np.dtype(np.float16): "__half", np.dtype(np.float32): "float"}
"""bf16 is what remains of the types that checkpoints store."""


class CalibrationKernels(GeneralKernels):
    """All kernels of one GPU, on one stream."""

    def row_absmax(
        self, matrix: FloatMatrix, factors: cp.ndarray | None, top: cp.ndarray, fp32_scales: cp.ndarray
    ) -> None:
        """The largest magnitude of each row, and 1 in ``fp32_scales`` if the scale of one does not fit fp16."""
        self._over(
            "row_absmax", matrix.kind, "ppppi", len(top),
            (matrix.values.data.ptr, address(factors), top.data.ptr, fp32_scales.data.ptr, matrix.shape[1]),
            matrix.values, top,
        )  # fmt: skip

    def row_codes(
        self,
        matrix: FloatMatrix,
        factors: cp.ndarray | None,
        top: cp.ndarray,
        fp32_scales: cp.ndarray,
        scales: cp.ndarray,
        codes: cp.ndarray,
    ) -> None:
        """Codes and scales from what :meth:`row_absmax` found."""
        self._over(
            "row_codes",
            matrix.kind,
            "ppppppqi",
            len(top),
            (
                matrix.values.data.ptr,
                address(factors),
                top.data.ptr,
                fp32_scales.data.ptr,
                scales.data.ptr,
                codes.data.ptr,
                pitch_of(codes),
                matrix.shape[1],
            ),
            matrix.values,
            codes,
        )

    def column_absmax(self, x: cp.ndarray, kind: str, divisors: cp.ndarray | None, top: cp.ndarray) -> None:
        """The largest magnitude of each column, or what ``top`` has. Rows are divided by ``divisors`` before."""
        (rows, k), grid = x.shape, (ceil_div(x.shape[1], THREADS), ceil_div(x.shape[0], STRIP))
        self._over(
            "column_absmax", kind, "pqppii", grid,
            (x.data.ptr, pitch_of(x), address(divisors), top.data.ptr, rows, k), x,
        )  # fmt: skip

    def take_columns(self, matrix: FloatMatrix, factors: cp.ndarray | None, index: cp.ndarray, out: cp.ndarray) -> None:
        """Columns as rows of ``out``, fp16."""
        n, k = matrix.shape
        self._over(
            "take_columns", matrix.kind, "ppppqii", (ceil_div(n, THREADS), len(index)),
            (matrix.values.data.ptr, address(factors), index.data.ptr, out.data.ptr, pitch_of(out), n, k), out,
        )  # fmt: skip

    def to_half(self, matrix: FloatMatrix, out: cp.ndarray) -> None:
        """All of a matrix in padded rows, fp16."""
        n, k = matrix.shape
        arguments = (matrix.values.data.ptr, out.data.ptr, pitch_of(out), k)
        self._over("to_half", matrix.kind, "ppqi", n, arguments, matrix.values, out)

    def take_rows(self, x: cp.ndarray, index: cp.ndarray, out: cp.ndarray) -> None:
        """Some rows of an activation, in fp32."""
        arguments = (x.data.ptr, pitch_of(x), index.data.ptr, out.data.ptr, pitch_of(out), out.shape[1])
        self._over("take_rows", KINDS[x.dtype], "pqppqi", len(index), arguments, out)

    def divide_rows(self, x: cp.ndarray, factors: cp.ndarray | None, out: cp.ndarray) -> None:
        """Rows fp32, divided by ``factors`` or not, in fp16."""
        arguments = (x.data.ptr, pitch_of(x), address(factors), out.data.ptr, pitch_of(out), out.shape[1])
        self._over("divide_rows", "", "pqppqi", len(out), arguments, x, out)

    def row_squares(self, got: cp.ndarray, expected: cp.ndarray, squares: cp.ndarray) -> None:
        """Squared differences and magnitudes of rows, fp64 ``[2, rows]``."""
        rows, n = got.shape
        arguments = (got.data.ptr, pitch_of(got), expected.data.ptr, pitch_of(expected), squares.data.ptr, rows, n)
        self._over("row_squares", "", "pqpqpii", rows, arguments, got, expected)

    def _over(
        self, name: str, kind: str, signature: str, grid: int | tuple[int, int], arguments: tuple[object, ...],
        *bytes_moved: cp.ndarray,
    ) -> None:  # fmt: skip
        expression = f"{name}<{kind}>" if kind else name
        self._launch(
            "rowwise/calibration.cu",
            expression,
            signature,
            grid,
            THREADS,
            arguments,
            bytes_moved=nbytes_of(*bytes_moved),
        )


class CudaCalibrationOps(CalibrationOps):
    """The operations of :class:`CalibrationOps` on ``backend``'s GPU."""

    ops: CudaBackend

    def __init__(self, backend: CudaBackend):
        super().__init__(backend)
        self.arrays = backend.arrays
        self.kernels = backend.kernels

    def matrix(self, values: np.ndarray) -> Array:
        return self.ops.loader.matrix(values)

    def column_absmax(self, x: Array, before: Array | None = None) -> Array:
        values = self.arrays.padded(self.ops._materialize(x))
        top = self.arrays.zeros((values.shape[1],), np.float32) if before is None else before
        self.kernels.column_absmax(values, KINDS[values.dtype], None, top)
        return top

    def weight_column_absmax(self, matrix: Array) -> Array:
        top = self.arrays.zeros((matrix.shape[1],), np.float32)
        self.kernels.column_absmax(matrix.values, matrix.kind, None, top)
        return top

    def relative_column_absmax(self, matrix: Array) -> Array:
        rows, fp32_scales = self.arrays.empty((matrix.shape[0],), np.float32), self.arrays.zeros((1,), np.int32)
        self.kernels.row_absmax(matrix, None, rows, fp32_scales)
        top = self.arrays.zeros((matrix.shape[1],), np.float32)
        self.kernels.column_absmax(matrix.values, matrix.kind, rows, top)
        return top

    def rows(self, x: Array, index: np.ndarray) -> Array:
        values = self.arrays.padded(self.ops._materialize(x))
        out = self.arrays.rows(len(index), values.shape[1], np.float32)
        if len(index):
            self.kernels.take_rows(values, self.arrays.upload(index.astype(np.int32)), out)
        return out

    def joined(self, parts: Sequence[Array]) -> Array:
        if len(parts) == 1:
            return parts[0]
        out = self.arrays.rows(sum(map(len, parts)), parts[0].shape[1], np.float32)
        first = 0
        with self.arrays.current():
            for part in parts:
                out[first : first + len(part)] = part
                first += len(part)
        return out

    def divided(self, rows: Array, factors: np.ndarray | None) -> Array:
        out = self.arrays.rows(rows.shape[0], rows.shape[1], np.float16)
        self.kernels.divide_rows(rows, self._factors(factors), out)
        return out

    def weight(
        self,
        matrix: Array,
        dynamic: bool | None,
        factors: np.ndarray | None = None,
        outliers: np.ndarray | None = None,
    ) -> Weight:
        n, k = matrix.shape
        if dynamic is None:
            assert factors is None and outliers is None
            half = self._empty_or_zeros(round_up(n, PAD), round_up(k, PAD), n, k, np.float16)
            self.kernels.to_half(matrix, half)
            return Weight(half, None, None, n, k, half.shape[1])
        kept = None
        if outliers is not None:
            kept = Outliers(self.arrays.upload(outliers), self.arrays.rows(len(outliers), n, np.float16))
            self.kernels.take_columns(matrix, self._factors(factors), kept.index, kept.values)
            factors = np.ones(k, np.float32) if factors is None else np.array(factors)
            factors[outliers] = 0
        plan = self.ops.int8_gemm.plan(n, k) if dynamic else None
        rows, pitch = (round_up(n, PAD), round_up(k, PAD)) if plan is None else plan.layouts.padded
        codes = self._empty_or_zeros(rows, pitch, n, k, np.int8)
        scale = self._quantize(matrix, self._factors(factors), codes)
        if plan is not None and not plan.layouts.is_row_major:
            with self.arrays.current():
                codes = plan.pack_weight(codes[:n, :k])
        return Weight(codes, scale, None, n, k, pitch, plan, kept)

    def squares(self, got: Array, expected: Array) -> tuple[np.ndarray, np.ndarray]:
        got, expected = (self.arrays.padded(self.ops._materialize(x)) for x in (got, expected))
        squares = self.arrays.empty((2, len(got)), np.float64)
        self.kernels.row_squares(got, expected, squares)
        noise, size = self.ops.host(squares)
        return noise, size

    def _quantize(self, matrix: FloatMatrix, factors: cp.ndarray | None, codes: cp.ndarray) -> cp.ndarray:
        """Set ``codes`` ``[rows, pitch]``; returns the scales, fp32 ``[out]``."""
        n = matrix.shape[0]
        top, fp32_scales = self.arrays.empty((n,), np.float32), self.arrays.zeros((1,), np.int32)
        scale = self.arrays.zeros((round_up(n, PAD),), np.float32)[:n]
        self.kernels.row_absmax(matrix, factors, top, fp32_scales)
        self.kernels.row_codes(matrix, factors, top, fp32_scales, scale, codes)
        return scale

    def _factors(self, factors: np.ndarray | None) -> cp.ndarray | None:
        return None if factors is None else self.arrays.upload(factors.astype(np.float32))

    def _empty_or_zeros(self, rows: int, pitch: int, n: int, k: int, dtype: type) -> cp.ndarray:
        """An array ``[rows, pitch]`` for a matrix ``[n, k]``, with zeros where that is smaller."""
        return self.arrays.empty((n, k), dtype) if (rows, pitch) == (n, k) else self.arrays.zeros((rows, pitch), dtype)
