"""Opening a checkpoint's files: a folder with ``config.json`` and weights, in one file or in shards with an index.

A GGUF file, or a folder that holds one, is a checkpoint too (see :mod:`.gguf_file`), and so are weights that others
have quantized (see :mod:`.quantized_sources`).

The weights are safetensors or, in older checkpoints, PyTorch files (see :mod:`.torch_file`). Where a folder has both,
safetensors are taken. Opening reads the files' headers only, which takes milliseconds, and reports everything that is
wrong with the files in one error.

:mod:`.opened_model` checks the tensors against the model that ``config.json`` describes.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from ..backend.quantization import HostWeight, Int8Weight, OutlierColumns
from ..backend.stored_matrix import StoredMatrix
from ..errors import CheckpointError, checkpoint_error
from ..files import expand, parse_json, read_small_file, thread_count
from ..gguf_files.header import find_gguf
from ..models.spec import FusedExperts, Parameter
from . import quantized_sources
from .checksum import array_checksum
from .compressed_tensors import packed_width, parse_quantization, unpack
from .derived_tensor import DerivedTensor, RecentExperts, experts_of, joined
from .gguf_file import open_gguf
from .manifest import DAMAGED_MANIFEST, FORMAT_VERSIONS, MANIFEST_FILE, file_records
from .quantized_sources.source_tensors import dequantized
from .safetensors_file import SafetensorsFile
from .tensor_file import DTYPES, FLOAT_DTYPES, TensorFile, TensorInfo
from .torch_file import TorchFile

SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
VARIANT = re.compile(r"\.(fp16|bf16|fp32|ema|non_ema)[-.]")
"""Words that transformers puts into names of files: ``model.fp16.safetensors``."""
MAX_CONFIG_BYTES = 1 << 24
"""The size that a file of settings may have; published ones have some thousand bytes."""
MAX_LIST_BYTES = 1 << 27
"""The size that a list of tensors may have: an index has about 100 bytes for each tensor, a manifest 500."""

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""Where the weights are: the first of these that exists, or the shards of its ``.index.json``."""


