"""Adapters as PEFT saves them (``adapter_config.json`` and ``adapter_model.safetensors``), for an open model.

PEFT names a matrix by its module in transformers' model, behind ``base_model.model.``, and stores ``lora_A.weight``
``[rank, in]`` and ``lora_B.weight`` ``[out, rank]`` for it (https://huggingface.co/docs/peft). Here an adapter is a
mapping from the names of the model's matrices to :class:`~bminf_lite.backend.side_products.Adapter`, scaled as PEFT
scales them: by ``lora_alpha / r``, or with ``use_rslora`` by ``lora_alpha / sqrt(r)``, of each matrix by itself.

The adapter was trained on the original model. :mod:`.adapter_coordinates` changes it for a migrated one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..backend.adapter_slots import Part, SavedMatrix
from ..backend.side_products import Adapter
from ..errors import CheckpointError, checkpoint_error
from ..files import expand
from ..models.spec import Role, Spec
from .adapter_coordinates import fitted_to_folder
from .expert_adapters import expert_adapters, fused_of, in_memory, parameter_of, rank_of, renamed, turns_experts
from .opened_model import OpenedModel, open_model
from .reader import open_file, read_json
from .tensor_file import FLOAT_DTYPES, TensorFile

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
PARTS = {"lora_A.weight": 0, "lora_B.weight": 1}
"""What PEFT adds to the name of a matrix, and which factor of the product that is."""
TABLE_PARTS = {"lora_embedding_A": 0, "lora_embedding_B": 1}
"""The same of a table of tokens: ``[rank, tokens]`` and ``[features, rank]``."""
BASE_COPY = ".base_layer.weight", ".base_layer.bias"
"""The ends of names under which PEFT saves a head as it was, beside an adapter of the head."""

NOT_DONE: Mapping[str, str] = {
    "use_dora": "DoRA, which scales the rows of each matrix",
    "use_qalora": "QALoRA, which pools the inputs of a matrix",
    "use_bdlora": "BD-LoRA, whose factors are block-diagonal",
    "lora_bias": "biases of lora_B",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "megatron_config": "Megatron's parallel layers (megatron_config)",
    "arrow_config": "Arrow's routing between adapters (arrow_config)",
    "kasa_config": "KaSA (kasa_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "velora_config": "VeLoRA (velora_config)",
}
"""Options of PEFT with which an adapter is more than a product of two matrices; empty values are none."""

MERGE = "merge the adapter into the float model (merge_and_unload of peft), and migrate the result"
NO_REQUEST = "which no request can have: merge it before quantizing (bminf-lite migrate --merge)"


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter in the coordinates of an open model: ``parts`` by the names of its matrices.

    ``base`` is the model that it was trained on, as its configuration names it; it may be empty.
    """

    path: Path
    parts: Mapping[str, Part]
    base: str = ""

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The products that are added."""
        return {name: part for name, part in self.parts.items() if isinstance(part, Adapter)}

    @property
    def saved(self) -> frozenset[str]:
        """The matrices that the adapter replaces."""
        return frozenset(name for name, part in self.parts.items() if isinstance(part, SavedMatrix))

    @property
    def rank(self) -> int:
        """The largest rank of a matrix."""
        return max((int(adapter.a.shape[0]) for adapter in self.adapters.values()), default=0)

    @property
    def nbytes(self) -> int:
        """The size of the parts in 16 bits."""
        saved = sum(part.values.size for part in self.parts.values() if isinstance(part, SavedMatrix))
        return 2 * (int(saved) + sum(int(adapter.a.size + adapter.b.size) for adapter in self.adapters.values()))


def read_adapter(
    folder: str | Path, model: OpenedModel, adaptable: Collection[str], replaceable: Collection[str] = ()
) -> AdapterFolder:
    """The adapter in a folder that PEFT saved, for an open model whose matrices ``adaptable`` take adapters.

    It may replace the matrices ``replaceable``.

    Raises :class:`CheckpointError` with everything that is wrong: for a folder that is no adapter, for what is not
    done (DoRA, trained tokens, ...), and for an adapter of another model.
    """
    path = expand(folder)
    config = _config(path)
    with _open_weights(path) as file:
        parts, changes = _parts(path, config, file, model.spec, adaptable, replaceable)
    fit = fitted_to_folder(model)
    fitted = {name: fit(name, part) for name, part in parts.items()}
    if changes:
        with open_model(model.path) as again:  # the given one may be closed
            for name, change in changes.items():
                table = np.asarray(again.weights().vector(name)).astype(np.float32)
                fitted[name] = SavedMatrix(table + cast(SavedMatrix, fit(name, change)).values)
    return AdapterFolder(path, fitted, str(config.get("base_model_name_or_path") or ""))


def _config(path: Path) -> dict[str, Any]:
    """The configuration of an adapter. Raises :class:`CheckpointError` for what is not done."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: {what}; give the folder that PEFT saved the adapter in, with {CONFIG_FILE}")
    try:
        is_adapter = (path / CONFIG_FILE).exists()
        inside = [] if is_adapter else sorted(str(file.parent) for file in path.glob(f"*/{CONFIG_FILE}"))
    except OSError as error:
        problem = f"{error.strerror or error}; let this user read the folder"
        raise CheckpointError(f"{path}: cannot be read: {problem}") from error
    if not is_adapter:
        listed = f"give {' or '.join(inside[:3])}, which has one" if inside else "give the folder that PEFT saved"
        raise CheckpointError(f"{path}: is no adapter, because it has no {CONFIG_FILE}; {listed}")
    config = read_json(path / CONFIG_FILE)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type is {kind!r}, and adapters are LORA here; {MERGE}")
    problems = [f"has {what}, which is not done here" for key, what in NOT_DONE.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        problems.append(f"has trained biases (bias is {config['bias']!r}), which is not done here")
    if config.get("modules_to_save") and config.get("ensure_weight_tying"):
        problems.append("has a trained table that is the head too (ensure_weight_tying), which is not done here")
    for key, kinds in (("r", int), ("lora_alpha", (int, float)), ("rank_pattern", dict), ("alpha_pattern", dict)):
        value = config.get(key, {} if kinds is dict else 8)
        is_bad = not isinstance(value, kinds) or isinstance(value, bool)  # type: ignore[arg-type]
        if is_bad or (kinds is not dict and not 0 < value < math.inf):
            problems.append(f"{key} is {value!r}, but must be {'an object' if kinds is dict else 'a number above 0'}")
    if isinstance(patterns := config.get("alpha_pattern"), dict):
        problems += [
            f"alpha_pattern has {value!r} for {name!r}, but must have a number above 0"
            for name, value in patterns.items()
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf
        ]
    if problems:
        raise checkpoint_error(path, problems, MERGE)
    return config


def _open_weights(path: Path) -> _Closing:
    for name in WEIGHTS_FILES:
        if (path / name).exists():
            return _Closing(open_file(path / name))
    listed = " nor ".join(WEIGHTS_FILES)
    raise CheckpointError(f"{path}: holds neither {listed}; get the whole folder anew")


@dataclass
class _Closing:
    """Closes a file at the end of a ``with``."""

    file: TensorFile

    def __enter__(self) -> TensorFile:
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _parts(
    path: Path,
    config: Mapping[str, Any],
    file: TensorFile,
    spec: Spec,
    adaptable: Collection[str],
    replaceable: Collection[str],
) -> tuple[dict[str, Part], dict[str, SavedMatrix]]:
    """The parts of a file by the names of matrices, and what is added to tables of tokens.

    Raises :class:`CheckpointError` with all that is wrong.
    """
    found: dict[str, Part] = {}
    tables: dict[str, list[str]] = {}
    problems: list[str] = []
    pairs: dict[str, list[str]] = {}
    wrappers: dict[str, list[str]] = {}
    for tensor, info in file.tensors.items():
        module, factor = _module(tensor)
        is_of_experts = (
            module is not None
            and module_tensor(_unwrapped(module), spec) not in spec.parameters
            and fused_of(_unwrapped(module), spec)
        )
        if is_of_experts and info.dtype in FLOAT_DTYPES:
            wrappers.setdefault(tensor.rpartition(".lora_")[0], ["", ""])[factor] = tensor
            continue
        if tensor.endswith(BASE_COPY):
            problems += _copy_problems(tensor, info.shape, spec)
        elif (ending := tensor.rpartition(".")[2]) in TABLE_PARTS:
            name = module_tensor(tensor.removeprefix(PREFIX).removesuffix(f".{ending}"), spec)
            if name in replaceable and spec.parameters[name].role is Role.EMBEDDING:
                tables.setdefault(name, ["", ""])[TABLE_PARTS[ending]] = tensor
            else:
                problems.append(f"holds {tensor!r}, an adapter of an embedding that this model does not have")
        elif tensor.endswith(".weight") and module is None and (name := _saved_name(tensor, spec)) in replaceable:
            problem = _saved_problem(tensor, info.shape, spec.parameters[name].shape)
            if problem is None and info.dtype not in FLOAT_DTYPES:
                problem = f"tensor {tensor!r} is {info.dtype}, not one of {', '.join(FLOAT_DTYPES)}"
            problems += [problem] if problem else []
            if not problems:
                values = np.asarray(file.read(tensor)).astype(np.float32)
                problems += [] if np.isfinite(values).all() else [_not_finite(f"{tensor!r}")]
                found[name] = SavedMatrix(values)
        elif module is None:
            problems.append(f"holds {tensor!r}, which is no factor of a matrix: {_other_kind(tensor)}")
        elif info.dtype not in FLOAT_DTYPES:
            problems.append(f"tensor {tensor!r} is {info.dtype}, not one of {', '.join(FLOAT_DTYPES)}")
        else:
            pairs.setdefault(module, ["", ""])[factor] = tensor
    for module, (first, second) in pairs.items():
        name = module_tensor(module, spec)
        problem = _problem(module, name, spec, adaptable)
        if not (first and second):
            problem = f"has one factor of {module!r}, not both"
        if problem is None:
            shapes = file.tensors[first].shape, file.tensors[second].shape
            problem = _shape_problem(module, name, shapes, spec)
        if problem is not None:
            problems.append(problem)
        elif not problems:
            a, b = (np.asarray(file.read(tensor)).astype(np.float32) for tensor in (first, second))
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                problems.append(_not_finite(f"a factor of {module!r}"))
            found[name] = Adapter(a, b, scale_of(module, a.shape[0], config))
    for wrapper, (first, second) in wrappers.items():
        problem = _add_experts(wrapper, first, second, config, file, spec, found)
        problems += [problem] if problem else []
    changes = (
        {} if problems else {name: _table_change(path, config, file, spec, name, *of) for name, of in tables.items()}
    )
    if problems:
        raise checkpoint_error(path, problems, f"it is of another model or kind: give one for this model, or {MERGE}")
    if not found and not changes:
        raise CheckpointError(f"{path}: changes no matrix")
    return found, changes


def _not_finite(what: str) -> str:
    return f"{what} holds a NaN or an infinity; train or export it again"


def _unwrapped(module: str) -> str:
    """The module that PEFT has wrapped, once for each of its parameters."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _add_experts(
    wrapper: str,
    first: str,
    second: str,
    config: Mapping[str, Any],
    file: TensorFile,
    spec: Spec,
    found: dict[str, Part],
) -> str | None:
    """Add the adapters of experts that a wrapper holds to ``found``; returns what is wrong, or None."""
    module = _unwrapped(wrapper.removeprefix(PREFIX))
    if not (first and second):
        return f"has one factor of {module!r}, not both"
    is_turned = turns_experts(config)
    name = parameter_of(module, file.tensors[first].shape, file.tensors[second].shape, is_turned, spec)
    if name is None:
        shapes = [list(file.tensors[tensor].shape) for tensor in (first, second)]
        return f"{module!r} has factors {shapes[0]} and {shapes[1]}, which fit none of its parameters here"
    a, b = (np.asarray(file.read(tensor)).astype(np.float32) for tensor in (first, second))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return _not_finite(f"a factor of {module!r}")
    scale = scale_of(in_memory(module, name, spec), rank_of(name, a, spec), config)
    found.update(expert_adapters(name, a, b, scale, is_turned, spec))
    return None


def _table_change(
    path: Path, config: Mapping[str, Any], file: TensorFile, spec: Spec, name: str, first: str, second: str
) -> SavedMatrix:
    """What an adapter adds to a table of tokens ``[tokens, features]``."""
    (tokens, features), ending = spec.parameters[name].shape, ".lora_embedding_A"
    if not (first and second):
        raise CheckpointError(f"{path}: has one factor of {name!r}, not both")
    a, b = (np.asarray(file.read(tensor)).astype(np.float32) for tensor in (first, second))
    if a.ndim != 2 or b.shape != (features, len(a)) or a.shape[1] != tokens:
        problem = f"factors {list(a.shape)} and {list(b.shape)}, but the table here is [{tokens}, {features}]"
        raise CheckpointError(f"{path}: {name!r} has {problem}: it was trained with other tokens")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{path}: {_not_finite(f'a factor of {name!r}')}")
    module = first.removeprefix(PREFIX).removesuffix(ending)
    return SavedMatrix(np.float32(scale_of(module, len(a), config)) * (a.T @ b.T))


def _copy_problems(tensor: str, shape: tuple[int, ...], spec: Spec) -> list[str]:
    """What is wrong with the copy of a head: it has another vocabulary."""
    module, _, part = tensor.removeprefix(PREFIX).rpartition(".base_layer.")
    name = module_tensor(module, spec)
    parameter = spec.parameters.get(name if part == "weight" else f"{name.removesuffix('.weight')}.bias")
    if parameter is None or parameter.shape == shape:
        return []
    wanted = list(parameter.shape)
    return [f"{tensor!r} is {list(shape)}, but that of this model is {wanted}: it was trained with other tokens"]


def _saved_name(tensor: str, spec: Spec) -> str:
    """The name of the matrix that a copy of a whole module replaces."""
    return module_tensor(tensor.removeprefix(PREFIX).removesuffix(".weight"), spec)


def _saved_problem(tensor: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str | None:
    if shape == wanted:
        return None
    return f"{tensor!r} is {list(shape)}, but that of this model is {list(wanted)}: it was trained with other tokens"


def _module(tensor: str) -> tuple[str | None, int]:
    """The module that a tensor of the file belongs to, and its factor; None for another tensor."""
    for ending, factor in PARTS.items():
        if tensor.endswith(f".{ending}"):
            return tensor.removesuffix(f".{ending}").removeprefix(PREFIX).removesuffix(".base_layer"), factor
    return None, 0


def _other_kind(tensor: str) -> str:
    kinds = {
        "lora_magnitude_vector": "DoRA, which is not done here",
        "trainable_tokens": "trained tokens, which is not done here",
        ".bias": "a trained bias, which is not done here",
    }
    return next((text for part, text in kinds.items() if part in tensor), "a trained copy of a module, not done here")


def module_tensor(module: str, spec: Spec) -> str:
    """The name of the matrix of a module, as the model has it."""
    return renamed(f"{module}.weight", spec)


def _problem(module: str, name: str, spec: Spec, adaptable: Collection[str]) -> str | None:
    """Why a module takes no adapter; None if it does."""
    parameter = spec.parameters.get(name)
    if parameter is None:
        if re.search(r"\.experts?(\.|$)", name):
            return f"changes experts ({module!r}), which is not done for this architecture"
        close = get_close_matches(name, spec.parameters, 1)
        return f"changes {module!r}, but this model has no {name!r}" + (f"; it has {close[0]!r}" if close else "")
    if name in adaptable:
        return None
    what = {
        Role.HEAD: "the output head, which is the embedding here",
        Role.EMBEDDING: "an embedding",
        Role.ROUTER: "a router",
        Role.ABSORBED: "a matrix that attention absorbs",
    }.get(parameter.role)
    if what is None:
        return f"changes {module!r}, a gate, {NO_REQUEST}"
    return f"changes {module!r}, {what}, which is not done here"


def _shape_problem(module: str, name: str, shapes: Sequence[tuple[int, ...]], spec: Spec) -> str | None:
    """What of the factors' shapes does not fit the matrix; None if they do."""
    parameter = spec.parameters[name]
    out, features = parameter.shape[::-1] if parameter.transposed else parameter.shape
    a, b = shapes
    fits = len(a) == len(b) == 2 and a[1] == features and b == (out, a[0]) and a[0] > 0
    if fits:
        return None
    return f"{module!r} has factors {list(a)} and {list(b)}, but its matrix here is [{out}, {features}]"


def scale_of(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """What PEFT multiplies the product of a module's factors by."""
    alpha = _of_pattern(module, config.get("alpha_pattern") or {}, config.get("lora_alpha", 8))
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_pattern(module: str, patterns: Mapping[str, Any], default: Any) -> Any:
    """The value of the first pattern that the end of the module's name matches, as PEFT finds it."""
    for pattern, value in patterns.items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            problem = f"alpha_pattern has {pattern!r}, which is no regular expression ({error})"
            raise CheckpointError(f"{CONFIG_FILE}: {problem}") from None
        if matches:
            return value
    return default
