"""Migration: a float checkpoint in, the same model with int8 weights out.

The source is read once, tensor by tensor and block by block (see :mod:`.conversion`), so memory stays small whatever
the size of the model, and the result appears complete or not at all (see :mod:`.output_folder`). What the recipe does
not quantize is copied bit for bit in the source's type: embeddings, norms and biases are a small part of a model, and
what is exact needs no explanation. A tied head has no tensor of its own in the source and gets none; it is listed as
unquantized, as the format demands, and quantized when the checkpoint is loaded. So are matrices that are stored
``[in, out]`` (GPT-2's), which the format's other readers can take only as they are.

The output is a compressed-tensors checkpoint that transformers and vLLM open, plus ``bminf_lite.json`` (see
:mod:`.manifest`). Tokenizer files, chat templates, generation settings, licence and readme are carried along.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import models
from ..errors import CheckpointError, UsageError
from ..models.spec import Role, Spec
from ._errors import checkpoint_error
from .compressed_tensors import quantization_config
from .conversion import ConversionTask, Converter, Progress
from .manifest import MANIFEST_FILE, MigrationReport, SourceFile, TensorReport
from .output_folder import check_target, output_folder
from .reader import Checkpoint, open_checkpoint
from .recipe import Recipe, Scheme, load_recipe
from .weight_rewrite import NO_REWRITE, CalibrateFn, CalibrationResult, VerifyFn, WeightRewrite
from .writer import SHARD_BYTES, CheckpointWriter, TensorDeclaration, write_json

MAX_IN_FEATURES = 131_071
"""With more, a sum of products of two int8 values can exceed int32."""

MAX_THREADS = 16
"""With more, the disk is the limit."""

COPIED_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "README*",
    "USE_POLICY*",
)
EXCLUDED_FILES = ("config.json", "*.index.json", MANIFEST_FILE, ".*")
COPIED_FOLDER = "additional_chat_templates"


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
    in ``out``, once the new one is complete. ``dry_run`` only reports what each tensor would become. ``progress`` is
    called with the bytes of the source that are done, all of them, and the name of the tensor at work. The result is
    split into files of ``shard_bytes``. ``calibrate`` runs the model and decides what a recipe leaves open; it is
    called when everything that can be checked before has been checked. ``verify`` is called with the complete folder
    before it takes its name; what it returns becomes the report's ``cost``, and an exception leaves no output.

    Raises :class:`CheckpointError` if the source cannot be read or quantized or ``out`` cannot be written, and
    :class:`UsageError` for a recipe that makes no sense. ``out`` is untouched then, and after Ctrl-C.
    """
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}; it must be 1 or more")
    chosen = load_recipe(recipe)
    if chosen.calibration is not None and calibrate is None:
        raise UsageError(f"recipe {chosen.name}: needs a text to calibrate on (--calibrate FILE, calibrate=...)")
    target = Path(out).resolve()
    with open_checkpoint(source) as checkpoint:
        spec = _checked_spec(checkpoint)
        _make_tasks(checkpoint, spec, chosen, {})
        if not dry_run:
            _check_target(checkpoint, target, force)
        calibrated = calibrate(checkpoint, spec, chosen) if calibrate and chosen.calibration else CalibrationResult()
        rewrites = calibrated.rewrites
        tasks = _make_tasks(checkpoint, spec, chosen, rewrites)
        tied_head = _tied_head(spec, chosen, rewrites)
        late = {
            name: s for name, s in _runtime_schemes(spec, chosen, rewrites).items() if spec.parameters[name].transposed
        }
        if dry_run:
            files = tuple(SourceFile(file.name, file.stat().st_size, "") for file in checkpoint.files())
            return MigrationReport(
                chosen, tied_head, tuple(map(_estimate_report, tasks)), files, calibrated.report, late
            )
        outputs = {name: declared for task in tasks for name, declared in task.outputs().items()}
        copied = _files_to_copy(checkpoint.path)
        needed = sum(d.nbytes for d in outputs.values()) + sum(f.stat().st_size for f in copied) + (1 << 20)
        with output_folder(target, force, needed) as folder:
            tensors, sources = _convert(checkpoint, tasks, outputs, folder, shard_bytes, progress)
            report = MigrationReport(chosen, tied_head, tuple(tensors), tuple(sources), calibrated.report, late)
            write_json(folder / "config.json", checkpoint.config | _quantization(spec, chosen, rewrites))
            write_json(folder / MANIFEST_FILE, report.manifest())
            _copy_files(checkpoint.path, copied, folder)
            if verify:
                report = replace(report, cost=verify(folder))
                write_json(folder / MANIFEST_FILE, report.manifest())
        return report


def _check_target(checkpoint: Checkpoint, target: Path, force: bool) -> None:
    """Find out before a long calibration what would forbid to write the result."""
    if checkpoint.path.resolve().is_relative_to(target):
        raise CheckpointError(f"{target}: holds the source, {checkpoint.path}; name another folder for the result")
    check_target(target, force)


