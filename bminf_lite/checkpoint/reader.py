"""Opening a checkpoint: a folder with ``config.json`` and weights, in one file or in shards with an index.

The weights are safetensors or, as older checkpoints have them, PyTorch files (see :mod:`.torch_file`), which are read
without PyTorch. Where a folder has both, safetensors are taken.

Everything that can be wrong with the files is found when the folder is opened, and reported in one error; whether the
tensors are those that a model needs is :meth:`Checkpoint.validate`'s question. Tensors are views of memory maps (see
:mod:`.tensor_file`), so opening costs milliseconds whatever the size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from ..backend.quantization import HostWeight, Int8Weight, OutlierColumns, quantize_weight
from ..backend.stored_matrix import StoredMatrix
from ..errors import CheckpointError
from ..models.spec import Role, Spec
from ._errors import checkpoint_error
from .compressed_tensors import packed_width, parse_quantization, unpack
from .manifest import MANIFEST_FILE
from .recipe import Scheme
from .safetensors_file import SafetensorsFile
from .tensor_file import DTYPES, FLOAT_DTYPES, TensorFile, TensorInfo
from .torch_file import TorchFile
from .validation import spec_problems

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""Where the weights are: the first of these that exists, or the shards of its ``.index.json``."""

TIED_ROWS = 64
"""How many rows tell whether a tensor is a copy of another."""


