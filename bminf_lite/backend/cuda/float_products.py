"""Products with float activations, of fp16 and int8 weights, see :class:`.products.ProductKernel`."""

from __future__ import annotations

import cupy as cp

from ..values import Array
from .deferred import DeferredMatmul, DeferredNorm
from .materialize import STALE
from .products import Product, ProductResults


class FloatProducts:
    """fp16 rows, or a norm of one row of the residual stream. All give a row the same bits, whatever their number."""

    def __init__(self, results: ProductResults) -> None:
        self.results = results

    def supports(self, product: Product) -> bool:
        return product.weight.plan is None

    def run(self, product: Product) -> Array:
        results, x, norm, early = self.results, product.x, None, False
        materializer, kernels = results.materializer, results.kernels
        if self._normalises(product):
            assert isinstance(x, DeferredNorm) and not x.stale, STALE
            out, stream = results.place(product, reads_input=True), x.residual
            x.used, norm, values = True, x.norm, results.arrays.padded(materializer.materialize(stream))
            early = kernels.step.reads(stream)
        else:
            values = materializer.to_half(x, product.weight.rotation)
            out = results.place(product, reads_input=isinstance(x, cp.ndarray))
        kernels.float_products.launch(
            kernels.step, values, norm, product.weight, out, product.epilogue, product.function, early
        )
        return results.placed(product, out)

    def _normalises(self, product: Product) -> bool:
        """Whether the kernel computes the norm. It must not read a stream that it adds to."""
        x, stream = product.x, product.stream
        if not isinstance(x, DeferredNorm) or stream is None or stream is product.target:
            return False
        fits = self.results.kernels.float_products.normalises(x.shape[0], product.weight, product.epilogue)
        fits = fits and product.weight.rotation == 1
        return fits and not isinstance(stream.pending, DeferredMatmul)
