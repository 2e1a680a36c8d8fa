"""Finds blocks of the cache by everything that determines their contents.

A block's key is a SHA-256 over the key of the block before it and its own tokens. The first block's parent is a root
that stands for what else changes the contents: the request's ``cache_salt``, and the source of an encoder-decoder.
Blocks with equal keys therefore hold equal keys and values of attention.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root_key(salt: str, source_token_ids: Sequence[int] = ()) -> bytes:
    """The parent of a sequence's first block."""
    return block_key(sha256(salt.encode()).digest(), source_token_ids)


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block with these tokens behind the block ``parent``."""
    return sha256(parent + array("i", token_ids).tobytes()).digest()


class PrefixIndex:
    """Full blocks by their key, one block for each key."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def find(self, key: bytes) -> int | None:
        """The block with this key."""
        return self._block_of.get(key)

    def add(self, key: bytes, block: int) -> None:
        """Enter a block. An earlier block of the same key stays, and the new one is not entered."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> None:
        """Remove a block, whose contents are about to change."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
