"""For initcheck, which does not see what cublasLt's kernels store by the copy engine: memory that is cleared before.

So what other kernels read of a product, and cublasLt's own of its workspace, has been written.
"""

from __future__ import annotations

from typing import Any

import pytest

from bminf_lite.cuda import matmul
from bminf_lite.cuda.cublaslt import Order
from bminf_lite.cuda.layouts import GROUP


def install() -> None:
    """Until the process ends."""
    patch = pytest.MonkeyPatch()
    launch, create = matmul.Prepared._launch, matmul.Multiplier.__init__

    def clear_and_launch(self: matmul.Prepared, algorithm: Any, a: int, b: int, d: int, stream: int) -> None:
        from cupy.cuda import runtime

        to, size = self.product.d, self.product.d.dtype.itemsize
        elements = {
            Order.COL: (to.cols - 1) * to.ld + to.rows,
            Order.ROW: (to.rows - 1) * to.ld + to.cols,
        }.get(to.order, -(-to.cols // GROUP) * to.ld)
        for i in range(to.batch):
            runtime.memsetAsync(d + i * to.stride * size, 0, elements * size, stream)
        launch(self, algorithm, a, b, d, stream)

    def create_and_clear(self: matmul.Multiplier, *arguments: Any, **named: Any) -> None:
        create(self, *arguments, **named)
        self.clear_workspace(0)

    patch.setattr(matmul.Prepared, "_launch", clear_and_launch)
    patch.setattr(matmul.Multiplier, "__init__", create_and_clear)
