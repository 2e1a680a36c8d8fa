"""A checkpoint together with the model that its ``config.json`` describes: found, parsed, validated, in one place.

:func:`describe_model` needs a configuration alone. :func:`open_model` opens a folder and checks its tensors too, so its
result can be built without further checks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import models
from ..backend.quantization import HostWeight, quantize_weight
from ..backend.rotation import is_rotation, rotated
from ..errors import CheckpointError, checkpoint_error, is_whole
from ..files import parse_json, read_small_file
from ..generation_config import normalized
from ..models import Architecture, ModelConfig
from ..models.spec import Parameter, Role, Spec
from .compressed_tensors import QUANTIZATION_SUFFIXES, QuantizationConfig, packed_width
from .manifest import MANIFEST_FILE
from .misnamed import misnamed
from .reader import Checkpoint, open_checkpoint
from .recipe import Scheme
from .tensor_file import FLOAT_DTYPES, TensorInfo

MODULES_FILE = "modules.json"
"""The list of modules in a folder of sentence-transformers."""
UNFIT = "the files do not fit config.json: get both anew from the same place, or export the model again"
MAX_TOKEN_ID = (1 << 24) - 1
"""The largest token id that is accepted; published vocabularies have 262,144 tokens at most."""
TIED_ROWS = 64
"""The number of rows that are compared to tell whether a tensor is a copy of another."""


@dataclass(frozen=True)
class ModelDescription:
    """The content of a ``config.json``: the architecture, its parsed configuration, and its tensors.

    ``config_json`` is the configuration as it was parsed: of a multimodal model, that of its text model.
    """

    architecture: Architecture
    config: ModelConfig
    spec: Spec
    config_json: Mapping[str, Any]


def describe_model(config: Mapping[str, Any], folder: Path | None = None) -> ModelDescription:
    """The model of a parsed ``config.json``, which is in ``folder``, or the text model of a multimodal one.

    Raises :class:`CheckpointError` for one that cannot be run.
    """
    with _errors_naming(folder):
        text_config = models.text_config(config)
        architecture = models.find(text_config)
        parsed = architecture.parse(text_config)
        if isinstance(parsed, models.DecoderConfig) and (models.makes_vectors(text_config) or _embeds(folder)):
            architecture = models.embedder(architecture)
            parsed = architecture.parse(text_config)
    spec = architecture.spec(parsed)
    if text_config is not config:
        spec = models.text_spec(spec, config)
    return ModelDescription(architecture, parsed, spec, text_config)


def _embeds(folder: Path | None) -> bool:
    """Whether a folder of sentence-transformers pools what its model computes."""
    if folder is None:
        return False
    try:
        modules = parse_json(read_small_file(folder / MODULES_FILE))
    except (OSError, ValueError):
        return False
    listed = modules if isinstance(modules, list) else []
    return any(isinstance(module, dict) and str(module.get("type")).endswith(".Pooling") for module in listed)


@contextmanager
def _errors_naming(folder: Path | None) -> Iterator[None]:
    """Put ``folder`` before the name of the file with which the message of a :class:`CheckpointError` begins."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(str(error) if folder is None else f"{folder}/{error}") from None


class OpenedModel:
    """An open checkpoint whose tensors are those of ``description``. A context manager that closes its files.

    ``path`` is the folder; ``architecture``, ``config`` and ``spec`` are those of the description. ``eos_ids`` are the
    tokens that end a completion by the configuration, or None where it names none. ``generation_config`` is that of the
    checkpoint, see :func:`.generation_config.normalized`.
    """

    def __init__(self, checkpoint: Checkpoint, description: ModelDescription, eos_ids: frozenset[int] | None):
        self.checkpoint = checkpoint
        self.eos_ids = eos_ids
        config = description.config
        starts = len(config.decoder_start_token_ids)
        self.generation_config = normalized(checkpoint.generation_config, config.vocab_size, eos_ids or (), starts)
        self.description = description
        self.path = checkpoint.path
        self.architecture = description.architecture
        self.config = description.config
        self.spec = description.spec

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; matrices that were not read yet can no longer be read."""
        self.checkpoint.close()

    def left_out(self) -> list[str]:
        """The parts of the folder that are not run: such as ``vision_tower``, and ``mtp``, which drafts; sorted."""
        spec = self.spec
        others = [name for name in self.checkpoint.tensors if name not in spec.parameters and name not in spec.tied]
        if self.description.config_json is self.checkpoint.config:
            own = {name.partition(".")[0] for name in (*spec.parameters, *spec.tied)}
            others = [name for name in others if name.partition(".")[0] not in own]
        return sorted({name.removeprefix("model.").partition(".")[0] for name in others})

    def weights(self) -> CheckpointWeights:
        """The tensors by the names that the model uses. Raises :class:`CheckpointError` for a wrong manifest."""
        return CheckpointWeights(self.checkpoint, self.spec)


class ModelSource(ABC):
    """What is opened as a checkpoint's folder is, of whose files it is made; as a path it is that folder."""

    @abstractmethod
    def __fspath__(self) -> str: ...

    @abstractmethod
    def open(self) -> OpenedModel:
        """The open model."""


