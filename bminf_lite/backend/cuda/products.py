"""Products on the GPU: which kernel computes which, and what becomes of the result.

:class:`Products` has an ordered list of :class:`ProductKernel`. The first one that supports a product computes it. A
kernel either has the product's epilogue itself, or stores the product, which :meth:`ProductResults.finish` completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import PAD, is_padded, pitch_of, round_up
from ...cuda.kernels.constants import ACTIVATIONS, Epilogue
from ...cuda.kernels.rowwise.adapters import SideInputs
from ...cuda.kernels.rowwise.rows import ROW
from ..values import Array
from .adapter_bank import AdapterBank
from .deferred import (
    DeferredActivation,
    DeferredMatmul,
    DeferredNorm,
    Outliers,
    QuantizedActivations,
    ResidualStream,
    SideProduct,
    Weight,
)
from .materialize import Materializer


@dataclass(eq=False, slots=True)
class Product:
    """A product to be computed, see :meth:`Backend.product`.

    ``target`` is the residual stream of ``ADD``, or an array for a stored product, which may be ``x``, or None.
    ``codes`` is ``x`` quantized, once a kernel has asked for it. ``ends_normed``: the stream of ``ADD`` was a norm,
    as in layers that normalise the stream itself; so another norm probably follows, which can add the product.
    """

    x: Array
    weight: Weight
    epilogue: Epilogue
    activation: str | None = None
    target: Any = None
    codes: QuantizedActivations | None = None
    ends_normed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """``(T, out)``."""
        return self.x.shape[0], self.weight.out_features

    @property
    def function(self) -> int:
        """The number of its activation function, 0 if it has none."""
        return 0 if self.activation is None else ACTIVATIONS[self.activation]

    @property
    def dtype(self) -> type:
        """The type of the product if it is stored."""
        return np.float32 if self.epilogue is Epilogue.TO_FLOAT else np.float16

    @property
    def stream(self) -> ResidualStream | None:
        """The residual stream that ``x`` is, or is a norm of that is not computed yet."""
        x = self.x
        if isinstance(x, DeferredNorm):
            return x.residual if x.values is None else None
        return x if isinstance(x, ResidualStream) else None


class ProductKernel(Protocol):
    """Computes some products."""

    def supports(self, product: Product) -> bool:
        """Whether this kernel can compute the product, and is used for it."""

    def run(self, product: Product) -> Array:
        """The result of the operation, deferred or not."""


class ProductResults:
    """Where products are written, and the epilogues of those whose kernel has none."""

    def __init__(self, materializer: Materializer) -> None:
        self.materializer = materializer
        self.arrays = materializer.arrays
        self.kernels = materializer.kernels

    def place(self, product: Product, reads_input: bool = False) -> cp.ndarray:
        """The array that a kernel with the product's epilogue writes: the stream of ``ADD``, complete, or padded rows.

        They are the target's unless the kernel ``reads_input``, where the target may lie, while it writes.
        """
        target, epilogue = product.target, product.epilogue
        if epilogue is Epilogue.ADD:
            self.materializer.flush_residual(target)
            return target.values
        if target is not None and not reads_input and is_padded(target):
            return target
        columns = product.weight.out_features // 2 if epilogue is Epilogue.GATED else product.weight.out_features
        return self.arrays.rows(product.x.shape[0], columns, product.dtype)

    def placed(self, product: Product, out: cp.ndarray) -> Array:
        """The operation's result, which was written to ``out``, a :meth:`place`."""
        target = product.target
        if product.epilogue is Epilogue.ADD:
            return ResidualStream(out)
        if target is None or target is out:
            return out
        with self.arrays.current():
            target[...] = out
        return target

    def finish(self, product: Product, y: cp.ndarray | DeferredMatmul) -> Array:
        """The epilogue of a product ``y``, ``[T, out]`` in the product's type or deferred."""
        epilogue, target = product.epilogue, product.target
        if epilogue in (Epilogue.GATED, Epilogue.ACTIVATED):
            assert product.activation is not None
            return DeferredActivation(y, product.activation, epilogue is Epilogue.GATED)
        if epilogue is Epilogue.ADD:
            return self._add(target, y)
        if not isinstance(y, DeferredMatmul):
            return self.placed(product, y)
        if epilogue is Epilogue.TO_HALF and target is None:
            return y
        out = self.place(product)
        self.materializer.write_product(y, out)
        return self.placed(product, out)

    def _add(self, target: ResidualStream, y: cp.ndarray | DeferredMatmul) -> ResidualStream:
        self.materializer.flush_residual(target)
        if isinstance(y, DeferredMatmul):
            return ResidualStream(target.values, y)
        with self.arrays.current():
            target.values += y
        return ResidualStream(target.values)


