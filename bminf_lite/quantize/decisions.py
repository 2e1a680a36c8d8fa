"""From what a calibration sees to what becomes of each tensor.

Products are decided one by one, in the order in which the model computes them, each as soon as its input is known; so
nothing of the calibration has to be kept. That is possible because decisions do not touch each other: a factor on a
matrix's rows changes neither the codes of its rows nor their errors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ..backend.base import Backend
from ..checkpoint.reader import Checkpoint
from ..checkpoint.recipe import Calibration, Recipe, Scheme
from ..checkpoint.treatment import UNTREATED, Calibrated, Treatment
from ..models.spec import Fold, Role, Spec
from .calibration import Observation, spread_rows
from .errors import Judge, Version
from .gptq import compensated, divided
from .precision import choose
from .smoothing import Smoothing, folded, search, spread

SEARCH_TOKENS = 512
"""Settings are compared on so many tokens."""

VERDICT_TOKENS = 4096
"""The errors that are reported, and that decide whether activations stay float, are measured on so many tokens."""


@dataclass(frozen=True)
class Decision:
    """What became of a product: the error that the recipe alone gives, and the one that was reached.

    ``exponent`` is that of the smoothing, None where there is none; ``outlier_columns`` are the inputs kept in fp16;
    ``rounding`` is ``nearest`` or ``gptq``.
    """

    tensors: tuple[str, ...]
    scheme: Scheme
    exponent: float | None
    outlier_columns: tuple[int, ...]
    rounding: str
    error_before: float
    error: float


class Decider:
    """Decides each product that it is shown. ``recipe`` must have a calibration.

    Codes that were computed here wait in files in ``scratch``, the system's place for such files by default.
    """

    def __init__(
        self, checkpoint: Checkpoint, spec: Spec, recipe: Recipe, ops: Backend, scratch: Path | None = None
    ):
        assert recipe.calibration is not None
        self.settings: Calibration = recipe.calibration
        self.recipe = recipe
        self.spec = spec
        self.ops = ops
        self.scratch = scratch
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
        input_max = np.maximum(seen.inputs.max(axis=0), -seen.inputs.min(axis=0))
        smoothing, factors = Smoothing(), None
        if self.settings.smoothing and (fold := self._fold_of.get(seen.tensors[0])):
            smoothing = self._smoothing(fold, seen.inputs, input_max, scheme)
            factors = None if smoothing.factors is None else spread(smoothing.factors, fold)
        judge = self._judge(seen.tensors, seen.inputs, VERDICT_TOKENS)
        before = max(judge.errors(Version(scheme)))
        limits = self.settings if self._are_stored(seen.tensors) else replace(self.settings, outlier_columns=0)
        version, error = choose(judge, Version(scheme, factors), limits, input_max)
        for name in seen.tensors:
            self._treat(name, scheme=version.scheme, outliers=version.outliers)
        rounding = "nearest"
        if self.settings.rounding == "gptq" and version.outliers is None and self._are_stored(seen.tensors):
            better = compensated(self.ops, seen.inputs, judge.weights, version)
            if better is not None:
                rounding, inputs = "gptq", divided(judge.inputs, version)
                error = max(judge.error(i, weight, inputs) for i, weight in enumerate(better))
                for name, weight in zip(seen.tensors, better, strict=True):
                    self._treat(name, codes=self._spilled(weight.codes), scale=weight.scale)
        kept = () if version.outliers is None else tuple(version.outliers.tolist())
        self.decisions.append(
            Decision(seen.tensors, version.scheme, smoothing.exponent, kept, rounding, before, error)
        )

    def result(self) -> Calibrated:
        """All treatments, and the decisions for the manifest."""
        products = [asdict(decision) | {"scheme": decision.scheme.value} for decision in self.decisions]
        return Calibrated(self._treatments, {"products": products})

    def _scheme(self, name: str) -> Scheme:
        return self.recipe.scheme_of(name, self.spec.parameters[name].role is Role.HEAD)

    def _are_stored(self, names: Sequence[str]) -> bool:
        """Whether the file will hold their codes: not those of matrices that are quantized when they are loaded."""
        return all(name not in self.spec.tied and not self.spec.parameters[name].transposed for name in names)

    def _spilled(self, codes: np.ndarray) -> np.ndarray:
        """The codes in a file without a name, which is gone when nobody needs it."""
        with tempfile.TemporaryFile(dir=self.scratch) as file:
            mapped = np.memmap(file, np.int8, "w+", shape=codes.shape)
        mapped[...] = codes
        return mapped

    def _smoothing(self, fold: Fold, inputs: np.ndarray, input_max: np.ndarray, scheme: Scheme) -> Smoothing:
        """The smoothing of a fold, found when the first of its consumers comes."""
        if fold not in self._smoothed:
            judge = self._judge(fold.consumers, inputs, SEARCH_TOKENS)
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
