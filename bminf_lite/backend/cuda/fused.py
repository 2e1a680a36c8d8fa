"""int8 products by kernels that finish their outputs themselves: they give an operation's result, not a sum."""

from __future__ import annotations

import cupy as cp

from ...cuda.few_rows import GROUP, Output
from ...cuda.igemm import Igemm
from .arrays import Arrays, pitch_of
from .launches import address, size_of
from .unfinished import Codes, Weight


class FusedProducts:
    """The products of a few rows, on one stream."""

    def __init__(self, products: Igemm, arrays: Arrays) -> None:
        self.products = products
        self.arrays = arrays

    def takes(self, codes: Codes, weight: Weight, output: Output) -> bool:
        """Whether such a kernel computes the product; it may be timed to find out."""
        assert weight.plan is not None
        x, scale = codes
        if output is Output.GATED and weight.out_features % (2 * GROUP):
            return False
        with self.arrays.current():
            return weight.plan.takes_few_rows(
                weight.matrix.data.ptr, x.data.ptr, len(scale), self.arrays.stream.ptr
            )

    def multiply(
        self, codes: Codes, weight: Weight, out: cp.ndarray, output: Output, activation: int = 0
    ) -> None:
        """Put the product into ``out`` ``[rows, features]``, as ``output`` says; ``activation`` by its number."""
        x, scale = codes
        self.products.few_rows.launch(
            x.data.ptr, scale.data.ptr, weight.matrix.data.ptr, address(weight.scale), address(weight.bias),
            out.data.ptr, pitch_of(out), len(scale), weight.out_features, weight.pitch, self.arrays.stream.ptr,
            output, activation, moved=weight.nbytes + size_of(x, scale, out),
        )  # fmt: skip