def _tied_head(spec: Spec, recipe: Recipe, rewrites: Mapping[str, WeightRewrite]) -> Scheme | None:
    """In which scheme a head without a tensor of its own is quantized when the result is loaded."""
    name = next((name for name in spec.tied if spec.parameters[name].role is Role.HEAD), None)
    if name is None:
        return None
    return rewrites.get(name, NO_REWRITE).scheme or recipe.scheme_of(name, is_head=True)


def _convert(
    checkpoint: Checkpoint,
    tasks: list[ConversionTask],
    outputs: Mapping[str, TensorDeclaration],
    folder: Path,
    shard_bytes: int,
    progress: Progress | None,
) -> tuple[list[TensorReport], list[SourceFile]]:
    """Write all tensors into ``folder``, and take the checksums of what they were made from."""
    hashers, workers = _thread_counts()
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


def _checked_spec(checkpoint: Checkpoint) -> Spec:
    """The tensors of the architecture, if the checkpoint has them, unquantized."""
    if checkpoint.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: has a quantization_config, so this checkpoint is quantized already; "
            "migrate the fp32, fp16 or bf16 checkpoint that it was made from"
        )
    architecture = models.find(checkpoint.config)
    spec = architecture.spec(architecture.parse(checkpoint.config))
    checkpoint.validate(spec)
    return spec


def _runtime_schemes(spec: Spec, recipe: Recipe, rewrites: Mapping[str, WeightRewrite]) -> dict[str, Scheme]:
    """How the model will run each weight matrix, by tensor name."""
    matrices = {name: p for name, p in spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD)}
    recipe.check_patterns(matrices)
    chosen = {name: recipe.scheme_of(name, parameter.role is Role.HEAD) for name, parameter in matrices.items()}
    return chosen | {name: rewrite.scheme for name, rewrite in rewrites.items() if rewrite.scheme}


def _stored_schemes(spec: Spec, recipe: Recipe, rewrites: Mapping[str, WeightRewrite]) -> dict[str, Scheme]:
    """What becomes of each weight matrix in the file: float if it is tied, or stored ``[in, out]``."""
    chosen = _runtime_schemes(spec, recipe, rewrites)
    late = {name for name in chosen if name in spec.tied or spec.parameters[name].transposed}
    return {name: Scheme.FLOAT if name in late else scheme for name, scheme in chosen.items()}


def _make_tasks(
    checkpoint: Checkpoint, spec: Spec, recipe: Recipe, rewrites: Mapping[str, WeightRewrite]
) -> list[ConversionTask]:
    """Every tensor that the output will have, in the order in which the source stores them."""
    schemes, chosen = _stored_schemes(spec, recipe, rewrites), _runtime_schemes(spec, recipe, rewrites)
    if all(scheme is Scheme.FLOAT for name, scheme in chosen.items() if name not in spec.tied):
        raise UsageError(f"recipe {recipe.name}: leaves every weight matrix of this checkpoint float")
    limit = f"w8a8 allows {MAX_IN_FEATURES:,} inputs at most; choose w8a16 or float for it"
    wide = [
        f"tensor {name!r} {list(spec.parameters[name].shape)}: {limit}"
        for name, scheme in schemes.items()
        if scheme is Scheme.W8A8 and spec.parameters[name].shape[-1] > MAX_IN_FEATURES
    ]
    if wide:
        raise checkpoint_error(checkpoint.path, wide)
    names = [name for name in spec.parameters if name not in spec.tied]
    tasks = [
        ConversionTask(name, checkpoint.tensors[name], schemes.get(name, Scheme.FLOAT), rewrites.get(name, NO_REWRITE))
        for name in names
    ]
    return sorted(tasks, key=lambda task: (task.info.file, task.info.offset))


def _estimate_report(task: ConversionTask) -> TensorReport:
    size = sum(declared.nbytes for declared in task.outputs().values())
    if task.scheme is not Scheme.FLOAT:
        size -= 2 * task.info.shape[0]  # the scales are declared as fp32, and nearly always fp16
    return TensorReport(task.name, task.info.shape, task.info.dtype, task.scheme, task.info.nbytes, size)


def _quantization(spec: Spec, recipe: Recipe, rewrites: Mapping[str, WeightRewrite]) -> dict[str, Any]:
    """What the result's ``config.json`` says beside the source's; nothing where every tensor of the file is float."""
    schemes = {name.removesuffix(".weight"): scheme for name, scheme in _stored_schemes(spec, recipe, rewrites).items()}
    if set(schemes.values()) <= {Scheme.FLOAT}:
        return {}
    kept = {name.removesuffix(".weight"): len(t.outliers) for name, t in rewrites.items() if t.outliers is not None}
    return {"quantization_config": quantization_config(schemes, kept)}


def _files_to_copy(source: Path) -> list[Path]:
    """The files that are not weights and belong to the model all the same."""
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
    """Threads for checksums and for everything else: SHA-256 of fp32 data takes about as long as all the rest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hashers = max(1, min(cores, MAX_THREADS) // 2)
    return hashers, max(1, min(cores, MAX_THREADS) - hashers)


@contextmanager
def _checksums(files: list[Path], threads: int) -> Iterator[list[Future[SourceFile]]]:
    """Hash files in the background, several at a time; stops early when the block is left before they are done.

    It goes over a file at about the time when the tensors are read from it, so one of the two finds it in the page
    cache, and the disk is read once.
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
