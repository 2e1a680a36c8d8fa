"""Checkpoints of model-parallel training: shards in PyTorch files, merged into one checkpoint.

Megatron and DeepSpeed divide matrices over the processes of a group, each of which saves
``mp_rank_XX_model_states.pt``. A column-parallel layer is cut along its outputs (rows of its matrix), a row-parallel
layer along its inputs (columns); norms, and the biases of the latter, are in every shard. A fused matrix (query, key
and value) is cut part by part, so a shard holds some heads of each. Tensors are merged one at a time.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.migrate import migrate
from ..checkpoint.opened_model import describe_model
from ..checkpoint.output_folder import check_space, check_target, output_folder
from ..checkpoint.recipe import load_recipe
from ..checkpoint.torch_file import TorchFile
from ..checkpoint.writer import CheckpointWriter, TensorDeclaration, write_json
from ..errors import CheckpointError, UsageError, listed, require_bool
from ..files import is_within, read_small_file

RANK = re.compile(r"mp_rank_(\d+)(?:\D*\.(?:pt|bin))?")
POINTERS = ("latest_checkpointed_iteration.txt", "latest")
UNUSED = (
    "numpy.*",
    "_codecs.encode",
    "argparse.Namespace",
    "copy_reg._reconstructor",
    "copyreg._reconstructor",
    "__builtin__.set",
    "__builtin__.object",
    "builtins.set",
    "builtins.object",
    "deepspeed.*",
    "fp16.*",
    "collections.defaultdict",
)
"""Names in the pickle of a training's other state (random states, arguments, loss scalers), which are skipped."""


@dataclass(frozen=True)
class Merge:
    """How the shards of a tensor are joined: along ``axis``, each of ``parts`` separately; None for equal copies."""

    axis: int | None = None
    parts: int = 1


ROWS, COLUMNS, COPIES = Merge(0), Merge(1), Merge()

Rules = Mapping[str, Merge]
"""Patterns of tensor names; the first match decides."""

Configure = Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any]]
"""Makes the ``config.json`` of a model from the shapes of its merged tensors, by name."""


