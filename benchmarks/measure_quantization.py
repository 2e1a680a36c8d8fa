"""The perplexity that each recipe costs the demo model, as it is and with outliers that change nothing in float.

    PYTHONPATH=tests/quantize python benchmarks/measure_quantization.py [RECIPE ...]

The recipes are the keys of ``RECIPES``, by default all. Calibrates on the first part of the held-out text and measures
on the rest of it; prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import outliers

import bminf_lite
from bminf_lite.checkpoint.recipe import CalibrationSettings, Recipe, load_recipe
from bminf_lite.evaluation.perplexity import perplexity
from bminf_lite.migration.budget import offline_part

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
CALIBRATION_TOKENS = 8192
WINDOW = 1024
W8A8, ROTATE, AUTO = (load_recipe(name) for name in ("w8a8", "w8a8-rotate", "auto"))
MIXED = CalibrationSettings(max_error=0.001)
SMOOTH = CalibrationSettings()
RECIPES: dict[str, Recipe] = {
    "w8a16": load_recipe("w8a16"),
    "w8a8": W8A8,
    "w8a8-rotate offline": offline_part(ROTATE),
    "w8a8-rotate": ROTATE,
    "w8a8-smooth": load_recipe("w8a8-smooth"),
    "w8a8-rotate smoothed": replace(ROTATE, calibration=SMOOTH),
    "auto": AUTO,
    "auto gptq": replace(AUTO, calibration=replace(MIXED, rounding="gptq")),
    "auto 8 columns": replace(AUTO, calibration=replace(MIXED, outlier_columns=8)),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=list(RECIPES))
    chosen = {name: RECIPES[name] for name in parser.parse_args().recipes}
    with bminf_lite.load(DEMO, "cpu") as model:
        ids = model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"), add_special_tokens=False)
    calibration, measured = ids[:CALIBRATION_TOKENS], ids[CALIBRATION_TOKENS:]
    cases = {
        "as it is": lambda tensors, config: None,
        "norms": outliers.in_norms,
        "up and down": outliers.in_neurons,
        "v and o": outliers.in_values,
        "spike": outliers.spike(Counter(ids).most_common(1)[0][0]),
    }
    print(f"{len(measured):,} tokens in windows of {WINDOW}, calibrated on {len(calibration):,} others\n")
    print("| outliers | float |", " | ".join(chosen), "|")
    print("|---|---|" + "---|" * len(chosen))
    with tempfile.TemporaryDirectory() as folder:
        for name, put_in in cases.items():
            source = outliers.write(DEMO, Path(folder) / name, put_in)
            unquantized = value(source, measured)
            costs = [cost(source, recipe, calibration, measured, unquantized) for recipe in chosen.values()]
            print(f"| {name} | {unquantized:.3f} |", " | ".join(costs), "|", flush=True)


def cost(source: Path, recipe: Recipe, calibration: list[int], measured: list[int], unquantized: float) -> str:
    """The increase of perplexity, the number of products that are not plain w8a8, and the seconds of the migration."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        calibrate = calibration if recipe.calibration else None
        start = time.perf_counter()
        report = bminf_lite.migrate(source, out, recipe, calibrate=calibrate, device="cpu")
        seconds = time.perf_counter() - start
        mixed = [p for p in report.calibration.get("products", []) if p["scheme"] != "w8a8" or p["outlier_columns"]]
        note = f" ({len(mixed)} of {len(report.calibration['products'])} mixed, {seconds:.1f} s)" if calibrate else ""
        return f"{100 * (value(out, measured) / unquantized - 1):+.3f} %{note}"


def value(folder: Path, measured: list[int]) -> float:
    """The perplexity of a checkpoint."""
    with bminf_lite.load(folder, "cpu") as model:
        return perplexity(model, measured, WINDOW).value


if __name__ == "__main__":
    main()
