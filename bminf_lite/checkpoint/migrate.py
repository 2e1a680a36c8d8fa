"""Migration: a float checkpoint in, the same model with int8 weights out.

The source is read once, tensor by tensor and block by block (see :mod:`.conversion`), so memory stays small whatever
the size of the model. The result appears complete or not at all (see :mod:`.output_folder`). Embeddings, norms, biases
and the matrices that the recipe leaves float are copied bit for bit in the source's type. Two kinds of matrices stay
float in the file and are quantized when the checkpoint is loaded: a tied head, which has no tensor of its own, and
matrices that are stored ``[in, out]`` (GPT-2's), which other readers of the format open only as float.

The output is a compressed-tensors checkpoint that transformers and vLLM open, plus ``bminf_lite.json`` (see
:mod:`.manifest`). Tokenizer files, chat templates, generation settings, licence and readme are copied.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UsageError, checkpoint_error
from ..models.spec import Role, Spec
from .compressed_tensors import quantization_config
from .conversion import ConversionTask, Converter, Progress, tensor_report
from .manifest import MANIFEST_FILE, MigrationReport, SourceFile, TensorReport
from .opened_model import OpenedModel, open_model
from .output_folder import check_target, output_folder
from .reader import Checkpoint
from .recipe import Recipe, Scheme, load_recipe
from .weight_rewrite import NO_REWRITE, CalibrationResult, WeightRewrite
from .writer import SHARD_BYTES, CheckpointWriter, write_json

MAX_IN_FEATURES = 131_071
"""A sum of more products of int8 values can exceed int32."""

MAX_THREADS = 16
"""More threads would wait for the disk."""

COPIED_FILES = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "LICENCE*", "NOTICE*", "README*", "USE_POLICY*",
)  # fmt: skip
EXCLUDED_FILES = ("config.json", "*.index.json", MANIFEST_FILE, ".*")
COPIED_FOLDER = "additional_chat_templates"

CalibrateFn = Callable[[OpenedModel, Recipe], CalibrationResult]
"""Decides the settings that the recipe leaves open, by running a valid model."""

VerifyFn = Callable[[Path], Mapping[str, Any]]
"""Measures the cost of a complete folder; an exception rejects it."""


def migrate(
    source: str | Path,
    out: str | Path,
    recipe: str | Path | Recipe = "w8a8",
    *,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    calibrate: CalibrateFn | None = None,
    verify: VerifyFn | None = None,
) -> MigrationReport:
    """Quantize the checkpoint in the folder ``source`` into the new folder ``out``.

    ``recipe`` is a built-in name, the path of a TOML file, or a :class:`Recipe`. ``force`` replaces an earlier result
    in ``out``, once the new one is complete. ``dry_run`` only reports how each tensor would be converted. The result is
    split into files of at most ``shard_bytes``. ``calibrate`` runs after the source, the recipe and ``out`` were
    checked. ``verify`` gets the complete folder before it takes its name, and returns the report's ``cost``.

    Raises :class:`CheckpointError` if the source cannot be read or quantized or ``out`` cannot be written, and
    :class:`UsageError` for a recipe that makes no sense. ``out`` is untouched then, and after Ctrl-C.
    """
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}; it must be 1 or more")
    chosen = load_recipe(recipe)
    if chosen.calibration is not None and calibrate is None:
        raise UsageError(f"recipe {chosen.name}: needs a text to calibrate on (--calibrate FILE, calibrate=...)")
    target = Path(out).resolve()
    with open_model(source) as model:
        checkpoint = model.checkpoint
        if checkpoint.quantization is not None:
            remedy = "migrate the fp32, fp16 or bf16 checkpoint that it was made from"
            raise CheckpointError(f"{checkpoint.path}: is quantized already (quantization_config); {remedy}")
        _make_tasks(checkpoint, SchemeChoice.of(model.spec, chosen), {})
        if not dry_run:
            if checkpoint.path.resolve().is_relative_to(target):
                raise CheckpointError(f"{target}: holds the source, {checkpoint.path}; name another folder")
            check_target(target, force)
        calibrated = calibrate(model, chosen) if calibrate and chosen.calibration else CalibrationResult()
        rewrites = calibrated.rewrites if chosen.calibration else _rotations(model.spec, chosen)
        schemes = SchemeChoice.of(model.spec, chosen, rewrites)
        tasks = _make_tasks(checkpoint, schemes, rewrites)
        estimated = tuple(map(_estimate_report, tasks))
        files = tuple(SourceFile(file.name, file.stat().st_size, "") for file in checkpoint.files())
        late_rotations = {name: rewrites[name].rotation or 1 for name in schemes.late if name in rewrites}
        report = MigrationReport(
            chosen, schemes.tied_head, estimated, files, calibrated.report, schemes.late,
            late_rotations={name: block for name, block in late_rotations.items() if block > 1},
        )  # fmt: skip
        if dry_run:
            return report
        copied = _files_to_copy(checkpoint.path)
        needed = sum(task.nbytes for task in tasks) + sum(file.stat().st_size for file in copied) + (1 << 20)
        with output_folder(target, force, needed) as folder:
            tensors, sources = _convert(checkpoint, tasks, folder, shard_bytes, progress)
            report = replace(report, tensors=tuple(tensors), sources=tuple(sources))
            quantization = _quantization(schemes, rewrites)
            write_json(folder / "config.json", checkpoint.config | quantization)
            write_json(folder / MANIFEST_FILE, report.manifest())
            _copy_files(checkpoint.path, copied, folder)
            if verify:
                report = replace(report, cost=verify(folder))
                write_json(folder / MANIFEST_FILE, report.manifest())
        return report


def _rotations(spec: Spec, recipe: Recipe) -> dict[str, WeightRewrite]:
    """The rotations of a recipe without a calibration, by tensor name."""
    blocks = {name: recipe.rotation_of(spec, name) for name in spec.rotatable}
    return {name: WeightRewrite(rotation=block) for name, block in blocks.items() if block > 1}


@dataclass(frozen=True)
class SchemeChoice:
    """The scheme in which the model runs each weight matrix, by tensor name."""

    spec: Spec
    running: Mapping[str, Scheme]

    @classmethod
    def of(cls, spec: Spec, recipe: Recipe, rewrites: Mapping[str, WeightRewrite] | None = None) -> SchemeChoice:
        """The recipe's schemes, replaced by those of ``rewrites``. Raises :class:`UsageError` if all are float."""
        matrices = {name: p for name, p in spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD)}
        recipe.check_patterns(matrices)
        chosen = {name: recipe.scheme_of(name, parameter.role is Role.HEAD) for name, parameter in matrices.items()}
        chosen |= {name: rewrite.scheme for name, rewrite in (rewrites or {}).items() if rewrite.scheme}
        if all(scheme is Scheme.FLOAT for name, scheme in chosen.items() if name not in spec.tied):
            raise UsageError(f"recipe {recipe.name}: leaves every weight matrix of this checkpoint float")
        return cls(spec, chosen)

    @property
    def stored(self) -> dict[str, Scheme]:
        """The scheme of each matrix in the file: float if it is tied, or stored ``[in, out]``."""
        late = {name for name in self.running if name in self.spec.tied or self.spec.parameters[name].transposed}
        return {name: Scheme.FLOAT if name in late else scheme for name, scheme in self.running.items()}

    @property
    def late(self) -> dict[str, Scheme]:
        """The schemes of matrices that are stored ``[in, out]``."""
        return {name: scheme for name, scheme in self.running.items() if self.spec.parameters[name].transposed}

    @property
    def tied_head(self) -> Scheme | None:
        """The scheme in which a head without a tensor of its own is quantized when the result is loaded."""
        name = next((name for name in self.spec.tied if self.spec.parameters[name].role is Role.HEAD), None)
        return None if name is None else self.running[name]


