"""Mixtures of experts: each token is computed by the experts that a router chooses."""

from __future__ import annotations

import numpy as np

from ..functions import product_by_row, silently
from ..mixture import (
    Mixture,
    SharedExpert,
    choose_experts,
    expert_result,
    input_factors,
    mix,
    result_weights,
    shared_result,
)
from ..rotation import rotated
from ..routing import sigmoid
from ..side_products import OutlierColumns, added
from ..values import Array
from .products import ProductOperations, exact_int_matmul
from .rows import RowOperations


class ExpertOperations(ProductOperations, RowOperations):
    """A mixture as one operation, whose formulas are those of :mod:`..mixture`."""

    choices: list[Array] | None = None
    """A list to which each :meth:`experts` appends the experts of its tokens, int32 ``[T, top_k]``, or None."""

    @silently
    def experts(
        self,
        x: Array,
        mixture: Mixture,
        residual: Array = None,
        addend: Array = None,
        gate: Array = None,
        routed: Array = None,
        shared: SharedExpert | None = None,
    ) -> Array:
        """The sum of what each token's experts make of it: ``[T, in]`` -> fp32 ``[T, out]``; see :mod:`..mixture`.

        The router reads ``routed``, by default ``x``, which is a :meth:`norm` or a residual stream. An ``addend`` fp32
        ``[T, out]``, times the ``gate`` fp32 ``[T, 1]`` if there is one, is added to the sum, or what a ``shared``
        expert makes of ``x``. With a ``residual`` fp32 ``[T, out]``, which may be overwritten, the result is added to
        that.

        An expert computes :meth:`linear` of :meth:`gated_linear` or :meth:`activated_linear`, each rounded to the
        activation type. The results of a token are multiplied by the router's weights, unless these multiply the
        inputs, and added in fp32 in the order of the experts' ranks. Adapters of experts are side products of their
        weights: what they add is that of the token's adapter.
        """
        if shared is not None:
            addend, gate = shared_result(self, x, shared)
        topk_ids, topk_weights = choose_experts(x if routed is None else routed, mixture)
        if self.choices is not None:
            self.choices.append(topk_ids)

        def result_of(expert: int, tokens: np.ndarray) -> Array:
            factors = input_factors(topk_ids, topk_weights, mixture, expert, tokens)
            with mixture.of_tokens(tokens):
                if factors is None:
                    return expert_result(self, x[tokens], mixture, expert)
                return self._result_of_scaled(x[tokens], factors, mixture, expert)

        found = mix(topk_ids, result_weights(topk_weights, mixture), result_of)
        return self.add_experts(found, residual, addend, gate)

    def _result_of_scaled(self, x: Array, factors: Array, mixture: Mixture, expert: int) -> Array:
        """What one expert makes of rows times ``factors`` fp32 ``[n]``: ``[n, in]`` -> ``[n, out]``.

        The factors multiply the scales of rows that are quantized, else the rows, which are then rounded to the
        activation type: see :func:`..experts.expert_linear`. They also multiply the rows of a weight with outlier
        columns, or with scales of groups, and those that adapters read.
        """
        weight, activation = mixture.hidden[expert], mixture.activation
        assert activation.gated and activation.limit is None
        scaled = self._round(self._round(x).astype(np.float32) * factors[:, None])
        if not weight.dynamic or weight.group_size or any(isinstance(s, OutlierColumns) for s in weight.side_products):
            y = self._sums(self._round(x.astype(np.float32) * factors[:, None]), weight)
        else:
            codes, scale = self.quantize(rotated(x, weight.rotation) if weight.rotation > 1 else x)
            acc = exact_int_matmul(codes.astype(np.float32), weight.values).astype(np.float32)
            y = (scale * factors)[:, None] * (weight.scale * acc)
            for side in weight.side_products:
                y = added(y, side.product(scaled, self._round))
            y = y if weight.bias is None else y + weight.bias
        return self.linear(self._gated(self._round(y), activation.function), mixture.down[expert])

    def add_experts(self, found: Array, residual: Array, addend: Array, gate: Array) -> Array:
        """What :meth:`experts` returns, of the sum of the experts, fp32 ``[T, out]``; the arguments are its own."""
        if addend is not None:
            found = found + (addend if gate is None else gate * addend)
        return found if residual is None else self.add(residual, found)

    @silently
    def scalar_gate(self, x: Array, vector: Array) -> Array:
        """``sigmoid(x @ vector)`` of each row: ``[T, in]``, fp32 ``[in]`` -> fp32 ``[T, 1]``, row by row."""
        return sigmoid(product_by_row(x.astype(np.float32), vector[:, None]))