class Checkpoint:
    """The open files of a checkpoint. Made by :func:`open_checkpoint`; a context manager.

    ``config``, ``generation_config`` and ``manifest`` (of a migrated checkpoint) are the parsed JSON files, ``{}``
    where the latter two do not exist. ``text_files`` makes further files of a folder, by name, that a GGUF file stands
    for. ``tensors`` maps names to types, shapes and places. ``quantization`` is the parsed ``quantization_config`` of
    ``config.json``, or None.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        files: list[TensorFile],
        metadata_files: list[Path],
        generation_config: dict[str, Any] | None = None,
        text_files: Callable[[], Mapping[str, str]] = dict,
    ):
        self.path = path
        self.text_files = text_files
        source_format = quantized_sources.find(config, path / "config.json")
        self.config = config if source_format is None else without_quantization(config)
        self.quantization = parse_quantization(self.config, path / "config.json")
        self._metadata_files = metadata_files
        self._files = {file.path: file for file in files}
        self.tensors: Mapping[str, TensorInfo] = {k: v for file in files for k, v in file.tensors.items()}
        self._name_in_file = {name: name for name in self.tensors}
        self.generation_config = generation_config or _read_optional(path / "generation_config.json")
        self.manifest = _read_optional(path / MANIFEST_FILE, MAX_LIST_BYTES)
        _check_manifest(path, self.manifest, files)
        self._checksums = self.manifest.get("checked_when_loaded") or {}
        self._derived: Mapping[str, DerivedTensor] = {}
        self._recent = RecentExperts(thread_count() + 1)
        self._parts: dict[str, tuple[str, int]] = {}  # of a fused tensor: its name in the file, and the first byte
        if source_format is not None:
            stored = {name: self._kept(name) for name in self.tensors}
            self.tensors, self._derived = dequantized(source_format, self.tensors, stored, path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; matrices that were not read yet can no longer be read."""
        for file in self._files.values():
            file.close()

    def files(self) -> list[Path]:
        """Every file that the tensors and their meaning come from: ``config.json``, the index, the weights."""
        return [*self._metadata_files, *self._files]

    def check_unchanged(self) -> None:
        """Raise :class:`CheckpointError` if a file of weights was written to since the checkpoint was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def rename(self, aliases: Sequence[tuple[str, str]]) -> None:
        """Rename the tensors whose name an alias matches; see :class:`~bminf_lite.models.spec.Spec`.

        Names stay as they are if two of them would become equal; validation then reports one as unexpected.
        """
        renamed = {}
        for name in self.tensors:
            matches = ((re.fullmatch(pattern, name), replacement) for pattern, replacement in aliases)
            renamed[name] = next((match.expand(replacement) for match, replacement in matches if match), name)
        if len(set(renamed.values())) == len(renamed):
            self._name_in_file = {new: self._name_in_file.get(old, old) for old, new in renamed.items()}
            self._derived = {renamed[old]: tensor for old, tensor in self._derived.items() if old in renamed}
            self.tensors = {renamed[old]: info for old, info in self.tensors.items()}

    def rename_tensor(self, old: str, new: str) -> None:
        """Rename one tensor to a name that is not in use."""
        assert new not in self.tensors
        self.tensors = {new if name == old else name: info for name, info in self.tensors.items()}
        self._name_in_file[new] = self._name_in_file.pop(old, old)
        self._derived = {new if name == old else name: tensor for name, tensor in self._derived.items()}

    def split(self, name: str, fused: FusedExperts, parameters: Mapping[str, Parameter]) -> None:
        """Replace the tensor ``name`` by those of experts that ``fused`` says it holds."""
        whole, begin = self.tensors[name], 0
        found: dict[str, TensorInfo] = {}
        for part in chain(*fused.experts):
            shape = parameters[part].shape
            nbytes = math.prod(shape) * DTYPES[whole.dtype].itemsize
            stored = whole.stored_bytes * nbytes // max(whole.nbytes, 1)
            skipped = begin * whole.stored_bytes // whole.nbytes if whole.stored_bytes else begin
            found[part] = TensorInfo(
                whole.dtype, shape, whole.file, whole.offset + skipped, nbytes, whole.stored_as, stored
            )
            if fused.is_stacked and name not in self._derived:
                self._parts[part] = self._name_in_file[name], begin
            begin += nbytes
        assert begin == whole.nbytes
        if not fused.is_stacked or name in self._derived:
            values = cast(np.ndarray, self._kept(name))
            self._derived = {**self._derived, **experts_of(name, fused, found, values, self._recent)}
        self.tensors = {
            k: v
            for other, info in self.tensors.items()
            for k, v in (found.items() if other == name else ((other, info),))
        }

    def join(self, name: str, parts: Sequence[str], order: np.ndarray | None = None) -> None:
        """Replace the tensors ``parts``, if all are there, by ``name`` with their rows, stacked or in ``order``.

        They stay as they are if their rows have different lengths; validation then reports them as unexpected.
        """
        infos = [self.tensors[part] for part in parts if part in self.tensors]
        if len(infos) < len(parts) or len({info.shape[1:] for info in infos}) > 1 or len(infos[0].shape) != 2:
            return
        tensor = joined(infos, [cast(np.ndarray, self._kept(part)) for part in parts], order)
        self._derived = {**self._derived, name: tensor}
        self.tensors = {k: v for k, v in self.tensors.items() if k not in parts} | {name: tensor.info}

    def with_derived(self, tensors: Mapping[str, DerivedTensor], config: dict[str, Any] | None = None) -> Checkpoint:
        """A checkpoint with the same files, in which ``tensors`` are computed, and with another ``config`` if given.

        Both share the files, which one of them closes.
        """
        other = copy.copy(self)
        other._derived = {**self._derived, **tensors}
        other.tensors = {**self.tensors, **{name: tensor.info for name, tensor in tensors.items()}}
        other.config = self.config if config is None else config
        return other

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored or computed, in new memory. bf16 comes as ``ml_dtypes.bfloat16``."""
        info = self._info(name)
        values = np.empty(info.shape, DTYPES[info.dtype])
        if values.size:
            self.read_into(name, values.reshape(-1).view(np.uint8).data)
        return values

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill ``buffer`` with a tensor's bytes from ``offset`` on."""
        if name in self._derived:
            self._derived[name].read_into(buffer, offset)
            return
        stored, begin = self._place(name)
        self._files[self._info(name).file].read_tensor(stored, buffer, begin + offset)

    def _kept(self, name: str) -> StoredMatrix:
        """A tensor like :meth:`stored`, which stays readable when the checkpoint no longer lists it."""
        info, derived = self._info(name), self._derived.get(name)
        if derived is not None:
            return StoredMatrix(info.shape, DTYPES[info.dtype], derived.read_into)
        file, (stored, begin) = self._files[info.file], self._place(name)

        def read(buffer: memoryview, offset: int) -> None:
            file.read_tensor(stored, buffer, begin + offset)

        return StoredMatrix(info.shape, DTYPES[info.dtype], read)

    def is_verbatim(self, name: str) -> bool:
        """Whether :meth:`read_into` gives the bytes of the tensor's file from its offset on."""
        return name not in self._derived and self._files[self._info(name).file].is_verbatim(self._place(name)[0])

    def _place(self, name: str) -> tuple[str, int]:
        """The name of a tensor in its file, and the byte of that tensor at which it begins."""
        return self._parts[name] if name in self._parts else (self._name_in_file[name], 0)

    def stored(self, name: str) -> np.ndarray:
        """A tensor as it is stored, read when it is used: a :class:`StoredMatrix`, valid while the files are open."""
        info = self._info(name)

        def read(buffer: memoryview, offset: int) -> None:
            self.read_into(name, buffer, offset)

        return cast(np.ndarray, StoredMatrix(info.shape, DTYPES[info.dtype], read))

    def stored_float(self, name: str) -> np.ndarray:
        """A float tensor like :meth:`stored`; raises :class:`CheckpointError` for one of another type."""
        info = self._info(name)
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{info.file}: tensor {name!r} is {info.dtype}, not one of {', '.join(FLOAT_DTYPES)}")
        return self.stored(name)

    def vector(self, name: str) -> np.ndarray:
        """A float tensor (the weight or the bias of a norm, a bias) in new memory."""
        return self._checked(name, np.asarray(self.stored_float(name)))

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` (``model.layers.0.mlp.up_proj.weight``) ``[out, in]``: float or int8, as it is stored.

        Values and unpacked codes are :class:`StoredMatrix`; everything small is read.
        """
        module = name.removesuffix(".weight")
        packed = self.tensors.get(f"{module}.weight_packed")
        if packed is None and self._info(name).dtype != "I8":
            return self.stored_float(name)
        group = self.quantization.group_of(module) if self.quantization else None
        if group is None:
            raise CheckpointError(f"{self.path}: {module} holds int8 codes, but quantization_config does not cover it")
        codes = self.stored(name) if packed is None else self._unpacked(module, packed)
        return Int8Weight(
            codes,
            self._scale(module, codes.shape[0], codes.shape[1] // group.group_size if group.group_size else 1),
            group.dynamic,
            self._outliers(module, codes),
            self.quantization.rotation_of(module) if self.quantization else 1,
        )

    def _unpacked(self, module: str, packed: TensorInfo) -> np.ndarray:
        """The codes int8 ``[out, in]`` of a layer in the packed format."""
        rows, columns = (int(size) for size in self.read(f"{module}.weight_shape"))
        needed = (rows, packed_width(columns))
        if packed.shape != needed:
            problem = f"takes weight_packed {list(needed)}, not {list(packed.shape)}"
            raise CheckpointError(f"{packed.file}: {module}.weight_shape {[rows, columns]} {problem}")
        return unpack(self.read(f"{module}.weight_packed"), columns)

    def _scale(self, module: str, rows: int, groups: int = 1) -> np.ndarray:
        """The scales of a layer ``[out]``, or ``[out, groups]`` of its groups of columns.

        A single scale of the whole tensor is repeated for its rows.
        """
        scale = self.vector(f"{module}.weight_scale")
        if scale.size not in (1, rows) if groups == 1 else scale.size != rows * groups:
            problem = f"{rows} rows" if groups == 1 else f"{rows} rows of {groups} groups of columns"
            raise CheckpointError(f"{self.path}: {module}.weight_scale has {scale.size} values for {problem}")
        values = scale.astype(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.path}: {module}.weight_scale holds a NaN or an infinity")
        if values.size and values.min() <= 0:
            problem = f"holds {values.min():g}, but scales are positive; the file is damaged, or its writer is wrong"
            raise CheckpointError(f"{self.path}: {module}.weight_scale {problem}")
        zero_point = f"{module}.weight_zero_point"
        if zero_point in self.tensors and self.read(zero_point).any():
            raise CheckpointError(f"{self.path}: {zero_point} is not zero; only symmetric weights can be run")
        if groups > 1:
            return np.ascontiguousarray(scale.reshape(rows, groups))
        return np.ascontiguousarray(np.broadcast_to(scale.reshape(-1), (rows,)))

    def _outliers(self, module: str, codes: np.ndarray) -> OutlierColumns | None:
        """The columns ``[n]`` of a layer that stay fp16, and their weights ``[out, n]``."""
        if self.quantization is None or module not in self.quantization.outliers:
            return None
        index = self.read(f"{module}.outlier_columns")
        if not ((np.diff(index, prepend=-1) > 0).all() and index[-1] < codes.shape[1]):
            problem = f"outlier_columns are not ascending numbers below {codes.shape[1]}"
            raise CheckpointError(f"{self.path}: {module}.{problem}")
        return OutlierColumns(index, self.vector(f"{module}.outlier_weight"))

    def _checked(self, name: str, values: np.ndarray) -> np.ndarray:
        """``values`` of the tensor ``name``, compared with their checksum at migration if there is one."""
        if name in self._checksums and array_checksum(values) != self._checksums[name]:
            problem = f"tensor {name!r} is not what migration wrote: the file is damaged"
            raise CheckpointError(f"{self._info(name).file}: {problem}; copy it again, or migrate again")
        return values

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self.tensors[name]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint in the folder ``path``, or the GGUF file ``path``.

    Raises :class:`CheckpointError` if the folder, ``config.json``, the index or a file of weights cannot be used; all
    problems of the shards are listed together.
    """
    path = expand(path)
    if (gguf := find_gguf(path)) is not None:
        found = open_gguf(gguf)
        checkpoint = Checkpoint(gguf, found.config, found.files, [], found.generation_config, found.text_files)
        for name, (parts, order) in found.joined.items():
            checkpoint.join(name, parts, order)
        for name, fused in found.stacked.items():
            checkpoint.split(name, fused, found.parameters)
        return checkpoint
    if not path.is_dir():
        what = "is a file, neither a folder nor GGUF" if path.exists() else "does not exist"
        remedy = "give the folder that holds config.json and the weights"
        if path.exists() and (path.parent / "config.json").exists():
            remedy = f"give its folder, {path.parent}"
        raise CheckpointError(f"{path}: {what}; {remedy}")
    if not os.path.lexists(path / "config.json"):
        raise CheckpointError(_no_config(path))
    config = read_json(path / "config.json")
    metadata_files = [path / "config.json"]
    weights = next(
        (path / f for name in SINGLE_FILES for f in (name, f"{name}.index.json") if os.path.lexists(path / f)), None
    )
    if weights is None:
        raise CheckpointError(_no_weights(path))
    if weights.suffix == ".json":
        files = _open_shards(weights, _read_index(weights))
        metadata_files.append(weights)
    else:
        files = [open_file(weights)]
    try:
        return Checkpoint(path, config, files, metadata_files)
    except BaseException:
        for file in files:
            file.close()
        raise


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` of the same model with float weights."""
    return {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}


def read_json(path: Path, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON file of at most ``most`` bytes that holds an object; raises :class:`CheckpointError` for anything else."""
    try:
        value = parse_json(read_small_file(path, most))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: does not exist; copy it from the model's original folder") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); download or export it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _read_optional(path: Path, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    return read_json(path, most) if path.exists() else {}


