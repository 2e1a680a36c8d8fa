"""Products of int8 weights whose activations are quantized, see :class:`.products.ProductKernel`.

All of them give the same bits. One row takes ``gemv``, which normalises and quantizes its input. A few rows, or many if
the GPU has a kernel for them, take a kernel with an epilogue. cublasLt computes all others into int32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import cupy as cp
import numpy as np

from ...cuda.kernels.constants import Epilogue
from ...cuda.kernels.gemm.gemm_hopper import MIN_ROWS
from ...cuda.kernels.gemm.layouts import Layout
from ...cuda.kernels.gemv import gemv
from ...cuda.kernels.rowwise.adapters import QUANTIZED_ROWS, SideInputs
from ...cuda.kernels.rowwise.rows import MAX_NORM_WIDTH
from ...cuda.runtime.cublaslt import Order
from ..values import Array, Norm
from .deferred import (
    Deferred,
    DeferredMatmul,
    DeferredNorm,
    NormAddend,
    QuantizedActivations,
    ResidualStream,
    Weight,
)
from .fused import FusedGemms
from .materialize import STALE, Materializer
from .products import Product, ProductResults


@dataclass(frozen=True)
class SideRows:
    """The input of a product with a side product: ``codes``, and ``half``, padded fp16 rows that are not rotated.

    ``is_written``: the codes are; else the next kernel has to write them. ``is_counted``: the kernel that writes them
    counts their rows.
    """

    codes: QuantizedActivations
    half: cp.ndarray
    is_written: bool = True
    is_counted: bool = False


class InputCodes:
    """Quantizes the inputs of products. ``in_one_block``: codes and scales share a block of memory.

    They do if the GPU has the fused kernel for many rows. Elsewhere deferred sums keep the scales alive, and one block
    would keep the codes too.
    """

    def __init__(self, materializer: Materializer, in_one_block: bool) -> None:
        self.materializer = materializer
        self.in_one_block = in_one_block

    def of(self, product: Product) -> QuantizedActivations:
        """``x`` quantized, as the weight's plan lays activations out, after the weight's rotation."""
        if product.codes is not None:
            return product.codes
        product.codes = codes = self._quantized(product.x, product.weight)
        return codes

    def with_half(self, product: Product, later: bool, counter: int) -> SideRows:
        """:meth:`of`, and ``x`` in fp16. A norm is computed once for both.

        ``later``: whether the next kernel can quantize fp16 rows. ``counter``: the address of an int32 in which the
        norm's kernel counts rows, or 0.
        """
        materializer, x = self.materializer, product.x
        assert product.weight.plan is not None
        if isinstance(x, DeferredNorm) and x.values is None and x.shape[1] <= MAX_NORM_WIDTH:
            if product.codes is None:
                product.codes = self._allocate(product.weight.plan.activation(x.shape[0]))
            half = materializer.arrays.rows(x.shape[0], x.shape[1], np.float16)
            materializer.transform(x, product.codes, product.weight.rotation, half, counter)
            return SideRows(product.codes, half, is_counted=counter != 0)
        half = materializer.to_half(x)
        if isinstance(x, Deferred) or (isinstance(x, cp.ndarray) and x.dtype == half.dtype):
            product.x = half
        layout, is_plain = product.weight.plan.activation(x.shape[0]), product.weight.rotation == 1
        if later and is_plain and product.codes is None and product.x is half and layout.order is Order.ROW:
            product.codes = self._allocate(layout)
            return SideRows(product.codes, half, is_written=False)
        return SideRows(self.of(product), half)

    def _quantized(self, x: Array, weight: Weight) -> QuantizedActivations:
        assert weight.plan is not None
        layout = weight.plan.activation(x.shape[0])
        if (codes := self._of_divided_rows(x, weight, layout)) is not None:
            return codes
        norm = x if isinstance(x, DeferredNorm) and x.used else None
        if norm is not None and norm.codes is not None:
            known, rotation = norm.codes
            if known.layout == layout and rotation == weight.rotation:
                return known
        codes = self._allocate(layout)
        self.materializer.transform(x, codes, weight.rotation)
        if norm is not None:
            norm.codes = codes, weight.rotation
        return codes

    def _of_divided_rows(self, x: Array, weight: Weight, layout: Layout) -> QuantizedActivations | None:
        """The codes of a norm of a residual stream that is divided among ranks, if its owner can make them.

        They are valid until ranks meet, so this is for a product that is computed at once, by a kernel that scales it.
        """
        if not isinstance(x, DeferredNorm) or x.used or x.values is not None or x.residual.divided is None:
            return None
        is_scaled = self.in_one_block and weight.is_row_major and weight.out_features % 4 == 0
        if not is_scaled or layout.order is not Order.ROW or layout.ld != x.shape[1]:
            return None
        x.used = True
        return x.residual.divided.owner.codes(x.residual, x.norm, layout, weight.rotation)

    def _allocate(self, layout: Layout) -> QuantizedActivations:
        memory, nbytes, scale_bytes = self.materializer.arrays.memory, layout.nbytes, 4 * layout.rows
        if not self.in_one_block:
            return QuantizedActivations(layout, memory(nbytes), memory(scale_bytes))
        block = memory(nbytes + scale_bytes)
        return QuantizedActivations(layout, block, block + nbytes)


class GemvProducts:
    """One row: fp16, a norm of the residual stream, or the stream itself, to which it adds a pending norm."""

    def __init__(self, results: ProductResults) -> None:
        self.results = results

    def supports(self, product: Product) -> bool:
        x, weight = product.x, product.weight
        if x.shape[0] > 1 or weight.plan is None or weight.pitch > gemv.MAX_WIDTH or not weight.is_row_major:
            return False
        stream = product.stream
        if stream is None:
            return isinstance(x, cp.ndarray) and x.dtype == np.float16
        fits = weight.pitch <= gemv.MAX_FUSED_NORM_WIDTH and (weight.rotation == 1 or isinstance(x, DeferredNorm))
        return fits and not isinstance(stream.pending, DeferredMatmul) and stream is not product.target

    def run(self, product: Product) -> Array:
        results, weight, x = self.results, product.weight, product.x
        out, kernels = results.place(product, reads_input=True), results.kernels
        norm, addend, early, is_shared = None, None, False, False
        if isinstance(x, DeferredNorm):
            assert not x.stale, STALE
            x.used, norm, is_shared, x = True, x.norm, x.is_shared, x.residual
        if isinstance(x, ResidualStream):
            stream, x = x, x.values
            addend = self._addend(stream, norm, weight)
            early = kernels.step.reads(stream)
        kernels.gemv.launch(
            kernels.step,
            results.arrays.padded(x),
            norm,
            weight,
            out,
            product.epilogue,
            product.function,
            weight.rotation,
            addend,
            early,
            is_shared and addend is None,
        )
        return results.placed(product, out)

    def _addend(self, stream: ResidualStream, norm: Norm | None, weight: Weight) -> gemv.RowAddend | None:
        """The pending norm of the stream if the kernel can add it, with a new array for the stream's values.

        Otherwise it is added by a kernel of its own.
        """
        pending = stream.pending
        if not isinstance(pending, NormAddend):
            return None
        centers = pending.norm.center or (norm is not None and norm.center)
        if centers or weight.pitch > gemv.MAX_FUSED_SUM_WIDTH or pending.scale != 1:
            self.results.materializer.materialize(stream)
            return None
        stream.values = self.results.arrays.rows(1, pending.values.shape[1], np.float32)
        stream.pending = None
        return gemv.RowAddend(pending.values, pending.norm, stream.values)


@dataclass(frozen=True)
class FusedProducts:
    """Rows that a kernel with an epilogue takes."""

    results: ProductResults
    codes: InputCodes
    gemms: FusedGemms

    def supports(self, product: Product) -> bool:
        weight = product.weight
        if weight.plan is None:
            return False
        kind = Epilogue.TO_HALF if self._leaves_activation(product) or leaves_sum(product) else product.epilogue
        return self.gemms.supports(self.codes.of(product), weight, kind)

    def run(self, product: Product) -> Array:
        if leaves_sum(product):
            self.results.materializer.flush_residual(product.target)
            y = self.results.arrays.rows(*product.shape, np.float16)
            self.gemms.multiply(self.codes.of(product), product.weight, y, Epilogue.TO_HALF)
            return ResidualStream(product.target.values, y)
        if self._leaves_activation(product):
            y = self.results.arrays.rows(*product.shape, np.float16)
            self.gemms.multiply(self.codes.of(product), product.weight, y, Epilogue.TO_HALF)
            return self.results.finish(product, y)
        out = self.results.place(product)
        self.gemms.multiply(self.codes.of(product), product.weight, out, product.epilogue, product.function)
        return self.results.placed(product, out)

    def _leaves_activation(self, product: Product) -> bool:
        """Whether the kernel that reads the product applies the activation."""
        is_activated = product.epilogue is Epilogue.ACTIVATED
        return is_activated and not self.gemms.activates(product.x.shape[0], product.weight)


@dataclass(frozen=True)
class AdaptedProducts:
    """Rows whose adapters a kernel with an epilogue adds. One row takes it too, which is quantized first.

    The product of a few rows starts beside the kernel of its side inputs. Each such product has a counter of ``ready``,
    in turn.
    """

    results: ProductResults
    codes: InputCodes
    gemms: FusedGemms
    ready: Iterator[int]

    def supports(self, product: Product) -> bool:
        weight = product.weight
        if weight.plan is None or weight.side_products or weight.adapters is None:
            return False
        kind = Epilogue.TO_HALF if leaves_activation(product) else product.epilogue
        return self.gemms.supports_adapters(product.x.shape[0], weight, kind)

    def run(self, product: Product) -> Array:
        weight, results = product.weight, self.results
        assert weight.adapters is not None
        slots, adapters = weight.adapters.slots.rows, weight.adapters.adapters
        rows, kernels = product.x.shape[0], results.kernels
        assert len(slots) == rows, "the rows of a product are not those of the step"
        ready = 0 if rows >= MIN_ROWS else next(self.ready)
        counter = ready if rows <= QUANTIZED_ROWS else 0
        found = self.codes.with_half(product, kernels.adapters.quantizes(rows, adapters), counter)
        codes = found.codes
        side = SideInputs(slots, adapters, results.arrays.empty((rows, adapters.columns), np.float16), ready)
        places = None if found.is_written else (codes.values.ptr, codes.layout.ld, codes.scales.ptr)
        counting = replace(side, ready=0) if found.is_counted else side
        kernels.adapters.shrink(kernels.step, found.half, counting, places)
        if leaves_activation(product):
            y = results.arrays.rows(*product.shape, np.float16)
            self.gemms.multiply(codes, weight, y, Epilogue.TO_HALF, side=side)
            return results.finish(product, y)
        out = results.place(product)
        self.gemms.multiply(codes, weight, out, product.epilogue, product.function, side)
        return results.placed(product, out)


def leaves_activation(product: Product) -> bool:
    """The same of a product with adapters, whose kernel for many rows only applies gates."""
    return product.epilogue is Epilogue.ACTIVATED and product.x.shape[0] >= MIN_ROWS


def leaves_sum(product: Product) -> bool:
    """Whether the norm that follows adds many rows to the stream, which it reads anyway."""
    return product.ends_normed and product.x.shape[0] >= MIN_ROWS


class SumProducts:
    """Any rows, into int32 sums, which the next kernel scales while it reads them."""

    def __init__(self, results: ProductResults, codes: InputCodes) -> None:
        self.results = results
        self.codes = codes

    def supports(self, product: Product) -> bool:
        return product.weight.plan is not None

    def run(self, product: Product) -> Array:
        codes, results, weight = self.codes.of(product), self.results, product.weight
        assert weight.plan is not None
        if product.epilogue is Epilogue.ADD:  # before, so that the memory of pending sums is free for these
            results.materializer.flush_residual(product.target)
        rows, arrays = codes.layout.rows, results.arrays
        layout = weight.plan.result(rows)
        acc = arrays.empty((layout.size,), np.int32)
        weight.plan.run(acc.data.ptr, weight.matrix.data.ptr, codes.values.ptr, rows, arrays.stream.ptr)
        return results.finish(product, DeferredMatmul(acc, layout, codes.scales, weight))