def _make_tasks(
    checkpoint: Checkpoint, schemes: SchemeChoice, rewrites: Mapping[str, WeightRewrite]
) -> list[ConversionTask]:
    """The conversion of each tensor, in the order in which the source stores them."""
    spec, stored = schemes.spec, schemes.stored
    wide = [
        f"tensor {name!r} {list(spec.parameters[name].shape)}: w8a8 allows {MAX_IN_FEATURES:,} inputs at most"
        for name, scheme in stored.items()
        if scheme is Scheme.W8A8 and spec.parameters[name].shape[-1] > MAX_IN_FEATURES
    ]
    if wide:
        raise checkpoint_error(checkpoint.path, wide, "choose w8a16 or float")
    tasks = [
        ConversionTask(name, checkpoint.tensors[name], stored.get(name, Scheme.FLOAT), rewrites.get(name, NO_REWRITE))
        for name in spec.parameters
        if name not in spec.tied
    ]
    return sorted(tasks, key=lambda task: (task.info.file, task.info.offset))


def _estimate_report(task: ConversionTask) -> TensorReport:
    """The report of a dry run: scales are declared as fp32, and nearly always fp16."""
    return tensor_report(task, task.nbytes - (0 if task.scheme is Scheme.FLOAT else 2 * task.rows))


