"""The values that layers and backends exchange. They hold arrays of a device and do not name it.

An ``Array`` is a backend's: a NumPy array, a CuPy array, or a deferred value, which the backend computes when the next
operation reads it. Layers pass arrays on and read nothing of them but ``shape``.

A step processes the new tokens of several sequences at once, packed one after another without padding. Prefilling
ragged prompts and decoding one token of each sequence are therefore the same operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

Array = Any
"""``[T, features]`` in docstrings: ``T`` tokens of a step, ``B`` sequences."""
BLOCK_SIZE = 64
"""Tokens of a block of the key-value cache."""
GPTQ_BLOCK = 128
"""Columns of a weight whose rounding errors GPTQ compensates together."""
GUESS_HEAT = 0.5
"""The temperature at which a draft model's guesses are drawn, of that of the sequence."""
STATE_CHUNK = 16
"""Tokens of a chunk of a gated DeltaNet or of Mamba 2. Decoding reads a state and half a chunk's rows, and writes a
state once per chunk. The fewest bytes are those of 16 tokens for a DeltaNet with heads of 128 elements and three value
heads to a key head, and of 14 to 21 for the published sizes of Mamba 2."""
SEGMENT = 1024
"""Keys of a segment, within which attention sums in one order; segments are merged in order of position."""
LATENT_SEGMENT = 256
"""The same of latent rows, which all heads read at once: shorter, for a block of a GPU computes several heads."""
POOLING_LANES = 8
"""The vectors of a text's tokens are summed in this many parts, which then are added."""
NULL_BLOCK = 0
"""The block that no sequence owns. Tables name it where a sequence has no block."""


class ProductEpilogue(Enum):
    """What becomes of a product ``y``, fp32 ``[T, out]`` with its bias.

    ``STORE`` rounds it to the activation type, ``STORE_FP32`` does not. The others round it first: ``ADD`` adds it to
    the residual stream in fp32; ``GATE`` gives ``f(gate) * up`` of its halves ``[gate, up]``; ``ACTIVATE`` gives
    ``f(y)``. ``f`` is computed in fp32, and its result is rounded.
    """

    STORE = "store"
    STORE_FP32 = "store fp32"
    ADD = "add"
    GATE = "gate"
    ACTIVATE = "activate"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own hash takes longer than a look-up


class Pooling(Enum):
    """What one vector is made of the vectors of a sequence's tokens, see :meth:`.base.Backend.pool`.

    ``FIRST`` and ``LAST`` are the vector of the first or the last token, ``MAX`` has the largest value of each feature,
    and ``MEAN`` is the sum over the number of tokens. ``MEAN_SQRT_LEN`` is the sum over the root of that number.
    ``WEIGHTED_MEAN`` weights each token with its position, counted from 1.
    """

    FIRST = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST = "lasttoken"