def open_model(path: str | Path | ModelSource) -> OpenedModel:
    """Open the checkpoint in the folder ``path`` and validate it.

    Tensors that the files have under an alias get the specification's names. Raises :class:`CheckpointError` if the
    files cannot be used (see :func:`.open_checkpoint`), if the model is unknown, if its configuration makes no sense,
    and with every missing, unexpected, misshapen or wrongly typed tensor.
    """
    if isinstance(path, ModelSource):
        return path.open()
    checkpoint = open_checkpoint(path)
    try:
        return checked(checkpoint, _with_decoder_start(checkpoint, describe_model(checkpoint.config, checkpoint.path)))
    except BaseException:
        checkpoint.close()
        raise


def checked(checkpoint: Checkpoint, description: ModelDescription) -> OpenedModel:
    """The model of a checkpoint, whose tensors are checked as :func:`open_model` says. On errors it is closed."""
    try:
        checkpoint.rename(description.spec.aliases)
        description = replace(description, spec=_with_drafting(checkpoint, description.spec))
        description = replace(description, spec=_resolve_ties(checkpoint, description.spec))
        fused_problems = _split_fused(checkpoint, description.spec)
        spec = description.spec
        problems, is_misnamed = _all_problems(checkpoint, spec)
        with _errors_naming(checkpoint.path):
            vocab_size = description.config.vocab_size
            eos_ids = configured_eos_ids(checkpoint.generation_config, checkpoint.config, vocab_size)
        if problems := fused_problems + problems:
            raise checkpoint_error(checkpoint.path, problems, "" if is_misnamed and len(problems) == 1 else UNFIT)
        return OpenedModel(checkpoint, description, eos_ids)
    except BaseException:
        checkpoint.close()
        raise


def _with_drafting(checkpoint: Checkpoint, spec: Spec) -> Spec:
    """The specification with the tensors of a layer that guesses tokens, if the file has that layer, or without any."""
    if spec.drafting is None:
        return spec
    first = next(iter(spec.drafting.parameters))
    if not {first, f"{first.removesuffix('.weight')}.weight_packed"} & checkpoint.tensors.keys():
        return replace(spec, drafting=None)
    return spec.with_drafting()


def _with_decoder_start(checkpoint: Checkpoint, description: ModelDescription) -> ModelDescription:
    """The description with the decoder's start token of ``generation_config.json``, which precedes ``config.json``.

    Raises ``CheckpointError`` for a value that is no token id.
    """
    start, vocab_size = checkpoint.generation_config.get("decoder_start_token_id"), description.config.vocab_size
    if start is None or not description.config.is_encoder_decoder:
        return description
    if not is_whole(start) or not 0 <= start < vocab_size:
        problem = f"decoder_start_token_id is {start!r}, but must be a token id from 0 to {vocab_size - 1}"
        raise CheckpointError(f"{checkpoint.path}/generation_config.json: {problem}")
    checkpoint.config = {**checkpoint.config, "decoder_start_token_id": start}
    return describe_model(checkpoint.config, checkpoint.path)


