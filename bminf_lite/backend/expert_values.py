"""How a mixture of experts routes and what its experts compute: plain values that backends and kernels exchange.

:mod:`.routing` and :mod:`.experts` define what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Score(IntEnum):
    """What the logits of a token become."""

    SOFTMAX = 0
    """The softmax over all experts."""
    SIGMOID = 1
    """The sigmoid of each."""
    SOFTMAX_OF_CHOSEN = 2
    """The softmax over the chosen experts. They are chosen by their logits."""
    SPARSE_MIXER = 3
    """A softmax for each rank, over the experts that no earlier rank has and whose logits are close to the largest."""


CHOSEN_BY_LOGITS = (Score.SOFTMAX_OF_CHOSEN, Score.SPARSE_MIXER)
"""Scores that exist of chosen experts alone."""


class GroupScore(IntEnum):
    """The score by which groups of experts are ranked."""

    TOP_TWO = 0
    """The sum of the two largest scores of a group."""
    LARGEST = 1
    """The largest score."""


class MaskedScore(IntEnum):
    """What the scores of experts outside the best groups count as when experts are ranked."""

    MINUS_INFINITY = 0
    ZERO = 1
    """An expert outside the best groups is chosen before one inside them whose score is negative."""


WEIGHT_TYPES = ("float32", "float16", "bfloat16")
"""Types that weights can be rounded to, by their names in ``config.json``."""


@dataclass(frozen=True)
class RouterSpec:
    """How a model's router makes weights of logits, see the module's docstring.

    ``renormalise`` divides the chosen scores by ``max(sum + epsilon, min_sum)``; ``scale`` multiplies the result. With
    ``num_groups`` above 1 the experts are divided into groups of neighbours, of which the ``top_groups`` best by
    ``group_score`` take part; the others' scores count as ``masked``. ``weight_type`` is what weights are rounded to at
    the end, for a model whose own code casts them to its type. ``scales_input``: the weights multiply the experts'
    inputs, not their results (Llama 4). ``closeness`` is for ``SPARSE_MIXER``: logits compete with the largest one if
    they are less by at most that share of the larger one of it and their magnitude.

    Raises ``ValueError`` that lists all contradictions.
    """

    num_experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    renormalise: bool = False
    epsilon: float = 0.0
    min_sum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.TOP_TWO
    masked: MaskedScore = MaskedScore.MINUS_INFINITY
    weight_type: str = "float32"
    scales_input: bool = False
    closeness: float = 0.0

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ValueError(f"this router cannot choose experts: {'; '.join(problems)}")

    def _problems(self) -> list[str]:
        found = []
        if not 1 <= self.top_k <= self.num_experts:
            found.append(
                f"{self.top_k} experts a token must be between 1 and the number of experts, {self.num_experts}"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            found.append(
                f"{self.top_groups} groups a token must be between 1 and the number of groups, {self.num_groups}"
            )
        elif self.num_experts % self.num_groups:
            found.append(f"{self.num_experts} experts cannot be divided into {self.num_groups} groups")
        else:
            if self.has_groups and self.group_size * self.top_groups < self.top_k:
                found.append(
                    f"{self.top_groups} groups of {self.group_size} experts do not hold the {self.top_k} of a token"
                )
            if self.has_groups and self.group_score is GroupScore.TOP_TWO and self.group_size < 2:
                found.append("groups of one expert have no two largest scores")
            if self.has_groups and self.score in CHOSEN_BY_LOGITS:
                found.append("a softmax over the chosen experts has no scores to rank groups by")
        if self.weight_type not in WEIGHT_TYPES:
            found.append(f"weights of type {self.weight_type!r}; known are {', '.join(WEIGHT_TYPES)}")
        return found

    @property
    def has_groups(self) -> bool:
        """Whether some experts do not take part."""
        return self.top_groups < self.num_groups

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups


@dataclass(frozen=True)
class ExpertActivation:
    """What stands between the two products of an expert, computed in fp32.

    ``function`` is one of :data:`.functions.ACTIVATIONS`. If ``gated`` the first product gives a gate and up, and the
    result is ``f(gate) * up``; else it is ``f`` of the product. With a ``limit`` (gpt-oss), the gate is at most that,
    up is within it, and the result is ``gate * sigmoid(alpha * gate) * (up + 1)`` whatever the ``function``.
    """

    function: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.702

    def __post_init__(self) -> None:
        assert self.gated or self.limit is None


@dataclass(frozen=True)
class ExpertBiases:
    """The biases of a mixture, fp32: the ``router``'s ``[experts]``, and of each expert those of its two products.

    ``hidden`` are ``[2 * features]`` of gate and up, or ``[features]``, and ``down`` ``[out]``.
    """

    router: np.ndarray
    hidden: Sequence[np.ndarray]
    down: Sequence[np.ndarray]
