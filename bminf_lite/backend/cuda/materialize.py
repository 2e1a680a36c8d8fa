"""Working out what operations left unfinished (see :mod:`.deferred`), for whoever cannot do it in passing.

Whoever changes the residual stream calls :meth:`MaterializingBackend._flush_residual` first: a norm that nobody has
computed yet would otherwise be taken of the changed values.
"""

from __future__ import annotations

import weakref

import cupy as cp
import numpy as np

from ..base import Backend
from ..values import Array
from .arrays import Arrays
from .deferred import DeferredGate, DeferredMatmul, DeferredNorm, QuantizedActivations, ResidualStream
from .launches import MAX_FUSED_NORM_WIDTH
from .rows import RowKernels

HALF = np.dtype(np.float16)
STALE = "a norm that two operations read must be read by both before the residual stream changes"


class MaterializingBackend(Backend):
    """The part of the GPU's backend that turns its values into arrays."""

    arrays: Arrays
    kernels: RowKernels
    _residuals: weakref.WeakValueDictionary[int, ResidualStream]

    def _transform(self, x: Array, out: cp.ndarray | QuantizedActivations) -> None:
        """Write ``x``, whatever it is still waiting for, as codes or as values."""
        if isinstance(x, DeferredNorm) and x.values is None:
            assert not x.stale, STALE
            residual = x.residual
            x.used = True
            if x.shape[1] <= MAX_FUSED_NORM_WIDTH:
                self.kernels.transform(residual.pending, out, residual.values, x.norm)
                residual.pending = None
                return
            fp32_out = isinstance(out, cp.ndarray) and out.dtype == np.float32
            values = out if fp32_out else self.arrays.rows(x.shape[0], x.shape[1], np.float32)
            self.kernels.norm(self._materialize(residual), x.norm, values)
            if fp32_out:
                return
            x = values
        elif isinstance(x, DeferredNorm):
            x = x.values
        if isinstance(x, DeferredGate) and isinstance(x.source, cp.ndarray):
            x = DeferredGate(self.arrays.padded(x.source), x.activation)
        if isinstance(x, ResidualStream):
            self._flush_residual(x)
            x = x.values
        self.kernels.transform(self.arrays.padded(x) if isinstance(x, cp.ndarray) else x, out)

    def _as_residual(self, x: Array) -> ResidualStream:
        """``x`` as a residual stream; another one's norm, where the norm comes after the layer, becomes one.

        An array is the same stream each time, so that changing it finds the norms that were taken of it.
        """
        if isinstance(x, ResidualStream):
            return x
        values = self.arrays.padded(self._materialize(x))
        return self._residuals.setdefault(values.data.ptr, ResidualStream(values))

    def _dequantize(self, product: DeferredMatmul, dtype: type) -> cp.ndarray:
        """The product, scaled and with its bias, as padded rows of fp16 or fp32."""
        out = self.arrays.rows(product.shape[0], product.shape[1], dtype)
        self.kernels.dequantize(product.acc, product.layout, product.x_scale, product.weight, out)
        return out

    def _to_half(self, x: Array) -> cp.ndarray:
        """``x`` as padded fp16 rows."""
        if isinstance(x, cp.ndarray) and x.dtype == HALF:
            return self.arrays.padded(x)
        if isinstance(x, DeferredMatmul):
            return self._dequantize(x, np.float16)
        out = self.arrays.rows(x.shape[0], x.shape[1], np.float16)
        self._transform(x, out)
        return out

    def _materialize(self, x: Array) -> cp.ndarray:
        """``x`` as an array: fp32 for the residual stream and its norms, fp16 for other unfinished values."""
        if isinstance(x, cp.ndarray):
            return x
        if isinstance(x, ResidualStream):
            if x.pending is not None:
                self.kernels.dequantize(
                    x.pending.acc, x.pending.layout, x.pending.x_scale, x.pending.weight, x.values, add=True
                )
                x.pending = None
            return x.values
        if isinstance(x, DeferredNorm):
            if x.values is None:
                out = self.arrays.rows(x.shape[0], x.shape[1], np.float32)
                self._transform(x, out)
                x.values = out
            return x.values
        return self._to_half(x)

    def _flush_residual(self, residual: ResidualStream) -> None:
        """Before the residual stream changes: take the norms of its present value, and add what is pending."""
        for reference in residual.norms:
            norm = reference()
            if norm is not None and norm.used:
                norm.stale = norm.values is None
            elif norm is not None:
                self._materialize(norm)
        residual.norms.clear()
        self._materialize(residual)
