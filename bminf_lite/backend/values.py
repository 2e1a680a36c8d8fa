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
from math import prod
from typing import Any

import numpy as np

Array = Any
"""``[T, features]`` in docstrings: ``T`` tokens of a step, ``B`` sequences."""
BLOCK_SIZE = 64
"""Tokens of a block of the key-value cache."""
GPTQ_BLOCK = 128
"""Columns of a weight whose rounding errors GPTQ compensates together."""
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
    In a step that ``has_drafts``, a sequence may stand for a draft: it has the table of the
    sequence before it, and its token follows that sequence's token. ``token_types`` int32 ``[T]`` says to
    which segment of a pair of texts a token belongs, for models with a table of these; None stands for zeros.
    ``layer_inputs`` ``[T, layers * size]``, in the activation type, is what layers read beside the residual stream: a
    part of each row for each layer. The input of a model with such layers computes it.

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
    def nbytes(self) -> int:
        """Bytes of all slots, and of the tables that say what is in them."""
        return self.slots * (sum(self.expert_bytes) + 4) + 8 * sum(self.layers) + 16 * 1024


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
    normalise each head before the rotation, and ``v_norm`` each head of values; all have one epsilon. With an
    ``output_gate``, the output is multiplied by the sigmoid of a gate for each of its elements. A ``softcap``, a
    ``LinearBias`` and an ``output_gate`` are for causal self-attention only. ``sinks`` fp32 ``[heads]`` is one more
    score of each head, whose value is zero: it takes a share of the softmax. They are for causal self-attention without
    a ``bias`` or a ``softcap`` only. ``int8_norms`` stand for ``q_norm`` and ``k_norm`` where the cache is int8, and
    give the same scores.
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

    def __post_init__(self) -> None:
        assert sum(x is not None for x in (self.bias, self.softcap, self.sinks)) <= 1

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
        return self.heads * self.head_dim if self.output_gate else 0

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


def latent_block_bytes(row_dim: int, int8: bool, itemsize: int = 2) -> tuple[int, ...]:
    """Bytes of a block in each array of a layer with latents: rows, and for ``int8`` codes two fp16 scales of each."""
    return (BLOCK_SIZE * row_dim, 4 * BLOCK_SIZE) if int8 else (BLOCK_SIZE * row_dim * itemsize,)


def block_bytes(kv_heads: int, head_dim: int, int8: bool, itemsize: int = 2) -> tuple[int, ...]:
    """Bytes of a block in each array of a layer: keys, values, and for ``int8`` codes the fp16 scales of both.

    ``head_dim`` includes the padding of a head, and ``itemsize`` is that of values that are not int8.
    """
    heads = kv_heads * BLOCK_SIZE
    return (heads * head_dim, heads * head_dim, 2 * heads, 2 * heads) if int8 else (heads * head_dim * itemsize,) * 2


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


