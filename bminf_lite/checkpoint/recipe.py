"""Recipes: which tensors become int8, and how.

A recipe is a TOML file. ``linear`` decides for the linear layers and ``head`` for the output projection, except for
tensors whose checkpoint name matches a pattern in ``[rules]`` (``*`` matches any characters; the first match decides).
Each decision is one of

- ``w8a8``: int8 weights, activations quantized per token at run time;
- ``w8a16``: int8 weights, float activations;
- ``float``: as in the source.

A tied head has no tensor of its own; it is quantized with ``head``'s scheme when the checkpoint is loaded.

``rotation = N``, a power of two up to 256, makes int8 matrices rotate their input in blocks of up to N elements (see
:mod:`bminf_lite.backend.rotation`). ``rotated_inputs`` says which: ``feed-forward``, the default, are the second
matrices of feed-forward layers where they are w8a8; ``all`` are all int8 matrices, the head included. Other readers
must apply the result's ``transform_config``. ``offline_rotation = true`` folds rotations of the residual stream and of
value heads into the weights (see :mod:`.offline_rotation`), which other readers do not notice. A recipe that rotates
all inputs leaves the weights as they are, because it rotates the same activations, after the gain of their norm.

``group_size = N``, a power of two from 16 to 1,024, gives each N neighbouring columns of a w8a16 matrix scales of their
own, or fewer where N does not divide its width. A GPU computes no experts with such scales.

A recipe with a table ``[calibration]`` needs a text to calibrate on; the keys of the table are the fields of
:class:`CalibrationSettings`.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

from ..backend.rotation import MAX_ROTATION, is_rotation, rotation_of
from ..errors import UsageError
from ..files import expand, read_small_file
from ..models.spec import Role, Spec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


MAX_RECIPE_BYTES = 1 << 24
OPTIONAL_KEYS: dict[str, tuple[type, str]] = {
    "name": (str, "text"),
    "description": (str, "text"),
    "rules": (dict, "a table"),
    "calibration": (dict, "a table"),
    "rotation": (int, "a whole number"),
    "offline_rotation": (bool, "true or false"),
    "rotated_inputs": (str, "text"),
    "group_size": (int, "a whole number"),
}
"""The keys of a recipe beside ``linear`` and ``head``, and the types of their values."""


MIN_GROUP, MAX_GROUP = 16, 1024
"""The fewest and the most columns that may share a scale where a row does not."""
DEFAULT_RECIPE = "w8a8-rotate-all"
"""The recipe of a migration that names none."""
PORTABLE_RECIPE = "w8a8"
"""The same for a result that other readers open."""


class Scheme(str, Enum):
    """The number formats of a weight matrix and of its input."""

    W8A8 = "w8a8"
    W8A16 = "w8a16"
    FLOAT = "float"


class RotatedInputs(str, Enum):
    """The matrices whose input a recipe with a ``rotation`` rotates."""

    FEED_FORWARD = "feed-forward"
    ALL = "all"


@dataclass(frozen=True)
class CalibrationSettings:
    """The methods of a calibration.

    ``smoothing`` moves factors per channel from activations into weights. A w8a8 product whose output error stays above
    ``max_error`` becomes w8a16; 0 turns that off. The error of a product is the mean over tokens of
    ``|y_int8 - y|^2 / |y|^2``, so 0.001 is a signal-to-noise ratio of 30 dB. The product stays w8a8 if it suffices that
    up to ``outlier_columns`` of its inputs stay fp16; only bminf-lite opens such a checkpoint. ``rounding`` is
    ``nearest``, or ``gptq`` for rounding that compensates its errors, if that gains enough. With ``search`` no error
    decides: each product has several options, and measured divergences choose among them.
    """

    smoothing: bool = True
    max_error: float = 0.0
    outlier_columns: int = 0
    rounding: str = "nearest"
    search: bool = False


@dataclass(frozen=True)
class Recipe:
    """Decisions for every weight matrix. ``rules`` maps patterns of tensor names to schemes, first match first.

    ``calibration`` is None for a recipe that needs no text. ``rotation`` is the largest block in which inputs are
    rotated; 1 is none. ``rotated_inputs`` are the matrices whose inputs these are. ``offline_rotation`` rotates the
    residual stream and value heads in the weights. ``group_size`` is the most columns of a w8a16 matrix that share a
    scale; 0 is a row.
    """

    name: str
    linear: Scheme
    head: Scheme
    rules: Mapping[str, Scheme] = field(default_factory=dict)
    description: str = ""
    calibration: CalibrationSettings | None = None
    rotation: int = 1
    offline_rotation: bool = False
    rotated_inputs: RotatedInputs = RotatedInputs.FEED_FORWARD
    group_size: int = 0

    def scheme_of(self, tensor: str, is_head: bool = False) -> Scheme:
        """The decision for a tensor, by its full name (``model.layers.0.mlp.up_proj.weight``)."""
        default = self.head if is_head else self.linear
        return next((scheme for pattern, scheme in self.rules.items() if fnmatch.fnmatchcase(tensor, pattern)), default)

    def rotation_of(self, spec: Spec, tensor: str) -> int:
        """The block in which a matrix of ``spec`` rotates its input: the largest allowed one that divides its width.

        1, no rotation, for a matrix that stays float or that is not among :attr:`rotated_inputs`.
        """
        parameter = spec.parameters[tensor]
        if parameter.role not in (Role.LINEAR, Role.HEAD):
            return 1
        scheme = self.scheme_of(tensor, parameter.role is Role.HEAD)
        if self.rotated_inputs is RotatedInputs.ALL:
            rotates = scheme is not Scheme.FLOAT
        else:
            rotates = tensor in spec.rotatable and scheme is Scheme.W8A8
        return rotation_of(parameter.input_width, self.rotation) if rotates else 1

    def group_size_of(self, spec: Spec, tensor: str) -> int:
        """The columns of a matrix of ``spec`` that share a scale: the most allowed ones that divide its width.

        0, a whole row, for a matrix that is not w8a16 or whose width has no divisor of :data:`MIN_GROUP` columns.
        """
        parameter = spec.parameters[tensor]
        is_head = parameter.role is Role.HEAD
        if not (is_head or parameter.role is Role.LINEAR) or self.scheme_of(tensor, is_head) is not Scheme.W8A16:
            return 0
        width = parameter.input_width
        size = rotation_of(width, self.group_size)
        return size if MIN_GROUP <= size < width else 0

    def check_patterns(self, tensors: Iterable[str]) -> None:
        """Raise :class:`UsageError` for every pattern that matches none of ``tensors``."""
        names = list(tensors)
        unused = [pattern for pattern in self.rules if not fnmatch.filter(names, pattern)]
        if unused:
            problem = f"no weight matrix of this checkpoint matches {', '.join(map(repr, unused))}"
            raise UsageError(f"recipe {self.name}: {problem}; patterns match full tensor names such as {names[0]!r}")

    def to_dict(self) -> dict[str, Any]:
        """The recipe with the keys of its file."""
        rules = {pattern: scheme.value for pattern, scheme in self.rules.items()}
        result: dict[str, Any] = {
            "name": self.name,
            "linear": self.linear.value,
            "head": self.head.value,
            "rules": rules,
        }
        result |= {"group_size": self.group_size} if self.group_size else {}
        result |= {"rotation": self.rotation} if self.rotation > 1 else {}
        result |= {"offline_rotation": True} if self.offline_rotation else {}
        if self.rotated_inputs is not RotatedInputs.FEED_FORWARD:
            result["rotated_inputs"] = self.rotated_inputs.value
        return result | ({"calibration": asdict(self.calibration)} if self.calibration else {})


def built_in_recipes() -> list[str]:
    """The names of the recipes that come with the package, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in _built_in().iterdir() if file.name.endswith(".toml"))