class Checkpoint:
    """An open checkpoint. Made by :func:`open_checkpoint`; a context manager.

    ``config``, ``generation_config`` and ``manifest`` (of a migrated checkpoint) are the parsed JSON files, ``{}``
    where the latter two do not exist. ``tensors`` maps names to types, shapes and places. ``quantization`` is what
    ``config.json`` says about int8 layers, or None.
    """

    def __init__(self, path: Path, config: dict[str, Any], files: list[TensorFile], metadata_files: list[Path]):
        self.path = path
        self.config = config
        self.quantization = parse_quantization(config, path / "config.json")
        self._metadata_files = metadata_files
        self._files = {file.path: file for file in files}
        self.tensors: Mapping[str, TensorInfo] = {k: v for file in files for k, v in file.tensors.items()}
        self._stored: dict[str, str] = {}  # by name, the name in the file, where it is another
        self.generation_config = _read_optional(path / "generation_config.json")
        self.manifest = _read_optional(path / MANIFEST_FILE)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; arrays that were handed out stay valid."""
        for file in self._files.values():
            file.close()

    def files(self) -> list[Path]:
        """Every file that the tensors and their meaning come from: ``config.json``, the index, the weights."""
        return [*self._metadata_files, *self._files]

    def check_unchanged(self) -> None:
        """Raise :class:`CheckpointError` if a file of weights was written to since the checkpoint was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored: a read-only view of the file. bf16 comes as ``ml_dtypes.bfloat16``."""
        return self._files[self._info(name).file].view(self._stored.get(name, name))

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill ``buffer`` with a tensor's bytes from ``offset`` on, without a memory map."""
        info = self._info(name)
        self._files[info.file].read_tensor(self._stored.get(name, name), buffer, offset)

    def vector(self, name: str, stored: bool = False) -> np.ndarray:
        """A float tensor (a gain, a bias, an embedding table) as it is stored; see :meth:`stored`."""
        info = self._info(name)
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{info.file}: tensor {name!r} is {info.dtype}, not one of {', '.join(FLOAT_DTYPES)}")
        return self.stored(name) if stored else self.read(name)

    def stored(self, name: str) -> np.ndarray:
        """A tensor as it is stored, which is not read until it is wanted, and then without a memory map.

        What it raises if the file changed meanwhile is a :class:`CheckpointError`. It behaves as an array does that is
        converted before it is used (see :class:`StoredMatrix`).
        """
        info = self._info(name)

        def read(buffer: memoryview, offset: int) -> None:
            self.read_into(name, buffer, offset)

        return cast(np.ndarray, StoredMatrix(info.shape, DTYPES[info.dtype], read))

    def weight(self, name: str, stored: bool = False) -> HostWeight:
        """The matrix ``name`` (``model.layers.0.mlp.up_proj.weight``) ``[out, in]``: float as stored, or int8.

        With ``stored``, matrices that need no unpacking are as :meth:`stored` says; they need the checkpoint open.
        """
        module = name.removesuffix(".weight")
        packed = self.tensors.get(f"{module}.weight_packed")
        if packed is None and self._info(name).dtype != "I8":
            return self.vector(name, stored)
        group = self.quantization.group_of(module) if self.quantization else None
        if group is None:
            raise CheckpointError(f"{self.path}: {module} holds int8 codes, but quantization_config does not cover it")
        if packed is None:
            codes = self.stored(name) if stored else self.read(name)
        else:
            rows, columns = (int(size) for size in self._array(f"{module}.weight_shape", stored))
            if packed.shape != (rows, packed_width(columns)):
                raise CheckpointError(
                    f"{packed.file}: {module}.weight_shape is {[rows, columns]}, which takes weight_packed "
                    f"{[rows, packed_width(columns)]}, not {list(packed.shape)}"
                )
            codes = unpack(self._array(f"{module}.weight_packed", stored), columns)
        scale, outliers = self._scale(module, codes.shape[0], stored), self._outliers(module, codes.shape, stored)
        return Int8Weight(codes, scale, group.dynamic, outliers)

    def _array(self, name: str, stored: bool) -> np.ndarray:
        """A tensor as it is stored: read now, or else a view of the file."""
        return np.asarray(self.stored(name)) if stored else self.read(name)

    def _outliers(self, module: str, shape: tuple[int, ...], stored: bool) -> OutlierColumns | None:
        """The columns ``[n]`` of a layer ``[out, in]`` that stay fp16, and their weights ``[out, n]``."""
        if self.quantization is None or module not in self.quantization.outliers:
            return None
        index = self._array(f"{module}.outlier_columns", stored)
        if not ((np.diff(index, prepend=-1) > 0).all() and index[-1] < shape[1]):
            raise CheckpointError(f"{self.path}: {module}.outlier_columns are not ascending numbers below {shape[1]}")
        return OutlierColumns(index, np.asarray(self.vector(f"{module}.outlier_weight", stored)))

    def validate(self, spec: Spec) -> None:
        """Raise one :class:`CheckpointError` with every missing, unexpected, misshapen or wrongly typed tensor.

        From then on, tensors that the files have under an alias go by the specification's names.
        """
        self._adopt_names(spec)
        problems = spec_problems(spec, self.tensors, self.quantization) or self._tied_problems(spec)
        if problems:
            remedy = "the files do not fit config.json: get both anew from the same place, or export the model again"
            raise checkpoint_error(self.path, problems, remedy)

    def _adopt_names(self, spec: Spec) -> None:
        renamed = {}
        for name in self.tensors:
            matches = ((re.fullmatch(pattern, name), replacement) for pattern, replacement in spec.aliases)
            renamed[name] = next((match.expand(replacement) for match, replacement in matches if match), name)
        if len(set(renamed.values())) == len(renamed):  # else a name is there twice, and is reported as unexpected
            self._stored = {new: self._stored.get(old, old) for old, new in renamed.items()}
            self.tensors = {renamed[old]: info for old, info in self.tensors.items()}

    def _tied_problems(self, spec: Spec) -> list[str]:
        """Tensors that the file holds although they are tied to others, and that differ from those: the first rows."""
        problems = []
        for name, source in spec.tied.items():
            pair = [self.tensors.get(name), self.tensors.get(source)]
            if any(info is None or info.dtype not in FLOAT_DTYPES for info in pair):
                continue
            one, other = (np.asarray(self.stored(n)[:TIED_ROWS]).astype(np.float32) for n in (name, source))
            if not np.array_equal(one, other, equal_nan=True):
                problems.append(
                    f"tensor {name!r} differs from {source!r}, to which config.json ties it; correct "
                    "tie_word_embeddings there, or remove the tensor"
                )
        return problems

    def weights(self, spec: Spec, stored: bool = False) -> CheckpointWeights:
        """The tensors by the names that a model uses, tied ones included; without memory maps if ``stored``."""
        return CheckpointWeights(self, spec, stored)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self.tensors[name]

    def _scale(self, module: str, rows: int, stored: bool) -> np.ndarray:
        """The scales of a layer ``[out]``; one scale for the whole tensor is spread over its rows."""
        scale = np.asarray(self.vector(f"{module}.weight_scale", stored))
        if scale.size not in (1, rows):
            raise CheckpointError(f"{self.path}: {module}.weight_scale has {scale.size} values for {rows} rows")
        if not np.isfinite(scale.astype(np.float32)).all():
            raise CheckpointError(f"{self.path}: {module}.weight_scale holds a NaN or an infinity")
        zero_point = f"{module}.weight_zero_point"
        if zero_point in self.tensors and self._array(zero_point, stored).any():
            raise CheckpointError(f"{self.path}: {zero_point} is not zero; only symmetric weights can be run")
        return np.ascontiguousarray(np.broadcast_to(scale.reshape(-1), (rows,)))


@dataclass(frozen=True)
class ShardIndex:
    """An index file's name, and what it says: which file has which tensor."""

    name: str
    weight_map: Mapping[str, str]


