"""What layers keep of a sequence between steps: which tokens, in what arrays, and of how many bytes.

:mod:`bminf_lite.layers.cache` makes layouts of these, for a model's layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from .values import BLOCK_SIZE, Array


def block_bytes(kv_heads: int, head_dim: int, int8: bool, itemsize: int = 2) -> tuple[int, ...]:
    """Bytes of a block in each array of a layer: keys, values, and for ``int8`` codes the fp16 scales of both.

    ``head_dim`` includes the padding of a head, and ``itemsize`` is that of values that are not int8.
    """
    heads = kv_heads * BLOCK_SIZE
    return (heads * head_dim, heads * head_dim, 2 * heads, 2 * heads) if int8 else (heads * head_dim * itemsize,) * 2


def latent_block_bytes(row_dim: int, int8: bool, itemsize: int = 2) -> tuple[int, ...]:
    """Bytes of a block in each array of a layer with latents: rows, and for ``int8`` codes two fp16 scales of each."""
    return (BLOCK_SIZE * row_dim, 4 * BLOCK_SIZE) if int8 else (BLOCK_SIZE * row_dim * itemsize,)


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


SLOT_ALIGNMENT = 16
"""Bytes of which the slots of a state's array are multiples, because kernels copy as many at once."""


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
