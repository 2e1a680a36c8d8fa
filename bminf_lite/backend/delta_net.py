"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) over NumPy, in the chunked form that defines its bits.

A head has a state ``S`` ``[key_dim, value_dim]``. With a token's key ``k``, value ``v``, rate of learning ``beta`` and
log-decay ``g``, the mathematics is

    S = exp(g) * S
    delta = beta * (v - k @ S)
    S = S + outer(k, delta)
    out = q @ S

The chunked form (https://arxiv.org/abs/2406.06484) computes a token from the state at the start of its chunk, and from
what the tokens of the chunk up to itself have left: a key, the sum of the log-decays ``d`` since the chunk's start, a
difference ``r`` from what the state foretold, and ``solves``, by which the differences become deltas. Where ``a_ij`` is
``exp(d_i - d_j) * (k_i @ k_j)``, ``p_ij`` the same of the query, and ``e_i`` a row with 1 at ``i``:

    r_i = v_i - exp(d_i) * (k_i @ S)
    solves_i = beta_i * (e_i - sum(a_ij * solves_j for j < i))
    out_i = exp(d_i) * (q_i @ S) + sum(p_ij * solves_j for j <= i) @ r
    delta_i = solves_i @ r

Neither ``solves`` nor their products with ``p`` depend on the state.

In Kimi Delta Attention (https://arxiv.org/abs/2510.26692) each element ``m`` of a key has a log-decay of its own. Then
the factors stand inside the products,

    r_i = v_i - (exp(d_i) * k_i) @ S
    a_ij = sum(k_im * k_jm * exp(d_im - d_jm) for all m)
    out_i = (exp(d_i) * q_i) @ S + sum(p_ij * solves_j for j <= i) @ r

and the state behind the chunk is ``exp(d_l)[:, None] * S + sum(outer(exp(d_l - d_j) * k_j, delta_j))``.

:mod:`.chunked_state` says where chunks lie, and what becomes of the state behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .chunked_state import Chunk, softplus
from .functions import silently
from .routing import sigmoid
from .values import STATE_CHUNK as CHUNK
from .values import DeltaNetSpec

NORM_EPS = np.float32(1e-6)
"""What is added to the sum of squares of a query or key."""


@dataclass(frozen=True)
class TokenInputs:
    """What the recurrence reads of each token, fp32.

    ``queries`` and ``keys`` are ``[T, key_heads, key_dim]``, ``values`` ``[T, value_heads, value_dim]``, and
    ``log_decays`` and ``rates`` ``[T, value_heads]``; log-decays of channels are ``[T, value_heads, key_dim]``.
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
def token_inputs(mixed: np.ndarray, rates: np.ndarray, decays: np.ndarray, spec: DeltaNetSpec) -> TokenInputs:
    """The inputs of tokens with ``mixed`` queries, keys and values ``[T, channels]``.

    ``rates`` ``[T, value_heads]`` and ``decays`` ``[T, value_heads]`` or ``[T, value_heads * key_dim]`` are those
    before their functions. Queries and keys are divided by their lengths, ``sqrt(sum(x * x) + NORM_EPS)``, and queries
    by the root of ``key_dim``. A rate of learning is ``max_rate * sigmoid(b)``, and a log-decay ``decay_rates *
    softplus(a + decay_bias)``.
    """
    keys, tokens = spec.key_features, len(mixed)
    heads = (tokens, spec.key_heads, spec.key_dim)
    queries = _of_length_1(mixed[:, :keys].reshape(heads)) * np.float32(spec.key_dim**-0.5)
    values = mixed[:, 2 * keys :].reshape(tokens, spec.value_heads, spec.value_dim)
    log_decays = softplus(decays.astype(np.float32) + spec.decay_bias)
    if spec.per_channel:
        log_decays = spec.decay_rates[:, None] * log_decays.reshape(tokens, spec.value_heads, spec.key_dim)
    else:
        log_decays = spec.decay_rates * log_decays
    rates = np.float32(spec.max_rate) * sigmoid(rates.astype(np.float32))
    return TokenInputs(queries, _of_length_1(mixed[:, keys : 2 * keys].reshape(heads)), values, log_decays, rates)


def _of_length_1(x: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x * (np.float32(1) / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + NORM_EPS))
    return scaled


@dataclass
class DeltaChunk(Chunk):
    """A chunk of the delta rule. ``deltas`` are differences, of which ``solves`` make deltas.

    ``solves`` are ``[value_heads, CHUNK, CHUNK]``: a row for each token, an element for each difference.
    """

    solves: np.ndarray

    KEPT = ("keys", "deltas", "decays", "solves")

    def output(self, i: int, token: TokenInputs) -> np.ndarray:
        (query,), (key,), (value,), (log_decay,), (rate,) = (
            token.queries,
            token.keys,
            token.values,
            token.log_decays,
            token.rates,
        )
        self.keys[:, i] = key
        read, scores = self.read(i, self.add_decay(i, log_decay), np.stack([key, query], axis=1))
        own = (np.arange(CHUNK) == i).astype(np.float32)
        self.solves[:, i] = rate[:, None] * (own - (scores[:, :1] @ self.solves)[:, 0])
        self.deltas[:, i] = value - read[:, 0]
        found: np.ndarray = read[:, 1] + (scores[:, 1:] @ self.solves @ self.deltas)[:, 0]
        return found

    def all_deltas(self) -> np.ndarray:
        found: np.ndarray = self.solves @ self.deltas
        return found

    def read(self, i: int, decay: np.ndarray, pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What token ``i``'s key and query ``[key_heads, 2, key_dim]`` read: of the state, and scores of the chunk."""
        return np.exp(decay)[:, None] * self.read_state(pair), self.scores(i, pair)


class ChannelChunk(DeltaChunk):
    """A chunk of the delta rule whose channels decay apart: ``decays`` are ``[value_heads, CHUNK, key_dim]``."""

    def read(self, i: int, decay: np.ndarray, pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        since = np.minimum(decay - self.decays, np.float32(0))
        factors = np.where(np.arange(CHUNK)[:, None] <= i, np.exp(since), np.float32(0))
        return self.read_state(pair * np.exp(decay)), pair @ (self.keys * factors).swapaxes(1, 2)

    def next_state(self) -> np.ndarray:
        last = self.decays[:, -1]
        keys = self.keys * np.exp(last[:, None] - self.decays)
        found: np.ndarray = np.exp(last)[:, :, None] * self.state + keys.swapaxes(1, 2) @ self.all_deltas()
        return found