def default_recipe(portable: bool) -> str:
    """The name of the recipe of a migration that names none; ``portable``: of one whose result other readers open."""
    return PORTABLE_RECIPE if portable else DEFAULT_RECIPE


def load_recipe(recipe: str | Path | Recipe) -> Recipe:
    """A built-in recipe by name, or one from a TOML file by path. A :class:`Recipe` is returned as it is.

    Raises :class:`UsageError` for an unknown name, and for a file with unknown keys or values (all of them listed).
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in built_in_recipes():
        return parse_recipe(_built_in().joinpath(f"{recipe}.toml").read_text(encoding="utf-8"), str(recipe))
    path = expand(recipe, "recipe")
    if not path.is_file():
        raise UsageError(f"recipe {str(recipe)!r} is neither built in ({', '.join(built_in_recipes())}) nor a file")
    try:
        text = read_small_file(path, MAX_RECIPE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, source: str) -> Recipe:
    """Read a recipe from TOML; ``source`` names it in errors."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"recipe {source}: not valid TOML: {error}") from error
    problems = [f"unknown key {key!r}" for key in raw.keys() - {"linear", "head", *OPTIONAL_KEYS}]
    wrong = [key for key, (kind, _) in OPTIONAL_KEYS.items() if not isinstance(raw.get(key, kind()), kind)]
    problems += [f"{key} must be {OPTIONAL_KEYS[key][1]}, not {raw.pop(key)!r}" for key in wrong]
    rules, calibration = raw.get("rules", {}), raw.get("calibration", {})
    decisions = {key: raw.get(key) for key in ("linear", "head")} | {f"rules.{key}": rules[key] for key in rules}
    allowed = [scheme.value for scheme in Scheme]
    problems += [
        f"{key} is missing" if value is None else f"{key} is {value!r}, not one of {', '.join(allowed)}"
        for key, value in decisions.items()
        if value not in allowed
    ]
    problems += [f"unknown key 'calibration.{key}'" for key in calibration.keys() - _CALIBRATION_VALUES.keys()]
    for key, (fits, what) in _CALIBRATION_VALUES.items():
        if key in calibration and not fits(calibration[key]):
            problems.append(f"calibration.{key} is {calibration[key]!r}, not {what}")
    if not is_rotation(raw.get("rotation", 1)):
        problems.append(f"rotation is {raw['rotation']!r}, not a power of two from 1 to {MAX_ROTATION}")
    size = raw.get("group_size", 0)
    if size and not (MIN_GROUP <= size <= MAX_GROUP and size & (size - 1) == 0):
        problems.append(f"group_size is {size!r}, not a power of two from {MIN_GROUP} to {MAX_GROUP:,}, or 0 for a row")
    elif size and calibration:
        problems.append("group_size is for recipes without [calibration], which rounds with a scale for each row")
    scopes = [scope.value for scope in RotatedInputs]
    if "rotated_inputs" in raw and raw["rotated_inputs"] not in scopes:
        problems.append(f"rotated_inputs is {raw['rotated_inputs']!r}, not one of {', '.join(scopes)}")
    if raw.get("rotated_inputs") == RotatedInputs.ALL and raw.get("offline_rotation"):
        problems.append("rotated_inputs = 'all' rotates what offline_rotation rotates: choose one")
    searches = calibration.get("search")
    if calibration.get("outlier_columns") and not calibration.get("max_error") and not searches:
        problems.append("calibration.outlier_columns needs calibration.max_error, above which products get them")
    if searches and calibration.get("max_error"):
        problems.append("calibration.search chooses by measured divergence: leave out calibration.max_error")
    if searches and raw.get("linear") != Scheme.W8A8.value:
        problems.append(f"calibration.search chooses how w8a8 is refined: linear is {raw.get('linear')!r}, not 'w8a8'")
    if problems:
        raise UsageError(f"recipe {source}: " + "; ".join(sorted(problems)))
    return Recipe(
        raw.get("name", Path(source).stem),
        Scheme(raw["linear"]),
        Scheme(raw["head"]),
        {pattern: Scheme(scheme) for pattern, scheme in rules.items()},
        raw.get("description", ""),
        CalibrationSettings(**calibration) if "calibration" in raw else None,
        raw.get("rotation", 1),
        raw.get("offline_rotation", False),
        RotatedInputs(raw.get("rotated_inputs", RotatedInputs.FEED_FORWARD)),
        size,
    )


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


_CALIBRATION_VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    "smoothing": (lambda value: isinstance(value, bool), "true or false"),
    "search": (lambda value: isinstance(value, bool), "true or false"),
    "max_error": (_is_share, "a number from 0 to 1"),
    "outlier_columns": (lambda value: type(value) is int and 0 <= value <= 256, "a whole number from 0 to 256"),
    "rounding": (lambda value: value in ("nearest", "gptq"), "nearest or gptq"),
}
"""The keys of ``[calibration]``: a test of their values, and its description."""


def _built_in() -> Any:
    return resources.files(__package__).joinpath("recipes")
