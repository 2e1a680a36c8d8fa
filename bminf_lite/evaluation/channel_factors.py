"""Factors per channel between the matrices of a model and those of its reference, found in the weights.

Smoothing divides the channels of an activation by factors and multiplies the weights that read it by them; keys and
gated products are scaled likewise. The model stays the same, but its activations are not those of the reference, and a
comparison would count the difference as an error. So a matrix of the model is ``V[i, j] = r[i] * f[j] * W[i, j]``
beside rounding, with ``W`` that of the reference: its inputs are the reference's divided by ``f``, its outputs are
multiplied by ``r``.

Factors are taken from weights, not from activations: of these a single token can be a thousand times larger than all
others, and a rounding error would look like a factor. A channel keeps the factor 1 unless another one explains its
weights better than rounding does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..backend.quantization import HostWeight, Int8Weight, rows_per_block
from ..backend.rotation import rotated

SAMPLE = 512
"""Rows, and columns, that are compared. The factor of a channel is then known to about 0.05 %: the rounding of int8 is
about 1 % of a weight, and independent from weight to weight."""
ROUNDING = 0.26
"""The mean square difference that rounding to the nearest code can cause, in squared steps: 0.25, and fp16's rounding
of scales."""
GAIN = 1.2
"""A simpler factor (1, then a power of two) is kept unless another one has a mean square difference that is smaller by
this. The ratio of two such means over 512 weights varies by 6 % (one standard deviation) by chance."""
EVIDENCE = 10.0
"""Factors exist at all if that of one channel reduces the mean square difference by this, and explains the weights but
for that part. Rounding, of GPTQ too, stays far below."""
UNEXPLAINED = 4.0
"""The mean square difference in squared steps that such a channel may keep: what GPTQ moves from one column to others
is about a step. Clipped weights, which are no multiples of others, differ by tens of steps."""
MIN_STEPS = 2.0
"""Codes from here on are wrong by a quarter at most."""
COARSE = 1.0
"""Channels whose weights are smaller than a step (in the mean square) have no unbiased factor; activations give it."""
CLOSE = 0.3
"""Factors whose logarithms to the base 2 differ by less are taken for the same: activations give one within that."""
COMMON_SHARE = 0.1
"""The least share of outputs whose factor is taken for 1."""


@dataclass(frozen=True)
class ChannelFactors:
    """``inputs`` fp64 ``[in]`` divide the model's activations, ``outputs`` fp64 ``[out]`` multiply its results.

    None where all are 1.
    """

    inputs: np.ndarray | None = None
    outputs: np.ndarray | None = None

    def to_model(self, x: np.ndarray) -> np.ndarray:
        """The reference's input fp32 ``[T, in]`` as the model would have it."""
        return x if self.inputs is None else (x / self.inputs).astype(np.float32)

    def to_reference(self, y: np.ndarray) -> np.ndarray:
        """The model's output fp32 ``[T, out]`` as the reference would have it."""
        return y if self.outputs is None else (y / self.outputs).astype(np.float32)


NO_FACTORS = ChannelFactors()


def find_channel_factors(
    model: Sequence[HostWeight], reference: Sequence[HostWeight], x: np.ndarray, reference_x: np.ndarray
) -> ChannelFactors:
    """The factors of a product whose matrices, stacked along their outputs, are ``model`` and ``reference``.

    ``x`` and ``reference_x`` fp32 ``[T, in]`` are an input of both. They decide only whether a factor that all inputs
    or all outputs have in common is one of the inputs or of the outputs, which the weights do not tell.
    """
    shapes = [sum(part.shape[0] for part in parts) for parts in (model, reference)]
    if shapes[0] != shapes[1] or model[0].shape[1] != reference[0].shape[1]:
        return NO_FACTORS
    block = max(_rotation(part) for part in (*model, *reference))
    some = Sample.of(shapes[0], model[0].shape[1], block)
    of_rows, of_columns = _compared(model, reference, some)
    if not (of_rows.is_finite() and of_columns.is_finite()):
        return NO_FACTORS
    if of_rows.is_rounding() and of_columns.is_rounding():
        return NO_FACTORS
    rough = _rough_factors(of_rows, of_columns, some)
    if rough is None:
        return NO_FACTORS
    outputs: np.ndarray | None = _pinned(*rough, x, reference_x)
    inputs: np.ndarray | None = None
    coarse = np.mean(of_rows.model.astype(np.float64) ** 2, axis=0) < COARSE
    ratios = _activation_ratios(reference_x, x)
    for _ in range(2):  # the first time, those of outputs are rough
        inputs = of_rows.scaled(None if outputs is None else outputs[some.rows, None]).factors(axis=0)
        if inputs is not None:
            inputs = np.where(coarse & ~np.isnan(ratios), ratios, inputs)
        outputs = of_columns.scaled(None if inputs is None else inputs[None, some.columns]).factors(axis=1)
    return ChannelFactors(inputs, outputs)