class Products:
    """All products of one backend."""

    def __init__(self, results: ProductResults, kernels: Sequence[ProductKernel], adapted: ProductKernel) -> None:
        self.results = results
        self.kernels = tuple(kernels)
        self.adapted = adapted

    def run(self, product: Product) -> Array:
        """Compute the product by the first kernel that supports it, and add its side products if there are any.

        ``adapted`` is the kernel of products with adapters of requests, which adds them itself.
        """
        bank = product.weight.adapters
        if bank is not None and bank.slots.rows is None:
            product.weight, bank = product.weight.without_adapters, None
        if bank is not None and self.adapted.supports(product):
            return self.adapted.run(product)
        if product.weight.side_products or bank is not None:
            return self._with_side_products(product)
        for kernel in self.kernels:
            if kernel.supports(product):
                return kernel.run(product)
        raise AssertionError("no kernel supports the product")

    def _with_side_products(self, product: Product) -> Array:
        """The product with the matrix in fp32, with the bits that it has alone; then side products, bias and epilogue.

        The matrix comes first: its kernel may compute a deferred ``x`` while it reads it, which it can do only as long
        as no other kernel has stored ``x``.
        """
        results, x, weight = self.results, product.x, product.weight
        rest, kept = x, None
        for side in weight.side_products:
            if isinstance(side, Outliers):
                rest, kept = self._split(x, side)
        sums = self.run(Product(rest, weight.alone, Epilogue.TO_FLOAT))
        out = sums if product.dtype is np.float32 else results.arrays.rows(*product.shape, np.float16)
        sides = list(weight.side_products)
        while sides:
            side = sides.pop(0)
            is_last = not sides and weight.adapters is None
            bias, target = (weight.bias, out) if is_last else (None, sums)
            self._add(side, self._inputs(x, side, kept), sums, bias, target)
        if weight.adapters is not None:
            self._add_adapters(x, weight.adapters, sums, weight.bias, out)
        return results.finish(product, out)

    def _add_adapters(
        self, x: Array, bank: AdapterBank, sums: cp.ndarray, bias: cp.ndarray | None, out: cp.ndarray
    ) -> None:
        """Add what the adapters of the step's rows make of ``x``."""
        results, kernels, rows = self.results, self.results.kernels, bank.slots.rows
        assert len(rows) == x.shape[0], "the rows of a product are not those of the step"
        side = SideInputs(rows, bank.adapters, results.arrays.empty((len(rows), bank.adapters.columns), np.float16))
        kernels.adapters.shrink(kernels.step, results.materializer.to_half(x), side)
        kernels.adapters.expand(kernels.step, sums, side, bias, out)

    def _split(self, x: Array, side: Outliers) -> tuple[cp.ndarray, cp.ndarray]:
        """``x`` with zeros in the columns of ``side``, and these columns in fp16."""
        arrays, kernels = self.results.arrays, self.results.kernels
        values = arrays.padded(self.results.materializer.materialize(x))
        rest = arrays.rows(values.shape[0], values.shape[1], values.dtype)
        kept = arrays.empty((values.shape[0], len(side.index)), np.float16)
        kernels.pointwise.split_columns(kernels.step, values, side.index, rest, kept)
        return rest, kept

    def _inputs(self, x: Array, side: SideProduct, kept: cp.ndarray | None) -> cp.ndarray:
        """The inputs of a side product, fp16 ``[T, n]``: columns that were ``kept``, or those of an adapter."""
        if isinstance(side, Outliers):
            assert kept is not None
            return kept
        sums = self.run(Product(x, side.down, Epilogue.TO_FLOAT))
        (rows, rank), kernels = sums.shape, self.results.kernels
        inputs = self.results.arrays.empty((rows, round_up(rank, PAD)), np.float16)[:, :rank]
        kernels.rows.dequantize(kernels.step, sums, ROW, pitch_of(sums), 0, side.scale, None, inputs)
        return inputs

    def _add(
        self, side: SideProduct, inputs: cp.ndarray, sums: cp.ndarray, bias: cp.ndarray | None, out: cp.ndarray
    ) -> None:
        kernels = self.results.kernels
        kernels.pointwise.add_side_product(kernels.step, sums, inputs, side.values, bias, out)
