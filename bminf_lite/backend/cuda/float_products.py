"""Products with float activations, of fp16 and int8 weights, see :class:`.products.ProductKernel`."""

from __future__ import annotations

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import is_padded, pitch_of
from ...cuda.kernels.constants import Epilogue
from ...cuda.kernels.gemm.fgemm import FloatGemm
from ...cuda.kernels.gemv import gemv
from ...cuda.kernels.rowwise.rows import ROW
from ..values import Array
from .deferred import DeferredMatmul, DeferredNorm
from .materialize import STALE
from .products import Product, ProductResults

GEMV_FLOAT_MAX_ROWS = 4
"""Up to this many rows, float weights use gemv, which is faster than a product on the tensor cores."""


class GemvFloatProducts:
    """A few rows: fp16, or a norm of the residual stream. Not logits, which have one order of sums for any rows."""

    def __init__(self, results: ProductResults) -> None:
        self.results = results

    def supports(self, product: Product) -> bool:
        x, weight = product.x, product.weight
        if x.shape[0] > GEMV_FLOAT_MAX_ROWS or weight.plan is not None or weight.pitch > gemv.MAX_WIDTH:
            return False
        if weight.is_half and product.is_logits:
            return False
        if not isinstance(x, DeferredNorm):
            return isinstance(x, cp.ndarray) and x.dtype == np.float16
        stream = product.stream
        if stream is None or stream is product.target or isinstance(stream.pending, DeferredMatmul):
            return False
        return weight.pitch <= gemv.MAX_FUSED_NORM_WIDTH

    def run(self, product: Product) -> Array:
        results, x, norm = self.results, product.x, None
        out, kernels = results.place(product, reads_input=True), results.kernels
        if isinstance(x, DeferredNorm):
            assert not x.stale, STALE
            stream = x.residual
            x.used, norm, x = True, x.norm, results.materializer.materialize(stream)
            kernels.step.reads(stream)
        kernels.gemv_float.launch(
            kernels.step, results.arrays.padded(x), norm, product.weight, out, product.epilogue, product.function,
            product.weight.rotation,
        )  # fmt: skip
        return results.placed(product, out)


class FloatGemmProducts:
    """Any rows, by cublasLt into fp32 sums, which a kernel scales."""

    def __init__(self, results: ProductResults, gemm: FloatGemm) -> None:
        self.results = results
        self.gemm = gemm

    def supports(self, product: Product) -> bool:
        return product.weight.plan is None

    def run(self, product: Product) -> Array:
        out = self._place(product)
        self._multiply(product, out)
        return self.results.finish(product, out)

    def _place(self, product: Product) -> cp.ndarray:
        """Where the product is stored. What is added to the residual stream is written over ``x`` if it fits there."""
        if product.epilogue in (Epilogue.TO_HALF, Epilogue.TO_FLOAT):
            return self.results.place(product)
        x, shape = product.x, product.shape
        reusable = product.epilogue is Epilogue.ADD and isinstance(x, cp.ndarray) and x.dtype == np.float16
        return x if reusable and x.shape == shape and is_padded(x) else self.results.arrays.rows(*shape, np.float16)

    def _multiply(self, product: Product, out: cp.ndarray) -> None:
        """Write the product to ``out``. Logits of an fp16 weight are summed without splits, in one order."""
        arrays, kernels, weight = self.results.arrays, self.results.kernels, product.weight
        rows, (n, k) = product.x.shape[0], weight.matrix.shape
        logits = weight.is_half and product.is_logits
        values = self.results.materializer.to_half(product.x, weight.rotation)
        data = weight.matrix
        if data.dtype == np.int8:
            data = arrays.empty((n, k), np.float16)
            if weight.group_scales is None:
                kernels.rows.int8_to_half(kernels.step, weight.matrix, data)
            else:
                kernels.rows.grouped_to_half(kernels.step, weight.matrix, weight.group_scales, data)
        is_result = logits and weight.bias is None and pitch_of(out) == n
        acc = out if is_result else arrays.empty((rows, n), np.float32)
        self.gemm.linear(
            acc.data.ptr, data.data.ptr, values.data.ptr, rows, n, k, arrays.stream.ptr, out_dtype=np.float32,
            split_k=not logits,
        )  # fmt: skip
        if not is_result:
            kernels.rows.dequantize(kernels.step, acc, ROW, n, 0, weight.scale, weight.bias, out)
