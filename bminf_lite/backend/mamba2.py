"""The state space of Mamba 2 (https://arxiv.org/abs/2405.21060) over NumPy, in the chunked form that defines its bits.

A head has a state ``S`` ``[state_dim, head_dim]``. With a token's ``x``, time step ``dt``, and ``B`` and ``C`` of its
group, the mathematics is

    S = exp(decay_rate * dt) * S + outer(B, dt * x)
    out = C @ S + skip * x

The chunked form computes a token from the state at the start of its chunk, and from what the tokens of the chunk up to
itself have left: ``B``, ``dt * x``, and the sum ``d`` of the log-decays ``decay_rate * dt`` since the chunk's start.

    out_i = exp(d_i) * (C_i @ S) + sum(exp(d_i - d_j) * (C_i @ B_j) * dt_j * x_j for j <= i) + skip * x_i

:mod:`.chunked_state` says where chunks lie, and what becomes of the state behind them: ``B`` is a key there, ``dt * x``
a delta, and a group a key head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .chunked_state import Chunk, softplus
from .functions import norm_statistics, silently, silu
from .values import GatedNorm, Mamba2Spec


@dataclass(frozen=True)
class TokenInputs:
    """What the recurrence reads of each token, fp32.

    ``x`` is ``[T, heads, head_dim]``, ``b`` and ``c`` are ``[T, groups, state_dim]``, and ``steps``, ``log_decays`` and
    ``skipped``, which are ``skip * x``, ``[T, heads]`` and ``[T, heads, head_dim]``.
    """

    x: np.ndarray
    b: np.ndarray
    c: np.ndarray
    steps: np.ndarray
    log_decays: np.ndarray
    skipped: np.ndarray

    def of(self, rows: slice) -> TokenInputs:
        """Those of some tokens."""
        return TokenInputs(*(getattr(self, field.name)[rows] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.x)


@silently
def token_inputs(mixed: np.ndarray, steps: np.ndarray, spec: Mamba2Spec) -> TokenInputs:
    """The inputs of tokens with ``mixed`` x, B and C fp32 ``[T, channels]``, and ``steps`` ``[T, heads]``.

    A time step is ``softplus(step + step_bias)``, within the limits.
    """
    tokens, groups = len(mixed), (len(mixed), spec.groups, spec.state_dim)
    x, b, c = np.split(mixed, [spec.features, spec.features + spec.groups * spec.state_dim], axis=1)
    low, high = (np.float32(limit) for limit in spec.step_limits)
    dt = softplus(steps.astype(np.float32) + spec.step_bias)
    dt = np.where(dt < low, low, np.where(dt > high, high, dt))
    heads = x.reshape(tokens, spec.heads, spec.head_dim)
    skipped = spec.skip[:, None] * heads
    return TokenInputs(heads, b.reshape(groups), c.reshape(groups), dt, spec.decay_rates * dt, skipped)


class StateSpaceChunk(Chunk):
    """A chunk of a state space."""

    def output(self, i: int, token: TokenInputs) -> np.ndarray:
        self.keys[:, i] = token.b[0]
        self.deltas[:, i] = token.steps[0, :, None] * token.x[0]
        decay, c = self.add_decay(i, token.log_decays[0]), token.c[0, :, None]
        of_state = np.exp(decay) * self.read_state(c)[:, 0]
        found: np.ndarray = of_state + (self.scores(i, c) @ self.deltas)[:, 0] + token.skipped[0]
        return found


@silently
def gated(x: np.ndarray, gate: np.ndarray, norm: GatedNorm | None) -> np.ndarray:
    """fp32 ``[T, features]`` with the ``gate``'s SiLU and a norm: see :class:`.GatedNorm`; without one, a product."""
    factor = silu(gate.astype(np.float32))
    if norm is not None and norm.norm_first:
        x = _normalised(x, norm)
    found: np.ndarray = x * factor
    return found if norm is None or norm.norm_first else _normalised(found, norm)


def _normalised(x: np.ndarray, norm: GatedNorm) -> np.ndarray:
    groups = x.reshape(len(x), norm.groups, -1)
    _, inverse = norm_statistics(groups, norm.norm.eps, center=False)
    weight = norm.norm.weight.reshape(norm.groups, -1)
    found: np.ndarray = (groups * weight * inverse[..., None]).reshape(x.shape)
    return found
