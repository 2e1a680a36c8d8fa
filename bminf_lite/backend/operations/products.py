"""Products with a weight, and the sums of ranks that each have a part of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from ..blas_threads import blas_threads
from ..functions import ACTIVATIONS, product_by_row, silently, stored
from ..quantization import quantize_rows
from ..rotation import rotated
from ..side_products import added
from ..values import Array, ProductEpilogue
from .step import StepOperations
from .weights import NumpyWeight

FEW_ROWS = 4
"""Float products of up to ``FEW_ROWS`` rows are computed row by row, which takes BLAS no longer than one product."""
EXACT_IN_FP32 = 1024
"""Products of int8 codes summed over this many terms stay below 2**24, so fp32 arithmetic is exact."""


class ProductOperations(StepOperations):
    """One product with an epilogue, its names, and the exchange of ranks."""

    def quantize(self, x: Array) -> tuple[Array, Array]:
        """Per-token dynamic int8: ``[T, K]`` -> codes int8 ``[T, K]``, scale fp32 ``[T]``; see ``quantize_rows``."""
        return quantize_rows(x)

    def igemm(self, x: Array, w: Array) -> Array:
        """The exact product ``x @ w.T`` of int8 codes: ``[T, K]``, ``[N, K]`` -> int32 ``[T, N]``; K up to 131,071."""
        return exact_int_matmul(x.astype(np.float32), w.astype(np.float32)).astype(np.int32)

    @silently
    def product(
        self,
        x: Array,
        weight: NumpyWeight,
        epilogue: ProductEpilogue = ProductEpilogue.STORE,
        activation: str | None = None,
        target: Array = None,
    ) -> Array:
        """``epilogue`` of ``x @ weight.T``: ``[T, in]`` -> ``[T, out]``, or ``[T, out / 2]`` of a gate.

        The product with the matrix comes in fp32. For an int8 weight with dynamic activations, ``x`` is quantized per
        token and ``y = s_x * (s_w * fp32(acc))``. For an int8 weight without, ``y = s_w * sum(code * x)``. If the
        weight or its input has a scale for each group of columns, ``y`` is the sum of these of the groups, added in
        fp32 one after another; a scale of a whole row is then that of each of its groups. An int8
        weight may have a rotation: then ``x`` is first transformed as :func:`..rotation.rotated` says, and for float
        activations rounded to the activation type. The weight's side products are added to it (:mod:`..side_products`),
        and then the bias. :class:`ProductEpilogue` says what becomes of the sum.

        ``activation`` names the function of ``GATE`` and ``ACTIVATE``, one of :data:`ACTIVATIONS`. ``target`` is the
        residual stream of ``ADD``, fp32 ``[T, out]``, which may be overwritten with the result. A stored product is
        written to ``target`` if given, of its shape and type.
        """
        y = self._sums(x, weight)
        if epilogue is ProductEpilogue.STORE_FP32:
            return stored(y, target)
        y = self._round(y)
        if epilogue is ProductEpilogue.STORE:
            return stored(y, target)
        if epilogue is ProductEpilogue.ADD:
            target += y
            return target
        assert activation is not None
        if epilogue is ProductEpilogue.ACTIVATE:
            return self._round(ACTIVATIONS[activation](y.astype(np.float32)))
        return self._gated(y, activation)

    def _gated(self, y: Array, activation: str) -> Array:
        gate, up = np.split(y.astype(np.float32, copy=False), 2, axis=-1)
        return self._round(ACTIVATIONS[activation](gate) * up)

    def linear(self, x: Array, weight: Any, fp32: bool = False, out: Array = None) -> Array:
        """``x @ weight.T + bias``, see :meth:`product`: ``[T, in]`` -> ``[T, out]`` in the activation type, or fp32.

        ``weight`` is this backend's, here and in the operations that follow, which are products under other names.
        The result is written to ``out`` if given, of that shape and type. ``out`` may be ``x`` if the weight is square.
        """
        return self.product(x, weight, ProductEpilogue.STORE_FP32 if fp32 else ProductEpilogue.STORE, target=out)

    def shared(self, x: Array) -> Array:
        """``x``, which the next two products read: a device may compute the second one beside the first."""
        return x

    @silently
    def float_linear(self, x: Array, matrix: Any) -> Array:
        """``linear`` in fp32 of a float weight with few outputs, in an order of sums that no other row changes.

        ``matrix`` stays float in every recipe, so nothing observes it.
        """
        return product_by_row(x.astype(np.float32), matrix.values.T)

    def linear_add(self, x: Array, weight: Any, residual: Array) -> Array:
        """``residual + linear(x, weight)``, fp32 ``[T, out]``.

        ``residual`` may be overwritten with the result, and ``x`` with the product if the weight is square.
        """
        return self.product(x, weight, ProductEpilogue.ADD, target=residual)

    def gated_linear(self, x: Array, weight: Any, activation: str) -> Array:
        """``f(gate) * up`` where ``[gate, up] = linear(x, weight)``: ``[T, in]`` -> ``[T, out / 2]``.

        ``activation`` names ``f``, one of :data:`ACTIVATIONS`, which is computed in fp32.
        """
        return self.product(x, weight, ProductEpilogue.GATE, activation)

    def activated_linear(self, x: Array, weight: Any, activation: str) -> Array:
        """``f(linear(x, weight))``: ``[T, in]`` -> ``[T, out]``.

        ``activation`` names ``f``, one of :data:`ACTIVATIONS`, which is computed in fp32.
        """
        return self.product(x, weight, ProductEpilogue.ACTIVATE, activation)

    @silently
    def saved_linear(self, x: Array, bank: Any, y: Array) -> Array:
        """``y`` fp32 ``[T, rows]`` with ``x @ matrix.T`` in the rows whose slot has a matrix; ``y`` is overwritten.

        ``x`` ``[T, columns]`` is rounded to the activation type; each row is computed by itself.
        """
        for matrix, rows in bank.rows():
            y[rows] = product_by_row(self._round(x[rows]).astype(np.float32), matrix.T)
        return y

    @silently
    def all_reduce_add(self, partial: Array, bias: Array = None, residual: Array = None) -> Array:
        """The sum of the ranks' products, as if one rank had computed the whole: fp32 ``[T, out]``.

        ``partial`` is fp32 ``[T, out]``, ``linear`` of this rank's columns, and may be overwritten. ``bias``, fp32
        ``[out]``, is added to the sum. With a ``residual``, fp32 ``[T, out]``, the result is ``residual`` plus the sum
        rounded to the activation type, as :meth:`linear_add` adds it; ``residual`` may be overwritten with it.
        """
        y = self.communicator.all_reduce_add(partial)
        if bias is not None:
            y = y + bias
        if residual is None:
            return y
        residual += self._round(y)
        return residual

    def linear_add_of_ranks(self, x: Array, weight: Any, bias: Array, residual: Array) -> Array:
        """``residual`` plus the sum of the ranks' products, fp32 ``[T, out]``; see :meth:`all_reduce_add`.

        ``x`` and ``weight`` are this rank's columns, and ``weight`` has no bias: ``bias``, fp32 ``[out]`` or None, is
        added to the sum. ``residual`` may be overwritten with the result.
        """
        return self.all_reduce_add(self.linear(x, weight, fp32=True), bias, residual)

    def all_gather_columns(self, part: Array, columns: slice, count: int) -> Array:
        """The columns of all ranks beside each other: fp32 ``[T, count]``.

        ``part`` fp32 ``[T, n]`` are this rank's ``columns``. The others count as zeros, and are added.
        """
        whole = np.zeros((len(part), count), np.float32)
        whole[:, columns] = part
        return self.communicator.all_reduce_add(whole)

    @silently
    def _sums(self, x: Array, weight: NumpyWeight) -> Array:
        """``x @ weight.T`` with its side products and its bias, fp32 ``[T, out]``."""
        if weight.tp_size == 1:
            y = self._rank_product(x, weight)
        else:
            runs = column_groups(weight.shape[1], weight.shape[1] // weight.tp_size)
            y = reduce(add, (self._rank_product(x[:, run], weight.columns(run)) for run in runs))
        return y if weight.bias is None else y + weight.bias

    def _rank_product(self, x: Array, weight: NumpyWeight) -> Array:
        """The product of one rank's columns with its side products."""
        rest = x
        for side in weight.side_products:
            rest = side.remaining(rest)
        y = self._matrix_product(rest, weight)
        for side in weight.side_products:
            y = added(y, side.product(x, self._round))
        return y

    def _matrix_product(self, x: Array, weight: NumpyWeight) -> Array:
        if weight.rotation > 1:
            x = rotated(x, weight.rotation)
        product = product_by_row if x.shape[0] <= FEW_ROWS else np.matmul
        with blas_threads.for_product(x.shape[0], *weight.values.T.shape):
            if weight.scale is None:
                return product(x.astype(np.float32, copy=False), weight.values.T)
            if weight.group_size:
                return self._grouped_product(x, weight, product)
            if weight.dynamic:
                codes, scale = self.quantize(x)
                y = exact_int_matmul(codes.astype(np.float32), weight.values).astype(np.float32, copy=False)
                y *= weight.scale
                y *= scale[:, None]
                return y
            y = product(self._round(x).astype(np.float32, copy=False), weight.values.T)
            y *= weight.scale
            return y

    def _grouped_product(self, x: Array, weight: NumpyWeight, product: Callable[[Array, Array], Array]) -> Array:
        """The product whose sums over groups of columns are scaled by themselves, and added one after another."""
        assert weight.scale is not None
        groups = column_groups(weight.shape[1], weight.group_size)
        w_scale = np.broadcast_to(weight.scale.reshape(weight.shape[0], -1), (weight.shape[0], len(groups)))
        if not weight.dynamic:
            x = self._round(x).astype(np.float32)
            sums = (product(x[:, k], weight.values[:, k].T) for k in groups)
            return reduce(add, (w_scale[:, g] * total for g, total in enumerate(sums)))
        codes, scale = quantize_rows(x, weight.input_group_size)
        x, x_scale = codes.astype(np.float32), np.broadcast_to(scale.reshape(len(x), -1), (len(x), len(groups)))
        exact = (exact_int_matmul(x[:, k], weight.values[:, k]).astype(np.float32) for k in groups)
        return reduce(add, (x_scale[:, g, None] * (w_scale[:, g] * acc) for g, acc in enumerate(exact)))


def column_groups(columns: int, size: int) -> list[slice]:
    """Runs of ``size`` neighbouring columns, of which ``columns`` is a multiple."""
    return [slice(first, first + size) for first in range(0, columns, size)]


def exact_int_matmul(x: Array, w: Array) -> Array:
    """``x @ w.T`` of integers held in fp32, exactly: fp32 ``[T, K]``, ``[N, K]`` -> fp32 or int32 ``[T, N]``."""
    if x.shape[1] <= EXACT_IN_FP32:
        return x @ w.T
    acc = np.zeros((x.shape[0], w.shape[0]), np.int32)
    for i in range(0, x.shape[1], EXACT_IN_FP32):
        chunk = slice(i, i + EXACT_IN_FP32)
        acc += (x[:, chunk] @ w[:, chunk].T).astype(np.int32)
    return acc