@dataclass(frozen=True)
class AllTokens:
    """What a layer keeps if every token sees all tokens before it, of which there are at most ``max_tokens``."""

    max_tokens: int | None = None
    keeps_all = True
    per_sequence = False

    def first_visible(self, position: int) -> int:
        """The first token that a token at ``position`` sees. Those before it are not needed any more."""
        return 0

    def tokens_read(self, num_tokens: int) -> int:
        """How many of ``num_tokens`` tokens the last one sees."""
        return num_tokens if self.max_tokens is None else min(num_tokens, self.max_tokens)

    def most_blocks(self, num_tokens: int, max_piece: int, block_size: int = BLOCK_SIZE) -> int:
        """The most blocks that a sequence of ``num_tokens`` tokens holds at once.

        Steps compute up to ``max_piece`` of its tokens, which have their blocks before passed ones are given back.
        """
        return -(-self.tokens_read(num_tokens) // block_size)


@dataclass(frozen=True)
class Window:
    """What a layer keeps if a token sees the last ``size`` tokens, itself included. Methods are :class:`AllTokens`'."""

    size: int
    keeps_all = False
    per_sequence = False

    def first_visible(self, position: int) -> int:
        return max(position - self.size + 1, 0)

    def tokens_read(self, num_tokens: int) -> int:
        return min(num_tokens, self.size)

    def most_blocks(self, num_tokens: int, max_piece: int, block_size: int = BLOCK_SIZE) -> int:
        return min(-(-num_tokens // block_size), -(-(self.size + max_piece) // block_size) + 1)


@dataclass(frozen=True)
class LatestState:
    """What a layer keeps if it sums a sequence's tokens up in a state: one slot for each sequence, and no tokens.

    A slot is a block that is not of tokens. Methods are :class:`AllTokens`'. Without ``has_snapshots``, a sequence goes
    on behind any prefix, and what it finds of that in its slot is arbitrary.
    """

    keeps_all = False
    per_sequence = True

    has_snapshots: bool = True

    def first_visible(self, position: int) -> int:
        return position

    def tokens_read(self, num_tokens: int) -> int:
        return 0

    def most_blocks(self, num_tokens: int, max_piece: int, block_size: int = BLOCK_SIZE) -> int:
        return 1


Retention = AllTokens | Window | LatestState
"""Which tokens of a sequence a layer keeps."""


@dataclass(frozen=True)
class StateArray:
    """What one sequence has in one array of a layer's state: elements of ``shape`` and ``dtype``, found by ``name``.

    None as ``dtype`` is the activation type. With a ``ring``, the array holds inputs of that many of the last tokens,
    each of ``shape``: that of the token at position ``p`` lies in row ``p % ring``. With ``is_sharded``, ranks divide
    the first axis of ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = "float32"
    ring: int = 0
    is_sharded: bool = False

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """The shape of what a slot holds."""
        return (self.ring, *self.shape) if self.ring else self.shape

    def slot_bytes(self, itemsize: int = 2) -> int:
        """Bytes from one slot to the next, a multiple of ``SLOT_ALIGNMENT``; ``itemsize`` is the activation type's."""
        nbytes = prod(self.slot_shape) * (itemsize if self.dtype is None else np.dtype(self.dtype).itemsize)
        return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def shard(self, tp_size: int) -> StateArray:
        """The array of one of ``tp_size`` ranks."""
        if tp_size == 1 or not self.is_sharded:
            return self
        return replace(self, shape=(self.shape[0] // tp_size, *self.shape[1:]))


SLOT_ALIGNMENT = 16
"""Bytes of which the slots of a state's array are multiples, because kernels copy as many at once."""


@dataclass
class LayerCache:
    """Keys and values of one layer in blocks of tokens, each ``[num_blocks, kv_heads, BLOCK_SIZE, head_dim]``.

    They are in the backend's activation type, or int8 codes with a scale per token and head: then the scales are fp16
    ``[num_blocks, kv_heads, BLOCK_SIZE]``. ``group`` says which of a step's ``block_tables`` names the blocks.
    ``memory`` and ``lanes`` belong to the backend: what the arrays lie in, if they can grow in place, and of each array
    its address and the bytes of a block, once they were needed. ``source`` holds the same layer's keys and values of
    the sources of an encoder-decoder.
    """

    keys: Array
    values: Array
    key_scales: Array = None
    value_scales: Array = None
    group: int = 0
    memory: Any = None
    lanes: Sequence[tuple[int, int]] = ()
    source: LayerCache | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return int(self.keys.shape[0])

    @property
    def arrays(self) -> list[Array]:
        """Keys, values, and the scales if there are any."""
        return [x for x in (self.keys, self.values, self.key_scales, self.value_scales) if x is not None]

    @property
    def floats(self) -> list[tuple[Array, int]]:
        """The arrays that are not codes, each with its axis of the tokens of a block."""
        pools = (self.keys, self.values) if self.key_scales is None else (self.key_scales, self.value_scales)
        return [(pool, 2) for pool in pools]

    def set_arrays(self, arrays: Sequence[Array]) -> None:
        """Replace :attr:`arrays` by others in the same order."""
        for name, array in zip(("keys", "values", "key_scales", "value_scales"), arrays, strict=False):
            setattr(self, name, array)

    def clear(self) -> None:
        """Refer to no array and no memory any more."""
        self.keys = self.values = self.key_scales = self.value_scales = self.memory = None


@dataclass
class StateCache:
    """The states of one layer: for each :class:`StateArray` an array ``[slots, *slot_shape]``, found by its name.

    Slot 0, the null slot, belongs to no sequence. The other fields are those of :class:`LayerCache`; the table of the
    group is int32 ``[B, 1]`` and names a slot.
    """

    named: dict[str, Array]
    group: int = 0
    memory: Any = None
    lanes: Sequence[tuple[int, int]] = ()

    def __getitem__(self, name: str) -> Array:
        return self.named[name]

    @property
    def num_blocks(self) -> int:
        """Slots, the null slot included."""
        return int(self.arrays[0].shape[0])

    @property
    def arrays(self) -> list[Array]:
        """The arrays, in the order of the layout."""
        return list(self.named.values())

    def set_arrays(self, arrays: Sequence[Array]) -> None:
        """Replace :attr:`arrays` by others in the same order."""
        self.named = dict(zip(self.named, arrays, strict=True))

    def clear(self) -> None:
        """Refer to no array and no memory any more."""
        self.named, self.memory = {}, None


@dataclass
class LatentCache:
    """The latent rows of one layer in blocks of tokens, ``[num_blocks, BLOCK_SIZE, row_dim]``; see ``LatentSpec``.

    They are in the backend's activation type, or int8 codes with two scales per token, of the latent and of the rotated
    key: then the scales are fp16 ``[num_blocks, BLOCK_SIZE, 2]``. The other fields are those of :class:`LayerCache`.
    """

    rows: Array
    scales: Array = None
    group: int = 0
    memory: Any = None
    lanes: Sequence[tuple[int, int]] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return int(self.rows.shape[0])

    @property
    def arrays(self) -> list[Array]:
        """The rows, and the scales if there are any."""
        return [self.rows] if self.scales is None else [self.rows, self.scales]

    @property
    def floats(self) -> list[tuple[Array, int]]:
        """The array that is not of codes, with its axis of the tokens of a block."""
        return [(self.rows if self.scales is None else self.scales, 1)]

    def set_arrays(self, arrays: Sequence[Array]) -> None:
        """Replace :attr:`arrays` by others in the same order."""
        self.rows, self.scales = arrays if len(arrays) == 2 else (arrays[0], None)

    def clear(self) -> None:
        """Refer to no array and no memory any more."""
        self.rows = self.scales = self.memory = None


AnyCache = LayerCache | StateCache | LatentCache
"""What a layer of any kind keeps."""
