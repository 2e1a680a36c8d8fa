"""MXFP4 as gpt-oss stores its experts (OCP Microscaling Formats 1.0; transformers' ``integrations/mxfp4.py``).

``X_blocks`` is uint8 ``[..., rows, blocks, 16]``: 32 FP4 values in a row, two in a byte, the first in the low bits.
``X_scales`` is uint8 ``[..., rows, blocks]``: ``2 ** (byte - 127)``. The result ``[..., rows, 32 * blocks]`` keeps the
name ``X_blocks``, because ``X`` is its transpose. It is bf16, which holds every such value exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from .codes import ScaledCodes, fp4
from .source_tensors import SourceFormat, SourceTensors, block_scales

BYTES = 16
"""The bytes of a block."""
LABEL = "MXFP4"


def parse(raw: Mapping[str, Any], source: object) -> SourceFormat:
    """The format; the layers that ``modules_to_not_convert`` names are those without blocks."""
    return Mxfp4()


class Mxfp4(SourceFormat):
    """The format of gpt-oss."""

    sign = "*_blocks (mxfp4)"

    def pair(self, source: SourceTensors) -> None:
        for name in source.ending("_blocks"):
            blocks, scales = f"{name}_blocks", f"{name}_scales"
            shape = source.infos[blocks].shape
            if len(shape) < 3 or shape[-1] != BYTES or source.infos[blocks].dtype != "U8":
                found = f"{source.infos[blocks].dtype} {list(shape)}"
                source.problems.append(f"tensor {blocks!r} is {found}; MXFP4 has U8 [..., rows, blocks, {BYTES}]")
            elif source.has(scales, ["U8"], shape[:-1], of=blocks):
                *leading, rows, groups = shape[:-1]
                columns = 2 * BYTES * groups
                codes = functools.partial(_codes, source, blocks, groups)
                weight = ScaledCodes(codes, block_scales(source, scales, rows, 1, groups), 2 * BYTES)
                result = (*leading, rows, columns)
                source.replace((blocks, scales), blocks, result, weight.rows, LABEL, "BF16")


def _codes(source: SourceTensors, name: str, groups: int, first: int, end: int) -> np.ndarray:
    packed = np.asarray(source.rows(name)[first * groups : end * groups])
    return fp4(packed.reshape(end - first, groups * BYTES))