def _check_manifest(path: Path, manifest: Mapping[str, Any], files: Sequence[TensorFile]) -> None:
    """Raise :class:`CheckpointError` for a manifest of another version, and for files of another size than it says."""
    version = manifest.get("format_version", FORMAT_VERSIONS[0])
    if version not in FORMAT_VERSIONS:
        known = ", ".join(map(str, FORMAT_VERSIONS))
        problem = f"format_version is {version!r}, and this version reads {known}"
        raise CheckpointError(f"{path / MANIFEST_FILE}: {problem}; upgrade bminf-lite, or migrate again")
    objects = ["recipe", "checked_when_loaded", "quantized_when_loaded", "rotated_when_loaded"]
    objects += ["folded", "rotated_norms"]
    if wrong := [key for key in objects if not isinstance(manifest.get(key) or {}, dict)]:
        raise CheckpointError(f"{path / MANIFEST_FILE}: {wrong[0]} is not an object: {DAMAGED_MANIFEST}")
    sizes = {record.name: record.bytes for record in file_records(manifest, path / MANIFEST_FILE)}
    problems = [
        f"{file.path.name} has {file.nbytes:,} bytes; migration wrote {sizes[file.path.name]:,}"
        for file in files
        if sizes.get(file.path.name, file.nbytes) != file.nbytes
    ]
    if problems:
        raise checkpoint_error(path, problems, "the files are damaged, or of different migrations: copy them again")


