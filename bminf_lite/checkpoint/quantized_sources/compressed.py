"""The formats of compressed-tensors that are not run as they are: FP8, int4, int8 with zero points, FP4.

| ``weights`` | codes | scales, ``X.weight_scale`` |
|---|---|---|
| ``float``, 8 bits | ``X.weight`` FP8 ``[out, in]`` | of the tensor, of rows, groups or blocks |
| ``int``, 8 bits | ``X.weight`` int8 ``[out, in]``, or packed | the same |
| ``int``, 4 bits | packed | the same |
| ``float``, 4 bits, groups of 16 (NVFP4) | ``X.weight_packed`` uint8 ``[out, in / 2]`` | FP8 ``[out, in / 16]`` |
| ``float``, 4 bits, groups of 32 (MXFP4) | the same | uint8 ``[out, in / 32]``: ``2 ** (byte - 127)`` |

Packed integers are ``X.weight_packed`` int32, ``code + 2 ** (bits - 1)`` from the low bits of a word on, and
``X.weight_shape``. The scales of NVFP4 are divided by ``X.weight_global_scale``.
Zero points are int8 ``X.weight_zero_point`` of the shape of the scales, or packed like codes, along the outputs.
``X.weight_g_idx`` int32 ``[in]`` is the group of each input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CheckpointError, checkpoint_error
from ..compressed_tensors import LINEAR, target_problems
from ..derived_tensor import Rows
from ..name_patterns import NameMatcher, Targets
from .codes import RowsOf, ScaledCodes, fp4, unsigned, unsigned_along_rows
from .fp8 import FP8, SCALES_OF_FP8, is_block, one_byte_codes, scale_shapes
from .int4 import groups_of_inputs
from .source_tensors import SCALES, SourceFormat, SourceTensors, block_scales

STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
MAX_GROUPS = 1_000
GROUPS_OF_FP4 = {16: "NVFP4", 32: "MXFP4"}


def is_source(raw: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` has weights that are not symmetric int8 codes of rows or groups."""
    groups = raw.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    return any(_is_source(args) for args in weights if isinstance(args, dict))


def _is_source(weights: Mapping[str, Any]) -> bool:
    is_float, bits = weights.get("type") == "float", weights.get("num_bits", 8)
    return is_float or bits == 4 or weights.get("symmetric") is False


@dataclass(frozen=True)
class WeightArgs:
    """How the weights of a group of layers are quantized."""

    targets: Targets
    is_float: bool
    bits: int
    group_size: int
    block: tuple[int, int] | None
    symmetric: bool