class CheckpointWeights:
    """A checkpoint seen through a model's specification: a tied tensor is read from where its values are.

    A tied head of a migrated checkpoint is quantized here, as the recipe in the manifest says, because the format keeps
    it as the float embedding; and so are matrices that are stored ``[in, out]``, which the format's readers leave
    float. Elsewhere they stay float.
    """

    def __init__(self, checkpoint: Checkpoint, spec: Spec, stored: bool = False):
        self.checkpoint = checkpoint
        self.spec = spec
        self.stored = stored
        self.tied_scheme = self._scheme("tied_head", checkpoint.manifest.get("tied_head"))
        late = checkpoint.manifest.get("quantized_when_loaded") or {}
        self.late = {name: self._scheme(f"quantized_when_loaded[{name!r}]", scheme) for name, scheme in late.items()}

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""
        if name in self.spec.tied:
            weight, scheme = self.vector(name), self.tied_scheme
        elif self.spec.parameters[name].transposed:
            weight = np.ascontiguousarray(self.vector(name).T)
            scheme = self.late.get(name, Scheme.FLOAT)
        else:
            return self.checkpoint.weight(name, self.stored)
        return weight if scheme is Scheme.FLOAT else quantize_weight(weight, dynamic=scheme is Scheme.W8A8)

    def _scheme(self, key: str, value: object) -> Scheme:
        """A scheme in the manifest; none means float."""
        if value is not None and value not in [s.value for s in Scheme]:
            raise CheckpointError(f"{self.checkpoint.path / MANIFEST_FILE}: {key} is {value!r}, which is no scheme")
        return Scheme.FLOAT if value is None else Scheme(value)

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``; an embedding table as :meth:`Checkpoint.stored` says, if that was asked for."""
        values = self.checkpoint.vector(self.spec.tied.get(name, name), self.stored)
        return values if self.spec.parameters[name].role is Role.EMBEDDING else np.asarray(values)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint in the folder ``path``.

    Raises :class:`CheckpointError` if the folder, ``config.json``, the index or a file of weights cannot be used; all
    problems of the shards are listed together.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: {what}; give the folder that holds config.json and the weights")
    config = read_json(path / "config.json")
    metadata_files = [path / "config.json"]
    index = None
    found = next((path / f for name in SINGLE_FILES for f in (name, f"{name}.index.json") if (path / f).exists()), None)
    if found is None:
        raise CheckpointError(_no_weights(path))
    if found.suffix == ".json":
        index = ShardIndex(found.name, _read_index(found))
        metadata_files.append(found)
    files: list[TensorFile] = []
    try:
        files = _open_shards(path, [found.name] if index is None else sorted(set(index.weight_map.values())), index)
        return Checkpoint(path, config, files, metadata_files)
    except BaseException:
        for file in files:
            file.close()
        raise


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; raises :class:`CheckpointError` if it does not exist or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: does not exist; copy it from the model's original folder") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); download or export it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_index(path: Path) -> dict[str, str]:
    """``weight_map`` of an index: tensor name -> file name, each a plain name inside the folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must map tensor names to files, not {weight_map!r}")
    problems = []
    suffix = Path(path.name.removesuffix(".index.json")).suffix
    for file in sorted(set(map(str, weight_map.values()))):
        if PurePosixPath(file).name != file or "\\" in file or "\0" in file:
            problems.append(f"names {file!r}, which is outside this folder; move the file into it and correct the name")
        elif not file.endswith(suffix):
            problems.append(f"names {file!r}, which is not a {suffix[1:]} file")
        elif not (path.parent / file).exists():
            problems.append(f"the shard {file} is missing; download it again")
    if problems:
        raise checkpoint_error(path, problems)
    return weight_map


def _open_shards(path: Path, names: list[str], index: ShardIndex | None) -> list[TensorFile]:
    """Open all files; their tensors must be those of the index, each in one file only."""
    files: list[TensorFile] = []
    problems = []
    for name in names:
        try:
            files.append(TorchFile(path / name) if name.endswith(".bin") else SafetensorsFile(path / name))
        except CheckpointError as error:  # noqa: PERF203, the others' problems are wanted too
            problems.append(str(error))
    if not problems:
        problems = _shard_problems(files, index)
    if problems:
        for file in files:
            file.close()
        if len(problems) == 1 and len(names) == 1:
            raise CheckpointError(problems[0])
        raise checkpoint_error(path, problems)
    return files


def _shard_problems(files: list[TensorFile], index: ShardIndex | None) -> list[str]:
    holders: dict[str, list[str]] = {}
    for file in files:
        for tensor in file.tensors:
            holders.setdefault(tensor, []).append(file.path.name)
    problems = [f"tensor {t!r} is in more than one shard: {', '.join(f)}" for t, f in holders.items() if len(f) > 1]
    if index is None:
        return problems
    for tensor, file_name in index.weight_map.items():
        found = holders.pop(tensor, [])
        if file_name not in found:
            where = f"but it is in {', '.join(found)}" if found else "but no shard has it"
            problems.append(f"{index.name} places tensor {tensor!r} in {file_name}, {where}")
    return problems + [f"tensor {t!r} of {', '.join(f)} is not in {index.name}" for t, f in holders.items()]


def _no_weights(path: Path) -> str:
    suffixes = (".bin", ".pt", ".pth", ".safetensors", ".gguf", ".h5")
    found = sorted(file.name for file in path.iterdir() if file.suffix in suffixes)
    listed = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
    for name in SINGLE_FILES:
        if any(file.endswith(Path(name).suffix) for file in found):
            return f"{path}: has {listed}, but neither {name} nor {name}.index.json; copy the missing index"
    if found:
        return (
            f"{path}: its weights are in {listed}, and this version reads {' and '.join(SINGLE_FILES)}; convert them "
            "with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return f"{path}: holds no weights: none of {', '.join(SINGLE_FILES)}, nor the index of shards"
