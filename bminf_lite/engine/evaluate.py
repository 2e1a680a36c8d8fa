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
    """Perplexity of ``token_ids`` in separate windows of ``window`` tokens; each window's first token is not scored."""
    losses = np.concatenate(list(window_losses(model, token_ids, window)))
    mean, spread = float(losses.mean()), float(losses.std(ddof=1)) if len(losses) > 1 else 0.0
    value = math.exp(mean)
    return Perplexity(value, value * spread / math.sqrt(len(losses)), len(losses))


def window_losses(model: Model, token_ids: Sequence[int], window: int) -> Iterator[np.ndarray]:
    """Negative log-likelihoods of each window's tokens after its first, fp64 ``[n - 1]``."""
    if window < 2 or len(token_ids) < 2:
        raise UsageError(
            f"perplexity needs windows and texts of at least 2 tokens; got a window of {window} and "
            f"{len(token_ids)} tokens"
        )
    for start in range(0, len(token_ids) - 1, window):
        ids = token_ids[start : start + window]
        if len(ids) < 2:
            return
        logits = model.logits(ids)[:-1].astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        normaliser = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        yield normaliser - logits[np.arange(len(ids) - 1), np.asarray(ids[1:])]
