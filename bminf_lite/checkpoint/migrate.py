"""Migration: a float checkpoint in, the same model with int8 weights out.

The source is read once, tensor by tensor and block by block (see :mod:`.conversion`), so memory does not grow with the
model. The result appears complete or not at all (see :mod:`.output_folder`). Embeddings, norms, biases
and the matrices that the recipe leaves float are copied bit for bit in the source's type. But fp32 embeddings become
fp16, the type in which the engine keeps them on a GPU: in fp32 they would be half of many int8 models. A tied head,
which has no tensor of its own, is quantized when the checkpoint is loaded.

A recipe may rotate the model in its weights first (see :mod:`.offline_rotation`), and gated products that fp16 cannot
hold are scaled (see :mod:`.fp16_range`).

The output is a compressed-tensors checkpoint that transformers and vLLM open, plus ``bminf_lite.json`` (see
:mod:`.manifest`), with one exception. Matrices that the source stores ``[in, out]`` (GPT-2's) are stored ``[out, in]``
as int8 like any other, and the format has no name for that, so only this package opens the result. With ``portable``
they stay float in the file and are quantized when the checkpoint is loaded.

Tokenizer files, chat templates, generation settings, licence and readme are copied, unless they are links to files
outside of the source.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.quantization import rows_fit_fp16, rows_per_block
from ..errors import CheckpointError, UsageError, checkpoint_error, require_bool, require_whole
from ..files import expand, is_within, linkable_root, parse_json, read_small_file, thread_count
from ..generation_config import not_obeyed_text
from ..models.spec import GatedProduct, Parameter, Role, Spec
from .adapter_merge import MergedFolder, merged
from .checksum import FileRecord
from .compressed_tensors import quantization_config
from .conversion import ConversionTask, Converter, Progress, tensor_report
from .fp16_range import limit_gated_products, range_factors, within_fp16
from .manifest import MANIFEST_FILE, MigrationReport, TensorReport
from .offline_rotation import rotate_offline, rotated_norms, rotates_offline
from .opened_model import MODULES_FILE, OpenedModel, open_model
from .output_folder import check_space, check_target, output_folder
from .reader import Checkpoint
from .recipe import Recipe, Scheme, load_recipe
from .weight_rewrite import NO_REWRITE, CalibrationResult, WeightRewrite, folded_factors, packed_vector
from .writer import SHARD_BYTES, CheckpointWriter, write_json, write_text

MAX_IN_FEATURES = 131_071
"""A sum of more products of int8 values can exceed int32."""

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
NO_OFFLINE_ROTATION = (
    "recipe {}: nothing of a {} can be rotated in its weights alone: its residual stream is not read by RMSNorms only, "
    "and its values are part of a fused matrix. Choose w8a8-rotate without offline_only, or w8a8"
)
COPIED_FOLDER = "additional_chat_templates"

CalibrateFn = Callable[[OpenedModel, Recipe], CalibrationResult]
"""Decides the settings that the recipe leaves open, by running a valid model."""

VerifyFn = Callable[[Path], Mapping[str, Any]]
"""Measures the cost of a complete folder; an exception rejects it."""


def migrate(
    source: str | Path | MergedFolder,
    out: str | Path,
    recipe: str | Path | Recipe = "w8a8",
    *,
    force: bool = False,
    dry_run: bool = False,
    portable: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    calibrate: CalibrateFn | None = None,
    verify: VerifyFn | None = None,
) -> MigrationReport:
    """Quantize the checkpoint in the folder ``source``, or the GGUF file ``source``, into the new folder ``out``.

    ``recipe`` is a built-in name, the path of a TOML file, or a :class:`Recipe`. ``force`` replaces an earlier result
    in ``out``, once the new one is complete. ``dry_run`` only reports how each tensor would be converted. ``portable``
    keeps GPT-2's matrices float in the file, because other readers open them in no other form. The result is split into
    files of at most ``shard_bytes``. ``calibrate`` runs after the source, the recipe and ``out`` were checked.
    ``verify`` gets the complete folder before it takes its name, and returns the report's ``cost``.

    Raises :class:`CheckpointError` if the source cannot be read or quantized or ``out`` cannot be written, and
    :class:`UsageError` for a recipe that makes no sense. ``out`` is untouched then, and after Ctrl-C.
    """
    require_whole("shard_bytes", shard_bytes)
    for name, flag in (("force", force), ("dry_run", dry_run), ("portable", portable)):
        require_bool(name, flag)
    chosen = load_recipe(recipe)
    if chosen.calibration is not None and calibrate is None:
        raise UsageError(f"recipe {chosen.name}: needs a text to calibrate on (--calibrate FILE, calibrate=...)")
    target = expand(out, "out").resolve()
    with open_model(source.folder if isinstance(source, MergedFolder) else source) as model:
        least = sum(task.nbytes for task in _check_source(model, chosen, portable))
        if not dry_run:
            if model.checkpoint.path.resolve().is_relative_to(target):
                raise CheckpointError(f"{target}: holds the source, {model.checkpoint.path}; name another folder")
            check_target(target, force)
            check_space(target, least)  # before a calibration; the exact number is known after it
        dequantized = sorted({info.stored_as for info in model.checkpoint.tensors.values()} - {""})
        rotated_offline, norms, factors = _offline_rotations(model, chosen), dict[str, str](), dict[str, np.ndarray]()
        if isinstance(source, MergedFolder):
            stay_float = [name for name in model.spec.parameters if not _is_quantized(model.spec, chosen, name)]
            model = merged(model, source.adapter, stay_float)
        if rotated_offline:
            norms = {name: packed_vector(values) for name, values in rotated_norms(model).items()}
            stay_float = [name for name in model.spec.parameters if not _is_quantized(model.spec, chosen, name)]
            model = rotate_offline(model, stay_float)
        if chosen.calibration:
            factors = range_factors(model)
            model = within_fp16(model, factors)
        checkpoint = model.checkpoint
        calibrated = calibrate(model, chosen) if calibrate and chosen.calibration else CalibrationResult()
        rewrites = calibrated.rewrites if chosen.calibration else recipe_rewrites(model.spec, chosen)
        schemes = SchemeChoice.of(model.spec, chosen, rewrites, portable)
        tasks = _make_tasks(checkpoint, schemes, rewrites, narrowed_tables(model))
        estimated = tuple(map(_estimate_report, tasks))
        files = tuple(FileRecord(file.name, file.stat().st_size, "") for file in checkpoint.files())
        copied, skipped = _files_to_copy(checkpoint.path)
        late = [name for name in (*schemes.late, *model.spec.tied) if name in rewrites]
        late_rotations = {name: rewrites[name].rotation or 1 for name in late}
        late_groups = {name: size for name in late if (size := rewrites[name].group_size)}
        report = MigrationReport(
            chosen,
            schemes.tied_head,
            estimated,
            files,
            calibrated.report,
            schemes.late,
            conv1d=schemes.conv1d,
            skipped=tuple(skipped),
            left_out=tuple(model.left_out()),
            late_rotations={name: block for name, block in late_rotations.items() if block > 1},
            late_groups=late_groups,
            folded=folded_factors(rewrites, factors),
            rotated_offline=rotated_offline,
            rotated_norms=norms,
            merged=source.adapter.name if isinstance(source, MergedFolder) else "",
            dequantized=tuple(dequantized),
            not_obeyed=not_obeyed_text(model.generation_config),
            rotates_inputs=bool(_input_rotations(schemes, rewrites)),
            generates=model.config.generates,
        )
        if dry_run:
            return report
        needed = sum(task.nbytes for task in tasks) + sum(file.stat().st_size for file in copied) + (1 << 20)
        with output_folder(target, force, needed) as folder:
            quantization = _quantization(schemes, rewrites)
            write_json(folder / "config.json", dict(model.description.config_json) | quantization)
            _copy_files(checkpoint.path, copied, folder)
            for name, text in checkpoint.text_files().items():
                (folder / name).parent.mkdir(exist_ok=True)
                write_text(folder / name, text)
            gated = () if chosen.calibration else model.spec.gated
            report, scaled = _convert(checkpoint, tasks, gated, folder, shard_bytes, progress, report)
            if scaled:
                report = replace(report, folded=folded_factors(rewrites, scaled))
            write_json(folder / MANIFEST_FILE, report.manifest())
            if verify:
                report = replace(report, cost=verify(folder))
                write_json(folder / MANIFEST_FILE, report.manifest())
        return report


def _check_source(model: OpenedModel, recipe: Recipe, portable: bool) -> list[ConversionTask]:
    """The conversion without a calibration's decisions.

    Raises an error for a source that is quantized already, or that the recipe does not fit.
    """
    checkpoint = model.checkpoint
    if checkpoint.quantization is not None:
        remedy = "migrate the fp32, fp16 or bf16 checkpoint that it was made from"
        raise CheckpointError(f"{checkpoint.path}: is quantized already (quantization_config); {remedy}")
    tables = frozenset(
        name
        for name, p in model.spec.parameters.items()
        if p.role is Role.EMBEDDING and name in checkpoint.tensors and checkpoint.tensors[name].dtype == "F32"
    )
    return _make_tasks(checkpoint, SchemeChoice.of(model.spec, recipe, portable=portable), {}, tables)


def _offline_rotations(model: OpenedModel, recipe: Recipe) -> tuple[str, ...]:
    """What the recipe rotates in the weights of the model, in words.

    Raises ``UsageError`` if that is nothing, unless a calibration or rotations of inputs remain.
    """
    if not recipe.offline_rotation:
        return ()
    found = rotates_offline(model.spec)
    if not found and recipe.rotation == 1 and recipe.calibration is None:
        raise UsageError(NO_OFFLINE_ROTATION.format(recipe.name, model.description.config_json["model_type"]))
    return found


def _is_quantized(spec: Spec, recipe: Recipe, name: str) -> bool:
    role = spec.parameters[name].role
    return role in (Role.LINEAR, Role.HEAD) and recipe.scheme_of(name, role is Role.HEAD) is not Scheme.FLOAT


def recipe_rewrites(spec: Spec, recipe: Recipe) -> dict[str, WeightRewrite]:
    """The rotations and the groups of columns of a recipe without a calibration, by tensor name."""
    found = {}
    for name in spec.parameters:
        block, size = recipe.rotation_of(spec, name), recipe.group_size_of(spec, name)
        rewrite = WeightRewrite(rotation=block if block > 1 else None, group_size=size or None)
        if rewrite != NO_REWRITE:
            found[name] = rewrite
    return found


@dataclass(frozen=True)
class SchemeChoice:
    """The scheme in which the model runs each weight matrix, by tensor name; for ``portable`` see :func:`migrate`."""

    spec: Spec
    running: Mapping[str, Scheme]
    portable: bool = False

    @classmethod
    def of(
        cls, spec: Spec, recipe: Recipe, rewrites: Mapping[str, WeightRewrite] | None = None, portable: bool = False
    ) -> SchemeChoice:
        """The recipe's schemes, replaced by those of ``rewrites``. Raises :class:`UsageError` if all are float."""
        matrices = {name: p for name, p in spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD)}
        recipe.check_patterns(matrices)
        chosen = {name: recipe.scheme_of(name, parameter.role is Role.HEAD) for name, parameter in matrices.items()}
        chosen |= {name: rewrite.scheme for name, rewrite in (rewrites or {}).items() if rewrite.scheme}
        chosen |= {name: Scheme.FLOAT for name, p in spec.parameters.items() if p.role is Role.ABSORBED}
        if all(scheme is Scheme.FLOAT for name, scheme in chosen.items() if name not in spec.tied):
            raise UsageError(f"recipe {recipe.name}: leaves every weight matrix of this checkpoint float")
        return cls(spec, chosen, portable)

    @property
    def stored(self) -> dict[str, Scheme]:
        """The scheme of each matrix in the file: float if it is tied or quantized when it is loaded."""
        late = {*self.late, *self.spec.tied}
        return {name: Scheme.FLOAT if name in late else scheme for name, scheme in self.running.items()}

    @property
    def late(self) -> dict[str, Scheme]:
        """The schemes of matrices that stay float and ``[in, out]`` in the file."""
        if not self.portable:
            return {}
        return {name: scheme for name, scheme in self.running.items() if self.spec.parameters[name].transposed}

    @property
    def conv1d(self) -> tuple[str, ...]:
        """The int8 matrices that the source stores ``[in, out]``."""
        stored = self.stored.items()
        return tuple(n for n, s in stored if self.spec.parameters[n].transposed and s is not Scheme.FLOAT)

    @property
    def tied_head(self) -> Scheme | None:
        """The scheme in which a head without a tensor of its own is quantized when the result is loaded."""
        name = next((name for name in self.spec.tied if self.spec.parameters[name].role is Role.HEAD), None)
        return None if name is None else self.running[name]


