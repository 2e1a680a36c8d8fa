"""Migration with a calibration: text in, int8 model out.

Without a text this is :func:`bminf_lite.checkpoint.migrate.migrate`, one pass over the source in little memory. With a
text, the float model first runs over samples of it, and its activations decide what the recipe leaves open (see
:mod:`bminf_lite.quantize`). The cost of the migration is then measured on held-out samples before the result appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..backend.base import Backend
from ..backend.communicator import on_ranks_apart
from ..checkpoint.adapter_merge import MergedFolder
from ..checkpoint.conversion import Progress
from ..checkpoint.fp16_range import within_fp16
from ..checkpoint.manifest import MigrationReport
from ..checkpoint.migrate import migrate as migrate_folder
from ..checkpoint.opened_model import OpenedModel, open_model
from ..checkpoint.recipe import Recipe, default_recipe, load_recipe
from ..checkpoint.weight_rewrite import CalibrationResult
from ..checkpoint.writer import SHARD_BYTES
from ..errors import OutOfMemory, UsageError, require_bool, require_function, require_whole
from ..evaluation.blockwise import Batch
from ..evaluation.corpus import encode_texts, framed_pieces, parse_config, read_texts, sliding_windows, text_frame
from ..files import expand
from ..quantize import calibration
from ..quantize.decisions import QuantizationSearch
from ..text.checkpoint_files import load_tokenizer
from ..text.prompts import validate_token_ids
from .budget import budget_recipe, is_searchable, offline_part, searches
from .held_out import MAX_TEXTS_HELD_OUT, CalibrationSplit, check_divergence, measure_cost, split_samples
from .target import AssignmentSearch

SAMPLE_TOKENS, TEXT_TOKENS = 512, 128
"""Tokens of a piece at most, and of a text for a model that makes vectors."""
MIN_TOKENS = 512
"""With fewer tokens, the largest activation of a channel would depend on chance."""

CalibrationSource = str | Path | Sequence[int]
"""What to calibrate on: a file (text, or JSONL with a ``text`` per line), or token ids."""


def migrate(
    source: str | Path,
    out: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    calibrate: CalibrationSource | None = None,
    samples: int = 128,
    device: str = "auto",
    gpus: int = 1,
    max_divergence: float | None = None,
    target_divergence: float | None = None,
    offline_only: bool = False,
    merge: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    portable: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    calibration_progress: calibration.Progress | None = None,
    cost_progress: Progress | None = None,
) -> MigrationReport:
    """Quantize the checkpoint in the folder ``source``, or the GGUF file ``source``, into the new folder ``out``.

    ``recipe`` is a built-in name, the path of a TOML file, or a :class:`Recipe`; without one it is
    :func:`.recipe.default_recipe`. A recipe with a calibration needs
    ``calibrate``: a file of text or JSONL, or token ids. ``samples`` pieces of up to 512 tokens each, spread over the
    whole text, run through the float model on ``device``. ``gpus`` GPUs, from that one on, divide the products of a
    calibration among them, and decide what one decides (docs/guides/several_gpus.md). A few other pieces are held out,
    also from a recipe without a calibration, and the report's ``cost`` is measured on them; the migration fails if the
    mean divergence exceeds ``max_divergence`` nats per token. Of a model that makes vectors the pieces are texts of up
    to 128 tokens, four times as many, and the divergence is ``1 - cosine`` of the vectors (see
    :mod:`..evaluation.outputs`).

    ``auto``, as every recipe whose calibration searches, measures assignments of quantizations to products and takes
    one that diverges no more than any quantization of all products alike (see :mod:`.target`). ``target_divergence``
    needs a text and a w8a8 recipe with a calibration, such as ``auto``. It searches the fastest assignment whose
    divergence is at most the target. Of both, the report's ``cost`` has the whole ``trade``. ``offline_only`` leaves
    out what other readers may not open; without a search, it makes a recipe that rotates inputs fold rotations into
    the weights instead (see :mod:`bminf_lite.checkpoint.offline_rotation`).

    ``merge`` is the folder of an adapter that PEFT saved: it is merged into the float weights before these are
    quantized, and costs are measured from the merged model (docs/guides/adapters.md).

    ``force`` replaces an earlier result in ``out``, once the new one is complete. ``dry_run`` only reports what each
    tensor would become. ``portable`` makes a result that other readers open: without a ``recipe`` it is ``w8a8``, and
    GPT-2's matrices, which have no other form, stay float in the file and are quantized when it is loaded. A recipe
    that rotates inputs needs ``offline_only`` too. The result is split into files of at most ``shard_bytes``.
    ``progress`` and ``calibration_progress`` are called as :data:`.conversion.Progress` and
    :data:`.calibration.Progress` say; ``cost_progress`` is called with layers.

    Raises :class:`UsageError` for an unfit text or a recipe that makes no sense, :class:`CheckpointError` if the source
    cannot be read or quantized or ``out`` cannot be written, and ``DeviceError``. Cheap checks come first. After an
    error or Ctrl-C ``out`` is untouched.
    """
    source, out = expand(source, "source"), expand(out, "out")
    opened_from = source if merge is None else MergedFolder(source, expand(merge, "merge"))
    if isinstance(calibrate, (str, Path)):
        calibrate = expand(calibrate, "calibrate")
    for name, flag in (("offline_only", offline_only), ("force", force), ("dry_run", dry_run), ("portable", portable)):
        require_bool(name, flag)
    functions = {"progress": progress, "calibration_progress": calibration_progress, "cost_progress": cost_progress}
    for name, function in functions.items():
        require_function(name, function)
    require_whole("samples", samples)
    recipe = load_recipe(default_recipe(portable) if recipe is None else recipe)
    backend.check_device(device)
    require_whole("gpus", gpus, backend.MAX_GPUS)
    if gpus > 1 and (calibrate is None or recipe.calibration is None):
        reason = "without a text" if calibrate is None else f"the recipe {recipe.name} does not calibrate"
        raise UsageError(
            f"gpus is {gpus}, but they divide a calibration, and nothing is calibrated ({reason}): give 1, or a text "
            "(--calibrate FILE, calibrate=...) and a recipe such as auto"
        )
    check_divergence("max_divergence", max_divergence, calibrate is not None)
    check_divergence("target_divergence", target_divergence, calibrate is not None)
    if target_divergence is not None:
        _check_target_options(recipe, max_divergence, dry_run)
    elif offline_only and not searches(recipe):
        recipe = _without_input_rotations(recipe)
    if portable and not offline_only and (recipe.rotation > 1 or searches(recipe) or target_divergence is not None):
        raise UsageError(
            f"portable: the recipe {recipe.name} may rotate the inputs of products, and then only bminf-lite opens the "
            "result; give no recipe, or offline_only (--offline-only) too"
        )
    write = partial(
        migrate_folder,
        opened_from,
        out,
        force=force,
        dry_run=dry_run,
        portable=portable,
        progress=progress,
        shard_bytes=shard_bytes,
    )
    if calibrate is None:
        return write(recipe)
    tokens = load_calibration_split(source, calibrate, samples)

    def search_on(
        devices: Sequence[Backend], model: OpenedModel, recipe: Recipe, alternatives: bool
    ) -> QuantizationSearch:
        scratch = next(folder for folder in Path(out).absolute().parents if folder.is_dir())
        searches = [
            QuantizationSearch(model, recipe, ops, scratch, alternatives, rank, len(devices))
            for rank, ops in enumerate(devices)
        ]

        def calibrate_part(rank: int, check: Callable[[], None]) -> None:
            def advance(*step: Any) -> None:
                check()
                if rank == 0 and calibration_progress:
                    calibration_progress(*step)

            try:
                calibration.run_calibration(model, tokens.samples, devices[rank], searches[rank], advance)
                searches[rank].finish()
            finally:
                searches[rank].cancel()

        try:
            on_ranks_apart(devices, calibrate_part)
        except MemoryError as error:
            raise OutOfMemory(
                f"no room to calibrate on {len(tokens.samples)} samples at once: {error}. Use fewer (--samples)"
            ) from error
        searches[0].join(searches[1:])
        return searches[0]

    known: list[tuple[Batch, np.ndarray]] = []

    def measure(limit: float | None, folder: Path) -> dict[str, Any]:
        return measure_cost(folder, opened_from, tokens.held_out, device, limit, cost_progress, known)

    if target_divergence is None and not searches(recipe):

        def decide(model: OpenedModel, recipe: Recipe) -> CalibrationResult:
            with _devices(gpus, device) as devices:
                return search_on(devices, model, recipe, alternatives=False).result()

        return write(recipe, calibrate=decide, verify=partial(measure, max_divergence))
    with open_model(opened_from) as opened:
        recipe = budget_recipe(recipe, offline_only, rotates_stream=opened.spec.stream is not None)
    trade: dict[str, Any] = {}

    def choose(model: OpenedModel, recipe: Recipe) -> CalibrationResult:
        with _devices(gpus, device) as devices, open_model(opened_from) as reference:
            options = search_on(devices, model, recipe, alternatives=True)
            search = AssignmentSearch(
                opened_from, within_fp16(reference), model, options, tokens, devices, target_divergence, cost_progress
            )
            chosen, found = search.run()
            trade.update(found)
            known.extend(search.known())
            return chosen

    def verify(folder: Path) -> dict[str, Any]:
        limit = max_divergence if target_divergence is None else target_divergence
        return measure(limit, folder) | {"trade": trade}

    return write(recipe, calibrate=choose, verify=verify)


@contextmanager
def _devices(gpus: int, device: str) -> Iterator[Sequence[Backend]]:
    """The backends that divide a calibration."""
    devices = backend.create_apart(gpus, device)
    try:
        yield devices
    finally:
        backend.close_ranks(devices)


def _check_target_options(recipe: Recipe, max_divergence: float | None, dry_run: bool) -> None:
    """Raise ``UsageError`` for a recipe or options that exclude a target for the divergence."""
    if not is_searchable(recipe) or max_divergence is not None or dry_run:
        raise UsageError(
            "target_divergence chooses how each product is quantized by what it measures: it needs a w8a8 recipe with "
            f"a calibration, such as auto (--recipe auto), not {recipe.name}, and neither max_divergence nor dry_run"
        )


def _without_input_rotations(recipe: Recipe) -> Recipe:
    """``recipe`` with rotations in the weights alone; ``UsageError`` for one that does not rotate."""
    if recipe.rotation == 1 and not recipe.offline_rotation:
        raise UsageError(
            f"offline_only is for a recipe that rotates (w8a8-rotate), or with target_divergence; {recipe.name} "
            "rotates nothing"
        )
    return offline_part(recipe)


def load_calibration_split(source: str | Path, text: CalibrationSource, samples: int) -> CalibrationSplit:
    """``samples`` sequences of ``text`` for the model in the folder ``source``, and some that are held out.

    Raises :class:`UsageError` for an unfit text, see :func:`.corpus.read_texts`, and for one that is too short.
    """
    if samples < 1:
        raise UsageError(f"samples is {samples}; it must be 1 or more")
    config = parse_config(source)
    frame = leading, _ = np.zeros(0, np.int32), np.zeros(0, np.int32)
    if isinstance(text, (str, Path)):
        tokenizer = load_tokenizer(Path(source), config.vocab_size)
        documents, frame = encode_texts(read_texts(Path(text)), tokenizer), text_frame(tokenizer)
        leading = frame[0]
    else:
        documents = [np.array(validate_token_ids(text, config.vocab_size), np.int32)]
    total = sum(map(len, documents))
    if total < MIN_TOKENS:
        raise UsageError(f"the calibration text is too short: {total:,} tokens; give {MIN_TOKENS} or more")
    if not config.generates:
        length = min(TEXT_TOKENS, config.context_length)
        return split_samples(
            framed_pieces(documents, length, frame), samples * (SAMPLE_TOKENS // TEXT_TOKENS), MAX_TEXTS_HELD_OUT
        )
    length = min(SAMPLE_TOKENS, config.context_length)
    sequences = [window.tokens for window in sliding_windows(documents, length, None, leading)]
    return split_samples(sequences, samples)
