"""Perplexity: how well a model predicts a text. Its increase measures the error of quantization."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..api import Model
from .corpus import Window, check_window, sliding_windows


@dataclass(frozen=True)
class Perplexity:
    """``exp`` of the mean negative log-likelihood per token.

    ``standard_error`` is that of the perplexity, see :func:`mean_and_error`; NaN for a single token.
    """

    value: float
    standard_error: float
    tokens: int

    @classmethod
    def from_losses(cls, losses: np.ndarray) -> Perplexity:
        """From the negative log-likelihoods of tokens in the order of the text, fp64 ``[n]``."""
        mean, error = mean_and_error(losses)
        with np.errstate(over="ignore", invalid="ignore"):
            value = float(np.exp(mean))
            return cls(value, float(np.float64(value) * error), len(losses))

    def __str__(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.4f}"
        return f"{self.value:.4f}{error} over {self.tokens:,} tokens"


def perplexity(
    model: Model,
    token_ids: Sequence[int],
    window: int = 512,
    stride: int | None = None,
    leading: Sequence[int] | np.ndarray = (),
) -> Perplexity:
    """Perplexity of ``token_ids`` in windows of ``window`` tokens, one every ``stride``, each behind ``leading``.

    See :func:`.corpus.sliding_windows`. Raises ``UsageError`` for fewer than 2 tokens, for a window shorter than 2
    tokens or longer than the model's context, and for a stride shorter than 1 token or longer than the window.
    """
    check_window(window, window if stride is None else stride, model.engine_config.context_length)
    windows = sliding_windows([token_ids], window, stride, leading)
    if model.engine_config.is_encoder_decoder:
        windows = [w.for_encoder_decoder(model.engine_config.decoder_start_token_ids) for w in windows]
    return Perplexity.from_losses(np.concatenate(list(window_losses(model, windows))))


def window_losses(model: Model, windows: Iterable[Window]) -> Iterator[np.ndarray]:
    """Negative log-likelihoods of each window's scored tokens, fp64 ``[scored]``."""
    for window in windows:
        logits = model.logits(window.tokens, source=window.source)
        yield cross_entropy(logits[-window.scored - 1 : -1], window.tokens[-window.scored :])


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """``-log softmax(logits)[i, targets[i]]``: fp32 ``[n, vocab]``, ``[n]`` -> fp64 ``[n]``."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(targets)), targets].astype(np.float64)
    losses: np.ndarray = np.log(np.exp(shifted).sum(axis=1, dtype=np.float64)) - chosen
    return losses


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """The mean of a sequence, fp64 ``[n]``, and its standard error where neighbours are correlated.

    Tokens of one passage are hard or easy together, so an error computed as if they were independent is too small. The
    method is batch means (https://arxiv.org/abs/math/0703746): the sequence is cut into batches of about ``sqrt(n)``
    neighbours, and the error follows from the spread of the batches. The error of a single value is NaN.
    """
    n = len(values)
    if n < 2:
        return float(values.mean()), math.nan
    batches = np.array_split(values, math.isqrt(n) if n >= 4 else n)
    sizes = np.array([len(batch) for batch in batches], np.float64)
    mean = float(values.mean())
    with np.errstate(invalid="ignore"):
        excess = np.array([batch.sum() for batch in batches]) - sizes * mean
        variance = float((excess**2).sum()) * len(batches) / (len(batches) - 1)
    return mean, math.sqrt(variance) / n
