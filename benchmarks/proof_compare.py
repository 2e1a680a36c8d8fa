"""Compare the results of two trees, and say which promises are broken; see ``proof.py``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOUND = 0.01
"""The part of its speed that a test may lose."""
WARM_UP_BOUND = 1.1
"""Times that a warm-up may take as long: not slower, as far as two rounds can tell."""
MAX_SIZES = 64
"""Captured sizes for 256 sequences."""
Row = tuple[str, str, bool]
"""What is compared, the finding, and whether it breaks a promise."""


def compare_bits(
    before: dict[str, Any], after: dict[str, Any], promised: Sequence[str], invariant: Sequence[str]
) -> list[Row]:
    """A row for each case that differs, and one with the number of cases; see :func:`compare`."""
    rows = []
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case, {"error": "absent"}), after.get(case, {"error": "absent"})
        recipe = case.split(", ")[-2]
        differs = [key for key in ("error", "tokens", "logprobs") if old.get(key) != new.get(key)]
        failed = [f"{tree}: {row['error']}" for tree, row in (("before", old), ("after", new)) if "error" in row]
        alone = [] if new.get("alone_is_together", True) else ["after: alone it gets other bits than together"]
        if differs or failed or alone:
            text = "; ".join(failed or [*(f"other {key}" for key in differs), *alone])
            is_broken = bool(failed) or (bool(differs) and recipe in promised) or (bool(alone) and recipe in invariant)
            rows.append((f"bits of {case}", text, is_broken))
    return [("cases of bits", f"{len(before)} before, {len(after)} after, {len(rows)} to look at", False), *rows]


def compare_speeds(before: dict[str, list[float]], after: dict[str, list[float]]) -> list[Row]:
    """A row for each test of ``bench``: the medians of both trees' rounds, their ratio, and the range of the rounds."""
    rows = []
    for test in sorted(before.keys() | after.keys()):
        old, new = before.get(test, [0.0]), after.get(test, [0.0])
        first, second = statistics.median(old), statistics.median(new)
        ratio = second / first if first else 0.0
        ranges = ", ".join(f"{100 * (max(s) - min(s)) / (max(s) or 1):.2f} %" for s in (old, new))
        text = f"{first:,.1f} -> {second:,.1f} tokens/s, {100 * (ratio - 1):+.2f} % (rounds differ by {ranges})"
        rows.append((test, text, ratio < 1 - BOUND))
    return rows


def compare_sizes(before: dict[str, Any], after: dict[str, Any]) -> list[Row]:
    """A row for each part whose lines differ, and the totals."""
    old, new = before["lines"], after["lines"]
    parts = [part for part in sorted(old.keys() | new.keys()) if old.get(part) != new.get(part)]
    counts = {f"lines of {part}": (old.get(part, 0), new.get(part, 0)) for part in parts}
    counts["lines in all"] = sum(old.values()), sum(new.values())
    counts["test functions"] = before["test_functions"], after["test_functions"]
    return [(name, f"{first:,} -> {second:,}", False) for name, (first, second) in counts.items()]


def compare(before: Path, after: Path, promised: Sequence[str], invariant: Sequence[str]) -> int:
    """Print what differs between two files of results; 1 if a promise is broken.

    The bits of recipes that are ``promised`` must be equal in both trees. In the tree after, requests by recipes that
    are ``invariant`` must get alone what they get together.
    """
    old, new = (json.loads(path.read_text()) for path in (before, after))
    rows: list[Row] = [
        (f"part {part} {tree}", text, True)
        for tree, results in (("before", old), ("after", new))
        for part, text in results["errors"].items()
    ]
    if "bits" in old and "bits" in new:
        rows += compare_bits(old["bits"], new["bits"], promised, invariant)
    rows += compare_speeds(old.get("bench", {}), new.get("bench", {}))
    if "warm_up" in old and "warm_up" in new:
        first, second = (results["warm_up"] for results in (old, new))
        text = f"{first['seconds']:.2f} -> {second['seconds']:.2f} s"
        rows.append(("warm-up", text, second["seconds"] > WARM_UP_BOUND * first["seconds"]))
        text = f"{first['captured_sizes']} -> {second['captured_sizes']}"
        rows.append(("captured sizes, 256 sequences", text, second["captured_sizes"] > MAX_SIZES))
    for tree, results in (("before", old), ("after", new)):
        if found := results.get("goldens"):
            rows.append((f"goldens {tree}", found["summary"], not found["passed"]))
    if "sizes" in old and "sizes" in new:
        rows += compare_sizes(old["sizes"], new["sizes"])
    width = max(len(name) for name, _, _ in rows)
    for name, text, is_broken in rows:
        print(f"{name:{width}}  {text}{'  BROKEN' if is_broken else ''}")
    return int(any(is_broken for _, _, is_broken in rows))