@dataclass
class ForwardBatch:
    """The new tokens of ``B`` sequences, ``T`` in all, on the device.

    ``tokens`` is int32 ``[T]``. Sequence ``b`` owns ``tokens[cu_seqlens[b]:cu_seqlens[b + 1]]`` (``cu_seqlens`` is
    int32 ``[B + 1]``), and ``context_lens[b]`` of its tokens are in the cache before the step (int32 ``[B]``).

    ``block_tables`` has a table int32 ``[B, W]`` for each group of layers (see ``CacheLayout``): token ``p`` of
    sequence ``b`` lies in block ``table[b, p // BLOCK_SIZE]``. In a group of layers with states ``table[b, 0]`` is the
    slot of sequence ``b``, and ``W`` is 1. The sources of an encoder-decoder have
    ``source_tables``, a table of the same form, and ``source_lens``, int32 ``[B]``.

    The other numbers are known on the host: ``batch_size`` is ``B``; ``num_decodes`` says how many sequences, which
    come first, have one new token each; ``max_query_len`` is the largest number of new tokens of a sequence;
    ``max_context_len`` and ``max_source_len`` are upper bounds of the tokens of a sequence after the step and of a
    source. ``logit_rows`` int32 ``[L]`` are the tokens whose logits are wanted; None stands for the last token of each
    sequence. If these are the only ones and some sequence has several tokens, ``last_positions`` int32 ``[B]`` has the
    position of each sequence's last token, 0 for a sequence without tokens: then the last layer computes no other rows
    behind its keys and values. ``lora_ids`` int32 ``[T]`` are the slots of the tokens' adapters, 0 for none (see
    :mod:`.adapter_slots`), and ``logit_lora_ids`` int32 ``[L]`` those of the rows of logits; None if no token has one.
    In a step that ``has_drafts``, a sequence may stand for a draft: it has the table of the sequence before it, and its
    token follows that sequence's token. ``draft_offsets`` int32 ``[B]`` say how many sequences before a sequence belong
    to its text so, at most 16; None where only the tables tell. ``token_types`` int32 ``[T]`` says to which segment of
    a pair of texts a token belongs, for models with a table of these; None stands for zeros. ``layer_inputs``
    ``[T, layers * size]``, in the activation type, is what layers read beside the residual stream: a part of each row
    for each layer. The input of a model with such layers computes it.

    A step may be padded: with sequences without tokens, and with tokens behind those of the last sequence. What is
    computed of such tokens changes nothing else.
    """

    tokens: Array
    cu_seqlens: Array
    context_lens: Array
    block_tables: tuple[Array, ...]
    batch_size: int
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0
    has_drafts: bool = False
    draft_offsets: Array = None
    logit_rows: Array = None
    source_tables: Array = None
    source_lens: Array = None
    max_source_len: int = 0
    last_positions: Array = None
    lora_ids: Array = None
    logit_lora_ids: Array = None
    token_types: Array = None
    layer_inputs: Array = None

    @classmethod
    def packed(
        cls,
        array: Callable[[np.ndarray], Array],
        tokens: Sequence[Sequence[int] | np.ndarray] | np.ndarray,
        context_lens: Sequence[int] | None = None,
        block_tables: Sequence[np.ndarray] = (),
        source_tables: np.ndarray | None = None,
        source_lens: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """A step of one or more new ``tokens`` of each sequence: by default from their start, and without a cache.

        ``array`` copies an array to the device: a backend's ``array`` or ``upload``.
        """
        counts = [len(row) for row in tokens]
        context_lens = [0] * len(counts) if context_lens is None else context_lens
        several = [b for b, count in enumerate(counts) if count > 1]
        lasts = np.array([max(p + n - 1, 0) for p, n in zip(context_lens, counts, strict=True)], np.int32)
        return cls(
            tokens=array(np.concatenate(tokens).astype(np.int32)),
            cu_seqlens=array(np.cumsum([0, *counts], dtype=np.int32)),
            context_lens=array(np.array(context_lens, np.int32)),
            block_tables=tuple(array(np.asarray(table, np.int32)) for table in block_tables),
            batch_size=len(counts),
            max_query_len=max(counts),
            max_context_len=max(p + n for p, n in zip(context_lens, counts, strict=True)),
            num_decodes=several[0] if several else len(counts),
            source_tables=None if source_tables is None else array(np.asarray(source_tables, np.int32)),
            source_lens=None if source_lens is None else array(np.array(source_lens, np.int32)),
            max_source_len=max(source_lens or (0,)),
            last_positions=array(lasts) if several else None,
        )

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return self.num_decodes == self.batch_size

    @cached_property
    def parts(self) -> tuple[ForwardBatch | None, ForwardBatch | None]:
        """The first ``num_decodes`` sequences and the others, each as a batch, or None if there is no such sequence.

        ``cu_seqlens`` of the second still counts from the first token of the whole step.
        """
        count = self.num_decodes
        if count in (0, self.batch_size):
            return (self, None) if count else (None, self)
        return self._part(slice(0, count), 1), self._part(slice(count, self.batch_size), self.max_query_len)

    def _part(self, rows: slice, max_query_len: int) -> ForwardBatch:
        return replace(
            self,
            tokens=self.tokens[rows.start : None if rows.start else rows.stop],
            cu_seqlens=self.cu_seqlens[rows.start : rows.stop + 1],
            context_lens=self.context_lens[rows],
            block_tables=tuple(table[rows] for table in self.block_tables),
            batch_size=rows.stop - rows.start,
            max_query_len=max_query_len,
            num_decodes=0 if rows.start else rows.stop,
            logit_rows=None,
            last_positions=None,
            token_types=None,
            layer_inputs=None,
            draft_offsets=None if self.draft_offsets is None else self.draft_offsets[rows],
            source_tables=None if self.source_tables is None else self.source_tables[rows],
            source_lens=None if self.source_lens is None else self.source_lens[rows],
        )


def sequential_tables(sequences: int, tokens: int) -> np.ndarray:
    """A block table int32 ``[sequences, W]`` with room for ``tokens`` tokens each: blocks from 1 on, in order."""
    width = -(-max(tokens, 1) // BLOCK_SIZE)
    return np.arange(1, 1 + sequences * width, dtype=np.int32).reshape(sequences, width)


@dataclass(frozen=True)
class ExpertSlots:
    """Slots of device memory for experts of several layers, all of which lie on the host.

    ``expert_bytes`` are the bytes of each of the two matrices of an expert. ``layers`` has the number of experts of
    each layer. There is a slot for each expert of the largest layer, at least.
    """

    expert_bytes: tuple[int, int]
    slots: int
    layers: tuple[int, ...]

    @property
    def missing(self) -> int:
        """Experts for which there is no slot."""
        return sum(self.layers) - self.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, with its place in the tables."""
        return sum(self.expert_bytes) + 4

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, and of the tables that say what is in them."""
        return self.slots * self.slot_bytes + 8 * sum(self.layers) + 16 * 1024


@dataclass(frozen=True)
class Placement:
    """Where a model's weights live, for a backend whose memory is not the host's.

    ``streamed`` are the numbers of the layers whose matrices stay on the host and pass through ``slots`` slots of
    device memory of ``slot_size`` bytes each. Layers are numbered through all stacks, and each streamed stack has its
    own slots. With ``host_tables``, embedding tables stay on the host, and the device reads rows from there.
    ``experts`` are pools of slots for the experts of mixtures: a mixture has that of its ``expert_bytes``.
    """

    streamed: tuple[int, ...] = ()
    slots: int = 2
    slot_size: int = 0
    host_tables: bool = False
    experts: tuple[ExpertSlots, ...] = ()


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
class Xielu:
    """The numbers of xIELU (https://arxiv.org/abs/2411.13010), an activation whose two slopes a layer has learned.

    Of ``x`` above 0 it is ``positive * x^2 + beta * x``, else ``negative * (expm1(min(x, eps)) - x) + beta * x``.
    """

    positive: float
    negative: float
    beta: float
    eps: float


@dataclass(frozen=True)
class LinearBias:
    """ALiBi (https://arxiv.org/abs/2108.12409): the bias ``slope * (key - query)`` that attention adds to a score.

    ``slopes`` is fp32 ``[heads]``.
    """

    slopes: Array


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped key-value heads (https://arxiv.org/abs/2305.13245).

    Query head ``h`` reads key-value head ``h // (heads // kv_heads)``. ``scale`` multiplies the scores, to which
    ``bias`` is then added. ``softcap``, which excludes a bias, limits a score ``s`` to ``softcap * tanh(s / softcap)``.
    In causal self-attention a query at position ``p`` sees keys ``p - window < j <= p`` (all ``j <= p`` without a
    window), and in an encoder's those less than ``window`` tokens before or behind it. ``q_norm`` and ``k_norm``
    normalise each head before the rotation, or behind it with ``norm_after_rope``, and ``v_norm`` each head of values;
    all have one epsilon. ``norm_after_rope`` excludes a ``bias``, a ``softcap`` and ``sinks``. With an ``output_gate``,
    the output is multiplied by the ``gate_function`` (``sigmoid`` or ``softplus``) of a gate for each of its elements,
    or with ``gate_by_head`` for each head. A ``softcap``, a ``LinearBias`` and an ``output_gate`` are for causal
    self-attention only. ``sinks`` fp32 ``[heads]`` is one more score of each head, whose value is zero: it takes a
    share of the softmax. They are for causal self-attention without a ``bias`` or a ``softcap`` only. ``int8_norms``
    stand for ``q_norm`` and ``k_norm`` where the cache is int8, and give the same scores.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    rope: Rope | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    bias: RelativeBias | LinearBias | None = None
    softcap: float | None = None
    sinks: Array | None = None
    output_gate: bool = False
    int8_norms: tuple[Norm, Norm] | None = None
    v_norm: Norm | None = None
    norm_after_rope: bool = False
    gate_function: str = "sigmoid"
    gate_by_head: bool = False

    def __post_init__(self) -> None:
        assert sum(x is not None for x in (self.bias, self.softcap, self.sinks)) <= 1 - self.norm_after_rope

    def for_cache(self, int8: bool) -> AttentionSpec:
        """The attention over an int8 or another cache."""
        if not int8 or self.int8_norms is None:
            return self
        return replace(self, q_norm=self.int8_norms[0], k_norm=self.int8_norms[1], int8_norms=None)

    def shard(self, tp_size: int) -> AttentionSpec:
        """The attention of one of ``tp_size`` ranks, which divide the heads; with fewer heads of keys, each has one.

        ``bias`` and ``sinks`` already have the rank's heads.
        """
        return replace(self, heads=self.heads // tp_size, kv_heads=max(1, self.kv_heads // tp_size))

    @property
    def gate_features(self) -> int:
        """Width of the output's gate, which lies before the queries; 0 without one."""
        return self.heads * (1 if self.gate_by_head else self.head_dim) if self.output_gate else 0

    @property
    def qkv_features(self) -> int:
        """Width of the fused query, key, value projection, and of the output's gate before them."""
        return self.gate_features + (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class PositionScale:
    """A factor on queries that grows with their position (Llama 4, Mistral 4): ``1 + beta * ln(1 + p // original)``.

    It is computed in fp32.
    """

    beta: float
    original: int


@dataclass(frozen=True)
class LatentSpec:
    """Attention whose heads read one compressed row per token (https://arxiv.org/abs/2405.04434, section 2.1).

    The row of a token is a latent of ``rank`` elements, normalised by ``norm``, and behind it a key of ``rope_dim``
    elements, rotated by ``rope``. Head ``h`` would expand the latent to a key of ``nope_dim`` elements and a value of
    ``value_dim``. Instead, the matrix of the keys is absorbed into the query, and that of the values is applied to the
    mean of the latents. So all heads read the same rows. ``scale`` multiplies the scores. ``position_scale``
    multiplies the queries, if it is given.
    """

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    scale: float
    norm: Norm
    rope: Rope
    position_scale: PositionScale | None = None

    @property
    def row_dim(self) -> int:
        """Elements that a token has in the cache."""
        return self.rank + self.rope_dim

    @property
    def query_features(self) -> int:
        """Width of the projected queries: of each head first what the latent meets, then what is rotated."""
        return self.heads * (self.nope_dim + self.rope_dim)


@dataclass(frozen=True)
class ShortConvolution:
    """A causal convolution of each channel: ``y[t] = sum(taps[j] * x[t - j]) + bias``, in the order of ``j`` from 0.

    ``taps`` are fp32 ``[number of taps, channels]``, without gaps; ``bias`` is fp32 ``[channels]``.
    """

    taps: Array
    bias: Array = None


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet (https://arxiv.org/abs/2412.06464), see :mod:`.delta_net`.

    Value head ``h`` reads key head ``h // (value_heads // key_heads)``. The ``convolution`` has a channel for each
    element of queries, keys and values. ``decay_rates`` are fp32 ``[value_heads]``, not positive, and ``decay_bias``
    too. ``norm`` is that of a head's output, whose weight fp32 ``[value_dim]`` all heads share. Rates of learning are
    below ``max_rate``.

    With ``per_channel`` (Kimi Delta Attention, https://arxiv.org/abs/2510.26692) each element of a key has a decay of
    its own, there are as many key heads as value heads, and ``decay_bias`` is fp32 ``[value_heads * key_dim]``. The
    gate of an output is then a sigmoid.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: ShortConvolution
    decay_rates: Array
    decay_bias: Array
    norm: Norm
    max_rate: float = 1.0
    per_channel: bool = False

    @property
    def key_features(self) -> int:
        """Width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_features(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_features + self.value_features


@dataclass(frozen=True)
class GatedNorm:
    """An RMSNorm of each of ``groups`` equal parts of a row, beside a gate: ``norm(x * silu(gate))``.

    With ``norm_first`` it is ``norm(x) * silu(gate)``. ``norm.weight`` is fp32 ``[features]``, of the whole row.
    """

    norm: Norm
    groups: int = 1
    norm_first: bool = False


@dataclass(frozen=True)
class Mamba2Spec:
    """A state space of Mamba 2 (https://arxiv.org/abs/2405.21060), see :mod:`.mamba2`.

    Head ``h`` reads B and C of group ``h // (heads // groups)``. The ``convolution`` has a channel for each element of
    x, B and C, and a bias or none. ``decay_rates``, which are not positive, ``step_bias`` and ``skip`` are fp32
    ``[heads]``. ``step_limits`` are the least and the largest time step. Without a ``norm`` the output is multiplied by
    SiLU of the gate alone.
    """

    groups: int
    heads: int
    head_dim: int
    state_dim: int
    convolution: ShortConvolution
    decay_rates: Array
    step_bias: Array
    skip: Array
    step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: GatedNorm | None = None

    @property
    def features(self) -> int:
        """Width of x, of the gate and of the result."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.features + 2 * self.groups * self.state_dim
