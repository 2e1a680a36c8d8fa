"""What the launchers of products with float activations share: the kinds of weights, and tensor maps of operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.tensor_maps import NBYTES, TensorMapDataType, tensor_map
from ..arrays import WeightRows, ceil_div, pitch_of
from ..constants import Activation, Epilogue
from ..instantiations import numbers

if TYPE_CHECKING:
    import cupy as cp

BLOCK = 64
"""Columns of a row of 128 bytes in fp16."""
GROUPS = (32, 64, 128)
"""Columns that may share a scale; 0 stands for all columns of a row. Of wider groups, each 128 columns have one."""
EPILOGUES = (Epilogue.TO_HALF, Epilogue.TO_FLOAT, Epilogue.ADD, Epilogue.GATED, Epilogue.ACTIVATED)
FLOAT_EPILOGUES = (Epilogue.TO_FLOAT, Epilogue.ADD)
"""Those with fp32 results."""
EPILOGUE_NUMBERS, ACTIVATION_NUMBERS = numbers(EPILOGUES), numbers(Activation)
INT8, HALF, FLOAT = "bminf::int8", "__half", "float"
NO_MAP = bytes(NBYTES)
_ELEMENTS = {1: TensorMapDataType.INT8, 2: TensorMapDataType.FLOAT16, 4: TensorMapDataType.FLOAT32}


@dataclass(frozen=True)
class WeightKind:
    """Template arguments: the type of a weight's elements, the columns that share a scale, and the scale's type."""

    element: str
    group_size: int
    scale: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 1 if self.element == INT8 else 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale of a group; 0 if the scales are those of channels."""
        return 0 if self.group_size == 0 else 2 if self.scale == HALF else 4

    def __str__(self) -> str:
        return f"{self.element}, {self.group_size}, {self.scale}"


KINDS = (
    WeightKind(HALF, 0, FLOAT),
    WeightKind(INT8, 0, FLOAT),
    *(WeightKind(INT8, group, scale) for group in GROUPS for scale in (HALF, FLOAT)),
)


def kind_of(weight: WeightRows) -> WeightKind:
    """The kind of a weight."""
    if weight.scale is None:
        return KINDS[0]
    if weight.group_size == 0:
        return KINDS[1]
    return WeightKind(INT8, weight.group_size, HALF if weight.scale.dtype == np.float16 else FLOAT)


def possible_epilogue(epilogue: int, activation: int) -> bool:
    """Whether the combination is launched: only a gated or an activated epilogue has an activation."""
    return epilogue in (Epilogue.GATED, Epilogue.ACTIVATED) or activation == 0


def weight_map(weight: WeightRows, columns: int, channels: int, gated: bool) -> bytes:
    """Boxes of ``columns`` columns of ``channels`` rows; if ``gated``, eight rows of the gate and of up by turns.

    If the outputs are not a multiple of eight, the last rows of the gate are followed by rows of up. Those behind up
    are padding of the matrix.
    """
    data, n, k, pitch = weight.matrix, weight.out_features, weight.in_features, weight.pitch
    element = _ELEMENTS[data.itemsize]
    if not gated:
        return tensor_map(data.data.ptr, element, (k, n), (pitch,), (columns, channels))
    outputs = n // 2
    sizes, pitches = (k, 8, 2, ceil_div(outputs, 8)), (pitch, outputs * pitch, 8 * pitch)
    return tensor_map(data.data.ptr, element, sizes, pitches, (columns, 8, 2, channels // 16))


def scale_map(weight: WeightRows, channels: int, groups: int) -> bytes:
    """Boxes of the scales of ``channels`` channels for ``groups`` groups; nothing if a scale is that of a channel."""
    if weight.group_size == 0:
        return NO_MAP
    scale = weight.scale
    assert scale is not None
    sizes = weight.out_features, ceil_div(weight.in_features, weight.group_size)
    element = _ELEMENTS[scale.itemsize]
    return tensor_map(scale.data.ptr, element, sizes, (pitch_of(scale),), (channels, groups), swizzled=False)


def has_scales_for_tma(weight: WeightRows, gated: bool) -> bool:
    """Whether TMA reads the scales: those of up begin at a multiple of 16 bytes."""
    return not gated or weight.scale is None or weight.out_features // 2 * kind_of(weight).scale_bytes % 16 == 0


def scale_pitch(weight: WeightRows) -> int:
    """Scales from one group to the next; 0 if a scale is that of a channel."""
    return 0 if weight.group_size == 0 or weight.scale is None else pitch_of(weight.scale)


def activations_map(x: cp.ndarray, columns: int, rows: int) -> bytes:
    """Boxes of ``rows`` rows of ``columns`` columns of fp16 rows."""
    return tensor_map(x.data.ptr, TensorMapDataType.FLOAT16, x.shape[::-1], (pitch_of(x),), (columns, rows), True)


def result_map(out: cp.ndarray, columns: int, rows: int) -> bytes:
    """Boxes of ``rows`` rows of ``columns`` columns of the result."""
    return tensor_map(out.data.ptr, _ELEMENTS[out.itemsize], out.shape[::-1], (pitch_of(out),), (columns, rows), True)
