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


def pairs_of_rotation(head_dim: int) -> int:
    """Pairs of elements in a block of :func:`rotated_heads`: the largest power of two up to 128 that divides a half.

    0 for heads of an odd size, which stay as they are.
    """
    return 0 if head_dim % 2 else rotation_of(head_dim // 2, MAX_ROTATION // 2)


def rotated_heads(x: np.ndarray) -> np.ndarray:
    """Heads for an int8 cache, float ``[..., head_dim]`` -> fp32, likewise, in new memory.

    Queries and keys are transformed alike, so their scores stay the same, and an element that is large in every key is
    spread over the head, whose one scale it would enlarge. Rotary embedding has pairs ``i`` and ``i + head_dim / 2``. A
    block is :func:`pairs_of_rotation` neighbouring pairs, first elements before second ones, and is transformed as in
    :func:`rotated`; it is the whole head if ``head_dim`` is a power of two of at most ``MAX_ROTATION``.
    """
    head_dim, pairs = x.shape[-1], pairs_of_rotation(x.shape[-1])
    if pairs == 0:
        return np.array(x, np.float32)
    blocks = x.reshape(*x.shape[:-1], 2, head_dim // 2 // pairs, pairs).swapaxes(-3, -2)
    turned = rotated(blocks.reshape(*x.shape[:-1], head_dim), 2 * pairs).reshape(blocks.shape)
    return turned.swapaxes(-3, -2).reshape(x.shape)


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