class Shards:
    """The open shards of a model. ``names`` maps a tensor's name to its name in each file, which wrappers prefix.

    Raises :class:`CheckpointError` for a folder without shards, for files that cannot be used and for shards with
    different tensors.
    """

    def __init__(self, source: Path, ignored: tuple[str, ...] = ()):
        self.source = source
        self.files: list[TorchFile] = []
        try:
            for path in find_shards(source):
                self.files.append(TorchFile(path, "module", UNUSED))
            self.names = self._names(ignored)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self.files:
            file.close()

    def read(self, name: str, merge: Merge) -> np.ndarray:
        """A tensor, merged. Raises :class:`CheckpointError` if the shards do not fit together."""
        parts = [file.read(stored) for file, stored in zip(self.files, self.names[name], strict=True)]
        if merge.axis is None or len(parts) == 1:
            if any(part.shape != parts[0].shape or part.tobytes() != parts[0].tobytes() for part in parts[1:]):
                raise CheckpointError(f"{self.source}: tensor {name!r} is not the same in all shards, as it should be")
            return parts[0]
        if len({(part.dtype, part.shape) for part in parts}) > 1:
            raise CheckpointError(f"{self.source}: tensor {name!r} has another shape or type in another shard")
        rows = parts[0].shape[merge.axis]
        if rows % merge.parts:
            raise CheckpointError(f"{self.source}: tensor {name!r} of {rows} rows does not have {merge.parts} parts")
        pieces = [np.split(part, merge.parts, merge.axis) for part in parts]
        return np.concatenate([piece[i] for i in range(merge.parts) for piece in pieces], merge.axis)

    def merged(self, name: str, merge: Merge) -> TensorDeclaration:
        """The declaration of the tensor that :meth:`read` returns."""
        info = self.files[0].tensors[self.names[name][0]]
        shape = list(info.shape)
        if merge.axis is not None:
            shape[merge.axis] *= len(self.files)
        return TensorDeclaration(info.dtype, tuple(shape))

    def _names(self, ignored: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Names in the model -> names in each of the files."""
        plain = [{unwrapped(name): name for name in file.tensors} for file in self.files]
        for file, names in zip(self.files, plain, strict=True):
            different = sorted(names.keys() ^ plain[0].keys())
            if different:
                raise CheckpointError(f"{file.path}: differs from the first shard in {', '.join(different[:5])}")
        wanted = [name for name in plain[0] if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)]
        return {name: tuple(names[name] for names in plain) for name in wanted}


def find_shards(source: Path) -> list[Path]:
    """The files of all shards in the order of their ranks: the file ``source``, or those of the folder ``source``.

    Training saves into a folder per iteration, and writes the name of the last one into a file.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise CheckpointError(f"{source}: does not exist")
    for name in POINTERS:
        if (source / name).is_file():
            inner = _named_folder(source / name)
            if inner is not None and inner.is_dir():
                return find_shards(inner)
    files = [path for path in sorted(source.iterdir()) if path.is_file()]
    ranks = {int(match[1]): path for path in files if (match := RANK.fullmatch(path.name))}
    if ranks:
        if sorted(ranks) != list(range(len(ranks))):
            raise CheckpointError(f"{source}: has the shards {sorted(ranks)}; those between or before them are missing")
        return [path for _, path in sorted(ranks.items())]
    found = [path for path in files if path.suffix in (".pt", ".bin")]
    if not found:
        raise CheckpointError(f"{source}: holds neither mp_rank_*_model_states.pt nor another *.pt or *.bin file")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{source}: holds {names}; name the one that is the model")
    return found


def _named_folder(pointer: Path) -> Path | None:
    """The folder beside ``pointer`` that it names; None if it names none. Raises :class:`CheckpointError`."""
    try:
        iteration = read_small_file(pointer).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    name = Path(iteration).name
    return pointer.parent / name if is_within(name) else None


def unwrapped(name: str) -> str:
    """A tensor's name without the prefixes of training wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def rule_of(name: str, rules: Rules) -> Merge | None:
    return next((merge for pattern, merge in rules.items() if fnmatch.fnmatchcase(name, pattern)), None)


def merge_shards(shards: Shards, rules: Rules, configure: Configure, folder: Path) -> None:
    """Write the merged checkpoint into ``folder``: safetensors, and the ``config.json`` of ``configure``.

    Raises :class:`CheckpointError` with every tensor that is unknown, missing or not of the configuration's shape.
    """
    merges = {name: merge for name in shards.names if (merge := rule_of(name, rules))}
    unknown = [f"unknown tensor {name!r}" for name in shards.names if name not in merges]
    if unknown:
        raise CheckpointError(listed(shards.source, unknown))
    declared = {name: shards.merged(name, merge) for name, merge in merges.items()}
    config = configure({name: tensor.shape for name, tensor in declared.items()})
    spec = describe_model(config).spec
    wanted = {name: p.shape for name, p in spec.parameters.items() if name not in spec.tied}
    problems = [f"missing tensor {name!r}" for name in wanted.keys() - declared.keys()]
    problems += [
        f"tensor {name!r} is {list(declared[name].shape)} when merged; the model has {list(shape)}"
        for name, shape in wanted.items()
        if name in declared and declared[name].shape != shape
    ]
    problems += [f"tensor {name!r} is none of the model's" for name in declared.keys() - wanted.keys()]
    if problems:
        raise CheckpointError(listed(shards.source, sorted(problems)))
    writer = CheckpointWriter(folder, declared, set())
    try:
        for name, merge in merges.items():
            writer.write(name, np.ascontiguousarray(shards.read(name, merge)))
        writer.finish()
    finally:
        writer.close()
    write_json(folder / "config.json", config)


def convert(write: Callable[[Path], None], source: Path, out: Path, recipe: str, force: bool) -> None:
    """Merge ``source`` with ``write``, which writes the merged checkpoint into a folder, and migrate it to ``out``.

    With the recipe ``merge``, ``out`` is the merged checkpoint itself. ``force`` replaces an earlier result. The
    recipe, ``out`` and the disk are checked before the merge, which may take minutes. Raises :class:`CheckpointError`
    and :class:`UsageError`; ``out`` is untouched then.
    """
    require_bool("force", force)
    size = sum(path.stat().st_size for path in find_shards(source))
    if recipe == "merge":
        with output_folder(out, force, size) as folder:
            write(folder)
        return
    loaded = load_recipe(recipe)
    if loaded.calibration is not None:
        raise UsageError(f"recipe {loaded.name}: convert with --recipe merge, then run bminf-lite migrate --calibrate")
    check_target(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out, size)
    merged = Path(tempfile.mkdtemp(prefix=".merged-", dir=out.parent))
    try:
        write(merged)
        migrate(merged, out, loaded, force=force)
    finally:
        shutil.rmtree(merged)


def write_vocabulary(folder: Path, vocabulary: Path, name: str, tokenizer_class: str) -> None:
    """Copy the vocabulary to ``folder`` under the name that the tokenizer class expects."""
    if not vocabulary.is_file():
        raise CheckpointError(f"{vocabulary}: does not exist; it comes with the model's code")
    shutil.copyfile(vocabulary, folder / name)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class})
