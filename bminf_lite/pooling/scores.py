"""Numbers of a classifier as scores: what its configuration says, and what callers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.functions import softmax
from ..errors import UsageError
from .settings import identity, sigmoid


@dataclass(frozen=True)
class Classification:
    """The ``label`` of a text with the highest score, that ``score``, and the ``scores`` of all labels by name."""

    label: str
    score: float
    scores: Mapping[str, float]


@dataclass(frozen=True)
class TokenLabel:
    """The label of one token: characters ``start`` to ``end`` of the text, and the ``score`` of the label."""

    text: str
    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Ranked:
    """A text's place in a list, ``index``, and its ``score`` for a query."""

    index: int
    score: float
    text: str


@dataclass(frozen=True)
class ClassifierSettings:
    """How the numbers of a classifier become scores.

    ``function`` is that of classification, ``softmax``, ``sigmoid`` or ``identity``. ``relevance`` is that of one
    number as a text's relevance for a query.
    """

    labels: tuple[str, ...]
    function: str
    relevance: str

    @classmethod
    def of(cls, config: Mapping[str, Any], labels: tuple[str, ...]) -> ClassifierSettings:
        """The settings in a ``config.json`` of a model with ``labels``."""
        kind = config.get("problem_type")
        is_independent = kind == "multi_label_classification" or (kind is None and len(labels) == 1)
        function = "identity" if kind == "regression" else "sigmoid" if is_independent else "softmax"
        own = config.get("sentence_transformers")
        name = own.get("activation_fn") if isinstance(own, Mapping) else None
        name = name or config.get("sbert_ce_default_activation_function") or "Sigmoid"
        return cls(labels, function, "identity" if str(name).endswith("Identity") else "sigmoid")

    def scores(self, numbers: np.ndarray, function: str | None = None) -> np.ndarray:
        """Numbers fp32 ``[n, labels]`` as scores, of the same shape."""
        name = function or self.function
        if name == "softmax":
            return softmax(numbers)
        return sigmoid(numbers) if name == "sigmoid" else identity(numbers)

    def classifications(self, numbers: np.ndarray) -> list[Classification]:
        """What the numbers fp32 ``[n, labels]`` say of each text."""
        return [self._best(row) for row in self.scores(numbers)]

    def relevances(self, numbers: np.ndarray) -> np.ndarray:
        """The relevance of each text, fp32 ``[n]``; ``UsageError`` for a classifier of several labels."""
        self.require_one_label()
        return self.scores(numbers, self.relevance)[:, 0]

    def require_one_label(self) -> None:
        """Raise ``UsageError`` for a classifier of several labels, which gives no relevance."""
        if len(self.labels) != 1:
            raise UsageError(
                f"this model has {len(self.labels)} labels ({', '.join(self.labels[:4])}), and a reranker has one: "
                "classify pairs of texts instead"
            )

    def _best(self, scores: np.ndarray) -> Classification:
        best = int(np.argmax(scores))
        by_label = {label: float(score) for label, score in zip(self.labels, scores, strict=True)}
        return Classification(self.labels[best], float(scores[best]), by_label)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The cosines of rows of length 1, fp32 ``[n, elements]`` -> fp32 ``[n]``; rounding takes none beyond 1."""
    found: np.ndarray = np.clip((a * b).sum(axis=1), -1, 1)
    return found


def ranked(scores: np.ndarray, texts: list[str], top_n: int | None) -> list[Ranked]:
    """The texts by falling score, at most ``top_n``; of equal ones the first comes first."""
    order = np.argsort(-scores, kind="stable")[:top_n]
    return [Ranked(int(i), float(scores[i]), texts[int(i)]) for i in order]
