"""The compressed-tensors format: its ``quantization_config``, and the layout of int8 codes.

Three layouts of a quantized layer ``X`` are read. ``int-quantized`` and ``naive-quantized`` keep ``X.weight`` as int8
``[out, in]``; ``pack-quantized`` keeps ``X.weight_packed``, int32 ``[out, ceil(in / 4)]`` with ``code + 128`` in each
byte, and ``X.weight_shape``, int64 ``[2]``. All have ``X.weight_scale``, ``[out, 1]``, or with the strategy ``group``
``[out, in / group_size]``, where activations are float. Two are written: ``int-quantized`` where activations are
quantized too, ``pack-quantized`` where they are not, because both transformers and vLLM open these.

A configuration that this package cannot run is refused, and the error names the setting.

Outlier columns are an extension of this project: ``X.outlier_columns``, int32 ``[n]``, are inputs whose codes are zero,
and ``X.outlier_weight``, fp16 ``[out, n]``, holds their weights. A reader that ignores them would compute wrong
results. So their group, otherwise like ``int-quantized``, has the format :data:`OUTLIER_FORMAT`, which other readers
refuse, and ``outlier_columns`` in the configuration counts those of each layer.

Another extension is for matrices that unquantized checkpoints store ``[in, out]`` (``Conv1D`` of GPT-2), because the
format has no scales per output for these. They are stored ``[out, in]`` like any other, in a group with the format
:data:`CONV1D_FORMAT`, with int8 activations or without.

``transform_config`` lists the layers whose input is transformed at run time. This package runs block Hadamard
transforms of the input (``"type": "hadamard"``, ``"head_dim"`` the size of a block, ``"location": "input"``). Those of
weights are part of the stored weights. transformers 5.23 ignores ``transform_config`` and would compute wrong results.
So such a checkpoint has the ``quantization_status`` :data:`TRANSFORMED_STATUS`, which transformers refuses by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backend.rotation import MAX_ROTATION, is_rotation
from ..errors import checkpoint_error
from .name_patterns import NO_TARGETS, NameMatcher, Targets, pattern_problems
from .recipe import Scheme

INT8_FORMATS = ("int-quantized", "naive-quantized")
PACKED_FORMAT = "pack-quantized"
OUTLIER_FORMAT = "bminf-lite-outlier-columns-1"
"""The number is the format's version."""
CONV1D_FORMAT = "bminf-lite-conv1d-1"
LINEAR = "Linear"
"""The class that stands for all linear layers among targets."""
MAX_GROUPS = 1_000
TRANSFORMED_STATUS = "compressed; apply transform_config"
READ_FORMATS = (*INT8_FORMATS, PACKED_FORMAT, OUTLIER_FORMAT, CONV1D_FORMAT)
OUTLIERS = (".outlier_columns", ".outlier_weight")
QUANTIZATION_SUFFIXES = (".weight_scale", ".weight_packed", ".weight_shape", ".weight_zero_point", *OUTLIERS)
"""The suffixes of tensors beside, or instead of, the ``.weight`` of a quantized layer."""


@dataclass(frozen=True)
class ConfigGroup:
    """Layers that are quantized alike. ``dynamic``: activations are quantized too, per token, at run time.

    ``conv1d``: the layers are those that unquantized checkpoints store ``[in, out]``. ``group_size``: columns of a row
    that have a scale of their own; 0 is the whole row.
    """

    targets: Targets
    packed: bool
    dynamic: bool
    conv1d: bool = False
    group_size: int = 0


@dataclass(frozen=True)
class InputTransform:
    """Layers whose inputs are rotated in blocks of ``block`` elements; ``name`` is the group's."""

    name: str
    targets: Targets
    ignore: Targets
    block: int


