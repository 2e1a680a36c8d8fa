"""The decisions of a calibration (:mod:`bminf_lite.quantize`) for a tensor, which migration carries out."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from .recipe import Scheme


@dataclass(frozen=True)
class WeightRewrite:
    """The changes to one tensor beside those of the recipe. None leaves a property as it is.

    ``scheme`` replaces the recipe's. The tensor's rows are multiplied by ``row_factors`` and its columns by
    ``column_factors``, both fp32 powers of two, before anything else happens to it; a vector is one row. The columns
    ``outliers`` (int32 ``[n]``, ascending) of an int8 tensor stay fp16. ``codes`` int8 ``[out, in]`` and ``scale``
    ``[out]`` are stored instead of rounding; row factors apply to that scale. Rows of an int8 tensor are transformed
    in blocks of ``rotation`` elements after the factors, and its inputs at run time; ``codes`` are then those of the
    transformed rows. Each ``group_size`` neighbouring columns of an int8 tensor have scales of their own.
    """

    scheme: Scheme | None = None
    row_factors: np.ndarray | None = None
    column_factors: np.ndarray | None = None
    outliers: np.ndarray | None = None
    codes: np.ndarray | None = None
    scale: np.ndarray | None = None
    rotation: int | None = None
    group_size: int | None = None

    def merged(self, other: WeightRewrite) -> WeightRewrite:
        """This rewrite, with every property that ``other`` sets."""
        given = {field.name: getattr(other, field.name) for field in fields(other)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})


NO_REWRITE = WeightRewrite()


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a calibration: rewrites by tensor name, and its entry in the manifest."""

    rewrites: Mapping[str, WeightRewrite] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


def folded_factors(
    rewrites: Mapping[str, WeightRewrite], rows: Mapping[str, np.ndarray] | None = None
) -> dict[str, dict[str, str]]:
    """What rows and columns of tensors are multiplied by, by name and ``rows`` or ``columns``, as JSON takes it.

    ``rows`` are factors of rows beside those of the rewrites. A tensor without factors is not named.
    :func:`unpacked_factors` gives the numbers back.
    """
    others = rows or {}
    both = {
        name: {
            "rows": _product(rewrites.get(name, NO_REWRITE).row_factors, others.get(name)),
            "columns": rewrites.get(name, NO_REWRITE).column_factors,
        }
        for name in (*rewrites, *others)
    }
    packed = {
        name: {
            axis: _packed(factors) for axis, factors in found.items() if factors is not None and (factors != 1).any()
        }
        for name, found in both.items()
    }
    return {name: found for name, found in packed.items() if found}


def _product(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    return second if first is None else first if second is None else first * second


def _packed(factors: np.ndarray) -> str:
    """Powers of two as text: base64 of their exponents, int8, compressed by zlib."""
    return base64.b64encode(zlib.compress(np.log2(factors).astype(np.int8).tobytes(), 9)).decode()


def unpacked_factors(text: str) -> np.ndarray:
    """The powers of two, fp32 ``[n]``, of a text of :func:`folded_factors`."""
    return np.exp2(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int8).astype(np.float32))


def packed_vector(values: np.ndarray) -> str:
    """fp32 ``[n]`` as text: base64 of the first bytes of all numbers, the second ones, ..., compressed by zlib."""
    planes = np.ascontiguousarray(values.astype("<f4").view(np.uint8).reshape(-1, 4).T)
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


def unpacked_vector(text: str) -> np.ndarray:
    """The numbers fp32 ``[n]`` of a text of :func:`packed_vector`."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view("<f4").reshape(-1).astype(np.float32)
