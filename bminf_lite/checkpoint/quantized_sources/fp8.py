"""FP8 weights: ``float8_e4m3fn`` codes beside scales of blocks, rows or whole tensors.

``fp8`` (DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3.2; transformers' ``finegrained_fp8.py``): ``X.weight``
``[out, in]`` and ``X.weight_scale_inv`` ``[ceil(out / 128), ceil(in / 128)]`` of the blocks that ``weight_block_size``
states, or one scale where it is null. The experts of a layer may lie in one tensor, ``X`` ``[experts, out, in]`` beside
``X_scale_inv``. Scales are fp32, bf16 or E8M0. A scale multiplies, whatever its name says.

``fbgemm_fp8``: ``X.weight_scale`` ``[out, 1]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import checkpoint_error, is_whole
from .codes import E4M3, ScaledCodes
from .source_tensors import SCALES, SourceFormat, SourceTensors, block_scales

FP8 = "F8_E4M3"
SCALES_OF_FP8 = (*SCALES, "F8_E8M0", "U8")
MAX_BLOCK = 1 << 24
"""The most rows or columns of a block; published ones have 128."""


def parse(raw: Mapping[str, Any], source: object) -> SourceFormat:
    """The format of ``quantization_config``. Raises :class:`CheckpointError` for blocks of an impossible size."""
    if raw["quant_method"] == "fbgemm_fp8":
        return Fp8("_scale", None)
    block = raw.get("weight_block_size")
    if block is not None and not is_block(block):
        problem = f"quantization_config.weight_block_size is {block!r}, which is no pair of sizes above 0"
        raise checkpoint_error(source, [problem])
    return Fp8("_scale_inv", tuple(block) if block else None)


def is_block(value: object) -> bool:
    """Whether ``value`` is a list of the rows and the columns of a block."""
    sizes = value if isinstance(value, list) and len(value) == 2 else [0]
    return all(is_whole(size) and 0 < size <= MAX_BLOCK for size in sizes)


@dataclass(frozen=True)
class Fp8(SourceFormat):
    """FP8 codes; ``suffix`` is what the name of their scales adds, and ``block`` the rows and columns that share one.

    Without a block a scale is that of a row, or of a whole matrix.
    """

    suffix: str
    block: tuple[int, int] | None
    sign = "of FP8 (E4M3)"

    def pair(self, source: SourceTensors) -> None:
        for name, info in source.infos.items():
            scale = name + self.suffix
            if scale in source.infos and info.dtype != FP8:
                source.problems.append(f"tensor {name!r} is {info.dtype}; beside {scale!r} it must be {FP8}")
            elif info.dtype == FP8 and not name.endswith("_scale"):
                pair_fp8(source, name, scale, self.block)


def pair_fp8(source: SourceTensors, name: str, scale: str, block: tuple[int, int] | None) -> None:
    """Replace the codes ``name`` ``[..., out, in]`` and their scales by the product."""
    info = source.infos[name]
    if len(info.shape) < 2:
        source.problems.append(f"tensor {name!r} has shape {list(info.shape)}, and FP8 weights are matrices")
        return
    *leading, rows, columns = info.shape
    if source.has(scale, SCALES_OF_FP8, *scale_shapes(info.shape, block), of=name):
        count, matrices = math.prod(source.infos[scale].shape), math.prod(leading)
        block_rows, block_columns = block or (rows if count == matrices else 1, columns)
        what = f"blocks of {block[0]} x {block[1]}" if block else "rows" if block_rows == 1 else "whole matrices"
        scales = block_scales(source, scale, rows, block_rows, -(-columns // block_columns))
        weight = ScaledCodes(functools.partial(one_byte_codes, source, name), scales, block_columns)
        source.replace((name, scale), name, info.shape, weight.rows, f"FP8 with scales of {what}")


def scale_shapes(shape: tuple[int, ...], block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """The shapes that the scales of codes ``shape`` may have."""
    *leading, rows, columns = shape
    if block:
        return [(*leading, -(-rows // block[0]), -(-columns // block[1]))]
    of_rows, of_matrices = (*leading, rows, 1), (*leading, 1, 1)
    return [of_rows, of_rows[:-1], of_matrices, tuple(leading), *([] if leading else [(1,)])]


def one_byte_codes(source: SourceTensors, name: str, first: int, end: int) -> np.ndarray:
    """Rows of the codes ``name``, FP8 or int8, fp32 ``[rows, in]``."""
    codes = np.asarray(source.rows(name)[first:end])
    values: np.ndarray = E4M3[codes.view(np.uint8)] if source.infos[name].dtype == FP8 else codes.astype(np.float32)
    return values
