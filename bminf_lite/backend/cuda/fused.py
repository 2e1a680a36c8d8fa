"""int8 products by kernels that finish their outputs themselves: they give an operation's result, not a sum."""

from __future__ import annotations

import functools

import cupy as cp

from ...cuda.kernels.gemm.gemm_hopper import MIN_ROWS, ScaledGemm
from ...cuda.kernels.gemm.igemm import Igemm
from ...cuda.kernels.gemm.skinny_gemm import GROUP, Output
from .arrays import Arrays, pitch_of
from .deferred import Codes, Weight
from .launches import address, size_of


class FusedProducts:
    """The products of a few rows, and of many where the GPU has a kernel for these, on one stream."""

    def __init__(self, products: Igemm, arrays: Arrays) -> None:
        self.products = products
        self.arrays = arrays
        self.many_rows = ScaledGemm(products.device)

    def takes(self, codes: Codes, weight: Weight, output: Output) -> bool:
        """Whether such a kernel computes the product; it may be timed to find out."""
        assert weight.plan is not None
        rows = codes.layout.rows
        if weight.is_plain and self.many_rows.takes(rows, weight.out_features, output) and self._trusts_many:
            return True
        if output is Output.GATED and weight.out_features % (2 * GROUP):
            return False
        known = weight.plan.few_rows_verdict(rows)
        if known is None:
            with self.arrays.current():
                known = weight.plan.takes_few_rows(
                    weight.matrix.data.ptr, codes.values.ptr, rows, self.arrays.stream.ptr
                )
        return known

    def multiply(self, codes: Codes, weight: Weight, out: cp.ndarray, output: Output, activation: int = 0) -> None:
        """Put the product into ``out`` ``[rows, features]``, as ``output`` says; ``activation`` by its number.

        The product must be one that :meth:`takes`.
        """
        x, scale, rows = codes.values.ptr, codes.scales.ptr, codes.layout.rows
        observed, stream = self.products.device.observer is not None, self.arrays.stream.ptr
        moved = weight.nbytes + size_of(codes, out) if observed else 0
        if rows >= MIN_ROWS:  # more than the other kernel takes
            assert weight.scale is not None
            self.many_rows.launch(
                (x, weight.pitch), scale,
                (weight.matrix.data.ptr, weight.pitch), weight.scale.data.ptr, address(weight.bias),
                (out.data.ptr, pitch_of(out)), rows=rows, channels=weight.out_features,
                in_features=weight.in_features, output=output, activation=activation, stream=stream, moved=moved,
            )  # fmt: skip
            return
        self.products.few_rows.launch(
            x, scale, weight.matrix.data.ptr, address(weight.scale), address(weight.bias),
            out.data.ptr, pitch_of(out), rows, weight.out_features, weight.pitch, stream, output, activation,
            moved=moved,
        )  # fmt: skip

    @functools.cached_property
    def _trusts_many(self) -> bool:
        with self.arrays.current():
            return self.many_rows.trusted