def _resolve_ties(checkpoint: Checkpoint, spec: Spec) -> Spec:
    """Give a tensor that a file holds under the name of a copy its own name, and tie those that the file may omit.

    Writers that store equal tensors once choose among their names: ``safetensors.torch.save_model`` takes the first in
    alphabetical order, which for a tied LLaMA is ``lm_head.weight``. Returns the specification of this file.
    """
    absent = {
        name: source
        for name, source in spec.tied_if_absent.items()
        if not {name, f"{name.removesuffix('.weight')}.weight_packed"} & checkpoint.tensors.keys()
    }
    if absent:
        folds = tuple(fold for fold in spec.foldable if not absent.keys() & set(fold.consumers))
        spec = replace(spec, tied={**spec.tied, **absent}, foldable=folds)
    for source in {*spec.tied.values(), *spec.copies}:
        copies = (*spec.copies.get(source, ()), *(name for name, other in spec.tied.items() if other == source))
        held = next((name for name in copies if name in checkpoint.tensors), None)
        if source not in checkpoint.tensors and held is not None:
            checkpoint.rename_tensor(held, source)
    return spec


def _split_fused(checkpoint: Checkpoint, spec: Spec) -> list[str]:
    """Give the matrices of experts that lie in one tensor their names. Returns what is wrong with such tensors."""
    problems = []
    for name, fused in spec.fused.items():
        if name not in checkpoint.tensors:
            continue
        found, expected = checkpoint.tensors[name].shape, fused.shape(spec.parameters)
        if found == expected:
            checkpoint.split(name, fused, spec.parameters)
        else:
            problems.append(f"tensor {name!r} has shape {list(found)}; config.json needs {list(expected)}")
    return problems


def configured_eos_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int
) -> frozenset[int] | None:
    """The ``eos_token_id`` (an id or a list) of ``generation_config.json``, else of ``config.json``, else ``None``.

    Ids beyond the vocabulary count as none: transformers saves GPT-2's 50256 with a small GPT-2 that names no other.
    Raises ``CheckpointError`` for a value that is no id of any vocabulary.
    """
    for name, values in (("generation_config.json", generation_config), ("config.json", config)):
        value = values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i <= MAX_TOKEN_ID for i in ids):
            raise CheckpointError(
                f"{name}: eos_token_id is {value!r}, but must be a token id from 0 to {vocab_size - 1}, or a list"
            )
        known = frozenset(i for i in ids if i < vocab_size)
        if known or not ids:
            return known
    return None