def _quantization(schemes: SchemeChoice, rewrites: Mapping[str, WeightRewrite]) -> dict[str, Any]:
    """The result's ``quantization_config``; empty where every tensor of the file is float."""
    stored = {name.removesuffix(".weight"): scheme for name, scheme in schemes.stored.items()}
    if set(stored.values()) <= {Scheme.FLOAT}:
        return {}
    kept = {name.removesuffix(".weight"): len(t.outliers) for name, t in rewrites.items() if t.outliers is not None}
    rotations = {
        name.removesuffix(".weight"): rewrite.rotation
        for name, rewrite in rewrites.items()
        if rewrite.rotation is not None and schemes.stored[name] is not Scheme.FLOAT
    }
    return {"quantization_config": quantization_config(stored, kept, rotations)}


def _convert(
    checkpoint: Checkpoint, tasks: list[ConversionTask], folder: Path, shard_bytes: int, progress: Progress | None
) -> tuple[list[TensorReport], list[SourceFile]]:
    """Write all tensors into ``folder``, and compute the checksums of the source's files."""
    hashers, workers = _thread_counts()
    outputs = {name: declared for task in tasks for name, declared in task.outputs().items()}
    writer = CheckpointWriter(folder, outputs, {task.scale_name for task in tasks}, shard_bytes)
    try:
        with (
            _checksums(checkpoint.files(), hashers) as hashed,
            Converter(checkpoint, writer, workers, progress) as converter,
        ):
            tensors = converter.run(tasks)
            writer.finish()
            sources = [file.result() for file in hashed]
    finally:
        writer.close()
    checkpoint.check_unchanged()
    return tensors, sources


def _files_to_copy(source: Path) -> list[Path]:
    """The files of the model that are neither weights nor configuration."""
    found = [
        path
        for path in sorted(source.iterdir())
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in COPIED_FILES)
        and not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in EXCLUDED_FILES)
    ]
    folder = source / COPIED_FOLDER
    if folder.is_dir():
        found += sorted(folder.iterdir())
    return [path for path in found if path.is_file()]


def _copy_files(source: Path, files: list[Path], folder: Path) -> None:
    for file in files:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
        with open(copy, "rb+") as written:
            os.fsync(written.fileno())


def _thread_counts() -> tuple[int, int]:
    """Threads for checksums and for conversion: SHA-256 of fp32 data takes about as long as the conversion."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hashers = max(1, min(cores, MAX_THREADS) // 2)
    return hashers, max(1, min(cores, MAX_THREADS) - hashers)


@contextmanager
def _checksums(files: list[Path], threads: int) -> Iterator[list[Future[SourceFile]]]:
    """Hash files in the background, several at a time, until the block ends.

    A file is hashed at about the time when its tensors are converted, so the disk is read once.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(threads, "checksum")
    try:
        yield [pool.submit(_checksum, file, stop) for file in files]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _checksum(path: Path, stop: threading.Event) -> SourceFile:
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(1 << 20))
    try:
        with open(path, "rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not stop.is_set():
                digest.update(buffer[:count])
                size += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return SourceFile(path.name, size, digest.hexdigest())
