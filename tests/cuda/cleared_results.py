"""For initcheck: memory that is cleared before, where it would report reads that change no result.

- It does not see what kernels store by the copy engine: products by cublasLt and ``gemm_hopper.cu``, and cublasLt's
  workspace.
- Blocks of a cache are copied as a whole, with what was never written. Of the scales of tokens that are not there,
  decode attention copies no bytes, by an instruction for 16, which it takes for a read of them. Tests of attention fill
  such places with NaN themselves.
- Attention writes no output of the tokens that pad a captured step. Their rows are quantized with the others.
"""

from __future__ import annotations

from typing import Any

import pytest

from bminf_lite.backend.cache_values import LayerCache
from bminf_lite.cuda.kernels.arrays import PAD, round_up
from bminf_lite.cuda.kernels.constants import Epilogue
from bminf_lite.cuda.kernels.gemm import cublaslt_matmul as matmul
from bminf_lite.cuda.kernels.gemm import gemm_hopper as scaled_gemm
from bminf_lite.cuda.kernels.gemm.tensor_core_layouts import GROUP
from bminf_lite.cuda.runtime.cublaslt import Order


def install() -> None:
    """Until the process ends."""
    from bminf_lite.backend.cuda import arrays, backend, layer_caches

    patch = pytest.MonkeyPatch()
    attention = backend.CudaBackend.attention
    make, grow = layer_caches.LayerCaches.make, layer_caches.LayerCaches.grow
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

    def make_and_clear(self: layer_caches.LayerCaches, *arguments: Any) -> LayerCache:
        cache = make(self, *arguments)
        _clear_blocks(cache, 0, self.arrays.stream.ptr)
        return cache

    def grow_and_clear(self: layer_caches.LayerCaches, cache: LayerCache, num_blocks: int) -> None:
        before = cache.num_blocks
        grow(self, cache, num_blocks)
        _clear_blocks(cache, before, self.arrays.stream.ptr)

    def cleared_rows(self: arrays.Arrays, rows: int, columns: int, dtype: Any) -> Any:
        return self.zeros((rows, round_up(columns, PAD)), dtype)[:, :columns]

    def clear_and_attend(self: backend.CudaBackend, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(arrays.Arrays, "rows", cleared_rows)
            return attention(self, *arguments)

    patch.setattr(backend.CudaBackend, "attention", clear_and_attend)
    patch.setattr(layer_caches.LayerCaches, "make", make_and_clear)
    patch.setattr(layer_caches.LayerCaches, "grow", grow_and_clear)
    patch.setattr(matmul.PreparedMatmul, "_launch", clear_and_multiply)
    patch.setattr(matmul.MatmulContext, "__init__", create_and_clear)
    patch.setattr(scaled_gemm.ScaledGemm, "launch", clear_and_scale)


def _clear_blocks(cache: LayerCache, first: int, stream: int) -> None:
    """Clear the blocks of a cache from number ``first`` on."""
    for array in cache.arrays:
        nbytes = array.strides[0]
        _clear(array.data.ptr + first * nbytes, cache.num_blocks - first, nbytes, nbytes, stream)


def _clear(address: int, lines: int, nbytes: int, pitch: int, stream: int) -> None:
    from cupy.cuda import runtime

    if nbytes == pitch:
        lines, nbytes = 1, lines * nbytes
    for line in range(lines):
        runtime.memsetAsync(address + line * pitch, 0, nbytes, stream)