def _read_index(path: Path) -> dict[str, str]:
    """``weight_map`` of an index: tensor name -> file name, each a plain name inside the folder."""
    weight_map = read_json(path, MAX_LIST_BYTES).get("weight_map")
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


def open_file(path: Path) -> TensorFile:
    """Open a file of weights, of PyTorch or safetensors by its suffix. Raises :class:`CheckpointError`."""
    return TorchFile(path) if path.suffix == ".bin" else SafetensorsFile(path)


def _open_shards(index: Path, weight_map: Mapping[str, str]) -> list[TensorFile]:
    """Open the shards of an index. A tensor that they hold must be in the one file where ``weight_map`` places it."""
    files: list[TensorFile] = []
    problems = []
    for name in sorted(set(weight_map.values())):
        try:
            files.append(open_file(index.parent / name))
        except CheckpointError as error:  # noqa: PERF203, the problems of all shards are reported
            problems.append(str(error))
    if not problems:
        problems = _shard_problems(files, index.name, weight_map)
    if problems:
        for file in files:
            file.close()
        raise checkpoint_error(index.parent, problems)
    return files


def _shard_problems(files: list[TensorFile], index: str, weight_map: Mapping[str, str]) -> list[str]:
    """Tensors in several shards or in another one than the index says.

    A tensor of the index alone is no problem here: published indices (that of Flan-T5 XL) name copies that its shards
    lack. Whether the model has its tensors is found later, from what the shards hold.
    """
    holders: dict[str, list[str]] = {}
    for file in files:
        for tensor in file.tensors:
            holders.setdefault(tensor, []).append(file.path.name)
    problems = [f"tensor {t!r} is in more than one shard: {', '.join(f)}" for t, f in holders.items() if len(f) > 1]
    return problems + [
        f"{index} places tensor {tensor!r} in {file_name}, but it is in {', '.join(holders[tensor])}"
        for tensor, file_name in weight_map.items()
        if tensor in holders and file_name not in holders[tensor]
    ]


