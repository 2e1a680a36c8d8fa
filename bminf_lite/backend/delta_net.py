"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) over NumPy, in the chunked form that defines its bits.

A head has a state ``S`` ``[key_dim, value_dim]``. With a token's key ``k``, value ``v``, rate of learning ``beta`` and
log-decay ``g``, the mathematics is

    S = exp(g) * S
    delta = beta * (v - k @ S)
    S = S + outer(k, delta)
    out = q @ S

The chunked form (https://arxiv.org/abs/2406.06484) computes a token from the state at the start of its chunk, and from
what the tokens of the chunk up to itself have left: a key, a ``delta`` and the sum of the log-decays ``d`` since the
chunk's start.

    delta_i = beta_i * (v_i - (exp(d_i) * (k_i @ S) + sum(exp(d_i - d_j) * (k_i @ k_j) * delta_j for j < i)))
    out_i = exp(d_i) * (q_i @ S) + sum(exp(d_i - d_j) * (q_i @ k_j) * delta_j for j <= i)

Behind the last token of a chunk, ``l``, the state is ``exp(d_l) * S + sum(outer(exp(d_l - d_j) * k_j, delta_j))``.

Chunks lie at fixed positions, and a step that decodes one token computes the same as one that reads a prompt. So the
result of a token does not depend on how its sequence is cut into steps. All is fp32. BLAS chooses the order of a sum by
the shapes of a product, so every product here has one shape: that of a whole chunk, in which tokens to come are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .functions import silently
from .routing import sigmoid
from .values import DELTA_NET_CHUNK as CHUNK
from .values import DeltaNetSpec, StateArray, StateCache

NORM_EPS = np.float32(1e-6)
"""What is added to the sum of squares of a query or key."""
SOFTPLUS_MAX = np.float32(20)
"""Where ``log(1 + exp(x))`` is taken for ``x``, as in PyTorch."""


def state_arrays(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, channels: int, taps: int
) -> tuple[StateArray, ...]:
    """What a sequence keeps: the state at a chunk's start, rows of the tokens since, and inputs of the convolution."""
    return (
        StateArray("state", (value_heads, key_dim, value_dim), is_sharded=True),
        StateArray("keys", (key_heads, key_dim), ring=CHUNK, is_sharded=True),
        StateArray("deltas", (value_heads, value_dim), ring=CHUNK, is_sharded=True),
        StateArray("decays", (value_heads,), ring=CHUNK, is_sharded=True),
        StateArray("inputs", (channels,), dtype=None, ring=taps, is_sharded=True),
        StateArray("end", (), "int32"),
    )


@dataclass(frozen=True)
class TokenInputs:
    """What the recurrence reads of each token, fp32.

    ``queries`` and ``keys`` are ``[T, key_heads, key_dim]``, ``values`` ``[T, value_heads, value_dim]``, and
    ``log_decays`` and ``rates`` ``[T, value_heads]``.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    log_decays: np.ndarray
    rates: np.ndarray

    def of(self, rows: slice) -> TokenInputs:
        """Those of some tokens."""
        return TokenInputs(*(x[rows] for x in (self.queries, self.keys, self.values, self.log_decays, self.rates)))

    def __len__(self) -> int:
        return len(self.queries)


@silently
def token_inputs(mixed: np.ndarray, gates: np.ndarray, spec: DeltaNetSpec) -> TokenInputs:
    """The inputs of tokens with ``mixed`` queries, keys and values ``[T, channels]`` and ``gates`` ``[T, 2 * heads]``.

    Queries and keys are divided by their lengths, ``sqrt(sum(x * x) + NORM_EPS)``, and queries by the root of
    ``key_dim``. A rate of learning is ``sigmoid(b)``, a log-decay ``decay_rates * softplus(a + decay_bias)``.
    """
    keys, tokens = spec.key_features, len(mixed)
    heads = (tokens, spec.key_heads, spec.key_dim)
    queries = _of_length_1(mixed[:, :keys].reshape(heads)) * np.float32(spec.key_dim**-0.5)
    values = mixed[:, 2 * keys :].reshape(tokens, spec.value_heads, spec.value_dim)
    b, a = np.split(gates.astype(np.float32), 2, axis=1)
    log_decays = spec.decay_rates * softplus(a + spec.decay_bias)
    return TokenInputs(queries, _of_length_1(mixed[:, keys : 2 * keys].reshape(heads)), values, log_decays, sigmoid(b))


def _of_length_1(x: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x * (np.float32(1) / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + NORM_EPS))
    return scaled


def softplus(x: np.ndarray) -> np.ndarray:
    """``log(1 + exp(x))``."""
    y: np.ndarray = np.where(x > SOFTPLUS_MAX, x, np.log1p(np.exp(np.minimum(x, SOFTPLUS_MAX))))
    return y


@dataclass
class Chunk:
    """The ``state`` at a chunk's start ``[value_heads, key_dim, value_dim]``, and the rows of its first tokens.

    ``keys`` are ``[key_heads, CHUNK, key_dim]``, ``deltas`` ``[value_heads, CHUNK, value_dim]`` and ``decays``
    ``[value_heads, CHUNK]``; those of tokens to come are zeros.
    """

    state: np.ndarray
    keys: np.ndarray
    deltas: np.ndarray
    decays: np.ndarray

    @classmethod
    def at(cls, state: np.ndarray, spec: DeltaNetSpec) -> Chunk:
        """A chunk before its first token."""
        return cls(
            state,
            np.zeros((spec.key_heads, CHUNK, spec.key_dim), np.float32),
            np.zeros((spec.value_heads, CHUNK, spec.value_dim), np.float32),
            np.zeros((spec.value_heads, CHUNK), np.float32),
        )

    def output(self, i: int, token: TokenInputs) -> np.ndarray:
        """The output ``[value_heads, value_dim]`` of ``token``, the ``i``-th of the chunk, whose row is added."""
        group = len(self.decays) // len(self.keys)
        (query,), (key,), (value,), (log_decay,), (rate,) = (
            token.queries, token.keys, token.values, token.log_decays, token.rates,
        )  # fmt: skip
        self.keys[:, i] = key
        self.decays[:, i] = log_decay if i == 0 else self.decays[:, i - 1] + log_decay
        decay = self.decays[:, i : i + 1]
        pair = np.stack([key, query], axis=1)
        read = pair[:, None] @ self.state.reshape(len(pair), group, *self.state.shape[1:])
        from_key, from_query = (np.exp(decay) * read[:, :, j].reshape(value.shape) for j in range(2))
        factors = np.where(np.arange(CHUNK) <= i, np.exp(np.minimum(decay - self.decays, np.float32(0))), np.float32(0))
        scores = np.repeat(pair @ self.keys.swapaxes(1, 2), group, axis=0) * factors[:, None]
        earlier = (scores[:, :1] @ self.deltas)[:, 0]
        self.deltas[:, i] = rate[:, None] * (value - (from_key + earlier))
        found: np.ndarray = from_query + (scores[:, 1:] @ self.deltas)[:, 0]
        return found

    def next_state(self) -> np.ndarray:
        """The state behind the last token of the chunk."""
        group = len(self.decays) // len(self.keys)
        last = self.decays[:, -1:]
        keys = np.repeat(self.keys, group, axis=0) * np.exp(last - self.decays)[:, :, None]
        found: np.ndarray = np.exp(last)[:, :, None] * self.state + keys.swapaxes(1, 2) @ self.deltas
        return found


@silently
def outputs(
    tokens: TokenInputs, spec: DeltaNetSpec, cache: StateCache, slot: int, start: int, is_draft: bool
) -> np.ndarray:
    """The outputs of a sequence's tokens from position ``start`` on, fp32 ``[T, value_heads, value_dim]``.

    The slot of the ``cache`` is brought up to date as :class:`bminf_lite.layers.cache.State` says; a draft leaves its
    row alone.
    """
    rings = [cache[name][slot] for name in ("keys", "deltas", "decays")]
    size, end = len(rings[0]), int(cache["end"][slot]) if start else 0
    assert end % CHUNK == 0 and end <= start <= end + size
    state = cache["state"][slot].copy() if start else np.zeros(cache["state"].shape[1:], np.float32)
    found = np.empty((len(tokens), spec.value_heads, spec.value_dim), np.float32)
    known, chunk = start, _chunk_from(rings, state, end, start, spec)
    for i, position in enumerate(range(start, start + len(tokens))):
        while end + CHUNK <= position:
            state, end = chunk.next_state(), end + CHUNK
            chunk = _chunk_from(rings, state, end, known, spec)
        row = position - end
        found[i] = chunk.output(row, tokens.of(slice(i, i + 1)))
        for ring, rows in zip(rings, (chunk.keys, chunk.deltas, chunk.decays), strict=True):
            ring[position % size] = rows[:, row]
    if not is_draft:
        cache["state"][slot], cache["end"][slot] = state, end
    return found


def _chunk_from(rings: list[np.ndarray], state: np.ndarray, end: int, known: int, spec: DeltaNetSpec) -> Chunk:
    """The chunk that starts at ``end``, with the rows of tokens before ``known``, which lie in ``rings``."""
    chunk = Chunk.at(state, spec)
    positions = np.arange(end, min(end + CHUNK, known))
    for ring, rows in zip(rings, (chunk.keys, chunk.deltas, chunk.decays), strict=True):
        rows[:, : len(positions)] = ring[positions % len(ring)].swapaxes(0, 1)
    return chunk