@dataclass(frozen=True)
class QuantizationConfig:
    """Which layers of a checkpoint are quantized, and how; ``outliers`` counts their columns that stay fp16.

    ``matcher`` knows the patterns of all targets. Methods raise :class:`CheckpointError` for patterns that take too
    long.
    """

    groups: tuple[ConfigGroup, ...]
    ignore: Targets = NO_TARGETS
    outliers: Mapping[str, int] = field(default_factory=dict)
    transforms: tuple[InputTransform, ...] = ()
    matcher: NameMatcher = field(default_factory=NameMatcher, compare=False)

    def transforms_of(self, module: str) -> list[InputTransform]:
        """The transforms of a linear layer's input; more than one cannot be run."""
        return [
            transform
            for transform in self.transforms
            if (LINEAR in transform.targets.names or self.matcher.matches(transform.targets, module))
            and not self.matcher.matches(transform.ignore, module)
        ]

    def rotation_of(self, module: str) -> int:
        """The block in which the layer's input is rotated; 1 for none."""
        return next((transform.block for transform in self.transforms_of(module)), 1)

    def group_of(self, module: str) -> ConfigGroup | None:
        """The group of the linear layer ``module`` (``model.layers.0.mlp.up_proj``), or None if it stays float.

        A target that names the layer has precedence over one that names its class, as in the format's other readers.
        """
        if self.matcher.matches(self.ignore, module):
            return None
        by_name = (group for group in self.groups if self.matcher.matches(group.targets, module))
        by_class = (group for group in self.groups if LINEAR in group.targets.names)
        return next(by_name, None) or next(by_class, None)