class CheckpointWeights:
    """A checkpoint's tensors by the names that a model uses; a tied tensor has the values of the other name.

    Matrices and embedding tables are read when they are used (see :meth:`.Checkpoint.stored`).

    A tied head, which is the embedding, is float in the file, and so may be matrices that are stored ``[in, out]``.
    Those of a migrated checkpoint are quantized here, in the schemes of its manifest.
    """

    def __init__(self, checkpoint: Checkpoint, spec: Spec):
        self.checkpoint = checkpoint
        self.spec = spec
        self.tied_scheme = self._scheme("tied_head", checkpoint.manifest.get("tied_head"))
        late = checkpoint.manifest.get("quantized_when_loaded") or {}
        self.late = {name: self._scheme(f"quantized_when_loaded[{name!r}]", scheme) for name, scheme in late.items()}
        self.late_rotations = self._rotations(checkpoint.manifest.get("rotated_when_loaded") or {})
        self.late_groups = self._groups(checkpoint.manifest.get("grouped_when_loaded") or {})

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""
        if name in self.spec.tied:
            weight = self.vector(name)
        elif self.spec.parameters[name].transposed and not self._is_int8(name):
            weight = np.ascontiguousarray(self.vector(name).T)
        else:
            return self.checkpoint.weight(name)
        scheme, block = self.scheme_of(name), self.late_rotations.get(name, 1)
        if scheme is Scheme.FLOAT:
            return weight
        size = self.late_groups.get(name, 0)
        return replace(quantize_weight(rotated(weight, block), scheme is Scheme.W8A8, size), rotation=block)

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``."""
        stored = self.spec.tied.get(name, name)
        is_table = self.spec.parameters[name].role is Role.EMBEDDING
        return self.checkpoint.stored_float(stored) if is_table else self.checkpoint.vector(stored)

    def scheme_of(self, name: str) -> Scheme:
        """The scheme in which the model runs the matrix ``name``."""
        if name in self.spec.tied:
            return self.tied_scheme
        if self.spec.parameters[name].transposed and not self._is_int8(name):
            return self.late.get(name, Scheme.FLOAT)
        quantization = self.checkpoint.quantization
        group = quantization.group_of(name.removesuffix(".weight")) if quantization else None
        if group is None:
            return Scheme.FLOAT
        return Scheme.W8A8 if group.dynamic else Scheme.W8A16

    def _is_int8(self, name: str) -> bool:
        """Whether the file holds codes ``[out, in]`` of a matrix that unquantized checkpoints store ``[in, out]``."""
        return self.checkpoint.tensors[name].dtype == "I8"

    def _rotations(self, blocks: Mapping[str, Any]) -> dict[str, int]:
        """The blocks in which matrices that are quantized when they are loaded rotate their input, by name."""
        for name, block in blocks.items():
            is_late = name in self.late or name in self.spec.tied
            if not is_late or not is_rotation(block) or _in_features(self.spec.parameters[name]) % block:
                problem = f"rotated_when_loaded[{name!r}] is {block!r}, which is no block of such a matrix's inputs"
                raise CheckpointError(f"{self.checkpoint.path / MANIFEST_FILE}: {problem}")
        return dict(blocks)

    def _groups(self, sizes: Mapping[str, Any]) -> dict[str, int]:
        """The columns that share a scale, of matrices that are quantized when they are loaded, by name."""
        for name, size in sizes.items():
            is_late = name in self.late or name in self.spec.tied
            if not is_late or type(size) is not int or size < 1 or _in_features(self.spec.parameters[name]) % size:
                problem = f"grouped_when_loaded[{name!r}] is {size!r}, which is no group of such a matrix's columns"
                raise CheckpointError(f"{self.checkpoint.path / MANIFEST_FILE}: {problem}")
        return dict(sizes)

    def _scheme(self, key: str, value: object) -> Scheme:
        """A scheme in the manifest; None means float."""
        try:
            return Scheme.FLOAT if value is None else Scheme(value)
        except ValueError:
            where = self.checkpoint.path / MANIFEST_FILE
            raise CheckpointError(f"{where}: {key} is {value!r}, which is no scheme") from None


def _in_features(parameter: Parameter) -> int:
    return parameter.shape[0 if parameter.transposed else -1]


@dataclass(frozen=True)
class _ExpectedTensor:
    """A tensor that a checkpoint must, or may, hold, with its possible types and shapes."""

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True

    def mismatches(self, info: TensorInfo) -> Iterator[str]:
        """The problems of the tensor in the file."""
        if info.shape not in self.shapes:
            shapes = " or ".join(str(list(shape)) for shape in self.shapes)
            yield f"tensor {self.name!r} has shape {list(info.shape)}; config.json needs {shapes}"
        if info.dtype not in self.dtypes:
            yield f"tensor {self.name!r} is {info.dtype}; it must be {' or '.join(self.dtypes)}"


def _all_problems(checkpoint: Checkpoint, spec: Spec) -> tuple[list[str], bool]:
    """What is wrong with the tensors, and whether names differ alike, which is then the first problem."""
    tensors, quantization = checkpoint.tensors, checkpoint.quantization
    problems = _spec_problems(spec, tensors, quantization)
    if not problems:
        return _tied_problems(checkpoint, spec), False
    renamed = misnamed(spec, tensors)
    if renamed is None:
        return problems, False
    others = _spec_problems(spec, {renamed.names.get(name, name): info for name, info in tensors.items()}, quantization)
    return [renamed.problem, *others], True


def _spec_problems(spec: Spec, tensors: Mapping[str, TensorInfo], quantization: QuantizationConfig | None) -> list[str]:
    """Every missing, misshapen, wrongly typed or unexpected tensor; empty if the checkpoint fits."""
    problems: list[str] = []
    known: set[str] = set()
    for name, parameter in spec.parameters.items():
        if quantization and parameter.role in (Role.LINEAR, Role.HEAD):
            problems += _transform_problems(name, parameter, name in spec.tied, quantization)
        if name in spec.tied:
            known |= {name, *(name.removesuffix(".weight") + companion for companion in QUANTIZATION_SUFFIXES)}
            continue
        for expected in _expected_tensors(name, parameter, quantization):
            known.add(expected.name)
            if expected.name in tensors:
                problems += expected.mismatches(tensors[expected.name])
            elif expected.required:
                dtypes, shape = " or ".join(expected.dtypes), list(expected.shapes[0])
                problems.append(f"missing tensor {expected.name!r}, {dtypes} {shape}")
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    problems += [
        f"unexpected tensor {name!r}, {info.dtype} {list(info.shape)}; config.json describes a model without it"
        for name, info in tensors.items()
        if name not in known and not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    return problems


def _expected_tensors(
    name: str, parameter: Parameter, quantization: QuantizationConfig | None
) -> Iterator[_ExpectedTensor]:
    """The tensors that represent a parameter in a file.

    Only linear layers and the head can be quantized, and matrices that become float when they are loaded; ``Conv1D``
    weights in a group of their own.
    """
    module = name.removesuffix(".weight")
    quantizable = parameter.role in (Role.LINEAR, Role.HEAD, Role.ABSORBED)
    group = quantization.group_of(module) if quantization and quantizable else None
    if group is None or group.conv1d != parameter.transposed:
        yield _ExpectedTensor(name, FLOAT_DTYPES, (parameter.shape,))
        return
    rows, columns = parameter.shape[::-1] if parameter.transposed else parameter.shape
    if group.packed:
        yield _ExpectedTensor(f"{module}.weight_packed", ("I32",), ((rows, packed_width(columns)),))
        yield _ExpectedTensor(f"{module}.weight_shape", ("I64", "I32"), ((2,),))
    else:
        yield _ExpectedTensor(name, ("I8",), ((rows, columns),))
    per_row: tuple[tuple[int, ...], ...] = ((rows, 1), (rows,), (1,))
    if group.group_size:
        per_row = ((rows, -(-columns // group.group_size)),)
    yield _ExpectedTensor(f"{module}.weight_scale", FLOAT_DTYPES, per_row)
    yield _ExpectedTensor(f"{module}.weight_zero_point", ("I8", "I32", "I64"), per_row, required=False)
    for transform in quantization.transforms_of(module) if quantization else ():
        shape = transform.block, transform.block  # the matrix itself, which some writers store
        yield _ExpectedTensor(f"{module}.{transform.name}_input.weight", FLOAT_DTYPES, (shape,), required=False)
    if quantization and (count := quantization.outliers.get(module)):
        yield _ExpectedTensor(f"{module}.outlier_columns", ("I32",), ((count,),))
        yield _ExpectedTensor(f"{module}.outlier_weight", ("F16",), ((rows, count),))


def _transform_problems(
    name: str, parameter: Parameter, is_tied: bool, quantization: QuantizationConfig
) -> Iterator[str]:
    """The reasons why the transforms of a matrix's input, or its groups of columns, cannot be run."""
    module = name.removesuffix(".weight")
    transforms = quantization.transforms_of(module)
    group = None if is_tied else quantization.group_of(module)
    if group and group.group_size and _in_features(parameter) % group.group_size:
        yield f"{module}: {_in_features(parameter):,} columns are no groups of {group.group_size:,} (config.json)"
    if not transforms:
        return
    names = ", ".join(transform.name for transform in transforms)
    if len(transforms) > 1:
        yield f"{module}: several groups of transform_config ({names}) transform its input; one can be run"
    group, inputs = quantization.group_of(module), _in_features(parameter)
    if is_tied or group is None or group.conv1d != parameter.transposed:
        yield f"{module}: stays float, and transform_config ({names}) transforms its input; int8 layers can be run so"
    if module in quantization.outliers:
        yield f"{module}: has outlier columns, and transform_config ({names}) transforms its input; one can be run"
    if inputs % transforms[0].block:
        problem = f"has {inputs} inputs, which are no whole blocks of {transforms[0].block}"
        yield f"{module}: {problem} (transform_config, {names})"


def _tied_problems(checkpoint: Checkpoint, spec: Spec) -> list[str]:
    """Tensors that the file holds although they are tied to others, and whose first rows differ from those."""
    problems = []
    for name, source in spec.tied.items():
        pair = [checkpoint.tensors.get(name), checkpoint.tensors.get(source)]
        if any(info is None or info.dtype not in FLOAT_DTYPES for info in pair):
            continue
        one, other = (np.asarray(checkpoint.stored(n)[:TIED_ROWS]).astype(np.float32) for n in (name, source))
        if not np.array_equal(one, other, equal_nan=True):
            remedy = "correct tie_word_embeddings there, or remove the tensor"
            problems.append(f"tensor {name!r} differs from {source!r}, to which config.json ties it; {remedy}")
    return problems