@dataclass(frozen=True)
class Sample:
    """The numbers of the rows and columns that are compared; columns are whole blocks of a rotation."""

    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, out_features: int, in_features: int, block: int) -> Sample:
        blocks = _evenly(in_features // block, max(SAMPLE // block, 1))
        columns = (blocks[:, None] * block + np.arange(block)).ravel()
        return cls(_evenly(out_features, SAMPLE), columns)


def _evenly(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


@dataclass(frozen=True)
class Compared:
    """Some weights of the model, and of the reference, fp32 ``[n, m]``, in units of a step of each row of the model.

    A step is the distance of two codes, or the precision of a float type.
    """

    model: np.ndarray
    reference: np.ndarray

    def is_finite(self) -> bool:
        return bool(np.isfinite(self.model).all() and np.isfinite(self.reference).all())

    def is_rounding(self) -> bool:
        """Whether the weights differ by no more than rounding."""
        difference = (self.model - self.reference) ** 2
        return all(bool((np.mean(difference, axis) <= ROUNDING).all()) for axis in (0, 1))

    def scaled(self, factors: np.ndarray | None) -> Compared:
        return self if factors is None else Compared(self.model, self.reference * factors.astype(np.float32))

    def factors(self, axis: int) -> np.ndarray | None:
        """The factor of each channel, ``axis`` being that of the weights of a channel; None if all are 1.

        Of 1, the powers of two around the estimate, and the estimate by least squares, the simplest that explains the
        weights is taken.
        """
        v, w = (x.astype(np.float64) for x in (self.model, self.reference))
        vv, vw, ww = ((a * b).mean(axis) for a, b in ((v, v), (v, w), (w, w)))
        used = (ww > 0) & (vw > 0)
        fitted = np.divide(vw, ww, out=np.ones_like(ww), where=used)
        fitted = np.where(used, fitted, 1.0)

        def left(factors: np.ndarray) -> np.ndarray:
            difference: np.ndarray = np.maximum(vv - 2 * factors * vw + factors**2 * ww, 0)
            return difference

        # Where the model's weights are exact multiples, what is left is the error of fp64 and fp32 sums.
        least = np.maximum(left(fitted), 1e-12 * vv)
        near = np.log2(fitted)
        candidates = [np.ones_like(fitted), *(np.exp2(f(near)) for f in (np.rint, np.floor, np.ceil))]
        chosen: np.ndarray = fitted
        for candidate in reversed(candidates):
            chosen = np.where(left(candidate) <= GAIN * least, candidate, chosen)
        evident = used & (EVIDENCE * least < np.minimum(left(np.ones_like(fitted)), vv)) & (least < UNEXPLAINED)
        evident &= chosen != 1
        return chosen if evident.any() else None


def _compared(model: Sequence[HostWeight], reference: Sequence[HostWeight], some: Sample) -> tuple[Compared, Compared]:
    """The rows of ``some`` ``[n, in]``, and its columns ``[out, n]``."""
    (rows, columns, steps), (other_rows, other_columns, other_steps) = (
        _sampled(parts, some) for parts in (model, reference)
    )
    steps = np.maximum(steps, other_steps * np.float32(2.0**-20))  # of rows that are zero in the model
    steps = np.where(steps > 0, steps, 1)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        return (
            Compared(rows / steps[some.rows], other_rows / steps[some.rows]),
            Compared(columns / steps, other_columns / steps),
        )


def _sampled(parts: Sequence[HostWeight], some: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows fp32 ``[n, in]``, columns fp32 ``[out, n]``, and the step of each row fp32 ``[out]``."""
    blocks = []
    start = 0
    for part in parts:
        count = part.shape[0]
        wanted = some.rows[(some.rows >= start) & (some.rows < start + count)] - start
        start += count
        for first in range(0, count, rows_per_block(part.shape[1])):
            end = min(first + rows_per_block(part.shape[1]), count)
            index = wanted[(wanted >= first) & (wanted < end)] - first
            blocks.append(_block(part, first, end, index, some.columns))
    rows, columns, steps = (np.concatenate(values) for values in zip(*blocks, strict=True))
    return rows, columns, steps


def _block(
    weight: HostWeight, first: int, end: int, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From the rows ``first`` to ``end``: the rows numbered ``rows``, ``columns`` of all rows, and the rows' steps."""
    if not isinstance(weight, Int8Weight):
        values = np.asarray(weight[first:end])
        some = values[:, columns].astype(np.float32)
        return values[rows].astype(np.float32), some, np.abs(some).max(axis=1, initial=0) * _precision(values.dtype)
    codes, scale = np.asarray(weight.codes[first:end]), np.asarray(weight.scale[first:end]).astype(np.float32)
    some_rows, some_columns = (
        s[:, None] * c.astype(np.float32) for s, c in ((scale[rows], codes[rows]), (scale, codes[:, columns]))
    )
    if weight.outliers is not None:
        index, kept = weight.outliers.index, np.asarray(weight.outliers.values[first:end]).astype(np.float32)
        some_rows[:, index] = kept[rows]
        place = {int(column): i for i, column in enumerate(index)}
        for i, column in enumerate(columns):
            if int(column) in place:
                some_columns[:, i] = kept[:, place[int(column)]]
    if weight.rotation > 1:
        some_rows, some_columns = (rotated(x, weight.rotation) for x in (some_rows, some_columns))
    return some_rows, some_columns, scale


def _precision(dtype: np.dtype) -> np.float32:
    return np.float32(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _rotation(weight: HostWeight) -> int:
    return weight.rotation if isinstance(weight, Int8Weight) else 1


def _rough_factors(of_rows: Compared, of_columns: Compared, some: Sample) -> tuple[np.ndarray, np.ndarray] | None:
    """The factors of outputs and of inputs within some percent, from medians; None if the weights are not related.

    That of an input whose weights are all below some steps is NaN.
    """
    logs = _log_ratios(of_rows)
    inputs = _median(logs - _median(logs, 1)[:, None], 0)
    logs = _log_ratios(of_columns) - inputs[some.columns]
    outputs = _median(logs, 1)
    if np.isnan(inputs).all() or np.isnan(outputs).all():
        return None
    return np.exp2(np.where(np.isnan(outputs), np.nanmedian(outputs), outputs)), np.exp2(inputs)


def _log_ratios(pair: Compared) -> np.ndarray:
    """``log2(V / W)`` where it is known, NaN elsewhere."""
    known = (np.abs(pair.model) >= MIN_STEPS) & (pair.model * pair.reference > 0)
    ratio = np.divide(pair.model, pair.reference, out=np.ones_like(pair.model), where=known)
    return np.where(known, np.log2(ratio), np.nan)


def _median(values: np.ndarray, axis: int) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of channels without a weight that is large enough
        found: np.ndarray = np.nanmedian(values, axis)
    return found


def _pinned(outputs: np.ndarray, inputs: np.ndarray, x: np.ndarray, reference_x: np.ndarray) -> np.ndarray:
    """The factors of outputs, without the one that is common to all and belongs to the inputs.

    The activations give it within some percent. Where many outputs agree about it, it is that which makes their factor
    1: outputs that are not scaled exist in most products.
    """
    ratios = _activation_ratios(reference_x, x * inputs)
    if np.isnan(ratios).all():
        return outputs
    common = float(np.nanmedian(ratios))
    near = outputs[np.abs(np.log2(outputs / common)) < CLOSE]
    if len(near) >= COMMON_SHARE * len(outputs):
        common = float(np.median(near))
    elif abs(math.log2(common) - round(math.log2(common))) < CLOSE:
        common = 2.0 ** round(math.log2(common))
    return outputs / common


def _activation_ratios(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """By how much a channel is larger in ``expected`` than in ``got``, fp32 ``[T, n]``: of the median token, NaN if 0.

    Medians, because one token may be a thousand times larger than all others.
    """
    sizes = [np.median(np.abs(x), axis=0).astype(np.float64) for x in (expected, got)]
    known = (sizes[0] > 0) & (sizes[1] > 0) & np.isfinite(sizes[0]) & np.isfinite(sizes[1])
    ratios: np.ndarray = np.divide(sizes[0], sizes[1], out=np.full(len(sizes[0]), np.nan), where=known)
    return ratios
