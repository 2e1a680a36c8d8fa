"""int8 products by kernels with a fused epilogue, which write an operation's result instead of int32 sums."""

from __future__ import annotations

import functools

import cupy as cp

from ...cuda.kernels.arrays import address, pitch_of
from ...cuda.kernels.constants import SKINNY_ROWS, Epilogue
from ...cuda.kernels.gemm.gemm_hopper import MIN_ROWS, ScaledGemm
from ...cuda.kernels.gemm.igemm import Int8Gemm
from ...cuda.kernels.gemm.skinny_gemm_hopper import SECTION_MULTIPLE, SkinnyGemmHopper
from ...cuda.kernels.rowwise.adapters import SideInputs
from .arrays import Arrays
from .deferred import QuantizedActivations, Weight, nbytes_of


class FusedGemms:
    """Fused products of a few rows, and of many rows if the GPU has a kernel for them, on one stream."""

    def __init__(self, int8_gemm: Int8Gemm, arrays: Arrays) -> None:
        self.int8_gemm = int8_gemm
        self.arrays = arrays
        self.scaled_gemm = ScaledGemm(int8_gemm.device)

    def supports(self, codes: QuantizedActivations, weight: Weight, epilogue: Epilogue) -> bool:
        """Whether a fused kernel is used for the product; the first call for a shape may time it."""
        assert weight.plan is not None
        rows = codes.layout.rows
        if self.supports_many(rows, weight, epilogue):
            return True
        if epilogue is Epilogue.GATED and weight.out_features % (2 * SKINNY_ROWS):
            return False
        known = weight.plan.skinny_gemm_choice(rows)
        if known is None:
            with self.arrays.current():
                known = weight.plan.uses_skinny_gemm(
                    weight.matrix.data.ptr, codes.values.ptr, rows, self.arrays.stream.ptr
                )
        return known

    def supports_many(self, rows: int, weight: Weight, epilogue: Epilogue) -> bool:
        """Whether the kernel for many rows is used for the product."""
        fits = weight.is_row_major and self.scaled_gemm.supports(rows, weight.out_features, epilogue)
        return fits and self._scaled_gemm_verified

    def activates(self, rows: int, weight: Weight) -> bool:
        """Whether a kernel applies an activation itself, rather than the one that reads the product."""
        return rows < MIN_ROWS or self.scaled_gemm.hides_activation(rows, weight.out_features, weight.in_features)

    def supports_adapters(self, rows: int, weight: Weight, epilogue: Epilogue) -> bool:
        """Whether a kernel can add the adapters of ``rows`` to the product: those of 9.0 can."""
        assert weight.adapters is not None
        skinny = self.int8_gemm.skinny_gemm
        fits = weight.is_row_major and isinstance(skinny, SkinnyGemmHopper)
        if not fits or any(end % SECTION_MULTIPLE for end in weight.adapters.adapters.ends):
            return False
        if rows >= MIN_ROWS:
            gemm = self.scaled_gemm
            return gemm.supports(rows, weight.out_features, epilogue, adapted=True) and self._scaled_gemm_verified
        return epilogue is not Epilogue.GATED or weight.out_features % (2 * SKINNY_ROWS) == 0

    def multiply(
        self,
        codes: QuantizedActivations,
        weight: Weight,
        out: cp.ndarray,
        epilogue: Epilogue,
        activation: int = 0,
        side: SideInputs | None = None,
    ) -> None:
        """Write the product to ``out`` ``[rows, features]`` with ``epilogue``; ``activation`` is an ``Activation``.

        :meth:`supports` must be true of the product, or with a ``side`` product :meth:`supports_adapters`.
        """
        x, scale, rows = codes.values.ptr, codes.scales.ptr, codes.layout.rows
        observed, stream = self.int8_gemm.device.observer is not None, self.arrays.stream.ptr
        bytes_moved = weight.nbytes + nbytes_of(codes, out) if observed else 0
        if rows >= MIN_ROWS:  # skinny_gemm supports fewer
            assert weight.scale is not None
            self.scaled_gemm.launch(
                (x, weight.pitch),
                scale,
                (weight.matrix.data.ptr, weight.pitch),
                weight.scale.data.ptr,
                address(weight.bias),
                (out.data.ptr, pitch_of(out)),
                rows=rows,
                channels=weight.out_features,
                in_features=weight.in_features,
                epilogue=epilogue,
                activation=activation,
                stream=stream,
                bytes_moved=bytes_moved,
                side=() if side is None else side.arguments,
            )
            return
        adapted = {} if side is None else {"side": side.arguments}
        self.int8_gemm.skinny_gemm.launch(
            x, scale, weight.matrix.data.ptr, address(weight.scale), address(weight.bias),
            out.data.ptr, pitch_of(out), rows, weight.out_features, weight.pitch, stream, epilogue, activation,
            bytes_moved=bytes_moved, **adapted,
        )  # fmt: skip

    @functools.cached_property
    def _scaled_gemm_verified(self) -> bool:
        with self.arrays.current():
            return self.scaled_gemm.verified
