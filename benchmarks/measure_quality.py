"""What each recipe costs, and what an int8 cache costs: the table of docs/quantization.md.

    python benchmarks/measure_quality.py bundled digits
    python benchmarks/measure_quality.py OPT
    PYTHONPATH=tests/quantize python benchmarks/measure_quality.py million

``bundled`` is the model in the package, ``digits`` that of ``tests/data/digits_model``, and OPT a folder that
``train_demo_model.py --architecture opt`` wrote. Each is migrated by each recipe and compared with its source by the
definitions of ``bminf_lite.evaluation.divergence``, on the CPU. The text of the first and the last is the held-out
text in their folders, in windows of 256 tokens: the first 8,192 tokens calibrate, the others are measured. The digits
model sorts random digits. ``million`` is the bundled model with a pair of neurons that reaches a million on its most
frequent token, run with activations rounded to fp16 as on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import bminf_lite
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import CalibrationSettings, Recipe, load_recipe
from bminf_lite.errors import UsageError
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window
from bminf_lite.evaluation.divergence import Divergence, DivergenceAccumulator
from bminf_lite.layers.cache import KVCache
from bminf_lite.migration.budget import offline_part

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
DIGITS = Path(__file__).parents[1] / "tests" / "data" / "digits_model"
CALIBRATION_TOKENS = 8192
WINDOW = 256
SOURCES = 2000
"""Sequences that the digits model sorts, of one to ten digits."""
LONGEST = 10
END, FIRST_DIGIT = 1, 2
"""Token ids of the digits model."""


def recipes() -> list[Recipe]:
    """The recipes of the table, the fastest first."""
    gptq = CalibrationSettings(smoothing=True, rounding="gptq")
    auto, rotate = load_recipe("auto"), load_recipe("w8a8-rotate")
    assert auto.calibration is not None
    return [
        load_recipe("w8a8"),
        load_recipe("w8a8-smooth"),
        replace(load_recipe("w8a8"), name="w8a8, GPTQ", calibration=gptq),
        offline_part(rotate),
        rotate,
        replace(rotate, name="w8a8-rotate, GPTQ", calibration=gptq),
        load_recipe("w8a8-rotate-all"),
        auto,
        replace(auto, name="auto, GPTQ", calibration=replace(auto.calibration, rounding="gptq")),
        load_recipe("w8a16"),
    ]


@dataclass(frozen=True)
class Text:
    """Token ids to calibrate on, and windows to measure on."""

    calibration: list[int]
    windows: Sequence[Window]


def held_out_text(folder: Path) -> Text:
    """The text in the folder of a decoder."""
    with bminf_lite.load(folder, "cpu") as model:
        ids = model.tokenizer.encode((folder / "heldout.txt").read_text(encoding="utf-8"), add_special_tokens=False)
    rest = np.array(ids[CALIBRATION_TOKENS:], np.int32)
    windows = [rest[i : i + WINDOW] for i in range(0, len(rest) - WINDOW + 1, WINDOW)]
    return Text(ids[:CALIBRATION_TOKENS], [Window(window, WINDOW - 1) for window in windows])


def random_digits(start: int) -> Text:
    """Digits to sort, each sequence with its answer; ``start`` is the token from which the decoder starts."""
    random = np.random.default_rng(0)
    windows = []
    for _ in range(SOURCES):
        digits = random.integers(0, 10, random.integers(1, LONGEST + 1)) + FIRST_DIGIT
        answer = np.concatenate([[start], np.sort(digits), [END]]).astype(np.int32)
        windows.append(Window(answer, len(answer) - 1, np.append(digits, END).astype(np.int32)))
    return Text((random.integers(0, 10, 512) + FIRST_DIGIT).tolist(), windows)


def cell(found: Divergence, plain: float) -> str:
    """The figures of a comparison; ``plain`` is the divergence of w8a8."""
    return (
        f"{found.kl:.6f} ± {found.kl_error:.6f} | {found.kl / plain:.2f} | {found.ratio:.5f} ± {found.ratio_error:.5f} "
        f"| {found.agreement:.2%}"
    )


def cost_of_int8_cache(folder: Path, windows: Sequence[Window]) -> Divergence:
    """A model with an int8 cache, compared with itself without; float activations, lest these hide the cache."""
    total = DivergenceAccumulator()
    with bminf_lite.load(folder, "cpu") as plain, bminf_lite.load(folder, "cpu", kv_cache="int8") as int8:
        for window in windows:
            expected, got = (model.logits(window.tokens)[:-1] for model in (plain, int8))
            total.add(expected, got, window.tokens[1:])
    return total.result()


def measure(source: Path, text: Text) -> None:
    """Print the table of a model."""
    scored = sum(window.scored for window in text.windows)
    print(f"\n{source.name}: {scored:,} tokens\n\n| recipe | MB | divergence | of w8a8 | perplexity | same top |")
    print("|---|---|---|---|---|---|")
    plain = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, recipe in enumerate(recipes()):
            out = Path(folder) / str(number)
            calibrate = None if recipe.calibration is None else text.calibration
            try:
                report = bminf_lite.migrate(source, out, recipe, calibrate=calibrate, device="cpu")
            except UsageError:  # its architecture has nothing to rotate in the weights
                continue
            found = compare(out, source, text.windows, "cpu", layers=False).divergence
            plain = plain or found.kl
            print(f"| {recipe.name} | {report.bytes_after / 1e6:.2f} | {cell(found, plain)} |", flush=True)
        if all(window.source is None for window in text.windows):
            print(f"| int8 cache alone | | {cell(cost_of_int8_cache(source, text.windows), plain)} |", flush=True)
            scaled = replace(load_recipe("w8a16"), calibration=CalibrationSettings())
            bminf_lite.migrate(source, Path(folder) / "keys", scaled, calibrate=text.calibration, device="cpu")
            found = cost_of_int8_cache(Path(folder) / "keys", text.windows)
            print(f"| int8 cache alone, calibrated | | {cell(found, plain)} |", flush=True)


def logits(folder: Path, windows: Sequence[Window], activations: type) -> list[np.ndarray]:
    """The logits of each window but its last, activations rounded to a type."""
    ops = Backend(activations)
    found = []
    with open_model(folder) as model, np.errstate(all="ignore"):
        network = model.architecture.Model(model.config, model.weights(), ops)
        for window in windows:
            cache = KVCache.for_sequences(ops, model.config.cache_layout, 1, len(window.tokens))
            tables = cache.tables(1, len(window.tokens))
            batch = ForwardBatch.packed(ops.array, [window.tokens], block_tables=tables)
            found.append(np.array(network(batch, cache, all_logits=True))[:-1])
            cache.close()
    return found


def measure_million(text: Text) -> None:
    """Print the table of the bundled model with neurons that reach a million."""
    import outliers

    print("\na million between gate and down\n\n| recipe | divergence | of w8a8 | perplexity | same top |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        token = Counter(text.calibration).most_common(1)[0][0]
        source = outliers.write(DEMO, Path(folder) / "source", outliers.spike(token, 1e6))
        expected, plain = logits(source, text.windows, np.float32), 0.0
        for recipe in ("w8a8", "w8a8-rotate", "w8a8-smooth", "auto", "w8a16"):
            out, calibrate = Path(folder) / recipe, text.calibration if load_recipe(recipe).calibration else None
            bminf_lite.migrate(source, out, recipe, calibrate=calibrate, device="cpu")
            total = DivergenceAccumulator()
            for one, other, window in zip(expected, logits(out, text.windows, np.float16), text.windows, strict=True):
                total.add(one, other, window.tokens[1:])
            found = total.result()
            plain = plain or found.kl
            print(f"| {recipe} | {cell(found, plain)} |", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    for name in parser.parse_args().models:
        if name == "digits":
            measure(DIGITS, random_digits(start=0))
        elif name == "million":
            measure_million(held_out_text(DEMO))
        else:
            source = DEMO if name == "bundled" else Path(name)
            measure(source, held_out_text(source))


if __name__ == "__main__":
    main()
