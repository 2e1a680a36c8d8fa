"""The values that layers and backends exchange. They hold arrays of a device and do not name it.

An ``Array`` is a backend's: a NumPy array, a CuPy array, or a deferred value, which the backend computes when the next
operation reads it. Layers pass arrays on and read nothing of them but ``shape``.

A step processes the new tokens of several sequences at once, packed one after another without padding. Prefilling
ragged prompts and decoding one token of each sequence are therefore the same operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
"""``[T, features]`` in docstrings: ``T`` tokens of a step, ``B`` sequences."""
CACHE_BLOCK = 256
"""The key-value cache grows in blocks of this many tokens."""


@dataclass
class ForwardBatch:
    """The new tokens of ``B`` sequences, ``T`` in all, on the device.

    ``tokens`` is int32 ``[T]``. Sequence ``b`` owns ``tokens[cu_seqlens[b]:cu_seqlens[b + 1]]`` (``cu_seqlens`` is
    int32 ``[B + 1]``). Its row of the cache is ``slots[b]``, which holds ``context_lens[b]`` tokens before the step
    (both int32 ``[B]``). ``batch_size``, ``max_query_len`` and ``max_context_len`` are known on the host: ``B``, the
    largest number of new tokens of a sequence, and an upper bound of the tokens of a sequence after the step.
    """

    tokens: Array
    cu_seqlens: Array
    context_lens: Array
    slots: Array
    batch_size: int
    max_query_len: int
    max_context_len: int

    @classmethod
    def packed(
        cls,
        array: Callable[[np.ndarray], Array],
        tokens: Sequence[Sequence[int] | np.ndarray] | np.ndarray,
        context_lens: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """A step of one or more new ``tokens`` of each sequence: by default from their start, in slots 0, 1, ...

        ``array`` copies an array to the device: a backend's method of that name.
        """
        counts = [len(row) for row in tokens]
        context_lens = [0] * len(counts) if context_lens is None else context_lens
        slots = range(len(counts)) if slots is None else slots
        return cls(
            tokens=array(np.concatenate(tokens).astype(np.int32)),
            cu_seqlens=array(np.cumsum([0, *counts], dtype=np.int32)),
            context_lens=array(np.array(context_lens, np.int32)),
            slots=array(np.array(slots, np.int32)),
            batch_size=len(counts),
            max_query_len=max(counts),
            max_context_len=max(p + n for p, n in zip(context_lens, counts, strict=True)),
        )

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return self.max_query_len == 1


@dataclass(frozen=True)
class Placement:
    """Where a model's weights live, for a backend whose memory is not the host's.

    ``streamed`` are the numbers of the layers whose matrices stay on the host and pass through ``slots`` slots of
    device memory of ``slot_size`` bytes each. Layers are numbered through all stacks, and each streamed stack has its
    own slots. With ``host_tables``, embedding tables stay on the host, and the device reads rows from there.
    """

    streamed: tuple[int, ...] = ()
    slots: int = 2
    slot_size: int = 0
    host_tables: bool = False


@dataclass(frozen=True)
class Norm:
    """A normalization over the last axis, computed in fp32.

    With ``center`` it is LayerNorm (mean subtracted, ``weight`` and ``bias``), without it RMSNorm
    (https://arxiv.org/abs/1910.07467). ``weight`` and ``bias`` are fp32 ``[features]``.
    """

    weight: Array
    eps: float
    bias: Array | None = None
    center: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), the halves of a head rotated against each other.

    The angle of pair ``i`` at position ``p`` is ``fp32(p) * frequencies[i]`` in fp32; cosine and sine are multiplied
    by ``scale`` (YaRN's attention factor, else 1). ``frequencies`` is fp32 ``[head_dim / 2]``.
    """

    frequencies: Array
    scale: float = 1.0


@dataclass(frozen=True)
class RelativeBias:
    """The bias that attention adds to a score for the distance ``key - query`` of two positions.

    ``values`` is fp32 ``[heads, 2 * max_distance + 1]``: a column for each distance from ``-max_distance`` to
    ``max_distance``. A longer distance counts as ``max_distance``.
    """

    values: Array
    max_distance: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped key-value heads (https://arxiv.org/abs/2305.13245).

    Query head ``h`` reads key-value head ``h // (heads // kv_heads)``. ``scale`` multiplies the scores, to which
    ``bias`` is then added. In causal self-attention a query at position ``p`` sees keys ``p - window < j <= p`` (all
    ``j <= p`` without a window). ``q_norm`` and ``k_norm`` normalise each head before the rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    rope: Rope | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    bias: RelativeBias | None = None

    @property
    def qkv_features(self) -> int:
        """Width of the fused query, key, value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass
class LayerCache:
    """Keys and values of one layer, each ``[slots, kv_heads, capacity, head_dim]``.

    They are in the backend's activation type, or int8 codes with a scale per token and head: then the scales are fp16
    ``[slots, kv_heads, capacity]``.
    """

    keys: Array
    values: Array
    key_scales: Array = None
    value_scales: Array = None

    @property
    def capacity(self) -> int:
        """Tokens that fit per slot."""
        return int(self.keys.shape[2])
