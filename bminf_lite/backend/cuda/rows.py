"""Launches over rows on their own, in place or not: softmax, and norms that no product follows at once."""

from __future__ import annotations

import cupy as cp

from ...cuda.kernels.gemm.layouts import round_up
from ..values import Norm
from .arrays import PAD, is_padded, pitch_of
from .deferred import DeferredGate, DeferredMatmul, QuantizedActivations
from .launches import MAX_FUSED_NORM_WIDTH, CoreKernels, address, ceil_div, nbytes_of, norm_arguments, row_shape

BLOCK_ROW = MAX_FUSED_NORM_WIDTH
"""Elements of a row that one block holds in its registers."""
MAX_CLUSTER = 8
WIDE = 4096
"""Elements beyond which weight and bias take the L2 cache too long if a LayerNorm reads them for each of many rows."""
ROWS_EACH = 4
"""Rows for each multiprocessor, from which on it pays to keep them there."""


class RowKernels(CoreKernels):
    """Adds to :class:`CoreKernels` what works on rows of any width and alignment, whose elements are adjacent."""

    def transform(
        self,
        source: cp.ndarray | DeferredMatmul | DeferredGate | None,
        out: cp.ndarray | QuantizedActivations,
        residual: cp.ndarray | None = None,
        norm: Norm | None = None,
    ) -> None:
        if (
            source is None
            and norm is not None
            and norm.center
            and not isinstance(out, QuantizedActivations)
            and self._prefers_persistent(residual)
        ):
            self._layer_norm_persistent(residual, norm, out)
        else:
            super().transform(source, out, residual, norm)

    def _prefers_persistent(self, x: cp.ndarray) -> bool:
        """Whether rows are so wide and many that it pays to keep weight and bias, and there is the shared memory."""
        return (
            WIDE < x.shape[1] <= MAX_FUSED_NORM_WIDTH
            and len(x) >= ROWS_EACH * self.num_sms
            and self.half_shared > 4 * MAX_FUSED_NORM_WIDTH
        )

    def _layer_norm_persistent(self, x: cp.ndarray, norm: Norm, out: cp.ndarray) -> None:
        """LayerNorms of fp32 rows, padded, as fp16 or fp32; ``out`` may be ``x``."""
        rows, k = x.shape
        threads = 512 if k <= MAX_FUSED_NORM_WIDTH // 2 else 1024
        norm_weight, norm_bias, eps = norm_arguments(norm)
        has_bias, kind = "true" if norm_bias else "false", "__half" if out.dtype == cp.float16 else "float"
        self._launch(
            "rowwise/layer_norm_many_rows.cu", f"layer_norm_persistent<{has_bias}, {kind}, {threads}>", "pqppfpqii",
            self.num_sms * (1024 // threads), threads,
            (x.data.ptr, pitch_of(x), norm_weight, norm_bias, eps, out.data.ptr, pitch_of(out), rows, k),
            shared=4 * round_up(k, PAD) * (2 if norm_bias else 1), bytes_moved=self._nbytes_of(x, out), cache=True,
        )  # fmt: skip

    def norm(self, x: cp.ndarray, norm: Norm, out: cp.ndarray) -> None:
        """A norm of fp32 rows, fp32; ``out`` may be ``x``."""
        rows, k = x.shape
        if k <= MAX_FUSED_NORM_WIDTH and is_padded(x) and is_padded(out):
            self.transform(None, out, x, norm)
            return
        norm_weight, norm_bias, eps = norm_arguments(norm)
        self._launch(
            "rowwise/norm_unaligned.cu",
            f"norm_multi_pass<{'true' if norm.center else 'false'}>",
            "pqppfpqi?",
            rows,
            512,
            (x.data.ptr, pitch_of(x), norm_weight, norm_bias, eps, out.data.ptr, pitch_of(out), k, in_vectors(x, out)),
            bytes_moved=nbytes_of(x, out),
            cache=rows > self.num_sms,
        )

    def softmax(
        self, x: cp.ndarray, scale: float, bias: cp.ndarray | None, mask: cp.ndarray | None, out: cp.ndarray
    ) -> None:
        """See :meth:`Backend.softmax`; ``out`` may be ``x``."""
        rows, k = x.shape
        if not x.size:
            return
        arrays = [a for a in (x, out, bias, mask) if a is not None]
        assert all(a.strides[-1] == a.itemsize for a in arrays)
        whole = k % 8 == 0 and in_vectors(*arrays)
        fills_gpu = rows > self.num_sms
        template = f"{'__half' if x.dtype == cp.float16 else 'float'}, {'true' if whole else 'false'}"
        arguments = (
            x.data.ptr, pitch_of(x), scale, address(bias), row_step(bias), address(mask), row_step(mask),
            out.data.ptr, pitch_of(out),
        )  # fmt: skip
        cluster = 1 << (ceil_div(k, BLOCK_ROW) - 1).bit_length()
        if cluster > (MAX_CLUSTER if self.has_clusters else 1):
            self._launch(
                "rowwise/softmax.cu", f"softmax_two_pass<{template}>", "pqfpqpqpqi", rows, 512, (*arguments, k),
                bytes_moved=nbytes_of(*arrays), cache=fills_gpu,
            )  # fmt: skip
            return
        threads, vectors = row_shape(k, 4 if fills_gpu else 1) if cluster == 1 else (512, 4)
        grid = cluster * ceil_div(rows * threads, max(threads, 128))
        self._launch(
            "rowwise/softmax.cu", f"softmax<{template}, {threads}, {vectors}, {cluster}>", "pqfpqpqpqii", grid,
            max(threads, 128), (*arguments, rows, k), cluster=cluster if cluster > 1 else None,
            bytes_moved=nbytes_of(*arrays), cache=fills_gpu,
        )  # fmt: skip


def row_step(x: cp.ndarray | None) -> int:
    """Elements from one row to the next, 0 where there is one for all rows."""
    return pitch_of(x) if x is not None and x.ndim == 2 else 0


def in_vectors(*arrays: cp.ndarray) -> bool:
    """Whether each eight elements of a row lie where a kernel may read them at once."""
    width = {1: 8, 2: 16, 4: 16}
    return all(
        a.data.ptr % width[a.itemsize] == 0 and (row_step(a) * a.itemsize) % width[a.itemsize] == 0 for a in arrays
    )
