"""Perplexity: how well a model predicts a text, the yardstick for what quantization costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from .model import Model


@dataclass(frozen=True)
class Perplexity:
    """``exp`` of the mean negative log-likelihood per token.

    ``standard_error`` is the perplexity's, from the spread of the per-token values taken as independent.
    """

    value: float
    standard_error: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.4f} over {self.tokens:,} tokens"


def perplexity(model: Model, token_ids: Sequence[int], window: int = 512) -> Perplexity:
    """Perplexity of ``token_ids`` in separate windows of ``window`` tokens; each window's first token is not scored.

    Raises ``UsageError`` for fewer than 2 tokens, or a window that is not 2 to the model's context.
    """
    losses = np.concatenate(list(window_losses(model, token_ids, window)))
    with np.errstate(over="ignore"):
        value = float(np.exp(losses.mean()))
    spread = float(losses.std(ddof=1)) if len(losses) > 1 else 0.0
    return Perplexity(value, value * spread / math.sqrt(len(losses)), len(losses))


def window_losses(model: Model, token_ids: Sequence[int], window: int) -> Iterator[np.ndarray]:
    """Negative log-likelihoods of each window's tokens after its first, fp64 ``[n - 1]``."""
    context = model.limits.context_length
    if not 2 <= window <= context:
        raise UsageError(f"the window is {window:,} tokens; it must be 2 to the model's context, {context:,}")
    if len(token_ids) < 2:
        raise UsageError(f"perplexity needs 2 tokens at least, not {len(token_ids)}")
    for start in range(0, len(token_ids) - 1, window):
        ids = np.asarray(token_ids[start : start + window])
        yield losses_of(model.logits(ids)[:-1], ids[1:])


def losses_of(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """``-log softmax(logits)[i, targets[i]]``: fp32 ``[n, vocab]``, ``[n]`` -> fp64 ``[n]``."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(targets)), targets].astype(np.float64)
    return np.log(np.exp(shifted).sum(axis=1, dtype=np.float64)) - chosen