def narrowed_tables(model: OpenedModel) -> frozenset[str]:
    """The fp32 embeddings that are stored as fp16, the type in which the engine keeps them on a GPU.

    Others have a row that fp16 cannot hold with its full precision.
    """
    tensors = model.checkpoint.tensors
    names = [name for name, p in model.spec.parameters.items() if p.role is Role.EMBEDDING and name in tensors]
    return frozenset(n for n in names if tensors[n].dtype == "F32" and _fits_fp16(model.checkpoint, n))


def _fits_fp16(checkpoint: Checkpoint, name: str) -> bool:
    table = checkpoint.stored_float(name)
    step = rows_per_block(table.shape[-1])
    return all(rows_fit_fp16(np.asarray(table[i : i + step])) for i in range(0, table.shape[0], step))


def _make_tasks(
    checkpoint: Checkpoint,
    schemes: SchemeChoice,
    rewrites: Mapping[str, WeightRewrite],
    narrowed: frozenset[str] = frozenset(),
) -> list[ConversionTask]:
    """The conversion of each tensor, in the order in which the source stores them.

    Those in ``narrowed`` are fp32 in the source and fp16 in the result.
    """
    spec, stored = schemes.spec, schemes.stored
    wide = [
        f"tensor {name!r} {list(spec.parameters[name].shape)}: w8a8 allows {MAX_IN_FEATURES:,} inputs at most"
        for name, scheme in stored.items()
        if scheme is Scheme.W8A8 and _in_features(spec.parameters[name]) > MAX_IN_FEATURES
    ]
    if wide:
        raise checkpoint_error(checkpoint.path, wide, "choose w8a16 or float")
    conv1d = set(schemes.conv1d)
    tasks = [
        ConversionTask(
            name,
            checkpoint.tensors[name],
            stored.get(name, Scheme.FLOAT),
            rewrites.get(name, NO_REWRITE),
            transposed=name in conv1d,
            narrowed=name in narrowed,
        )
        for name in spec.parameters
        if name not in spec.tied
    ]
    tasks.sort(key=lambda task: (task.info.file, task.info.offset))
    places = [(task.info.file, task.info.offset, task.info.shape) for task in tasks]
    return [
        replace(task, repeats=i > 0 and task.info.nbytes > 0 and places[i] == places[i - 1])
        for i, task in enumerate(tasks)
    ]


