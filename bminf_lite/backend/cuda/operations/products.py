"""Products and the sums of ranks by kernels; :mod:`bminf_lite.backend.operations.products` defines them.

:mod:`..products` chooses the kernel of a product. Some leave int32 sums, which the kernel before the next product reads
while it writes the codes for that. For this an operation may return a deferred value (see :mod:`..deferred`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np

from ....cuda.kernels.arrays import PAD, round_up
from ....cuda.kernels.constants import Epilogue
from ....cuda.kernels.gemm.layouts import Layout
from ....cuda.kernels.rowwise.adapters import PRODUCTS
from ....cuda.runtime.cublaslt import Order
from ...operations.products import ProductOperations
from ...values import Array, ProductEpilogue
from ..adapter_bank import SavedBank
from ..deferred import DeferredNorm, QuantizedActivations, ResidualStream, Weight
from ..device import CudaDevice
from ..divided_rows import DividedRows
from ..float_products import FloatProducts
from ..fused import FusedGemms
from ..int8_products import AdaptedProducts, FusedProducts, GemvProducts, InputCodes, SumProducts
from ..peers import PeerRank
from ..products import Product, ProductResults, Products

KERNEL_EPILOGUES = {
    ProductEpilogue.STORE: Epilogue.TO_HALF,
    ProductEpilogue.STORE_FP32: Epilogue.TO_FLOAT,
    ProductEpilogue.ADD: Epilogue.ADD,
    ProductEpilogue.GATE: Epilogue.GATED,
    ProductEpilogue.ACTIVATE: Epilogue.ACTIVATED,
}
"""The epilogues of kernels that store activations in fp16."""


class CudaProductOperations(CudaDevice, ProductOperations):
    """Products by kernels, and the exchange of ranks."""

    def __init__(self, device: int = 0, memory_limit: int | str | None = None):
        super().__init__(device, memory_limit)
        self.fused = FusedGemms(self.int8_gemm, self.arrays)
        self.products = self._products()

    def _products(self) -> Products:
        """The kernels of products: the first that supports a product computes it."""
        results = ProductResults(self.materializer)
        self.input_codes = codes = InputCodes(self.materializer, in_one_block=self.fused.scaled_gemm.supported)
        kernels = (
            GemvProducts(results),
            FusedProducts(results, codes, self.fused),
            SumProducts(results, codes),
            FloatProducts(results),
        )
        return Products(results, kernels, AdaptedProducts(results, codes, self.fused, self._counters()))

    def _counters(self) -> Iterator[int]:
        """The addresses of counters of products, in turn; they are made when the first is asked for."""
        while True:
            counters = self.scratch.zeros("products beside their side inputs", PRODUCTS, np.int32)
            yield from range(counters.data.ptr, counters.data.ptr + counters.nbytes, counters.itemsize)

    def quantize(self, x: Array) -> tuple[Array, Array]:
        rows, k = x.shape
        layout = Layout(Order.ROW, rows, k, round_up(k, PAD))
        codes, scale = self.arrays.rows(rows, k, np.int8), self.arrays.empty((rows,), np.float32)
        self.materializer.transform(x, QuantizedActivations(layout, codes.data, scale.data))
        return codes, scale

    def igemm(self, x: Array, w: Array) -> Array:
        with self.arrays.current():
            return self.int8_gemm.matmul(x, w, transpose_b=True)

    def product(  # type: ignore[override]
        self,
        x: Array,
        weight: Weight,
        epilogue: ProductEpilogue = ProductEpilogue.STORE,
        activation: str | None = None,
        target: Array = None,
    ) -> Array:
        kind, ends_normed = KERNEL_EPILOGUES[epilogue], isinstance(target, DeferredNorm)
        if kind is Epilogue.ADD:
            target = self.materializer.as_residual(target)
            self.kernels.step.reads(None)
        elif target is not None:
            assert target.shape == (x.shape[0], weight.out_features)
            kind = Epilogue.TO_FLOAT if target.dtype == np.float32 else Epilogue.TO_HALF
        return self.products.run(Product(x, weight, kind, activation, target, ends_normed=ends_normed))

    def shared(self, x: Array) -> Array:
        if isinstance(x, DeferredNorm):
            x.is_shared = True
        return x

    def float_linear(self, x: Array, matrix: Any) -> Array:
        """The same: all float products here have one order of sums."""
        return self.linear(x, matrix, fp32=True)

    def saved_linear(self, x: Array, bank: SavedBank, y: Array) -> Array:
        rows, values = bank.slots.rows, self.materializer.materialize(y)
        if rows is not None:
            assert len(rows) == len(values), "the rows of a product are not those of the step"
            self.kernels.adapters.saved_products(
                self.kernels.step, self.materializer.to_half(x), rows, bank.saved, values
            )
        return values

    def all_reduce_add(self, partial: Array, bias: Array = None, residual: Array = None) -> Array:
        if not isinstance(self.communicator, PeerRank):
            values = self._rows(partial)
            with self.arrays.current():
                y = self.communicator.all_reduce_add(values)
            return self._add_to_stream(y, bias, residual)
        values = self._rows(partial)
        if residual is None:
            out = self.arrays.rows(values.shape[0], values.shape[1], np.float32)
            self.communicator.add(values, bias, out, add=False)
            return out
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.step.reads(None)
        return self.communicator.add_later(target, values, bias)

    def linear_add_of_ranks(self, x: Array, weight: Weight, bias: Array, residual: Array) -> Array:
        divided = self._divided_rows(x.shape[0], weight)
        if divided is None:
            return super().linear_add_of_ranks(x, weight, bias, residual)
        codes, target = (
            self.input_codes.of(Product(x, weight, Epilogue.TO_FLOAT)),
            self.materializer.as_residual(residual),
        )
        self.materializer.flush_norms(target)
        if target.divided is None:
            self.materializer.materialize(target)
        self.kernels.step.reads(None)
        weight, ld = weight.without_adapters, codes.layout.ld

        def multiply(rows: slice, out: cp.ndarray) -> None:
            layout = replace(codes.layout, rows=rows.stop - rows.start)
            part = QuantizedActivations(layout, codes.values + rows.start * ld, codes.scales + 4 * rows.start)
            self.fused.multiply(part, weight, out, Epilogue.TO_FLOAT)

        divided.store(*target.shape, multiply)
        return divided.stream(target, bias)

    def _divided_rows(self, rows: int, weight: Weight) -> DividedRows | None:
        """What divides a stream to which a product of ranks is added; None if every rank adds the whole sum."""
        divided = self.communicator.divided if isinstance(self.communicator, PeerRank) else None
        if divided is None or not divided.supports(rows, weight.out_features):
            return None
        has_adapters = weight.adapters is not None and weight.adapters.slots.rows is not None
        if weight.plan is None or weight.bias is not None or weight.side_products or has_adapters:
            return None
        return divided if self.fused.supports_many(rows // divided.sizes.ranks, weight, Epilogue.TO_FLOAT) else None

    def all_gather_columns(self, part: Array, columns: slice, count: int) -> Array:
        values = self.materializer.materialize(part)
        pitch = round_up(count, PAD)
        whole = self.arrays.zeros((len(values), pitch), np.float32)[:, :count]
        with self.arrays.current():
            whole[:, columns] = values
            return self.communicator.all_reduce_add(whole)

    def _rows(self, partial: Array) -> cp.ndarray:
        return self.arrays.padded(self.materializer.materialize(partial))

    def _add_to_stream(self, y: cp.ndarray, bias: Array, residual: Array) -> Array:
        """What ranks that are not GPUs' have added, and the bias, as it is or added to the residual stream."""
        with self.arrays.current():
            y = y if bias is None else y + bias
            if residual is None:
                return y
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        with self.arrays.current():
            target.values += y.astype(np.float16)
        return ResidualStream(target.values)