def parse(raw: Mapping[str, Any], source: object) -> SourceFormat:
    """The format of ``quantization_config``.

    Raises :class:`CheckpointError` with every setting that is not known.
    """
    problems: list[str] = []
    groups: dict[str, Any] = raw["config_groups"]
    if len(groups) > MAX_GROUPS:
        problem = f"quantization_config.config_groups has {len(groups):,} groups; {MAX_GROUPS:,} can be read"
        raise checkpoint_error(source, [problem])
    found = [_parse_group(f"quantization_config.config_groups.{name}", g, problems) for name, g in groups.items()]
    ignore = raw.get("ignore") or []
    problems += target_problems("quantization_config.ignore", ignore)
    sparsity, transforms = raw.get("sparsity_config") or {}, raw.get("transform_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        problems.append(f"quantization_config.sparsity_config is {sparsity!r}; only dense weights can be read")
    if not isinstance(transforms, dict) or transforms.get("config_groups"):
        problems.append("quantization_config.transform_config: rotations of inputs are run beside int8 weights only")
    if problems:
        raise checkpoint_error(source, problems)
    known = [args for args in found if args is not None]
    patterns = (
        pattern for targets in (*(args.targets for args in known), Targets(ignore)) for pattern in targets.patterns
    )
    return Compressed(tuple(known), Targets(ignore), NameMatcher(patterns, source))


def _parse_group(where: str, group: object, problems: list[str]) -> WeightArgs | None:
    """The weights of a group; None, and a note of each problem, for those that cannot be read."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        problems.append(f"{where} must be an object with an object weights, not {group!r}")
        return None
    targets, before = group.get("targets"), len(problems)
    problems += target_problems(f"{where}.targets", targets)
    is_float, bits = weights.get("type", "int") == "float", weights.get("num_bits", 8)
    size, block = weights.get("group_size"), weights.get("block_structure")
    has_groups = type(size) is int and size > 0
    default = "group" if has_groups else "channel" if size == -1 else "tensor"
    strategy = weights.get("strategy") or default
    wrong = {
        "type": weights.get("type", "int") not in ("int", "float"),
        "num_bits": bits not in (4, 8) or isinstance(bits, bool),
        "strategy": strategy not in STRATEGIES,
        "group_size": strategy in ("group", "tensor_group") and not has_groups,
        "block_structure": strategy == "block" and not is_block(block),
        "symmetric": not isinstance(weights.get("symmetric", True), bool),
        "dynamic": bool(weights.get("dynamic")),
    }
    problems += [f"{where}.weights.{key} is {weights.get(key)!r}, which cannot be read" for key in wrong if wrong[key]]
    if len(problems) == before and is_float and bits == 4 and size not in GROUPS_OF_FP4:
        problems.append(f"{where}.weights.group_size is {size!r}; FP4 has groups of 16 (NVFP4) or 32 (MXFP4)")
    if len(problems) > before or not isinstance(targets, list):
        return None
    grouped = size if strategy in ("group", "tensor_group") and type(size) is int else 0
    blocks = (block[0], block[1]) if strategy == "block" and isinstance(block, list) else None
    return WeightArgs(Targets(targets), is_float, bits, grouped, blocks, weights.get("symmetric", True))


@dataclass(frozen=True)
class Compressed(SourceFormat):
    """The layers of compressed-tensors' groups; ``matcher`` knows the patterns of all targets."""

    groups: tuple[WeightArgs, ...]
    ignore: Targets
    matcher: NameMatcher
    sign = "*.weight_scale (compressed-tensors)"

    def args_of(self, module: str) -> WeightArgs | None:
        """How a layer is quantized. A target that names the layer goes before one that names its class."""
        if self.matcher.matches(self.ignore, module):
            return None
        by_name = (group for group in self.groups if self.matcher.matches(group.targets, module))
        by_class = (group for group in self.groups if LINEAR in group.targets.names)
        return next(by_name, None) or next(by_class, None)

    def pair(self, source: SourceTensors) -> None:
        for module in _quantized_layers(source):
            args = self.args_of(module)
            if args is None:
                source.problems.append(f"{module!r} is quantized, and no group of quantization_config covers it")
            elif args.is_float and args.bits == 4:
                _pair_fp4(source, module, args)
            else:
                _pair_codes(source, module, args)


def _quantized_layers(source: SourceTensors) -> list[str]:
    """The layers with scales, packed codes or FP8 codes."""
    fp8 = (name for name in source.ending(".weight") if source.infos[f"{name}.weight"].dtype == FP8)
    return list(dict.fromkeys([*source.ending(".weight_scale"), *source.ending(".weight_packed"), *fp8]))


def _pair_fp4(source: SourceTensors, module: str, args: WeightArgs) -> None:
    """NVFP4 or MXFP4."""
    packed, scale, divisor = (f"{module}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    shape, is_nvfp4 = source.matrix(packed, "U8", of=scale), args.group_size == 16
    if shape is None:
        return
    rows, columns = shape[0], 2 * shape[1]
    groups = -(-columns // args.group_size)
    fits = source.has(scale, [FP8] if is_nvfp4 else ["U8", "F8_E8M0"], (rows, groups), of=packed)
    if is_nvfp4:
        fits &= source.has(divisor, ["F32"], (1,), (), of=packed)
    if not fits:
        return
    scales = block_scales(source, scale, rows, 1, groups)
    weight = ScaledCodes(
        lambda first, end: fp4(np.asarray(source.rows(packed)[first:end])),
        functools.partial(_divided, source, scales, divisor) if is_nvfp4 else scales,
        args.group_size,
    )
    names = (packed, scale, *([divisor] if is_nvfp4 else []))
    source.replace(names, f"{module}.weight", (rows, columns), weight.rows, GROUPS_OF_FP4[args.group_size])


def _divided(source: SourceTensors, scales: Rows, divisor: str, first: int, end: int) -> np.ndarray:
    """Scales divided by the global scale. Raises :class:`CheckpointError` if that is not above 0."""
    value = source.scales(divisor, np.asarray(source.stored[divisor])).reshape(-1)[0]
    if value <= 0:
        problem = f"tensor {divisor!r} is {value:g}, and scales are divided by it; download the file again"
        raise CheckpointError(f"{source.infos[divisor].file}: {problem}")
    divided: np.ndarray = scales(first, end) / value
    return divided


def _pair_codes(source: SourceTensors, module: str, args: WeightArgs) -> None:
    """Codes of FP8 or int8, or packed integers."""
    scale, zero, index = (f"{module}.weight_{part}" for part in ("scale", "zero_point", "g_idx"))
    is_packed = f"{module}.weight_packed" in source.infos or args.bits == 4
    name = f"{module}.weight_packed" if is_packed else f"{module}.weight"
    shape = source.matrix(name, "I32" if is_packed else FP8 if args.is_float else "I8", of=scale)
    if shape is not None and is_packed:
        shape = _unpacked_shape(source, module, shape, args.bits)
    if shape is None:
        return
    rows, columns = shape
    shapes = [(rows, -(-columns // args.group_size))] if args.group_size else scale_shapes(shape, args.block)
    fits, used = source.has(scale, SCALES_OF_FP8 if args.is_float else SCALES, *shapes, of=name), [name, scale]
    if not fits:
        return
    found = source.infos[scale].shape
    block_rows, block_columns = args.block or (rows if math.prod(found) == 1 else 1, args.group_size or columns)
    groups, zeros = -(-columns // block_columns), None
    if not args.symmetric:
        zeros = _zero_points(source, zero, scale, (rows, block_rows, groups), args.bits)
        used.append(zero)
    if index in source.infos:
        fits = source.has(index, ["I32", "I64"], (columns,), of=name)
        used.append(index)
    if not fits or (zeros is None and not args.symmetric):
        return
    weight = ScaledCodes(
        _packed_codes(source, name, args.bits, columns)
        if is_packed
        else functools.partial(one_byte_codes, source, name),
        block_scales(source, scale, rows, block_rows, groups),
        functools.partial(groups_of_inputs, source, index, groups) if index in source.infos else block_columns,
        zeros,
    )
    unused = [other for other in (f"{module}.weight_shape", zero) if other in source.infos and other not in used]
    label = "FP8" if args.is_float else f"int{args.bits}"
    source.replace((*used, *unused), f"{module}.weight", shape, weight.rows, f"{label} (compressed-tensors)")


def _unpacked_shape(source: SourceTensors, module: str, packed: tuple[int, int], bits: int) -> tuple[int, int] | None:
    """The shape of a layer whose codes are packed; notes a problem and returns None if the tensors disagree."""
    name, per = f"{module}.weight_shape", 32 // bits
    if not source.has(name, ["I64", "I32"], (2,), of=f"{module}.weight_packed"):
        return None
    rows, columns = (int(size) for size in np.asarray(source.stored[name]))
    if (rows, -(-columns // per)) != packed or columns < 1:
        problem = f"{name!r} is {[rows, columns]}, which {bits} bits pack into {[rows, -(-columns // per)]}"
        source.problems.append(f"{problem}, and {module}.weight_packed has shape {list(packed)}")
        return None
    return rows, columns


def _packed_codes(source: SourceTensors, name: str, bits: int, columns: int) -> RowsOf:
    stored, middle = source.rows(name), np.float32(1 << (bits - 1))

    def rows(first: int, end: int) -> np.ndarray:
        codes: np.ndarray = unsigned(np.asarray(stored[first:end]), bits)[:, :columns].astype(np.float32)
        return codes - middle

    return rows


def _zero_points(
    source: SourceTensors, name: str, scale: str, blocks: tuple[int, int, int], bits: int
) -> RowsOf | None:
    """The zero points of rows; notes a problem and returns None if they do not fit.

    ``blocks`` are the rows of the matrix, those of a block, and the groups of columns.
    """
    rows, block_rows, groups = blocks
    info, per, middle = source.infos.get(name), 32 // bits, np.float32(1 << (bits - 1))
    if info is None or info.dtype != "I32":
        fits = source.has(name, ["I8"], source.infos[scale].shape, of=scale)
        return block_scales(source, name, rows, block_rows, groups) if fits else None
    if not source.has(name, ["I32"], (-(-rows // per), groups), of=scale):
        return None
    stored = source.rows(name)

    def of_rows(first: int, end: int) -> np.ndarray:
        start = first // per
        codes = unsigned_along_rows(np.asarray(stored[start : -(-end // per)]), bits)
        zeros: np.ndarray = codes[first - start * per : end - start * per].astype(np.float32)
        return zeros - middle

    return of_rows
