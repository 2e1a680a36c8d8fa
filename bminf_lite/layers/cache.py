"""What the layers of a model keep of the tokens that they have seen, and the memory in which a device keeps it.

Each layer states a layout: :class:`KeyValues` or a :class:`Latent` of each token, or a :class:`State` of each sequence.
Layouts with equal retention form a group, whose layers share block tables: what one of them keeps of a token lies in
the block of the same number in each. All states form one group, in which a sequence has one slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

import numpy as np

from ..backend.base import Backend
from ..backend.cache_values import (
    AllTokens,
    AnyCache,
    LatentCache,
    LatestState,
    LayerCache,
    Retention,
    StateArray,
    StateCache,
    Window,
    block_bytes,
    latent_block_bytes,
)
from ..backend.values import BLOCK_SIZE, NULL_BLOCK, sequential_tables


@dataclass(frozen=True)
class KeyValues:
    """A layer with ``kv_heads`` heads of keys and values, each of ``head_dim`` elements, for each token.

    With ``int8`` they are codes, with an fp16 scale per head and token. With a ``window`` the layer sees that many
    tokens.
    """

    kv_heads: int
    head_dim: int
    int8: bool = False
    window: int | None = None

    @property
    def retention(self) -> Retention:
        """Which tokens are kept."""
        return AllTokens() if self.window is None else Window(self.window)

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that one token takes; ``itemsize`` is that of the activation type."""
        return 2 * self.kv_heads * (self.head_dim + 2 if self.int8 else self.head_dim * itemsize)

    def bytes_per_sequence(self, itemsize: int = 2) -> int:
        """Bytes that a sequence takes beside those of its tokens."""
        return 0

    @property
    def num_shards(self) -> int:
        """What ranks divide: their number is a divisor of it. 0 if nothing is divided."""
        return self.kv_heads

    def block_bytes(self, itemsize: int = 2, head_pad: int = 1) -> tuple[int, ...]:
        """Bytes of a block in each array, with heads padded to multiples of ``head_pad`` elements."""
        padded = -(-self.head_dim // head_pad) * head_pad
        return block_bytes(self.kv_heads, padded, self.int8, itemsize)

    def with_int8(self, int8: bool) -> KeyValues:
        """The same with keys and values in int8, or not."""
        return replace(self, int8=int8)

    def with_drafts(self, num_draft_tokens: int) -> KeyValues:
        """The same where a step checks up to ``num_draft_tokens`` drafts of a sequence."""
        return self

    def shard(self, tp_size: int) -> KeyValues:
        """What one of ``tp_size`` ranks keeps: its part of the heads, or one that other ranks have too."""
        return replace(self, kv_heads=max(1, self.kv_heads // tp_size))

    def make(self, ops: Backend, num_blocks: int, max_blocks: int | None) -> LayerCache:
        """The layer's memory on a device, which can grow to ``max_blocks`` blocks. A rank has its part of the heads."""
        heads = self.shard(ops.communicator.tp_size).kv_heads
        return ops.layer_cache(num_blocks, heads, self.head_dim, int8=self.int8, max_blocks=max_blocks)


@dataclass(frozen=True)
class Latent:
    """A layer with one row for each token: a latent of ``rank`` elements, and a rotated key of ``rope_dim``.

    All heads read it, so there are none here, and every rank of a model keeps whole rows. With ``int8`` a row is codes
    with two fp16 scales: of its latent, and of its key.
    """

    rank: int
    rope_dim: int
    int8: bool = False

    @property
    def retention(self) -> Retention:
        """Which tokens are kept: all."""
        return AllTokens()

    @property
    def row_dim(self) -> int:
        """Elements of a row."""
        return self.rank + self.rope_dim

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """As :meth:`KeyValues.bytes_per_token`."""
        return sum(self.block_bytes(itemsize)) // BLOCK_SIZE

    def bytes_per_sequence(self, itemsize: int = 2) -> int:
        """As :meth:`KeyValues.bytes_per_sequence`."""
        return 0

    @property
    def num_shards(self) -> int:
        """As :attr:`KeyValues.num_shards`."""
        return 0

    def block_bytes(self, itemsize: int = 2, head_pad: int = 1) -> tuple[int, ...]:
        """Bytes of a block in each array, with rows padded to multiples of ``head_pad`` elements."""
        return latent_block_bytes(-(-self.row_dim // head_pad) * head_pad, self.int8, itemsize)

    def with_int8(self, int8: bool) -> Latent:
        """The same with rows in int8, or not."""
        return replace(self, int8=int8)

    def with_drafts(self, num_draft_tokens: int) -> Latent:
        """As :meth:`KeyValues.with_drafts`."""
        return self

    def shard(self, tp_size: int) -> Latent:
        """As :meth:`KeyValues.shard`: whole rows."""
        return self

    def make(self, ops: Backend, num_blocks: int, max_blocks: int | None) -> LatentCache:
        """As :meth:`KeyValues.make`."""
        return ops.latent_cache(num_blocks, self.row_dim, int8=self.int8, max_blocks=max_blocks)


@dataclass(frozen=True)
class State:
    """A layer that sums the tokens of a sequence up in a state: ``arrays`` of the same size for any number of tokens.

    A sequence has a slot, a row of each array. What a layer does with it follows this contract, on which drafts,
    preemption and the reuse of prefixes rely:

    - Arrays with a ``ring`` hold inputs of the last tokens. A step leaves those of its new tokens there, at their
      positions modulo the ring's size, and reads those of earlier tokens before it overwrites them. The other arrays
      hold the state at the end of a chunk, and one of them holds the position of that end.
    - A token is computed from the state at the start of its chunk and the inputs of the chunk up to itself, in an order
      of sums that depends on its position alone. So its bits do not depend on how a prompt is cut.
    - A step brings the state to the last chunk's end at or before the position of its last token that is no draft, and
      not further: the inputs from there on lie in the ring. Where the last token ends a chunk, a later step does it,
      when it begins. Tokens before the ``context_lens`` of a sequence's first row are accepted. Rows of drafts follow
      that row, with the same slot (see ``has_drafts``); they advance nothing. So rejected drafts are overwritten by
      position, and nothing is copied, committed or replayed, also where a check crosses the end of a chunk.
    - A sequence at position 0 reads no state. So no slot is ever cleared. Padding has slot 0, and its rows are at
      position 0: they may write there, in any order, and read nothing.

    It follows that after a step the slot serves to go on at the position of the last token that is no draft, and at
    the one behind it. ``ring`` is stated for steps without drafts: the tokens of a chunk. A short convolution has no
    state but its ring, whose length is that of its kernel. :meth:`with_drafts` adds the drafts of a step.

    Without ``has_snapshots``, the state is one that no result depends on, such as that of a draft: a prefix is reused
    without it, and a sequence then finds finite numbers of others in its slot, or zeros.
    """

    arrays: tuple[StateArray, ...]
    int8: ClassVar[bool] = False
    has_snapshots: bool = True

    @property
    def retention(self) -> Retention:
        """Which tokens are kept: none."""
        return LatestState(self.has_snapshots)

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that one token takes: none."""
        return 0

    def bytes_per_sequence(self, itemsize: int = 2) -> int:
        """Bytes that a sequence takes; ``itemsize`` is that of the activation type."""
        return sum(self.block_bytes(itemsize))

    @property
    def num_shards(self) -> int:
        """As :attr:`KeyValues.num_shards`."""
        return gcd(*(array.shape[0] for array in self.arrays if array.is_sharded))

    def block_bytes(self, itemsize: int = 2, head_pad: int = 1) -> tuple[int, ...]:
        """Bytes of a slot in each array."""
        return tuple(array.slot_bytes(itemsize) for array in self.arrays)

    def with_int8(self, int8: bool) -> State:
        """The same: states are not quantized."""
        return self

    def with_drafts(self, num_draft_tokens: int) -> State:
        """The same where a step checks up to ``num_draft_tokens`` drafts of a sequence: rings hold these too."""
        arrays = tuple(replace(x, ring=x.ring + num_draft_tokens) if x.ring else x for x in self.arrays)
        return replace(self, arrays=arrays)

    def shard(self, tp_size: int) -> State:
        """As :meth:`KeyValues.shard`."""
        return replace(self, arrays=tuple(array.shard(tp_size) for array in self.arrays))

    def make(self, ops: Backend, num_blocks: int, max_blocks: int | None) -> StateCache:
        """The layer's memory on a device, as :meth:`KeyValues.make`."""
        arrays = self.shard(ops.communicator.tp_size).arrays
        return ops.state_cache(num_blocks, arrays, max_slots=max_blocks)


Layout = KeyValues | Latent | State
"""What a layer keeps."""


@dataclass(frozen=True)
class CacheLayout:
    """The layouts of a model's layers, in order."""

    layers: tuple[Layout, ...]

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, windows: Sequence[int | None] = ()) -> CacheLayout:
        """Layers with equal heads; ``windows`` has an entry for each, or none if no layer has a window."""
        return cls(tuple(KeyValues(kv_heads, head_dim, window=w) for w in windows or (None,) * layers))

    def beside(self, other: CacheLayout) -> CacheLayout:
        """These layers, and behind them those of a second model that reads the same tokens."""
        return CacheLayout((*self.layers, *other.layers))

    @property
    def groups(self) -> tuple[Retention, ...]:
        """The retention of each group of layers, in order of their first layers."""
        return tuple(dict.fromkeys(layer.retention for layer in self.layers))

    def group_of(self, layer: int) -> int:
        """The group of a layer, as an index of :attr:`groups`."""
        return self.groups.index(self.layers[layer].retention)

    def layers_of(self, group: int) -> tuple[Layout, ...]:
        """The layouts of a group."""
        retention = self.groups[group]
        return tuple(layer for layer in self.layers if layer.retention == retention)

    def with_int8(self, int8: bool = True) -> CacheLayout:
        """The same layers with keys and values in int8, or not."""
        return CacheLayout(tuple(layer.with_int8(int8) for layer in self.layers))

    def shard(self, tp_size: int) -> CacheLayout:
        """What one of ``tp_size`` ranks keeps."""
        return CacheLayout(tuple(layer.shard(tp_size) for layer in self.layers))

    def with_drafts(self, num_draft_tokens: int) -> CacheLayout:
        """The same layers where a step checks up to ``num_draft_tokens`` drafts of a sequence."""
        return CacheLayout(tuple(layer.with_drafts(num_draft_tokens) for layer in self.layers))

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        return sum(layer.bytes_per_token(itemsize) for layer in self.layers)

    def bytes_per_sequence(self, itemsize: int = 2) -> int:
        """Bytes that one sequence takes in all layers beside those of its tokens."""
        return sum(layer.bytes_per_sequence(itemsize) for layer in self.layers)

    def tables(self, sequences: int, tokens: int) -> list[np.ndarray]:
        """For each group a block table int32 ``[sequences, W]`` that gives every sequence blocks of its own."""
        return [sequential_tables(sequences, 1 if kept.per_sequence else tokens) for kept in self.groups]


class KVCache:
    """A pool of blocks for each layer. The caller gives blocks to sequences; block 0 belongs to none.

    ``num_blocks`` gives the blocks of each group of layers, the null block included. ``source`` holds the encoded
    sources, which the decoder of an encoder-decoder reads beside its own tokens; it has one group. The pools of a group
    can grow to ``max_blocks`` of it, at the same addresses.
    """

    def __init__(
        self, ops: Backend, layout: CacheLayout, num_blocks: Sequence[int], max_blocks: Sequence[int] | None = None
    ):
        self.ops = ops
        self.layout = layout
        self.num_blocks = list(num_blocks)
        self.layers: list[Any] = []
        """A ``LayerCache``, ``LatentCache`` or ``StateCache`` for each layer, as its layout says."""
        self._source: KVCache | None = None
        try:
            for index, own in enumerate(layout.layers):
                group = layout.group_of(index)
                layer = own.make(ops, self.num_blocks[group], max_blocks[group] if max_blocks else None)
                layer.group = group
                self.layers.append(layer)
                self._clear_null_block(layer)
                self._clear_slots(index, 0)
        except BaseException:
            self.close()
            raise

    @property
    def source(self) -> KVCache | None:
        """The cache of the sources of an encoder-decoder, whose layers each layer here refers to."""
        return self._source

    @source.setter
    def source(self, source: KVCache) -> None:
        self._source = source
        for layer, own in zip(self.layers, source.layers, strict=True):
            layer.source = own

    def _clear_null_block(self, layer: AnyCache) -> None:
        """Zeros, because kernels may read the null block where a window has passed: 0 times a NaN would be a NaN."""
        for array in layer.arrays:
            null_block = array[NULL_BLOCK : NULL_BLOCK + 1]
            self.ops.assign(null_block, np.zeros(null_block.shape, null_block.dtype))

    def _clear_slots(self, index: int, first: int) -> None:
        """Zeros in the slots from ``first`` on of a layer whose state a sequence may find there."""
        layout = self.layout.layers[index]
        if isinstance(layout, State) and not layout.has_snapshots:
            for array in self.layers[index].arrays:
                self.ops.assign(array[first:], np.zeros(array[first:].shape, array.dtype))

    @classmethod
    def for_sequences(cls, ops: Backend, layout: CacheLayout, sequences: int, tokens: int) -> KVCache:
        """A cache with the blocks of :meth:`tables`, for ``sequences`` sequences of up to ``tokens`` tokens."""
        return cls(ops, layout, [1 + table.size for table in layout.tables(sequences, tokens)])

    def tables(self, sequences: int, tokens: int) -> list[np.ndarray]:
        """For each group a block table int32 ``[sequences, W]`` that gives every sequence blocks of its own."""
        return self.layout.tables(sequences, tokens)

    def part(self, layers: slice) -> KVCache:
        """Some of the layers, as the cache of one of two models. The memory stays this cache's."""
        view = copy(self)
        view.layers = self.layers[layers]
        return view

    def close(self) -> None:
        """Free the memory now, even if a traceback or a caller still refers to the cache or to its layers."""
        for layer in self.layers:
            self.ops.free_layer_cache(layer)
        self.layers.clear()
        if self.source is not None:
            self.source.close()

    def grow(self, group: int, num_blocks: int) -> None:
        """Enlarge the pools of a group to ``num_blocks`` blocks. Contents are kept."""
        for index, layer in enumerate(self.layers):
            if layer.group == group:
                self.ops.grow(layer, num_blocks)
                self._clear_slots(index, self.num_blocks[group])
        self.num_blocks[group] = num_blocks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy a block in all layers of a group to another, after what was started before: a pair for each group.

        Groups whose pair is of null blocks copy nothing.
        """
        copied = [(layer, *pairs[layer.group]) for layer in self.layers if pairs[layer.group][1] != NULL_BLOCK]
        self.ops.copy_blocks(copied)

    def prepare_copies(self) -> None:
        """Load what :meth:`copy_blocks` needs, by copies of null blocks onto themselves."""
        self.ops.copy_blocks([(layer, NULL_BLOCK, NULL_BLOCK) for layer in self.layers])


def caches_of_layers(
    layouts: Sequence[Sequence[Layout]], cache: KVCache, sources: Mapping[int, int] | None = None
) -> list[Any]:
    """The cache of each layer of a model, whose ``layouts`` may be none, one or several: None, one, or a tuple.

    ``sources`` has, for a layer that reads the cache of another, the number of that.
    """
    layers = iter(cache.layers)
    own = [tuple(next(layers) for _ in of_layer) for of_layer in layouts]
    found: list[Any] = [caches[0] if len(caches) == 1 else caches or None for caches in own]
    for layer, source in (sources or {}).items():
        found[layer] = found[source]
    return found


def blocks_for(tokens: int) -> int:
    """Blocks that hold ``tokens`` tokens of one sequence."""
    return -(-tokens // BLOCK_SIZE)
