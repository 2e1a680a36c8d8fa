"""Recurrences in chunks at fixed positions: what gated DeltaNet and Mamba 2 share.

A head has a state ``S`` ``[key_dim, value_dim]``. A token leaves a key, a delta ``[value_dim]`` and a log-decay. The
state behind it is ``exp(log_decay) * S + outer(key, delta)``. A token's result is computed from the state at the start
of its chunk, and from what the tokens of the chunk up to itself have left, where ``d`` is the sum of the log-decays
since the chunk's start. Behind the last token of a chunk, ``l``, the state is ``exp(d_l) * S + sum(outer(exp(d_l - d_j)
* key_j, delta_j))``.

Chunks lie at fixed positions, and a step that decodes one token computes the same as one that reads a prompt. So the
result of a token does not depend on how its sequence is cut into steps. All is fp32. BLAS chooses the order of a sum by
the shapes of a product, so every product here has one shape: that of a whole chunk, in which tokens to come are zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .cache_values import StateArray, StateCache
from .functions import silently
from .values import STATE_CHUNK as CHUNK

SOFTPLUS_MAX = np.float32(20)
"""Where ``log(1 + exp(x))`` is taken for ``x``, as in PyTorch."""


def state_arrays(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    channels: int,
    taps: int,
    per_channel: bool = False,
    corrects: bool = True,
) -> tuple[StateArray, ...]:
    """What a sequence keeps: the state at a chunk's start, rows of the tokens since, and inputs of a convolution.

    A head has one decay, or ``per_channel`` one for each element of a key. Value head ``h`` reads key head
    ``h // (value_heads // key_heads)``. ``end`` has the position of the states of each key head's value heads.
    ``corrects``: a token's delta depends on those of earlier ones, as in :class:`.delta_net.DeltaChunk`.
    """
    solves = StateArray("solves", (value_heads, CHUNK), ring=CHUNK, is_sharded=True)
    return (
        StateArray("state", (value_heads, key_dim, value_dim), is_sharded=True),
        StateArray("keys", (key_heads, key_dim), ring=CHUNK, is_sharded=True),
        StateArray("deltas", (value_heads, value_dim), ring=CHUNK, is_sharded=True),
        StateArray("decays", (value_heads, key_dim) if per_channel else (value_heads,), ring=CHUNK, is_sharded=True),
        *([solves] if corrects else []),
        StateArray("inputs", (channels,), dtype=None, ring=taps, is_sharded=True),
        StateArray("end", (key_heads,), "int32", is_sharded=True),
    )


@dataclass
class Chunk(ABC):
    """The ``state`` at a chunk's start ``[value_heads, key_dim, value_dim]``, and the rows of its first tokens.

    ``keys`` are ``[key_heads, CHUNK, key_dim]``, ``deltas`` ``[value_heads, CHUNK, value_dim]`` and ``decays``, sums
    since the chunk's start, ``[value_heads, CHUNK]``; those of tokens to come are zeros.
    """

    state: np.ndarray
    keys: np.ndarray
    deltas: np.ndarray
    decays: np.ndarray

    KEPT: ClassVar[tuple[str, ...]] = ("keys", "deltas", "decays")
    """What is kept of each token, by the names of the arrays in the cache, in the order of the fields."""

    @abstractmethod
    def output(self, i: int, token: Any) -> np.ndarray:
        """The result ``[value_heads, value_dim]`` of ``token``, the ``i``-th of the chunk, whose row is added.

        ``token`` is what the kind of recurrence reads of one token.
        """

    @property
    def group(self) -> int:
        """Value heads that read a key head."""
        return len(self.decays) // len(self.keys)

    def add_decay(self, i: int, log_decay: np.ndarray) -> np.ndarray:
        """The sum of log-decays up to token ``i``, ``[value_heads, 1]``."""
        self.decays[:, i] = log_decay if i == 0 else self.decays[:, i - 1] + log_decay
        return self.decays[:, i : i + 1]

    def read_state(self, rows: np.ndarray) -> np.ndarray:
        """Rows ``[key_heads, n, key_dim]`` times the state: ``[value_heads, n, value_dim]``."""
        heads = self.state.reshape(len(rows), self.group, *self.state.shape[1:])
        found: np.ndarray = (rows[:, None] @ heads).reshape(len(self.state), rows.shape[1], -1)
        return found

    def scores(self, i: int, rows: np.ndarray) -> np.ndarray:
        """Rows ``[key_heads, n, key_dim]`` times the keys up to ``i``, with decay: ``[value_heads, n, CHUNK]``."""
        since = np.minimum(self.decays[:, i : i + 1] - self.decays, np.float32(0))
        factors = np.where(np.arange(CHUNK) <= i, np.exp(since), np.float32(0))
        found: np.ndarray = np.repeat(rows @ self.keys.swapaxes(1, 2), self.group, axis=0) * factors[:, None]
        return found

    def next_state(self) -> np.ndarray:
        """The state behind the last token of the chunk."""
        last = self.decays[:, -1:]
        keys = np.repeat(self.keys, self.group, axis=0) * np.exp(last - self.decays)[:, :, None]
        found: np.ndarray = np.exp(last)[:, :, None] * self.state + keys.swapaxes(1, 2) @ self.all_deltas()
        return found

    def all_deltas(self) -> np.ndarray:
        """The deltas of the tokens, from what is kept of them."""
        return self.deltas

    @property
    def kept(self) -> list[np.ndarray]:
        """What is kept of the tokens, ``[heads, CHUNK, ...]``."""
        return [getattr(self, name) for name in self.KEPT]


def softplus(x: np.ndarray) -> np.ndarray:
    """``log(1 + exp(x))``."""
    y: np.ndarray = np.where(x > SOFTPLUS_MAX, x, np.log1p(np.exp(np.minimum(x, SOFTPLUS_MAX))))
    return y


@silently
def outputs(kind: type[Chunk], tokens: Any, cache: StateCache, slot: int, start: int, is_draft: bool) -> np.ndarray:
    """The results of a sequence's tokens from position ``start`` on, fp32 ``[T, value_heads, value_dim]``.

    ``tokens.of`` gives what a ``kind`` of recurrence reads of some tokens. The slot of the ``cache`` is brought up to
    date as :class:`bminf_lite.layers.cache.State` says; a draft leaves its row alone.
    """
    rings = [cache[name][slot] for name in kind.KEPT]
    size, end = len(rings[0]), int(cache["end"][slot, 0]) if start else 0
    assert end % CHUNK == 0 and end <= start <= end + size
    state = cache["state"][slot].copy() if start else np.zeros(cache["state"].shape[1:], np.float32)
    found = np.empty((len(tokens), *rings[1].shape[1:]), np.float32)
    known, chunk = start, _chunk_from(kind, rings, state, end, start)
    for i, position in enumerate(range(start, start + len(tokens))):
        while end + CHUNK <= position:
            state, end = chunk.next_state(), end + CHUNK
            chunk = _chunk_from(kind, rings, state, end, known)
        row = position - end
        found[i] = chunk.output(row, tokens.of(slice(i, i + 1)))
        for ring, rows in zip(rings, chunk.kept, strict=True):
            ring[position % size] = rows[:, row]
    if not is_draft:
        cache["state"][slot], cache["end"][slot] = state, end
    return found


def _chunk_from(kind: type[Chunk], rings: list[np.ndarray], state: np.ndarray, end: int, known: int) -> Chunk:
    """The chunk that starts at ``end``, with the rows of tokens before ``known``, which lie in ``rings``."""
    chunk = kind(state, *(np.zeros((ring.shape[1], CHUNK, *ring.shape[2:]), np.float32) for ring in rings))
    positions = np.arange(end, min(end + CHUNK, known))
    for ring, rows in zip(rings, chunk.kept, strict=True):
        rows[:, : len(positions)] = ring[positions % len(ring)].swapaxes(0, 1)
    return chunk
