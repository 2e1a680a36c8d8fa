"""Arguments of the attention kernels that come from a specification and a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....backend.cache_values import LayerCache
from ....backend.values import AttentionSpec, LinearBias
from ..arrays import address
from ..constants import DecodeMask, ScoreKind

LARGE_HEAD_DIM, MAX_HEAD_DIM = 256, 512
"""Heads of more than ``LARGE_HEAD_DIM`` elements want compute capability 8.0."""
LOG2_E = math.log2(math.e)
ROPE_FIRST = ("NORM_AFTER_ROPE=1",)
"""The macro of kernels that normalise queries and keys behind their rotation."""
ELEMENTS = HALF, INT8 = "__half", "bminf::int8"
"""Element types of a cache, as the kernels name them."""


def head_pitch_of(cache: LayerCache) -> int:
    """Elements from one token's head to the next token's in the cache: the head size, padded."""
    pitch: int = cache.keys.strides[-2] // cache.keys.itemsize
    return pitch


def defines_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The macros of the kernels that prepare heads."""
    return ROPE_FIRST if spec.norm_after_rope else ()


def max_head_dim(capability: tuple[int, int]) -> int:
    """The largest heads that the kernels take."""
    return MAX_HEAD_DIM if capability >= (8, 0) else LARGE_HEAD_DIM


def element_of(cache: LayerCache) -> str:
    """The element type of a cache, as the kernels name it."""
    return HALF if cache.key_scales is None else INT8


@dataclass(frozen=True)
class Scores:
    """The kernels' arguments for scores of a ``kind``.

    ``scale`` is the factor on dot products. ``bias`` is the address of the biases, slopes or sinks, and
    ``max_distance`` the largest distance of the biases. ``softcap`` is the cap, times log2(e).
    """

    kind: ScoreKind
    scale: float
    bias: int = 0
    max_distance: int = 0
    softcap: float = 0.0

    @property
    def decode_mask(self) -> DecodeMask:
        """The mask for decode attention over a sequence's own tokens."""
        return DECODE_MASKS[self.kind]


DECODE_MASKS = {
    ScoreKind.PLAIN: DecodeMask.CAUSAL,
    ScoreKind.BIASED: DecodeMask.BIASED,
    ScoreKind.CAPPED: DecodeMask.CAPPED,
    ScoreKind.ALIBI: DecodeMask.ALIBI,
    ScoreKind.SINKS: DecodeMask.SINKS,
}


def scores_of(spec: AttentionSpec) -> Scores:
    """The arguments for the scores of ``spec``; the kernels' exponentials are to the base 2."""
    scale, bias = spec.scale * LOG2_E, spec.bias
    if spec.softcap is not None:
        return Scores(ScoreKind.CAPPED, 2 * scale / spec.softcap, softcap=spec.softcap * LOG2_E)
    if isinstance(bias, LinearBias):
        return Scores(ScoreKind.ALIBI, scale, address(bias.slopes))
    if spec.sinks is not None:
        return Scores(ScoreKind.SINKS, scale, address(spec.sinks))
    if bias is not None:
        return Scores(ScoreKind.BIASED, scale, address(bias.values), bias.max_distance)
    return Scores(ScoreKind.PLAIN, scale)


def head_arguments(spec: AttentionSpec) -> tuple[int, int, int, int, float, float]:
    """Norm weights of queries, keys and values, rotary frequencies, epsilon and the rotary scale."""
    queries, keys, values, rope = spec.q_norm, spec.k_norm, spec.v_norm, spec.rope
    norm = queries or keys or values
    return (
        address(queries.weight) if queries else 0,
        address(keys.weight) if keys else 0,
        address(values.weight) if values else 0,
        address(rope.frequencies) if rope else 0,
        norm.eps if norm else 0.0,
        rope.scale if rope else 1.0,
    )
