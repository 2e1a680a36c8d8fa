"""What quantization costs a model that makes vectors of texts: cosines with the float model's, and how pairs rank.

A search orders texts by their cosine with a query. So it matters whether pairs of texts keep their order: Spearman's
rank correlation of the cosines of pairs is 1 if all do. Of a classifier, the same is said of its numbers, and how often
the first label is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..api import Model, load
from ..errors import UsageError

MAX_PAIRS = 200_000
"""Pairs of texts whose cosines are compared, drawn at random if there are more."""


@dataclass(frozen=True)
class VectorComparison:
    """Vectors of ``texts`` texts: cosines of a text's two vectors, and the rank correlation of ``pairs`` pairs."""

    texts: int
    mean_cosine: float
    least_cosine: float
    pairs: int
    rank_correlation: float

    def summary(self) -> str:
        """The comparison as text."""
        return (
            f"cosine of {self.texts:,} texts' vectors: mean {self.mean_cosine:.6f}, least {self.least_cosine:.6f}\n"
            f"rank correlation of the cosines of {self.pairs:,} pairs of texts: {self.rank_correlation:.6f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class LabelComparison:
    """A classifier's numbers for ``texts`` texts: equal first labels, the largest difference, and how texts rank."""

    texts: int
    agreement: float
    largest_difference: float
    rank_correlation: float

    def summary(self) -> str:
        """The comparison as text."""
        return (
            f"first label of {self.texts:,} texts: the same in {self.agreement:.2%}; scores differ by "
            f"{self.largest_difference:.6f} at most\n"
            f"rank correlation of the texts by the score of each label, the least: {self.rank_correlation:.6f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def compare_vectors(
    model: str | Path,
    reference: str | Path,
    texts: Sequence[str],
    device: str = "auto",
    memory_limit: int | str | None = None,
) -> VectorComparison | LabelComparison:
    """Compare the model in a folder with the one that it was made from, on texts; one after the other is loaded.

    Raises ``UsageError`` for models that do not belong together, and for fewer than two texts.
    """
    if len(texts) < 2:
        raise UsageError(f"{len(texts)} texts are given, but two at least are compared: give a text per line")
    found = []
    for folder in (model, reference):
        with load(folder, device=device, memory_limit=memory_limit) as loaded:
            found.append(_numbers(loaded, texts))
    (own, is_class), (other, is_other_class) = found
    if own.shape != other.shape or is_class != is_other_class:
        raise UsageError(f"{model} and {reference} do not give alike numbers: {own.shape[1]:,} and {other.shape[1]:,}")
    return compared_labels(own, other) if is_class else compared(own, other)


def _numbers(model: Model, texts: Sequence[str]) -> tuple[np.ndarray, bool]:
    """Vectors fp32 ``[texts, elements]``, or the scores of a classifier, and whether they are those."""
    if model.pooler is None:
        raise UsageError("this model generates text: compare its predictions")
    if model.pooler.model.classifier is None:
        return model.embed(texts), False
    rows = model.classify(list(texts))
    if rows and isinstance(rows[0], list):
        raise UsageError("models that classify tokens are not compared")
    return np.array([list(row.scores.values()) for row in rows], np.float32), True


def compared(own: np.ndarray, other: np.ndarray, seed: int = 0) -> VectorComparison:
    """The comparison of vectors fp32 ``[texts, elements]`` of the same texts."""
    own, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (own.astype(np.float64), other))
    cosines = np.clip((own * other).sum(axis=1), -1, 1)
    count = len(own) * (len(own) - 1) // 2
    if count <= MAX_PAIRS:
        first, second = np.triu_indices(len(own), 1)
    else:
        drawn = np.random.default_rng(seed).integers(0, len(own), (2, MAX_PAIRS))
        first, second = drawn[:, drawn[0] != drawn[1]]
    ranks = rank_correlation(*((x[first] * x[second]).sum(axis=1) for x in (own, other)))
    return VectorComparison(len(own), float(cosines.mean()), float(cosines.min()), len(first), ranks)


def compared_labels(own: np.ndarray, other: np.ndarray) -> LabelComparison:
    """The comparison of scores fp32 ``[texts, labels]`` of the same texts."""
    agreement = float((own.argmax(axis=1) == other.argmax(axis=1)).mean())
    ranks = min(rank_correlation(a, b) for a, b in zip(own.T, other.T, strict=True))
    return LabelComparison(len(own), agreement, float(np.abs(own - other).max()), ranks)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two lists of numbers; equal numbers share the mean of their ranks."""
    ranks = [_ranks(x) - (len(x) - 1) / 2 for x in (a, b)]
    scale = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / scale if scale else 1.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each number from 0 on, fp64 ``[n]``."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: np.ndarray = (ends - counts + ends - 1) / 2
    return means[places]
