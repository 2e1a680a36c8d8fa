"""Working out what operations left unfinished (see :mod:`.deferred`), for whoever cannot do it in passing.

Whoever changes the residual stream calls :meth:`Finishing._settle` first: a norm that nobody has computed yet would
otherwise be taken of the changed values.
"""

from __future__ import annotations

import weakref

import cupy as cp
import numpy as np

from ..base import Backend
from ..values import Array
from .arrays import Arrays
from .deferred import Codes, Gated, Normed, Product, Residual
from .launches import WIDEST_NORM
from .rows import RowLaunches

HALF = np.dtype(np.float16)
STALE = "a norm that two operations read must be read by both before the residual stream changes"


class Finishing(Backend):
    """The part of the GPU's backend that turns its values into arrays."""

    arrays: Arrays
    launches: RowLaunches
    _residuals: weakref.WeakValueDictionary[int, Residual]

    def _transform(self, x: Array, out: cp.ndarray | Codes) -> None:
        """Write ``x``, whatever it is still waiting for, as codes or as values."""
        if isinstance(x, Normed) and x.values is None:
            assert not x.stale, STALE
            residual = x.residual
            x.used = True
            if x.shape[1] <= WIDEST_NORM:
                self.launches.transform(residual.pending, out, residual.values, x.norm)
                residual.pending = None
                return
            fp32_out = isinstance(out, cp.ndarray) and out.dtype == np.float32
            values = out if fp32_out else self.arrays.rows(x.shape[0], x.shape[1], np.float32)
            self.launches.norm(self._finished(residual), x.norm, values)
            if fp32_out:
                return
            x = values
        elif isinstance(x, Normed):
            x = x.values
        if isinstance(x, Gated) and isinstance(x.source, cp.ndarray):
            x = Gated(self.arrays.padded(x.source), x.activation)
        if isinstance(x, Residual):
            self._settle(x)
            x = x.values
        self.launches.transform(self.arrays.padded(x) if isinstance(x, cp.ndarray) else x, out)

    def _as_residual(self, x: Array) -> Residual:
        """``x`` as a residual stream; another one's norm, where the norm comes after the layer, becomes one.

        An array is the same stream each time, so that changing it finds the norms that were taken of it.
        """
        if isinstance(x, Residual):
            return x
        values = self.arrays.padded(self._finished(x))
        return self._residuals.setdefault(values.data.ptr, Residual(values))

    def _written(self, product: Product, dtype: type) -> cp.ndarray:
        """The product, scaled and with its bias, as padded rows of fp16 or fp32."""
        out = self.arrays.rows(product.shape[0], product.shape[1], dtype)
        self.launches.finish(product.acc, product.layout, product.x_scale, product.weight, out)
        return out

    def _half(self, x: Array) -> cp.ndarray:
        """``x`` as padded fp16 rows."""
        if isinstance(x, cp.ndarray) and x.dtype == HALF:
            return self.arrays.padded(x)
        if isinstance(x, Product):
            return self._written(x, np.float16)
        out = self.arrays.rows(x.shape[0], x.shape[1], np.float16)
        self._transform(x, out)
        return out

    def _finished(self, x: Array) -> cp.ndarray:
        """``x`` as an array: fp32 for the residual stream and its norms, fp16 for other unfinished values."""
        if isinstance(x, cp.ndarray):
            return x
        if isinstance(x, Residual):
            if x.pending is not None:
                self.launches.finish(
                    x.pending.acc, x.pending.layout, x.pending.x_scale, x.pending.weight, x.values, add=True
                )
                x.pending = None
            return x.values
        if isinstance(x, Normed):
            if x.values is None:
                out = self.arrays.rows(x.shape[0], x.shape[1], np.float32)
                self._transform(x, out)
                x.values = out
            return x.values
        return self._half(x)

    def _settle(self, residual: Residual) -> None:
        """Before the residual stream changes: take the norms of its present value, and add what is pending."""
        for reference in residual.norms:
            norm = reference()
            if norm is not None and norm.used:
                norm.stale = norm.values is None
            elif norm is not None:
                self._finished(norm)
        residual.norms.clear()
        self._finished(residual)
