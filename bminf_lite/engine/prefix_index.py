"""Finds blocks of the cache by everything that determines their contents.

A block's key is a SHA-256 over the key of the block before it and its own tokens. The first block's parent is a root
that stands for what else changes the contents: the request's ``cache_salt``, its adapter, and the source of an
encoder-decoder. Blocks with equal keys therefore hold equal keys and values of attention.

A block is also found by its start, its first few tokens behind the same parent, for a sequence that goes on like it and
then differs. And it is found by the key of a prefix that ends within it, where a snapshot of a state stands for that
prefix (:mod:`.snapshot_index`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import takewhile
from operator import eq

import numpy as np

from ..backend.values import NULL_BLOCK

RUN_BLOCKS = 16
"""Blocks whose keys are remembered together: the next turn of a chat has the keys of the last without hashing."""
REMEMBERED_RUNS = 1024
"""Runs that are remembered, those of a million tokens; they take 6 MB."""


def root_key(salt: str, source_token_ids: Sequence[int] = (), adapter: int = 0) -> bytes:
    """The parent of a sequence's first block. ``adapter`` is the serial number of its adapter, 0 for none."""
    root = block_key(sha256(salt.encode(errors="surrogatepass")).digest(), source_token_ids)
    return root if adapter == 0 else sha256(root + b"adapter" + adapter.to_bytes(8, "little")).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block with these tokens behind the block ``parent``."""
    return sha256(parent + array("i", token_ids).tobytes()).digest()


def append_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the keys of the full blocks of ``token_ids`` behind the last of ``keys``, or behind ``root``."""
    packed = np.asarray(token_ids, np.int32).tobytes()
    nbytes = 4 * block_size
    longest = nbytes * RUN_BLOCKS
    for start in range(0, len(packed) - nbytes + 1, longest):
        run = packed[start : start + longest]
        find = _remembered_keys if len(run) == longest else _keys
        keys += find(keys[-1] if keys else root, run, nbytes)


def _keys(parent: bytes, packed: bytes, nbytes: int) -> tuple[bytes, ...]:
    """The keys of consecutive blocks of ``nbytes`` bytes behind the block ``parent``."""
    keys = []
    for end in range(nbytes, len(packed) + 1, nbytes):
        parent = sha256(parent + packed[end - nbytes : end]).digest()
        keys.append(parent)
    return tuple(keys)


_remembered_keys = lru_cache(REMEMBERED_RUNS)(_keys)


class PrefixIndex:
    """Blocks by their key, one block for each key, and by their first ``start_tokens`` tokens, the newest of each.

    ``on_forget`` is called with each key under which a block is not found any more.
    """

    def __init__(self, start_tokens: int, on_forget: Callable[[bytes], None] | None = None) -> None:
        self.start_tokens = start_tokens
        self._on_forget = on_forget
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._starting_with: dict[bytes, tuple[int, array[int]]] = {}
        self._start_of: dict[int, bytes] = {}
        self._block_of_end: dict[bytes, int] = {}
        self._ends_of: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of or block in self._ends_of

    def find(self, key: bytes) -> int | None:
        """The block with this key."""
        return self._block_of.get(key)

    def find_end(self, key: bytes) -> int | None:
        """The block whose first tokens are the last of the prefix with this key: all its tokens, or some of them."""
        block = self._block_of.get(key)
        return self._block_of_end.get(key) if block is None else block

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """How many blocks have the first of these keys, up to one that no block has."""
        blocks = [*map(self._block_of.get, keys)]
        return blocks.index(None) if None in blocks else len(blocks)

    def blocks_of(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks with these keys, which must be in the index."""
        return [*map(self._block_of.__getitem__, keys)]

    def find_start(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, int, int]:
        """A block behind ``parent``: its key, number, and how many tokens from its first on are those of ``token_ids``.

        The count is 0, or ``start_tokens`` or more. Only the newest block with the same start is compared.
        """
        block, found = self._starting_with.get(self._start(parent, token_ids), (NULL_BLOCK, ()))
        return self._key_of.get(block, b""), block, sum(takewhile(bool, map(eq, found, token_ids)))

    def add(self, key: bytes, block: int, parent: bytes = b"", token_ids: Sequence[int] = ()) -> None:
        """Enter a block. An earlier block of the same key stays, and the new one is not entered.

        With the ``token_ids`` that it holds behind ``parent``, :meth:`find_start` finds it.
        """
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if len(token_ids) >= self.start_tokens:
                self._start_of[block] = start = self._start(parent, token_ids)
                self._starting_with[start] = block, array("i", token_ids)

    def add_end(self, key: bytes, block: int) -> None:
        """Let :meth:`find_end` find a block that the prefix with this key ends in. An earlier one stays."""
        if self.find_end(key) is None:
            self._block_of_end[key] = block
            self._ends_of.setdefault(block, []).append(key)

    def forget(self, block: int) -> None:
        """Remove a block, whose contents are about to change."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        start = self._start_of.pop(block, None)
        if start is not None and self._starting_with.get(start, (NULL_BLOCK,))[0] == block:
            del self._starting_with[start]
        if self._on_forget is not None:
            self._forget_ends(block, key, self._on_forget)

    def _forget_ends(self, block: int, key: bytes | None, on_forget: Callable[[bytes], None]) -> None:
        ends = self._ends_of.pop(block, [])
        for end in ends:
            del self._block_of_end[end]
        for gone in ends if key is None else [*ends, key]:
            if self.find_end(gone) is None:
                on_forget(gone)

    def _start(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return parent + array("i", token_ids[: self.start_tokens]).tobytes()
