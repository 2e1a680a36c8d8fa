"""Float products on the GPU, summed in fp32: fp16 or bf16 operands into either width, fp32 operands into fp32.

The algorithm is always the first that cublasLt's heuristic proposes. Timing could gain a little, but which algorithm
wins a race differs between runs, and so would the last bits of the results. fp32 products are computed in fp32, not in
TF32, and a sum that is split between blocks is put together in fp32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy as cp
import numpy as np

from ...runtime.cublaslt import ComputeType, DataType, Order
from .cublaslt_matmul import MatmulContext, PreparedMatmul, common_alignment
from .plans import MatmulOperand, MatmulProblem, row_major_matmul

PREPARED_LIMIT = 1024
"""Shapes for which descriptors are kept; beyond that, the least recently used is dropped."""

_DATA_TYPES = {"float16": DataType.R_16F, "bfloat16": DataType.R_16BF, "float32": DataType.R_32F}


class FloatGemm:
    """Float products on one GPU. After the first run of a shape, a run allocates nothing but its result."""

    def __init__(self, matmul_context: MatmulContext) -> None:
        self._matmul_context = matmul_context
        self._prepare = functools.lru_cache(PREPARED_LIMIT)(self._prepare_uncached)

    def matmul(
        self,
        x: cp.ndarray,
        w: cp.ndarray,
        transpose_x: bool = False,
        transpose_w: bool = False,
        out_dtype: np.dtype | type | None = None,
    ) -> cp.ndarray:
        """``op(x) @ op(w)`` on CuPy's current stream, where op transposes the last two axes or does nothing.

        ``op(x)`` is ``[..., m, k]``, ``op(w)`` ``[..., k, n]``, the axes before them broadcast, and the result is a new
        array ``[..., m, n]`` of ``out_dtype`` (by default the operands'). Operands are both fp16, both bf16, or both
        fp32; the result is the same or fp32. Raises ``ValueError`` for other shapes and dtypes.
        """
        out_dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
        self._check(x, w, out_dtype, transpose_x, transpose_w)
        m, k = x.shape[-2:][::-1] if transpose_x else x.shape[-2:]
        n = w.shape[-2] if transpose_w else w.shape[-1]
        batch = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        count = math.prod(batch)
        out = cp.empty((*batch, m, n), out_dtype)
        if out.size == 0 or k == 0:
            out.fill(0)
            return out
        xs, ws = _operand(x, batch), _operand(w, batch)
        strides = [v.shape[-1] * v.shape[-2] if len(v) > 1 else 0 for v in (xs, ws)]
        key = (m, n, k, x.dtype.name, out_dtype.name, count, *strides, transpose_x, transpose_w)
        addresses = ws.data.ptr, xs.data.ptr, out.data.ptr
        self._prepare(common_alignment(*addresses), *key).run(*addresses, cp.cuda.get_current_stream().ptr)
        return out

    def _prepare_uncached(self, alignment: int, *key: Any) -> PreparedMatmul:
        return self._matmul_context.prepare(_product(*key), alignment)

    @staticmethod
    def _check(x: cp.ndarray, w: cp.ndarray, out_dtype: np.dtype, transpose_x: bool, transpose_w: bool) -> None:
        known = x.dtype == w.dtype and x.dtype.name in _DATA_TYPES and out_dtype.name in (x.dtype.name, "float32")
        fits = x.ndim > 1 and w.ndim > 1 and x.shape[-2 if transpose_x else -1] == w.shape[-1 if transpose_w else -2]
        if not (known and fits):
            raise ValueError(
                f"matmul of {x.dtype} {list(x.shape)} and {w.dtype} {list(w.shape)} into {out_dtype}: both must be "
                f"fp16, bf16 or fp32 matrices whose inner sizes agree, the result of that type or fp32"
            )


def _product(
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    batch: int,
    x_stride: int,
    w_stride: int,
    transpose_x: bool,
    transpose_w: bool,
) -> MatmulProblem:
    operand, result = _DATA_TYPES[dtype], _DATA_TYPES[out_dtype]
    x_shape, w_shape = (k, m) if transpose_x else (m, k), (n, k) if transpose_w else (k, n)
    return row_major_matmul(
        MatmulOperand(operand, Order.ROW, *x_shape, x_shape[1], batch, x_stride),
        MatmulOperand(operand, Order.ROW, *w_shape, w_shape[1], batch, w_stride),
        MatmulOperand(result, Order.ROW, m, n, n, batch, m * n),
        ComputeType.COMPUTE_32F,
        transpose_x,
        transpose_w,
    )


def _operand(x: cp.ndarray, batch: tuple[int, ...]) -> cp.ndarray:
    """``x`` as contiguous ``[entries, rows, cols]``; 1 entry where all are the same."""
    if math.prod(x.shape[:-2]) == 1:
        return cp.ascontiguousarray(x).reshape(1, *x.shape[-2:])
    return cp.ascontiguousarray(cp.broadcast_to(x, (*batch, *x.shape[-2:]))).reshape(-1, *x.shape[-2:])
