"""Arguments of the attention kernels that come from a specification and a cache."""

from __future__ import annotations

from ....backend.values import AttentionSpec, LayerCache
from ..arrays import address

MAX_HEAD_DIM = 256
ELEMENTS = HALF, INT8 = "__half", "bminf::int8"
"""Element types of a cache, as the kernels name them."""


def head_pitch_of(cache: LayerCache) -> int:
    """Elements from one token's head to the next token's in the cache: the head size, padded."""
    pitch: int = cache.keys.strides[-2] // cache.keys.itemsize
    return pitch


def element_of(cache: LayerCache) -> str:
    """The element type of a cache, as the kernels name it."""
    return HALF if cache.key_scales is None else INT8


def bias_arguments(spec: AttentionSpec) -> tuple[int, int]:
    """The address of the score biases, and the largest distance that they cover."""
    return (0, 0) if spec.bias is None else (address(spec.bias.values), spec.bias.max_distance)


def head_arguments(spec: AttentionSpec) -> tuple[int, int, int, float, float]:
    """Norm weights of queries and keys, rotary frequencies, epsilon and the rotary scale."""
    norm = spec.q_norm or spec.k_norm
    return (
        address(spec.q_norm.weight) if spec.q_norm else 0,
        address(spec.k_norm.weight) if spec.k_norm else 0,
        address(spec.rope.frequencies) if spec.rope else 0,
        norm.eps if norm else 0.0,
        spec.rope.scale if spec.rope else 1.0,
    )
