"""The perplexity that each recipe costs the demo model, as it is and with outliers that change nothing in float.

    PYTHONPATH=tests/quantize python tools/measure_quantization.py

Calibrates on the first part of the held-out text and measures on the rest of it; prints a table in Markdown.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import outliers

import bminf_lite
from bminf_lite.evaluation.perplexity import perplexity

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
CALIBRATION_TOKENS = 8192
WINDOW = 1024
GPTQ = 'linear = "w8a8"\nhead = "w8a8"\n[calibration]\nsmoothing = true\nmax_error = 0.001\nrounding = "gptq"\n'
ROTATED = 'linear = "w8a8"\nhead = "w8a8"\nrotation = 64\n[calibration]\nsmoothing = true\n'
COLUMNS = 'linear = "w8a8"\nhead = "w8a8"\n[calibration]\nsmoothing = true\nmax_error = 0.001\noutlier_columns = 8\n'
RECIPES = {
    "w8a16": "", "w8a8": "", "w8a8-rotate": "", "w8a8-smooth": "", "w8a8-rotate, smoothed": ROTATED, "auto": "",
    "auto, gptq": GPTQ, "auto, 8 columns": COLUMNS,
}  # fmt: skip
"""The text of each recipe's file; empty for those that come with the package."""
UNCALIBRATED = ("w8a16", "w8a8", "w8a8-rotate")


def main() -> None:
    """Print the table."""
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
    print("| outliers | float |", " | ".join(RECIPES), "|")
    print("|---|---|" + "---|" * len(RECIPES))
    with tempfile.TemporaryDirectory() as folder:
        for name, put_in in cases.items():
            source = outliers.write(DEMO, Path(folder) / name, put_in)
            unquantized = value(source, measured)
            costs = [cost(source, recipe, calibration, measured, unquantized) for recipe in RECIPES]
            print(f"| {name} | {unquantized:.3f} |", " | ".join(costs), "|", flush=True)


def cost(source: Path, recipe: str, calibration: list[int], measured: list[int], unquantized: float) -> str:
    """The increase of perplexity, the number of products that are not plain w8a8, and the seconds of the migration."""
    with tempfile.TemporaryDirectory() as folder:
        out, chosen = Path(folder) / "out", recipe
        if text := RECIPES[recipe]:
            (Path(folder) / "recipe.toml").write_text(text)
            chosen = str(Path(folder) / "recipe.toml")
        calibrate = None if recipe in UNCALIBRATED else calibration
        start = time.perf_counter()
        report = bminf_lite.migrate(source, out, chosen, calibrate=calibrate, device="cpu")
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
