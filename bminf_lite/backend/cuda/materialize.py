"""Computes deferred values (see :mod:`.deferred`) if the next kernel cannot do so while it reads them.

:meth:`Materializer.flush_residual` must be called before the residual stream changes: a deferred norm would otherwise
read the changed values.
"""

from __future__ import annotations

from dataclasses import replace

import cupy as cp
import numpy as np

from ...cuda.kernels.constants import ACTIVATIONS
from ...cuda.kernels.rowwise.rows import MAX_NORM_WIDTH, NO_ROWS, sum_target
from ...cuda.runtime.cublaslt import Order
from ..values import Array, Norm
from .arrays import Arrays
from .deferred import (
    DeferredActivation,
    DeferredMatmul,
    DeferredNorm,
    NormAddend,
    QuantizedActivations,
    RankSum,
    ResidualStream,
    row_source,
    row_target,
)
from .kernels import Kernels

HALF = np.dtype(np.float16)
STALE = "a norm that two operations read must be read by both before the residual stream changes"


class Materializer:
    """Turns deferred values into arrays."""

    def __init__(self, arrays: Arrays, kernels: Kernels) -> None:
        self.arrays = arrays
        self.kernels = kernels

    def transform(
        self,
        x: Array,
        out: cp.ndarray | QuantizedActivations,
        rotation: int = 1,
        half: cp.ndarray | None = None,
        counter: int = 0,
    ) -> None:
        """Write ``x``, deferred or not, as codes or as fp16 or fp32 values.

        Codes and fp16 values may be those of ``x`` transformed in blocks of ``rotation`` elements. A norm that is not
        computed yet, and becomes codes, may go to padded fp16 rows ``half`` too, not transformed; the kernel counts its
        rows in ``counter`` then, if that is an address.
        """
        if isinstance(x, DeferredNorm) and x.values is None:
            assert not x.stale, STALE
            residual = x.residual
            x.used = True
            if isinstance(residual.pending, RankSum) and self._add_and_quantize(residual, x.norm, out, rotation, half):
                return
            self._complete(residual)
            if isinstance(residual.pending, cp.ndarray):
                if half is None and self._quantize_norm_of_sum(x, residual.pending, out, rotation):
                    return
                self.materialize(residual)
            if x.shape[1] <= MAX_NORM_WIDTH:
                assert residual.pending is None or isinstance(residual.pending, DeferredMatmul)
                if half is not None:
                    self.materialize(residual)
                self.write_rows(residual.pending, out, residual.values, x.norm, rotation, half, counter)
                residual.pending = None
                return
            fp32_out = isinstance(out, cp.ndarray) and out.dtype == np.float32
            values = out if fp32_out else self.arrays.rows(x.shape[0], x.shape[1], np.float32)
            self.kernels.rows.norm(self.kernels.step, self.materialize(residual), x.norm, values)
            if fp32_out:
                return
            x = values
        elif isinstance(x, DeferredNorm):
            x = x.values
        if isinstance(x, DeferredActivation) and isinstance(x.source, cp.ndarray):
            x = replace(x, source=self.arrays.padded(x.source))
        if isinstance(x, ResidualStream):
            self.flush_residual(x)
            x = x.values
        self.write_rows(self.arrays.padded(x) if isinstance(x, cp.ndarray) else x, out, rotation=rotation)

    def write_rows(
        self,
        source: cp.ndarray | DeferredMatmul | DeferredActivation | None,
        out: cp.ndarray | QuantizedActivations,
        residual: cp.ndarray | None = None,
        norm: Norm | None = None,
        rotation: int = 1,
        half: cp.ndarray | None = None,
        counter: int = 0,
    ) -> None:
        """Read rows, add them to the residual stream, normalise, gate or rotate them, and write codes or values."""
        rows, k = (residual if residual is not None else source).shape  # type: ignore[union-attr]
        moved = self.kernels.nbytes_moved(source, residual, out, residual if source is not None else None)
        activation, values, gated = None, source, False
        if isinstance(source, DeferredActivation):
            activation, values, gated = ACTIVATIONS[source.activation], source.source, source.gated
        self.kernels.rows.transform(
            self.kernels.step, row_source(values), row_target(out), rows, k, residual, norm, activation, moved,
            rotation, gated=gated, half=half, counter=counter,
        )  # fmt: skip

    def as_residual(self, x: Array) -> ResidualStream:
        """``x`` as a residual stream. If a layer ends with a norm, the norm becomes the next layer's stream.

        An array always maps to the same stream, so that the norms of its present value are known when it changes. It
        may be columns of wider rows.
        """
        if isinstance(x, ResidualStream):
            return x
        values = self.arrays.aligned(self.materialize(x))
        found: ResidualStream = self.kernels.step.streams.setdefault(values.data.ptr, ResidualStream(values))
        return found

    def dequantize(self, product: DeferredMatmul, dtype: type) -> cp.ndarray:
        """The product, scaled and with its bias, as padded rows of fp16 or fp32."""
        out = self.arrays.rows(product.shape[0], product.shape[1], dtype)
        self.write_product(product, out)
        return out

    def write_product(self, product: DeferredMatmul, out: cp.ndarray, add: bool = False) -> None:
        """The product, scaled and with its bias, into ``out`` or added to it."""
        layout, weight = product.layout, product.weight
        self.kernels.rows.dequantize(
            self.kernels.step,
            product.acc,
            int(layout.order),
            layout.ld,
            product.x_scale.ptr,
            weight.scale,
            weight.bias,
            out,
            add,
        )

    def to_half(self, x: Array, rotation: int = 1) -> cp.ndarray:
        """``x`` as padded fp16 rows, or columns of wider ones; transformed in blocks of ``rotation`` elements."""
        if isinstance(x, cp.ndarray) and x.dtype == HALF and rotation == 1:
            return self.arrays.aligned(x)
        if isinstance(x, DeferredMatmul) and rotation == 1:
            return self.dequantize(x, np.float16)
        out = self.arrays.rows(x.shape[0], x.shape[1], np.float16)
        self.transform(x, out, rotation)
        return out

    def materialize(self, x: Array) -> cp.ndarray:
        """``x`` as an array: fp32 for the residual stream and its norms, fp16 for other deferred values."""
        if isinstance(x, cp.ndarray):
            return x
        if isinstance(x, ResidualStream):
            self._complete(x)
            if isinstance(x.pending, DeferredMatmul):
                self.write_product(x.pending, x.values, add=True)
                x.pending = None
            if isinstance(x.pending, cp.ndarray):
                with self.arrays.current():
                    x.values += x.pending
                x.pending = None
            return x.values
        if isinstance(x, DeferredNorm):
            if x.values is None:
                out = self.arrays.rows(x.shape[0], x.shape[1], np.float32)
                self.transform(x, out)
                x.values = out
            return x.values
        return self.to_half(x)

    def _quantize_norm_of_sum(
        self, x: DeferredNorm, rows: cp.ndarray, out: cp.ndarray | QuantizedActivations, rotation: int
    ) -> bool:
        """Write the codes of a norm of a stream and fp16 ``rows``, and its values; False unless it can.

        The norm is mostly the next stream, so its values are wanted, and the sum is not.
        """
        stream, width = x.residual.values, x.shape[1]
        if not isinstance(out, QuantizedActivations) or out.layout.order is not Order.ROW or width > MAX_NORM_WIDTH:
            return False
        values = self.arrays.rows(x.shape[0], width, np.float32)
        if values.strides != stream.strides:
            return False
        moved = self.kernels.nbytes_moved(rows, stream, out, values)
        self.kernels.rows.transform(
            self.kernels.step, row_source(rows), row_target(out), x.shape[0], width, stream, x.norm, None, moved,
            rotation, values=values,
        )  # fmt: skip
        x.values = values
        return True

    @staticmethod
    def _add_and_quantize(
        residual: ResidualStream, norm: Norm, out: Array, rotation: int, half: cp.ndarray | None
    ) -> bool:
        """Add a sum over ranks and write the codes of a norm by one kernel; False if those are not wanted in rows."""
        pending = residual.pending
        is_codes = isinstance(out, QuantizedActivations) and out.layout.order is Order.ROW and half is None
        if not is_codes or not isinstance(pending, RankSum):
            return False
        residual.pending = None
        pending.rank.add_and_quantize(pending, residual.values, norm, rotation, out)
        return True

    def _complete(self, residual: ResidualStream) -> None:
        """Get the rows that other ranks have, and add the sum over ranks or the norm that is pending, if one is."""
        if residual.divided is not None:
            residual.divided.owner.gather(residual)
        if isinstance(residual.pending, RankSum):
            pending, residual.pending = residual.pending, None
            pending.rank.add(pending.partial, pending.bias, residual.values, add=True)
        if not isinstance(residual.pending, NormAddend):
            return
        addend, residual.pending = residual.pending, None
        rows, k = addend.values.shape
        if k <= MAX_NORM_WIDTH:
            moved = self.kernels.nbytes_moved(addend.values, residual.values, residual.values)
            self.kernels.rows.transform(
                self.kernels.step,
                NO_ROWS,
                sum_target(residual.values),
                rows,
                k,
                addend.values,
                addend.norm,
                bytes_moved=moved,
                scale=addend.scale,
            )
            return
        values = self.arrays.rows(rows, k, np.float32)
        self.kernels.rows.norm(self.kernels.step, addend.values, addend.norm, values)
        with self.arrays.current():
            residual.values += values
            if addend.scale != 1:
                residual.values *= np.float32(addend.scale)

    def flush_residual(self, residual: ResidualStream) -> None:
        """Compute the deferred norms of the residual stream, and add the pending product to it."""
        self.flush_norms(residual)
        self.materialize(residual)

    def flush_norms(self, residual: ResidualStream) -> None:
        """Compute the deferred norms of the residual stream."""
        for reference in residual.norms:
            norm = reference()
            if norm is not None and norm.used:
                norm.stale = norm.values is None
            elif norm is not None:
                self.materialize(norm)
        residual.norms.clear()