def parse_quantization(config: Mapping[str, Any], source: object) -> QuantizationConfig | None:
    """Read ``quantization_config`` of a ``config.json``; None if there is none.

    Raises :class:`CheckpointError`, with ``source`` as its title, for every setting that cannot be run.
    """
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "group_size" in mlx and "bits" in mlx:
        problem = f"is quantized by MLX (quantization: {mlx['bits']!r} bits, groups of {mlx['group_size']!r})"
        raise checkpoint_error(source, [problem], "get the unquantized model that it was made from, and migrate it")
    raw = config.get("quantization_config") or config.get("compression_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise checkpoint_error(source, [f"quantization_config must be an object, not {raw!r}"])
    method = raw.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        problem = f"quantization_config.quant_method is {method!r}, and this version reads compressed-tensors"
        raise checkpoint_error(source, [problem], "migrate this model's unquantized checkpoint (fp32, fp16 or bf16)")
    problems = [
        f"quantization_config.{key} is {raw[key]!r}, which this version cannot run"
        for key in ("kv_cache_scheme",)
        if raw.get(key)
    ]
    transforms, transform_problems = _parse_transforms(raw.get("transform_config"))
    problems += transform_problems
    sparsity = raw.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        problems.append(f"quantization_config.sparsity_config.format is {sparsity['format']!r}; only dense can be run")
    groups = []
    raw_groups = raw.get("config_groups")
    if not isinstance(raw_groups, dict) or not raw_groups:
        problems.append(f"quantization_config.config_groups must name at least one group, not {raw_groups!r}")
        raw_groups = {}
    if len(raw_groups) > MAX_GROUPS:
        problems.append(f"quantization_config.config_groups has {len(raw_groups):,} groups; {MAX_GROUPS:,} can be read")
        raw_groups = {}
    for name, group in raw_groups.items():
        found = _parse_group(f"quantization_config.config_groups.{name}", group, raw.get("format"))
        if isinstance(found, ConfigGroup):
            groups.append(found)
        else:
            problems.extend(found)
    ignore = raw.get("ignore") or []
    problems += target_problems("quantization_config.ignore", ignore)
    outliers = raw.get("outlier_columns") or {}
    if not isinstance(outliers, dict) or not all(type(count) is int and count > 0 for count in outliers.values()):
        problems.append(f"quantization_config.outlier_columns must map layers to numbers of columns, not {outliers!r}")
    if problems:
        raise checkpoint_error(source, problems)
    ignored = Targets(ignore)
    targets = [ignored, *(g.targets for g in groups), *(t for of in transforms for t in (of.targets, of.ignore))]
    matcher = NameMatcher((pattern for some in targets for pattern in some.patterns), source)
    return QuantizationConfig(tuple(groups), ignored, outliers, tuple(transforms), matcher)


def _parse_transforms(raw: object) -> tuple[list[InputTransform], list[str]]:
    """The transforms of inputs in a ``transform_config``, and a problem for each setting that cannot be run."""
    where = "quantization_config.transform_config"
    if not raw:
        return [], []
    groups = raw.get("config_groups") if isinstance(raw, dict) else None
    if not isinstance(groups, dict):
        return [], [f"{where} must hold an object config_groups, not {raw!r}"]
    if len(groups) > MAX_GROUPS:
        return [], [f"{where}.config_groups has {len(groups):,} groups; {MAX_GROUPS:,} can be read"]
    transforms, problems = [], []
    for name, group in groups.items():
        place = f"{where}.config_groups.{name}"
        applied = group.get("apply") if isinstance(group, dict) else None
        if not isinstance(applied, list) or not all(isinstance(args, dict) for args in applied):
            problems.append(f"{place} must be an object with a list apply, not {group!r}")
            continue
        at_run_time = [args for args in applied if args.get("location") not in ("weight_input", "weight_output")]
        if not at_run_time:
            continue  # the stored weights are transformed
        if group.get("type") != "hadamard" or group.get("randomize"):
            kind = f"type {group.get('type')!r}" + (" with randomize" if group.get("randomize") else "")
            problems.append(f"{place} has {kind}; this version runs 'hadamard' without randomize")
        block = group.get("head_dim")
        if not is_rotation(block):
            problems.append(f"{place}.head_dim is {block!r}; this version runs powers of two up to {MAX_ROTATION}")
        for args in at_run_time:
            if args.get("location") != "input":
                problems.append(f"{place} has location {args.get('location')!r}; this version runs 'input'")
            targets, ignore = (_as_list(args.get(key)) for key in ("targets", "ignore"))
            problems += target_problems(f"{place}.apply.targets", targets)
            problems += target_problems(f"{place}.apply.ignore", ignore)
            if not problems:
                transforms.append(InputTransform(name, Targets(targets), Targets(ignore), block))
    return transforms, problems


def _as_list(value: Any) -> Any:
    """A single name may stand for a list of one."""
    return [value] if isinstance(value, str) else value or []


def _parse_group(where: str, group: object, default_format: object) -> ConfigGroup | list[str]:
    if not isinstance(group, dict):
        return [f"{where} must be an object, not {group!r}"]
    layout = group.get("format") or default_format
    problems = []
    if layout not in READ_FORMATS:
        problems.append(f"{where}.format is {layout!r}; this version reads {', '.join(READ_FORMATS)}")
    targets = group.get("targets")
    problems += target_problems(f"{where}.targets", targets)
    weights, inputs = group.get("weights"), group.get("input_activations")
    size = _group_size(weights)
    problems += _mismatches(f"{where}.weights", weights, False, ("channel", "tensor", *("group",) * bool(size)), size)
    if size and inputs is not None:
        problem = f"has groups of {size} columns and quantized activations; this version runs groups with float ones"
        problems.append(f"{where} {problem}")
    if inputs is not None:
        problems += _mismatches(f"{where}.input_activations", inputs, dynamic=True, strategies=("token",))
    if group.get("output_activations") is not None:
        problems.append(f"{where}.output_activations is set; quantized outputs cannot be run")
    if problems or not isinstance(targets, list):
        return problems
    is_conv1d = layout == CONV1D_FORMAT
    return ConfigGroup(Targets(targets), layout == PACKED_FORMAT, inputs is not None, is_conv1d, size)


def _group_size(weights: object) -> int:
    """The columns that have one scale, of weights with the strategy ``group``, as given or by its size; 0 of others."""
    if not isinstance(weights, dict):
        return 0
    size: object = weights.get("group_size")
    if type(size) is int and size > 0 and weights.get("strategy") in (None, "group"):
        return size
    return 0


def target_problems(where: str, targets: object) -> list[str]:
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return [f"{where} must be a list of names, not {targets!r}"]
    return [f"{where}: {problem}" for problem in pattern_problems(targets)]


def _mismatches(where: str, args: object, dynamic: bool, strategies: Sequence[str], group_size: int = 0) -> list[str]:
    """A problem for each setting of weights or activations that is not symmetric int8 with one of ``strategies``.

    With a ``group_size`` the strategy is ``group``. A permutation of columns (``actorder``) may be part of the stored
    weights (``weight``), but groups of columns that are not neighbours cannot be run.
    """
    if not isinstance(args, dict):
        return [f"{where} must be an object, not {args!r}"]
    default_strategy = "group" if group_size else "channel" if args.get("group_size") == -1 else "tensor"
    given = args | {"strategy": args.get("strategy") or default_strategy}
    wanted: dict[str, tuple[Any, Sequence[Any]]] = {  # by key, the format's default and the values that can be run
        "num_bits": (8, [8]),
        "type": ("int", ["int"]),
        "symmetric": (True, [True]),
        "dynamic": (False, [dynamic]),
        "strategy": (None, strategies),
        "group_size": (None, [group_size] if group_size else [None, -1]),
        "actorder": (None, [None, False, "weight", "static"]),
        "block_structure": (None, [None]),
    }
    return [
        f"{where}.{key} is {given[key]!r}; this version runs {' or '.join(map(repr, allowed))}"
        for key, (default, allowed) in wanted.items()
        if given.setdefault(key, default) not in allowed
    ]


def quantization_config(
    schemes: Mapping[str, Scheme],
    outliers: Mapping[str, int] | None = None,
    conv1d: Collection[str] = (),
    rotations: Mapping[str, int] | None = None,
    group_sizes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint whose linear layers have ``schemes``, by module name.

    Layers that stay float are listed in ``ignore``. With one scheme the group targets the class ``Linear``; with two,
    each group lists its layers. ``outliers`` counts the columns that a layer keeps in fp16. ``conv1d`` are the layers
    that the source stores ``[in, out]``, and ``rotations`` the blocks in which layers rotate their input.
    ``group_sizes`` are the columns that have a scale of their own, of layers where that is not the whole row.
    """
    formats = FORMATS | ({Scheme.W8A8: OUTLIER_FORMAT} if outliers else {})
    members: dict[tuple[Scheme, str, int], list[str]] = {}
    for scheme in (Scheme.W8A8, Scheme.W8A16):
        for module in (module for module, s in schemes.items() if s is scheme):
            layout, size = CONV1D_FORMAT if module in conv1d else formats[scheme], (group_sizes or {}).get(module, 0)
            members.setdefault((scheme, layout, size), []).append(module)
    groups = {}
    for index, ((scheme, layout, size), modules) in enumerate(members.items()):
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(members) == 1 and not conv1d else modules,
            "format": layout,
            "weights": _quantization_args(dynamic=False, strategy="group" if size else "channel", group_size=size),
            "input_activations": _quantization_args(dynamic=True, strategy="token") if scheme is Scheme.W8A8 else None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": next(iter(members))[1] if len(members) == 1 else "mixed-precision",
        **({"outlier_columns": dict(outliers)} if outliers else {}),
        "quantization_status": TRANSFORMED_STATUS if rotations else "compressed",
        "ignore": [module for module, scheme in schemes.items() if scheme is Scheme.FLOAT],
        "config_groups": groups,
        "kv_cache_scheme": None,
        **({"transform_config": _transform_config(rotations)} if rotations else {}),
        "global_compression_ratio": None,
    }


def _transform_config(rotations: Mapping[str, int]) -> dict[str, Any]:
    """A group for each size of blocks; R4 is the name that QuaRot gave this rotation."""
    groups = {}
    for block in sorted(set(rotations.values())):
        targets = [module for module, size in rotations.items() if size == block]
        applied = [{"targets": targets, "location": "input"}]
        groups[f"R4_{block}"] = {"type": "hadamard", "head_dim": block, "apply": applied}
    return {"config_groups": groups}


FORMATS = {Scheme.W8A8: "int-quantized", Scheme.W8A16: PACKED_FORMAT}


def _quantization_args(dynamic: bool, strategy: str, group_size: int = 0) -> dict[str, Any]:
    fixed = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": group_size or None}
    return fixed | {"strategy": strategy, "dynamic": dynamic}


def packed_width(in_features: int) -> int:
    """The number of int32 words that hold a row of ``in_features`` codes."""
    return math.ceil(in_features / 4)


def pack(codes: np.ndarray) -> np.ndarray:
    """int8 ``[out, in]`` -> the bytes of ``weight_packed``, uint8 ``[out, 4 * ceil(in / 4)]``, padded with zeros."""
    rows, width = codes.shape
    packed = np.zeros((rows, 4 * packed_width(width)), np.uint8)
    np.bitwise_xor(codes.view(np.uint8), 0x80, out=packed[:, :width])
    return packed


def unpack(packed: np.ndarray, in_features: int) -> np.ndarray:
    """``weight_packed``, int32 ``[out, ceil(in / 4)]`` -> int8 ``[out, in]``; the inverse of :func:`pack`."""
    return (np.ascontiguousarray(packed).view(np.uint8)[:, :in_features] ^ np.uint8(0x80)).view(np.int8)
