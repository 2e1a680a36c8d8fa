"""For initcheck, which does not see what kernels store by the copy engine: memory that is cleared before.

So what others read of a product by cublasLt or by ``gemm_hopper.cu``, and cublasLt of its workspace, has been written.
"""

from __future__ import annotations

from typing import Any

import pytest

from bminf_lite.cuda.kernels.arrays import round_up
from bminf_lite.cuda.kernels.constants import Epilogue
from bminf_lite.cuda.kernels.gemm import cublaslt_matmul as matmul
from bminf_lite.cuda.kernels.gemm import gemm_hopper as scaled_gemm
from bminf_lite.cuda.kernels.gemm.tensor_core_layouts import GROUP
from bminf_lite.cuda.runtime.cublaslt import Order


def install() -> None:
    """Until the process ends."""
    patch = pytest.MonkeyPatch()
    product, create, scaled = (
        matmul.PreparedMatmul._launch,
        matmul.MatmulContext.__init__,
        scaled_gemm.ScaledGemm.launch,
    )

    def clear_and_multiply(self: matmul.PreparedMatmul, algorithm: Any, a: int, b: int, d: int, stream: int) -> None:
        to, size = self.product.d, self.product.d.dtype.itemsize
        lines = {Order.COL: (to.cols, to.rows), Order.ROW: (to.rows, to.cols)}
        count, elements = lines.get(to.order, (-(-to.cols // GROUP), to.ld))
        for i in range(to.batch):
            _clear(d + i * to.stride * size, count, elements * size, to.ld * size, stream)
        product(self, algorithm, a, b, d, stream)

    def create_and_clear(self: matmul.MatmulContext, *arguments: Any, **named: Any) -> None:
        create(self, *arguments, **named)
        self.clear_workspace(0)

    def clear_and_scale(self: scaled_gemm.ScaledGemm, *operands: Any, stream: int = 0, **named: Any) -> None:
        (out, pitch), epilogue = operands[5], named["epilogue"]
        columns = named["channels"] // (2 if epilogue is Epilogue.GATED else 1)
        itemsize = 4 if epilogue in scaled_gemm.FLOAT_EPILOGUES else 2
        if epilogue is not Epilogue.ADD:
            _clear(out, named["rows"], round_up(columns * itemsize, 16), pitch * itemsize, stream)
        scaled(self, *operands, stream=stream, **named)

    patch.setattr(matmul.PreparedMatmul, "_launch", clear_and_multiply)
    patch.setattr(matmul.MatmulContext, "__init__", create_and_clear)
    patch.setattr(scaled_gemm.ScaledGemm, "launch", clear_and_scale)


def _clear(address: int, lines: int, nbytes: int, pitch: int, stream: int) -> None:
    from cupy.cuda import runtime

    if nbytes == pitch:
        lines, nbytes = 1, lines * nbytes
    for line in range(lines):
        runtime.memsetAsync(address + line * pitch, 0, nbytes, stream)