def _no_config(path: Path) -> str:
    if (path / "adapter_config.json").exists():
        remedy = "give its base model's folder, and this one as an adapter (adapters=, --adapter, migrate --merge)"
        return f"{path}: is an adapter, not a model; {remedy}"
    patterns = "*/config.json", "snapshots/*/config.json"  # the second in the cache of Hugging Face
    inside = sorted(str(file.parent) for pattern in patterns for file in path.glob(pattern))
    listed = " or ".join(inside[:3])
    remedy = f"give the folder {listed}, which has one" if inside else "copy it from the model's original folder"
    return f"{path / 'config.json'}: does not exist; {remedy}"


def _no_weights(path: Path) -> str:
    suffixes = (".bin", ".pt", ".pth", ".safetensors", ".npz", ".gguf", ".h5")
    found = sorted(file.name for file in path.iterdir() if file.suffix in suffixes)
    listed = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
    for name in SINGLE_FILES:
        of_kind = [file for file in found if file.endswith(Path(name).suffix)]
        if of_kind:
            return f"{path}: has {listed}, but neither {name} nor {name}.index.json; {_weights_remedy(of_kind, name)}"
    if found:
        return (
            f"{path}: its weights are in {listed}, and this version reads {' and '.join(SINGLE_FILES)}; convert them "
            "with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return f"{path}: holds no weights: none of {', '.join(SINGLE_FILES)}, nor the index of shards"


def _weights_remedy(files: Sequence[str], name: str) -> str:
    """What helps a folder whose weights are in ``files`` of the kind of ``name``, none of which has that name."""
    if any(file.startswith("adapter_") for file in files):
        return "it is an adapter: merge it into its base model (merge_and_unload of peft), and save that model"
    if any(file.startswith(("consolidated.", "weights.")) for file in files):
        return "these are in their author's own form: get the files for transformers, which the same place offers"
    if any(SHARD.search(file) for file in files):
        variant = next((match[1] for file in files if (match := VARIANT.search(file))), None)
        if variant is None:
            return "copy the missing index"
        return f"copy {name}.index.{variant}.json from where the shards came from, as {name}.index.json"
    if len(files) == 1:
        return f"if {files[0]} is the whole model, rename it to {name}"
    return f"rename the one that is the whole model to {name}"


def open_tensor_file(path: Path) -> dict[str, np.ndarray]:
    """All tensors of one small file of weights, by name. Raises :class:`CheckpointError` for a damaged one."""
    file = open_file(path)
    try:
        return {name: np.array(file.read(name)) for name in file.tensors}
    finally:
        file.close()