def _in_features(parameter: Parameter) -> int:
    return parameter.shape[0 if parameter.transposed else -1]


def _estimate_report(task: ConversionTask) -> TensorReport:
    """The report of a dry run: scales are declared as fp32, and nearly always fp16."""
    return tensor_report(task, task.nbytes - (0 if task.scheme is Scheme.FLOAT else 2 * task.rows * task.groups))


def _quantization(schemes: SchemeChoice, rewrites: Mapping[str, WeightRewrite]) -> dict[str, Any]:
    """The result's ``quantization_config``; empty where every tensor of the file is float."""
    stored = {name.removesuffix(".weight"): scheme for name, scheme in schemes.stored.items()}
    if set(stored.values()) <= {Scheme.FLOAT}:
        return {}
    kept = {name.removesuffix(".weight"): len(t.outliers) for name, t in rewrites.items() if t.outliers is not None}
    conv1d = {name.removesuffix(".weight") for name in schemes.conv1d}
    rotations = _input_rotations(schemes, rewrites)
    sizes = {name.removesuffix(".weight"): rewrite.group_size or 0 for name, rewrite in rewrites.items()}
    return {"quantization_config": quantization_config(stored, kept, conv1d, rotations, sizes)}


def _input_rotations(schemes: SchemeChoice, rewrites: Mapping[str, WeightRewrite]) -> dict[str, int]:
    """The blocks in which modules with an int8 matrix in the file rotate their input."""
    return {
        name.removesuffix(".weight"): rewrite.rotation
        for name, rewrite in rewrites.items()
        if rewrite.rotation is not None and schemes.stored[name] is not Scheme.FLOAT
    }


