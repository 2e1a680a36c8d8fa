"""Products of int8 weights with scales of groups of columns, see :class:`.products.ProductKernel`."""

from __future__ import annotations

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import round_up
from ...cuda.kernels.gemm.group_scales import ColumnGroups
from ...cuda.kernels.gemm.layouts import Layout
from ...cuda.runtime.cublaslt import Order
from ..values import Array
from .deferred import QuantizedActivations
from .products import Product, ProductResults

SCALES_MULTIPLE = 4
"""The scales of one group are padded to whole vectors."""


class GroupScaleProducts:
    """Any rows, whose codes have one scale or one for each group."""

    def __init__(self, results: ProductResults) -> None:
        self.results = results

    def supports(self, product: Product) -> bool:
        return product.weight.groups is not None

    def run(self, product: Product) -> Array:
        results, weight, rows = self.results, product.weight, product.x.shape[0]
        groups, kernels = weight.groups, results.kernels
        assert groups is not None
        codes, scales, stride = self._codes(product.x, groups, weight.rotation)
        out = results.place(product)
        kernels.group_scales.launch(
            kernels.step, codes.data.ptr, scales.data.ptr, stride, rows, weight, groups, out, product.epilogue,
            product.function,
        )  # fmt: skip
        return results.placed(product, out)

    def _codes(self, x: Array, groups: ColumnGroups, rotation: int) -> tuple[cp.ndarray, cp.ndarray, int]:
        """``x`` quantized: codes ``[T, pitch]``, scales, and the elements from the scales of one group to the next."""
        arrays, materializer, kernels = self.results.arrays, self.results.materializer, self.results.kernels
        rows, columns = x.shape
        codes = arrays.empty((rows, groups.pitch), np.int8)
        if groups.of_input:
            stride = round_up(rows, SCALES_MULTIPLE)
            scales = arrays.empty((groups.count, stride), np.float32)
            kernels.group_scales.quantize(
                kernels.step, self._values(x, rotation), codes.data.ptr, scales.data.ptr, stride, groups
            )
            return codes, scales, stride
        scales = arrays.empty((rows,), np.float32)
        pitch = round_up(columns, 16)  # the kernel writes whole vectors
        dense = codes if groups.pitch == columns else arrays.empty((rows, pitch), np.int8)
        layout = Layout(Order.ROW, rows, columns, pitch)
        materializer.transform(x, QuantizedActivations(layout, dense.data, scales.data), rotation)
        if dense is not codes:
            with arrays.current():
                spread = codes.reshape(rows, groups.count, groups.padded)
                spread[...] = 0
                spread[:, :, : groups.size] = dense[:, :columns].reshape(rows, groups.count, groups.size)
        return codes, scales, 0

    def _values(self, x: Array, rotation: int) -> cp.ndarray:
        """``x`` in padded rows, transformed in blocks of ``rotation`` elements, in fp32 unless it is fp16."""
        arrays, materializer = self.results.arrays, self.results.materializer
        if rotation == 1:
            return arrays.padded(materializer.materialize(x))
        rows, columns = x.shape
        values = arrays.rows(rows, columns, np.float32)
        materializer.transform(x, values, rotation)
        return values
