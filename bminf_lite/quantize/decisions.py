"""From what a calibration sees to what becomes of each tensor.

Products are decided one by one, in the order in which the model computes them, each as soon as its input is known; so
nothing of the calibration has to be kept. That is possible because decisions do not touch each other: a factor on a
matrix's rows changes neither the codes of its rows nor their errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..backend.base import Backend
from ..checkpoint.reader import Checkpoint
from ..checkpoint.recipe import Calibration, Recipe, Scheme
from ..checkpoint.treatment import UNTREATED, Calibrated, Treatment
from ..models.spec import Fold, Role, Spec
from .calibration import Observation, spread_rows
from .errors import Judge
from .smoothing import Smoothing, folded, search, spread

SEARCH_TOKENS = 512
"""Settings are compared on so many tokens."""

VERDICT_TOKENS = 4096
"""The errors that are reported, and that decide whether activations stay float, are measured on so many tokens."""


@dataclass(frozen=True)
class Decision:
    """What became of a product: the error that the recipe alone gives, and the one that was reached.

    ``exponent`` is that of the smoothing, None where there is none.
    """

    tensors: tuple[str, ...]
    scheme: Scheme
    exponent: float | None
    error_before: float
    error: float


class Decider:
    """Decides each product that it is shown. ``recipe`` must have a calibration."""

    def __init__(self, checkpoint: Checkpoint, spec: Spec, recipe: Recipe, ops: Backend):
        assert recipe.calibration is not None
        self.settings: Calibration = recipe.calibration
        self.recipe = recipe
        self.spec = spec
        self.ops = ops
        self.weights = checkpoint.weights(spec)
        self.decisions: list[Decision] = []
        self._fold_of = {name: fold for fold in spec.foldable for name in fold.consumers}
        self._smoothed: dict[Fold, Smoothing] = {}
        self._treatments: dict[str, Treatment] = {}

    def __call__(self, seen: Observation) -> None:
        """Decide the product that ``seen`` goes into."""
        scheme = self._scheme(seen.tensors[0])
        if scheme is Scheme.FLOAT:
            return
        fold = self._fold_of.get(seen.tensors[0])
        smoothing = self._smoothing(fold, seen, scheme) if fold and self.settings.smoothing else Smoothing()
        factors = spread(smoothing.factors, fold) if fold and smoothing.factors is not None else None
        judge = self._judge(seen.tensors, seen.inputs, VERDICT_TOKENS)
        before = max(judge.errors(scheme))
        after = max(judge.errors(scheme, factors)) if factors is not None else before
        if scheme is Scheme.W8A8 and 0 < self.settings.max_error < after:
            scheme = Scheme.W8A16
            after = max(judge.errors(scheme, factors))
        for name in seen.tensors:
            self._treat(name, scheme=scheme)
        self.decisions.append(Decision(seen.tensors, scheme, smoothing.exponent, before, after))

    def result(self) -> Calibrated:
        """All treatments, and the decisions for the manifest."""
        products = [asdict(decision) | {"scheme": decision.scheme.value} for decision in self.decisions]
        return Calibrated(self._treatments, {"products": products})

    def _scheme(self, name: str) -> Scheme:
        parameter = self.spec.parameters[name]
        return Scheme.FLOAT if parameter.transposed else self.recipe.scheme_of(name, parameter.role is Role.HEAD)

    def _smoothing(self, fold: Fold, seen: Observation, scheme: Scheme) -> Smoothing:
        """The smoothing of a fold, found when the first of its consumers comes."""
        if fold not in self._smoothed:
            input_max = np.maximum(seen.inputs.max(axis=0), -seen.inputs.min(axis=0))
            judge = self._judge(fold.consumers, seen.inputs, SEARCH_TOKENS)
            found = self._smoothed[fold] = search(judge, fold, input_max, scheme)
            moved = {} if found.factors is None else folded(self.spec, fold, found.factors)
            for name, treatment in moved.items():
                self._treat(name, **treatment.factors())
        return self._smoothed[fold]

    def _treat(self, name: str, **changes: object) -> None:
        self._treatments[name] = replace(self._treatments.get(name, UNTREATED), **changes)  # type: ignore[arg-type]

    def _judge(self, names: Sequence[str], inputs: np.ndarray, tokens: int) -> Judge:
        weights = [np.asarray(self.weights.weight(name)).astype(np.float32) for name in names]
        return Judge(self.ops, inputs[spread_rows(len(inputs), tokens)], weights)