def _convert(
    checkpoint: Checkpoint,
    tasks: list[ConversionTask],
    gated: tuple[GatedProduct, ...],
    folder: Path,
    shard_bytes: int,
    progress: Progress | None,
    report: MigrationReport,
) -> tuple[MigrationReport, dict[str, np.ndarray]]:
    """Write all tensors into ``folder``; returns the report with them, and with the checksums of all files.

    ``gated`` are products that get the factors that they need. Also returns these, by the matrix whose rows they scale.
    """
    scaled: dict[str, np.ndarray] = {}
    outputs = {name: declared for task in tasks for name, declared in task.outputs().items()}
    writer = CheckpointWriter(folder, outputs, {task.scale_name for task in tasks}, shard_bytes)
    try:
        with Converter(checkpoint, writer, thread_count(), progress) as converter:
            tensors = converter.run(tasks)

            def scale_rows(name: str, factors: np.ndarray) -> None:
                converter.scale_rows(name, factors)
                scaled[name] = factors

            limit_gated_products(checkpoint, gated, converter.row_norms, scale_rows)
            writer.complete()
            sources = converter.source_records()
            written = sorted(path for path in folder.rglob("*") if path.is_file())
            checksums = converter.result_checksums(written, folder)
            writer.sync()
            files = checksums.records()
    finally:
        writer.close()
    checkpoint.check_unchanged()
    report = replace(
        report, tensors=tuple(tensors), sources=tuple(sources), files=tuple(files), checksums=converter.checksums
    )
    return report, scaled


