"""GPTQ on a GPU, as :mod:`..gptq` defines it: kernels for blocks of columns, float products for what lies between them.

The inverse root comes from a Cholesky decomposition of the Hessian with its columns in the opposite order: if that is
``L L^T``, the inverse of ``L``, turned around, is ``U``. Both are computed in fp32, block by block; the least pivot is
the damping, below which no eigenvalue of the damped Hessian lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import cupy as cp
import numpy as np

from ...cuda.kernels.constants import GPTQ_BLOCK, GPTQ_ROOT_BLOCK
from ...cuda.kernels.gemm.fgemm import FloatGemm
from ...cuda.kernels.rowwise.calibration import FloatMatrix
from ...cuda.kernels.rowwise.gptq import GPTQKernels
from ..gptq import act_order, damping_of
from .arrays import Arrays


@dataclass(frozen=True)
class DeviceRoot:
    """A :class:`..gptq.Root` on the GPU: ``order`` int32 ``[in]``, ``values`` fp32 ``[in, in]``."""

    order: cp.ndarray
    values: cp.ndarray


class GPTQ:
    """GPTQ's arithmetic on one GPU, on the stream of ``arrays``. Call it within ``arrays.current()``."""

    def __init__(self, arrays: Arrays, kernels: GPTQKernels, float_gemm: FloatGemm):
        self.arrays = arrays
        self.kernels = kernels
        self.float_gemm = float_gemm

    def add_hessian(self, x: cp.ndarray, before: cp.ndarray | None) -> cp.ndarray:
        """``x^T x`` of an activation ``[T, in]``, fp16 or fp32, plus ``before``, which is overwritten: fp32."""
        part = self.float_gemm.matmul(x, x, transpose_x=True, out_dtype=np.float32)
        if before is None:
            return part
        before += part
        return before

    def root(self, hessian: cp.ndarray) -> DeviceRoot:
        """The inverse root of a Hessian, fp32 ``[in, in]``."""
        diagonal = cp.asnumpy(hessian.reshape(-1)[:: len(hessian) + 1].copy(), stream=self.arrays.stream)
        order = act_order(diagonal).astype(np.int32)
        damping = damping_of(diagonal)
        turned = self.arrays.empty(hessian.shape, np.float32)
        self.kernels.gather_square(hessian, self.arrays.upload(order[::-1]), turned, damping)
        inverse = self._inverse_of_root(turned, damping)
        backwards = np.arange(len(hessian), dtype=np.int32)[::-1]
        self.kernels.gather_square(inverse, self.arrays.upload(backwards), turned)
        return DeviceRoot(self.arrays.upload(order), turned)

    def round(self, matrix: FloatMatrix, scale: cp.ndarray, root: DeviceRoot) -> cp.ndarray:
        """The codes int8 ``[out, in]`` of a matrix with ``scale`` fp32 ``[out]``."""
        n, k = matrix.shape
        codes, rest = self.arrays.empty((n, k), np.int8), self.arrays.empty((n, k), np.float32)
        self.kernels.ratios(matrix, root.order, scale, rest)
        for start in range(0, k, GPTQ_BLOCK):
            stop = min(start + GPTQ_BLOCK, k)
            errors = self.arrays.empty((n, stop - start), np.float32)
            self.kernels.round(rest, root.values, root.order, codes, errors, start)
            if stop < k:
                later = rest[:, stop:]
                later -= self.float_gemm.matmul(errors, root.values[start:stop, stop:])
        return codes

    def _inverse_of_root(self, a: cp.ndarray, smallest: float) -> cp.ndarray:
        """The inverse of ``L`` with ``L L^T = a``, fp32 ``[k, k]`` in new memory; ``a`` is overwritten by ``L``."""
        k, size, matmul = len(a), GPTQ_ROOT_BLOCK, self.float_gemm.matmul
        inverse = self.arrays.zeros((k, k), np.float32)
        for start in range(0, k, size):
            stop = min(start + size, k)
            block = self.arrays.empty((stop - start, stop - start), np.float32)
            self.kernels.cholesky_block(a[start:stop, start:stop], block, smallest)
            inverse[start:stop, start:stop] = block
            if stop < k:
                panel = matmul(a[stop:, start:stop], block, transpose_w=True)
                a[stop:, start:stop] = panel
                later = a[stop:, stop:]
                later -= matmul(panel, panel, transpose_w=True)
            if start > 0:
                row = matmul(a[start:stop, :start], inverse[:start, :start])
                row = matmul(block, row)
                row *= -1
                inverse[start:stop, :start] = row
        return inverse
