"""What a calibration decided for a tensor, as migration carries it out.

Calibration itself is ``bminf_lite.quantize``'s business; here are the words in which it tells migration the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .recipe import Recipe, Scheme

if TYPE_CHECKING:
    from ..models.spec import Spec
    from .reader import Checkpoint


@dataclass(frozen=True)
class WeightRewrite:
    """How one tensor differs from what the recipe alone says.

    ``scheme``, if given, replaces the recipe's. The tensor's rows are multiplied by ``row_factors`` and its columns by
    ``column_factors``, both fp32 and powers of two, before anything else happens to it; a vector is a row. Of an int8
    tensor the columns ``outliers`` (int32 ``[n]``, ascending) are kept in fp16. ``codes`` int8 ``[out, in]`` and
    ``scale`` ``[out]``, if given, are what to store; row factors apply to the scales.
    """

    scheme: Scheme | None = None
    row_factors: np.ndarray | None = None
    column_factors: np.ndarray | None = None
    outliers: np.ndarray | None = None
    codes: np.ndarray | None = None
    scale: np.ndarray | None = None

    def factors(self) -> dict[str, np.ndarray]:
        """The factors that are there, by the name of the field."""
        found = {"row_factors": self.row_factors, "column_factors": self.column_factors}
        return {name: values for name, values in found.items() if values is not None}


NO_REWRITE = WeightRewrite()


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a calibration: rewrites by tensor name, and what the manifest says about it."""

    rewrites: Mapping[str, WeightRewrite] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


CalibrateFn = Callable[["Checkpoint", "Spec", Recipe], CalibrationResult]
"""Runs a checkpoint whose files were found to be right, and decides."""

VerifyFn = Callable[[Path], Mapping[str, Any]]
"""Judges a complete folder before it takes its name, and says for the manifest what it found."""
