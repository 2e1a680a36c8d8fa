"""The distance of a model's predictions from those of a reference, token by token.

Perplexities are compared in pairs: the same tokens are hard for both models, so the difference of their losses has a
far smaller standard error than either loss. Perplexity depends only on the probability of the token that follows in the
text. The Kullback-Leibler divergence depends on all probabilities: it is zero only where all of them are equal, and
errors cannot cancel.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .perplexity import Perplexity, mean_and_error

BLOCK_ELEMENTS = 1 << 17
"""1 MiB of fp64, which fits a core's cache together with its intermediate results."""
MAX_THREADS = 16


@dataclass(frozen=True)
class Divergence:
    """Predictions of a model compared with a reference's on the same tokens.

    ``ratio`` is the model's perplexity over the reference's, ``ratio_error`` its standard error. ``divergences``, fp64
    ``[tokens]``, holds for each token the divergence ``sum p log(p / q)`` of the model's probabilities ``q`` from the
    reference's ``p``, in nats; ``kl``, ``kl_error``, ``kl_median`` and ``kl_p999`` are their mean, its standard error,
    their median and their 99.9th percentile. ``agreement`` is the share of tokens for which both models give the same
    token the highest probability.
    """

    perplexity: Perplexity
    reference: Perplexity
    ratio: float
    ratio_error: float
    kl: float
    kl_error: float
    kl_median: float
    kl_p999: float
    agreement: float
    agreement_error: float
    tokens: int
    divergences: np.ndarray = field(repr=False, compare=False)

    @property
    def mean(self) -> float:
        """The mean divergence, ``kl``."""
        return self.kl

    def to_dict(self) -> dict[str, Any]:
        """All numbers but ``divergences``, as JSON values; None for infinity and NaN."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.type in ("float", "int")}
        found |= {"perplexity": self.perplexity.value, "reference_perplexity": self.reference.value}
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def summary(self) -> str:
        """The numbers as two lines of text."""
        return (
            f"perplexity {self.perplexity.value:.4f}, reference {self.reference.value:.4f}: "
            f"ratio {self.ratio:.5f} ± {self.ratio_error:.5f} over {self.tokens:,} tokens\n"
            f"divergence mean {self.kl:.6f} ± {self.kl_error:.6f}, median {self.kl_median:.6f}, "
            f"99.9th percentile {self.kl_p999:.5f}; same most likely token {self.agreement:.2%}"
        )


class DivergenceAccumulator:
    """Collects logits of the two models, in the order of the text."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, reference: np.ndarray, model: np.ndarray, targets: np.ndarray) -> None:
        """Logits fp32 ``[n, vocab]`` of both models, and the tokens ``[n]`` that follow in the text."""
        rows = max(1, BLOCK_ELEMENTS // reference.shape[1])
        parts = [slice(first, first + rows) for first in range(0, len(targets), rows)]
        with ThreadPoolExecutor(min(len(parts), MAX_THREADS) or 1) as pool:
            self._parts += pool.map(lambda part: _token_metrics(reference[part], model[part], targets[part]), parts)

    def result(self) -> Divergence:
        """The divergence of all tokens that were added."""
        losses, kl, same = (np.concatenate(parts, axis=-1) for parts in zip(*self._parts, strict=True))
        theirs, ours = losses
        log_ratio, log_error = mean_and_error(ours - theirs)
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = float(np.exp(log_ratio))
        kl_mean, kl_error = mean_and_error(kl)
        agreement, agreement_error = mean_and_error(same.astype(np.float64))
        return Divergence(
            perplexity=Perplexity.from_losses(ours),
            reference=Perplexity.from_losses(theirs),
            ratio=ratio,
            ratio_error=ratio * log_error,
            kl=kl_mean,
            kl_error=kl_error,
            kl_median=float(np.median(kl)),
            kl_p999=float(np.quantile(kl, 0.999)),
            agreement=agreement,
            agreement_error=agreement_error,
            tokens=len(kl),
            divergences=kl,
        )


def _token_metrics(
    reference: np.ndarray, model: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each token: both losses ``[2, n]``, the divergence ``[n]``, and whether the likeliest token is the same."""
    p, q = log_softmax(reference), log_softmax(model)
    chosen = np.arange(len(p)), targets
    kl = np.maximum(np.einsum("ij,ij->i", np.exp(p), p - q), 0)
    return -np.stack([p[chosen], q[chosen]]), kl, p.argmax(axis=1) == q.argmax(axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """fp32 ``[n, vocab]`` -> fp64 ``[n, vocab]``."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
