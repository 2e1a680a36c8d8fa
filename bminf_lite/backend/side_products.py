"""Side products: what is added to the product with a weight's matrix, before the bias.

A side product makes inputs, ``[T, n]`` in the activation type, of the product's input, and has values ``[out, n]``. It
adds ``inputs @ values.T``, summed in fp32. A sum of zero adds nothing: the product keeps its bits, the sign of a zero
too. Outlier columns are one kind, adapters another; :mod:`.adapter_slots` has those that each row of a step chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .functions import product_by_row

Rounding = Callable[[np.ndarray], np.ndarray]
"""Rounds to the activation type."""


class SideProduct(Protocol):
    """A product beside a weight ``[out, in]``."""

    def product(self, x: np.ndarray, rounded: Rounding) -> np.ndarray:
        """What is added, fp32 ``[T, out]``, of the product's input ``[T, in]``; each row is computed by itself."""

    def remaining(self, x: np.ndarray) -> np.ndarray:
        """What the matrix multiplies, ``[T, in]``: ``x``, or ``x`` without what this side product takes."""

    def within(self, columns: slice) -> SideProduct | None:
        """The side product of some columns, counted from the first of these; None if it reads none of them."""


@dataclass(frozen=True)
class OutlierColumns:
    """Input columns of an int8 weight that stay fp16, because their large inputs would cost the others precision.

    ``index`` is int32 ``[n]``, ascending; ``values`` is fp16 ``[out, n]``, or fp32 on the CPU's backend. The weight's
    codes are zero there, and for the matrix these inputs count as zeros.
    """

    index: np.ndarray
    values: np.ndarray

    def product(self, x: np.ndarray, rounded: Rounding) -> np.ndarray:
        return product_by_row(rounded(x[:, self.index]).astype(np.float32), self.values.T)

    def remaining(self, x: np.ndarray) -> np.ndarray:
        rest = np.array(x)
        rest[:, self.index] = 0
        return rest

    def within(self, columns: slice) -> OutlierColumns | None:
        found = (self.index >= columns.start) & (self.index < columns.stop)
        if not found.any():
            return None
        return OutlierColumns(self.index[found] - np.int32(columns.start), self.values[:, found])


@dataclass(frozen=True)
class Adapter:
    """A low-rank addition ``scale * b @ a`` to a weight ``[out, in]`` (LoRA, https://arxiv.org/abs/2106.09685).

    ``a`` is ``[rank, in]`` and ``b`` ``[out, rank]``, both float. The inputs of the side product are
    ``scale * (x @ a.T)``, of ``x`` in the activation type, summed and scaled in fp32; its values are ``b``.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float = 1.0

    def inputs(self, x: np.ndarray, rounded: Rounding) -> np.ndarray:
        """What ``b`` multiplies, ``[T, rank]`` in the activation type."""
        return rounded(np.float32(self.scale) * product_by_row(rounded(x).astype(np.float32), self.a.T))

    def product(self, x: np.ndarray, rounded: Rounding) -> np.ndarray:
        return product_by_row(self.inputs(x, rounded).astype(np.float32), self.b.T)

    def remaining(self, x: np.ndarray) -> np.ndarray:
        return x

    def within(self, columns: slice) -> Adapter:
        return Adapter(self.a[:, columns], self.b, self.scale)

    def check(self, shape: tuple[int, int]) -> None:
        """Raise ``ValueError`` unless it fits a weight of ``shape``, ``(out, in)``."""
        (out, features), rank = shape, self.a.shape[0]
        if self.a.shape != (rank, features) or self.b.shape != (out, rank):
            raise ValueError(
                f"an adapter of {list(self.a.shape)} and {list(self.b.shape)} does not fit a weight "
                f"[{out}, {features}]: give a [rank, {features}] and b [{out}, rank]"
            )


def added(y: np.ndarray, side: np.ndarray) -> np.ndarray:
    """``y + side``, fp32 ``[T, out]``; where ``side`` is zero, ``y``."""
    total: np.ndarray = np.where(side == 0, y, y + side)
    return total
