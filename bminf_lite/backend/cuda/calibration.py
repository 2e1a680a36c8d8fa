"""The operations of :mod:`..calibration` on a GPU, by the kernels of ``rowwise/calibration.cu`` and ``gptq.cu``."""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import PAD, round_up
from ...cuda.kernels.gemm.fgemm import FloatGemm
from ...cuda.kernels.gemm.igemm import Int8Gemm
from ...cuda.kernels.rowwise.calibration import KINDS, FloatMatrix
from ..calibration import CalibrationOps, Operations
from ..quantization import Int8Weight, fits_fp16
from ..values import Array
from .deferred import Outliers, Weight
from .gptq import GPTQ, DeviceRoot
from .materialize import Materializer
from .weight_loader import Loader


class CudaCalibrationOps(CalibrationOps):
    """The operations of :class:`CalibrationOps` on the GPU of the backend ``ops``, with that backend's parts."""

    def __init__(
        self, ops: Operations, materializer: Materializer, loader: Loader, int8_gemm: Int8Gemm, float_gemm: FloatGemm
    ):
        super().__init__(ops)
        self.arrays = materializer.arrays
        self.kernels = materializer.kernels.calibration
        self.materialize = materializer.materialize
        self.loader = loader
        self.int8_gemm = int8_gemm
        self.gptq = GPTQ(materializer.arrays, materializer.kernels.gptq, float_gemm)

    def matrix(self, values: np.ndarray) -> Array:
        return self.loader.matrix(values)

    def column_absmax(self, x: Array, before: Array | None = None) -> Array:
        values = self.arrays.padded(self.materialize(x))
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
        values = self.arrays.padded(self.materialize(x))
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
        rotation: int = 1,
    ) -> Weight:
        n, k = matrix.shape
        if dynamic is None:
            assert factors is None and outliers is None
            half = self._empty_or_zeros(round_up(n, PAD), round_up(k, PAD), n, k, np.float16)
            self.kernels.to_half(matrix, half)
            return Weight(half, None, None, n, k, half.shape[1])
        side_products: tuple[Outliers, ...] = ()
        if outliers is not None:
            kept = Outliers(self.arrays.upload(outliers), self.arrays.rows(len(outliers), n, np.float16))
            self.kernels.take_columns(matrix, self._factors(factors), kept.index, kept.values)
            side_products = (kept,)
            factors = np.ones(k, np.float32) if factors is None else np.array(factors)
            factors[outliers] = 0
        if rotation > 1:
            matrix, factors = self._rotated(matrix, factors, rotation), None
        plan = self.int8_gemm.plan(n, k) if dynamic else None
        rows, pitch = (round_up(n, PAD), round_up(k, PAD)) if plan is None else plan.layouts.padded
        codes = self._empty_or_zeros(rows, pitch, n, k, np.int8)
        scale = self._quantize(matrix, self._factors(factors), codes)
        if plan is not None and not plan.layouts.is_row_major:
            with self.arrays.current():
                codes = plan.pack_weight(codes[:n, :k])
        return Weight(codes, scale, None, n, k, pitch, plan, side_products, rotation)

    def squares(self, got: Array, expected: Array) -> tuple[np.ndarray, np.ndarray]:
        got, expected = (self.arrays.padded(self.materialize(x)) for x in (got, expected))
        squares = self.arrays.empty((2, len(got)), np.float64)
        self.kernels.row_squares(got, expected, squares)
        noise, size = self.ops.host(squares)
        return noise, size

    def add_hessian(self, x: Array, count: int, before: Array | None = None) -> Array:
        values = self.materialize(x)
        with self.arrays.current():
            return self.gptq.add_hessian(values[:count], before)

    def gptq_root(self, hessian: Array, factors: np.ndarray | None, rotation: int) -> DeviceRoot:
        with self.arrays.current():
            if factors is not None or rotation > 1:
                inverses = None if factors is None else 1 / factors
                for _ in range(2):  # its rows, then its columns
                    hessian = cp.ascontiguousarray(self._rotated(_fp32(hessian), inverses, rotation).values.T)
            return self.gptq.root(hessian)

    def gptq_weight(
        self, matrix: FloatMatrix, root: DeviceRoot, factors: np.ndarray | None, rotation: int
    ) -> Int8Weight:
        if factors is not None or rotation > 1:
            matrix = self._rotated(matrix, factors, rotation)
        scale = self._quantize(matrix, None, self.arrays.empty(matrix.shape, np.int8))
        with self.arrays.current():
            codes = self.gptq.round(matrix, scale, root)
        scales = self.ops.host(scale)
        return Int8Weight(
            self.ops.host(codes), scales.astype(np.float16) if fits_fp16(scales) else scales, rotation=rotation
        )

    def _rotated(self, matrix: FloatMatrix, factors: np.ndarray | None, rotation: int) -> FloatMatrix:
        """The matrix, its columns multiplied by ``factors``, and then its rows rotated."""
        turned = _fp32(self.arrays.empty(matrix.shape, np.float32))
        self.kernels.rotate_rows(matrix, self._factors(factors), turned.values, rotation)
        return turned

    def _quantize(self, matrix: FloatMatrix, factors: cp.ndarray | None, codes: cp.ndarray) -> cp.ndarray:
        """Write ``codes`` ``[rows, pitch]``; returns the scales, fp32 ``[out]``."""
        n = matrix.shape[0]
        top, fp32_scales = self.arrays.empty((n,), np.float32), self.arrays.zeros((1,), np.int32)
        scale = self.arrays.zeros((round_up(n, PAD),), np.float32)[:n]
        self.kernels.row_absmax(matrix, factors, top, fp32_scales)
        self.kernels.row_codes(matrix, factors, top, fp32_scales, scale, codes)
        return scale

    def _factors(self, factors: np.ndarray | None) -> cp.ndarray | None:
        return None if factors is None else self.arrays.upload(factors.astype(np.float32))

    def _empty_or_zeros(self, rows: int, pitch: int, n: int, k: int, dtype: type) -> cp.ndarray:
        """An array ``[rows, pitch]`` for a matrix ``[n, k]``: zeros if there is padding, else undefined."""
        return self.arrays.empty((n, k), dtype) if (rows, pitch) == (n, k) else self.arrays.zeros((rows, pitch), dtype)


def _fp32(values: cp.ndarray) -> FloatMatrix:
    return FloatMatrix(values, KINDS[np.dtype(np.float32)])