def _files_to_copy(source: Path) -> tuple[list[Path], list[str]]:
    """The files of the model that are neither weights nor configuration, and those left out, each with the reason."""
    if source.is_file():
        return [], []
    found = [
        path
        for path in sorted(source.iterdir())
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in COPIED_FILES)
        and not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in EXCLUDED_FILES)
    ]
    folder = source / COPIED_FOLDER
    if folder.is_dir():
        found += sorted(folder.iterdir())
    found += [path for module in _module_folders(source) for path in sorted(module.iterdir())]
    root = linkable_root(source)
    reasons = {path: reason for path in found if (reason := _reason_to_skip(path, root))}
    return [path for path in found if path not in reasons], [f"{p.name} {reason}" for p, reason in reasons.items()]


def _module_folders(source: Path) -> list[Path]:
    """The folders of the modules behind a model of sentence-transformers, such as its pooling."""
    try:
        modules = parse_json(read_small_file(source / MODULES_FILE))
    except (OSError, ValueError):
        return []
    listed = modules if isinstance(modules, list) else []
    paths = [module.get("path") for module in listed if isinstance(module, dict)]
    folders = [source / path for path in paths if isinstance(path, str) and path and is_within(path)]
    return [folder for folder in folders if folder.is_dir()]


def _reason_to_skip(path: Path, root: Path) -> str | None:
    """The reason why a file is not carried along; None if it is. Links may lead to files inside ``root``."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which does not exist"
    if not path.is_file():
        return "is not a regular file"
    if not path.resolve().is_relative_to(root):
        return f"is a link to {path.resolve()}, outside of the source"
    return None


def _copy_files(source: Path, files: list[Path], folder: Path) -> None:
    for file in files:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        with open(copy, "rb+") as written:
            os.fsync(written.fileno())
