"""Rotation of a product's input: block Hadamard transforms, online (R4 of QuaRot, https://arxiv.org/abs/2404.00456).

An activation has one int8 scale per token, so a few large elements cost the others their precision. A transform of each
block of neighbouring elements spreads them over the block. It is orthogonal and its own inverse, so the product stays
the same if the weight's rows are transformed too. The weight is transformed once, when it is quantized; the activation
whenever it is quantized.
"""

from __future__ import annotations

import numpy as np

MAX_ROTATION = 256
"""The largest block that kernels transform."""
PART_ELEMENTS = 1 << 16
"""256 KiB of fp32: with as many results they fit a core's cache."""


def is_rotation(block: object) -> bool:
    """Whether ``block`` is a size of blocks: a power of two from 1, which leaves every element as it is, to 256."""
    return type(block) is int and 1 <= block <= MAX_ROTATION and block & (block - 1) == 0


def rotation_of(features: int, limit: int) -> int:
    """The largest block of up to ``limit`` (a power of two) that divides rows of ``features`` elements."""
    return min(limit, features & -features)


def rotated(x: np.ndarray, block: int) -> np.ndarray:
    """Each block of ``block`` neighbouring elements times Sylvester's Hadamard matrix over the root of its size.

    Float ``[..., features]`` -> fp32, likewise, in new memory. For the distances ``h = 1, 2, 4, ..., block / 2``, each
    pair ``a, b`` of elements ``h`` apart, whose first has bit ``h`` of its number in the block clear, becomes ``a + b``
    and ``a - b``, rounded to fp32. At the end each element is multiplied by ``fp32(block ** -0.5)``. Raises
    ``ValueError`` unless ``block`` is a power of two that divides ``features``.
    """
    features = x.shape[-1]
    if block < 1 or block & (block - 1) or features % block:
        raise ValueError(f"rows of {features} elements have no blocks of {block}: give a power of two that divides")
    y = np.array(x, np.float32, order="C")
    if block == 1:
        return y
    blocks = y.reshape(-1, block)
    step = max(PART_ELEMENTS // block, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            np.multiply(_transformed(part.T), np.float32(block**-0.5), out=part.T)
    return y


def _transformed(columns: np.ndarray) -> np.ndarray:
    """The sums and differences of :func:`rotated` for blocks as columns, fp32 ``[block, n]`` -> likewise.

    NumPy adds rows of ``n`` elements many times faster than elements that lie a few apart.
    """
    block, count = columns.shape
    source, target = np.array(columns, order="C"), np.empty((block, count), np.float32)
    h = 1
    while h < block:
        pairs, sums = (array.reshape(-1, 2, h, count) for array in (source, target))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        source, target = target, source
        h *= 2
    return source
