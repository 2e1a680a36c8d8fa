"""Symmetric int8 weights: the one definition of their codes and scales.

Per output channel, ``a = max|w|`` and ``scale = fp16(a / 127)``; the codes are computed with the *rounded* scale,
``code = clip(rint(w / fp32(scale)), -127, 127)``, rounding half to even, so that the codes fit the stored scales. A row
of zeros has scale 1. If any row's fp16 scale would be subnormal, all scales of that tensor are kept in fp32, because a
subnormal fp16 number has fewer bits. A scale may also be that of a group of neighbouring columns of a row, which is
then quantized as a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .side_products import OutlierColumns as OutlierColumns

FP16_SMALLEST_NORMAL = float(np.finfo(np.float16).tiny)
FP16_LARGEST = float(np.finfo(np.float16).max)
CODE_MAX = 127
LARGEST_HEAD_SCALE = np.float16(515.5)
"""The largest scale of a head of the cache: 127 times the next larger fp16 number is infinite in fp16."""
BLOCK_ELEMENTS = 1 << 18
"""1 MiB of fp32: a block, its ratios and its codes together fit the L2 cache of a core."""


@dataclass(frozen=True)
class Int8Weight:
    """A weight matrix in int8, on the host.

    ``codes`` is int8 ``[out, in]``; ``scale`` is ``[out]`` in fp16 (or fp32, or bf16 as some writers store it), and the
    weight is ``scale[:, None] * codes``, plus the columns ``outliers``. Or ``scale`` is ``[out, groups]``, and each of
    its columns belongs to an equal run of neighbouring columns of the codes. ``dynamic`` says whether activations are
    quantized too, per token at run time (w8a8), or stay float (w8a16). They have one scale per token, or with an
    ``input_group_size`` one for that many neighbouring elements; then the weight has scales of groups of this size, or
    one per row. Files of other writers may hold codes of -128, which are read as they are. ``rotation`` is the size of
    the blocks in which activations are transformed before they are quantized or multiplied (see :mod:`.rotation`); the
    codes are those of a transformed weight. 1 is no transform. Such a weight has no ``outliers``.
    """

    codes: np.ndarray
    scale: np.ndarray
    dynamic: bool = True
    outliers: OutlierColumns | None = None
    rotation: int = 1
    input_group_size: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        """Columns that share a scale of the weight; 0 if all of a row do."""
        return 0 if self.scale.ndim == 1 else self.shape[1] // self.scale.shape[1]

    def dequantize(self) -> np.ndarray:
        """The weight as fp32 ``[out, in]``, transformed as its inputs are."""
        codes, scale = np.asarray(self.codes, np.float32), self.scale.astype(np.float32)[..., None]
        weight = (scale * codes.reshape(*self.scale.shape, self.group_size or self.shape[1])).reshape(self.shape)
        if self.outliers is not None:
            weight[:, self.outliers.index] = self.outliers.values
        return weight


HostWeight = np.ndarray | Int8Weight
"""A weight matrix ``[out, in]`` as a checkpoint gives it: float (fp32, fp16, bf16) or int8."""


def weight_columns(weight: HostWeight, columns: slice) -> HostWeight:
    """Some columns of a matrix, ``[out, n]``. An int8 matrix keeps the scales of its rows.

    Raises ``ValueError`` if ``columns`` divide a block of the input's rotation, or a group that has one scale.
    """
    if not isinstance(weight, Int8Weight):
        return weight[:, columns]
    if any(edge % weight.rotation for edge in (columns.start, columns.stop)):
        raise ValueError(
            f"columns {columns.start} to {columns.stop} divide a block of {weight.rotation} inputs that are rotated "
            "together"
        )
    group = weight.group_size or weight.input_group_size
    if group and any(edge % group for edge in (columns.start, columns.stop)):
        raise ValueError(
            f"columns {columns.start} to {columns.stop} divide a group of {group} columns that have one scale"
        )
    outliers = None if weight.outliers is None else weight.outliers.within(columns)
    return replace(
        weight,
        codes=weight.codes[:, columns],
        scale=scale_columns(weight.scale, weight.shape[1], columns),
        outliers=outliers,
    )


def scale_columns(scale: np.ndarray, features: int, columns: slice) -> np.ndarray:
    """The scales of some columns of a weight ``[out, features]``: ``[out]`` or ``[out, groups]``, as ``scale`` is."""
    if scale.ndim == 1:
        return scale
    group = features // scale.shape[1]
    return scale[:, columns.start // group : columns.stop // group]


def exact_scales(row_max: np.ndarray) -> np.ndarray:
    """The unrounded scale of each row from its largest magnitude: fp32 ``[out]`` -> fp32 ``[out]``.

    A row so small that its scale is 0 in fp32 counts as zeros, and has scale 1.
    """
    scale = row_max.astype(np.float32) / np.float32(CODE_MAX)
    return np.where(scale > 0, scale, np.float32(1))


def fits_fp16(scale: np.ndarray) -> bool:
    """Whether fp16 holds all these scales with full precision: none would be subnormal or infinite."""
    return bool(((scale >= FP16_SMALLEST_NORMAL) & (scale <= FP16_LARGEST)).all())


def rows_fit_fp16(rows: np.ndarray) -> bool:
    """Whether fp16 holds each of these rows, fp32 ``[n, features]``, with an error of 2^-11 of its largest value.

    So it is where that is a normal number of fp16, or zero. False for a NaN.
    """
    largest = row_maxima(rows)
    return bool(((largest == 0) | ((largest >= FP16_SMALLEST_NORMAL) & (largest <= FP16_LARGEST))).all())


def weight_scales(row_max: np.ndarray) -> np.ndarray:
    """The scales of a weight as they are stored, fp32 ``[out]`` -> fp16 ``[out]``, or fp32 if any does not fit fp16."""
    scale = exact_scales(row_max)
    return scale.astype(np.float16) if fits_fp16(scale) else scale


def row_maxima(block: np.ndarray) -> np.ndarray:
    """The largest magnitude of each row, fp32 ``[rows, in]`` -> fp32 ``[rows]``; NaN for a row that holds a NaN."""
    maxima: np.ndarray = np.maximum(block.max(axis=1, initial=0), -block.min(axis=1, initial=0))
    return maxima


def round_to_codes(block: np.ndarray, scale: np.ndarray, ratio: np.ndarray, codes: np.ndarray) -> None:
    """Set ``ratio`` to ``block / scale`` and ``codes`` to the ratio, rounded and clipped; all fp32 ``[rows, in]``."""
    with np.errstate(all="ignore"):
        np.divide(block, scale.astype(np.float32)[:, None], out=ratio)
        np.rint(ratio, out=codes)
        np.clip(codes, -CODE_MAX, CODE_MAX, out=codes)


def rows_per_block(in_features: int) -> int:
    """How many rows to quantize at once, so that a block and its intermediate results stay in a core's cache."""
    return max(1, BLOCK_ELEMENTS // max(in_features, 1))


def quantize_weight(weight: np.ndarray, dynamic: bool = True, group_size: int = 0) -> Int8Weight:
    """Quantize a float matrix ``[out, in]`` per output channel; see the module's docstring for the formula.

    With a ``group_size``, which divides ``in``, each group of that many columns of a row has a scale. Works in blocks
    of rows, so it needs little memory beside its result. Raises ``ValueError`` for a NaN or an infinity, because such a
    row has no scale.
    """
    if group_size:
        out, groups = weight.shape[0], weight.shape[1] // group_size
        check_groups(weight.shape[1], group_size)
        rows = quantize_weight(weight.reshape(out * groups, group_size), dynamic)
        return replace(rows, codes=rows.codes.reshape(weight.shape), scale=rows.scale.reshape(out, groups))
    out_features, in_features = weight.shape
    step = rows_per_block(in_features)
    blocks = [slice(i, i + step) for i in range(0, out_features, step)]
    row_max = np.empty(out_features, np.float32)
    for block in blocks:
        row_max[block] = row_maxima(weight[block].astype(np.float32, copy=False))
    if not np.isfinite(row_max).all():
        raise ValueError(f"row {int(np.flatnonzero(~np.isfinite(row_max))[0])} holds a NaN or an infinity")
    scale = weight_scales(row_max)
    codes = np.empty(weight.shape, np.int8)
    ratio, rounded = np.empty((2, min(step, out_features), in_features), np.float32)
    for block in blocks:
        part = weight[block].astype(np.float32, copy=False)
        round_to_codes(part, scale[block], ratio[: len(part)], rounded[: len(part)])
        np.copyto(codes[block], rounded[: len(part)], casting="unsafe")
    return Int8Weight(codes, scale, dynamic)


def check_groups(features: int, group_size: int) -> None:
    """Raise ``ValueError`` unless ``features`` columns are whole groups of ``group_size``."""
    if group_size < 1 or features % group_size:
        raise ValueError(f"{features} columns are no groups of {group_size}: give a size that divides them")


def quantize_rows(x: np.ndarray, group_size: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Quantize activations per token (row): float ``[..., K]`` -> int8 codes ``[..., K]``, fp32 scale ``[...]``.

    With a ``group_size``, which divides ``K``, each group of that many neighbouring elements is quantized as a row of
    its own, and the scale is ``[..., K / group_size]``.

    In fp32: ``a = max|x|``, ``r = 127 / a`` (0 for a row of zeros), ``code = clip(rint(x * r), -127, 127)``, and the
    scale kept is ``a / 127``. A row that holds a NaN or an infinity gets the scale NaN, so its results are NaN too. A
    row whose ``127 / a`` overflows fp32 (``a`` below about 3.7e-37) counts as zeros.
    """
    if group_size:
        check_groups(x.shape[-1], group_size)
        codes, scale = quantize_rows(x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size))
        return codes.reshape(x.shape), scale
    x = x.astype(np.float32, copy=False)
    with np.errstate(all="ignore"):
        a = np.abs(x).max(axis=-1, initial=0)
        r = np.float32(CODE_MAX) / a
        finite = np.isfinite(a)
        r = np.where(finite & np.isfinite(r), r, np.float32(0))
        codes = np.clip(np.rint(np.where(finite[..., None], x * r[..., None], np.float32(0))), -CODE_MAX, CODE_MAX)
        scale = np.where(finite, np.where(r > 0, a / np.float32(CODE_MAX), np.float32(0)), np.float32(np.nan))
    return codes.astype(np.int8), scale.astype(np.float32)


def quantize_heads(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize keys or values for the cache: float ``[..., head_dim]`` -> int8 codes likewise, fp16 scale ``[...]``.

    With ``a = max|x|``, ``scale = fp16(a / 127)`` rounded up, and ``code = rint(x / fp32(scale))``: a code is wrong by
    half a step at most, however small ``a`` is. A head of zeros has scale 0. The scale is at most
    :data:`LARGEST_HEAD_SCALE`, and codes are clipped to 127. If ``a`` is a NaN or more than fp16 holds, the scale is
    NaN, and attention reads NaN.
    """
    x = x.astype(np.float32, copy=False)
    a = np.abs(x).max(axis=-1, initial=0)
    with np.errstate(all="ignore"):
        exact = a / np.float32(CODE_MAX)
        scale = exact.astype(np.float16)
        scale = np.where(scale < exact, np.nextafter(scale, np.float16(np.inf)), scale)
        scale = np.where(a <= FP16_LARGEST, np.minimum(scale, LARGEST_HEAD_SCALE), np.float16(np.nan))
        ratio = np.where(scale[..., None] > 0, x / scale[..., None].astype(np.float32), np.float32(0))
    return np.clip(np.rint(ratio), -CODE_MAX, CODE_MAX).astype(np.int8), scale


def int8_parts(parts: Sequence[HostWeight]) -> list[Int8Weight]:
    """``parts`` if all are int8 of one kind, ``[]`` if all are float; ``ValueError`` for a mixture."""
    quantized = [p for p in parts if isinstance(p, Int8Weight)]
    if quantized and (len(quantized) < len(parts) or len({p.dynamic for p in quantized}) > 1):
        raise ValueError("weights that are multiplied together must be quantized alike")
    if len({p.rotation for p in quantized}) > 1:
        raise ValueError("weights that are multiplied together must rotate their input alike")
    columns = {() if p.outliers is None else tuple(p.outliers.index.tolist()) for p in quantized}
    if len(columns) > 1:
        raise ValueError("weights that are multiplied together must keep the same columns in fp16")
    if quantized and quantized[0].rotation > 1 and quantized[0].outliers is not None:
        raise ValueError("a weight that rotates its input keeps no columns in fp16")
    if len({(p.group_size, p.input_group_size) for p in quantized}) > 1:
        raise ValueError("weights that are multiplied together must have scales of equal groups of columns")
    if quantized:
        _check_scales(quantized[0])
    return quantized


def _check_scales(part: Int8Weight) -> None:
    """Raise ``ValueError`` unless the groups of columns that have scales are whole and equal."""
    columns, groups = part.shape[1], 1 if part.scale.ndim == 1 else part.scale.shape[1]
    if columns % groups:
        raise ValueError(f"{columns} columns are no {groups} groups of equal size")
    if part.input_group_size:
        check_groups(columns, part.input_group_size)
        if part.group_size not in (0, part.input_group_size):
            raise ValueError(
                f"a weight with scales of {part.group_size} columns, and of {part.input_group_size} elements of its "
                "input: groups must be equal"
            )


def stack_outliers(parts: Sequence[Int8Weight]) -> OutlierColumns | None:
    """The outlier columns of stacked matrices, ``values`` fp32 ``[out, n]``, or None if there are none."""
    outliers = [part.outliers for part in parts if part.outliers is not None]
    if not outliers:
        return None
    return OutlierColumns(outliers[0].index, np.concatenate([o.values.astype(np.float32) for o in outliers]))


def stack_biases(parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The biases of stacked matrices as one vector, fp32 ``[out]``, or None if no part has one."""
    if all(b is None for b in biases):
        return None
    pairs = zip(parts, biases, strict=True)
    return np.concatenate([np.zeros(p.shape[0], np.float32) if b is None else b.astype(np.float32) for p, b in pairs])
