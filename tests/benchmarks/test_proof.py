"""The proof finds that a tree equals itself, and finds what another tree does otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PROOF = REPOSITORY / "benchmarks" / "proof.py"


def proof(*arguments: str | Path) -> tuple[int, str]:
    """The exit code and what is printed."""
    done = subprocess.run([sys.executable, PROOF, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def run_on_itself(out: Path, *options: str) -> dict[str, Any]:
    """Run parts with this tree as both; returns the results of one."""
    code, printed = proof("run", REPOSITORY, REPOSITORY, out, "--device", "cpu", *options)
    assert code == 0, printed
    results: dict[str, Any] = json.loads((out / "after.json").read_text())
    return results


def compare_with(out: Path, results: dict[str, Any], *options: str) -> tuple[int, str]:
    """Compare the tree before with changed results."""
    (out / "changed.json").write_text(json.dumps(results))
    return proof("compare", out / "before.json", out / "changed.json", *options)


@pytest.mark.slow
def test_bits(tmp_path: Path) -> None:
    """Digests are equal in two processes. Another digest breaks the promise of its recipe, and no other promise."""
    options = ("--models", "llama", "--recipes", "w8a8", "--kv-caches", "int8", "--jobs", "1")
    results = run_on_itself(tmp_path, "--parts", "sizes,bits", *options)
    assert list(results["bits"]) == ["llama, w8a8, int8 cache"]
    row = results["bits"]["llama, w8a8, int8 cache"]
    assert row["alone_is_together"] and row["cached_tokens"] > 0
    code, printed = compare_with(tmp_path, results)
    assert code == 0, printed

    row["logprobs"] = "0" * 64
    code, printed = compare_with(tmp_path, results)
    assert code == 1 and "other logprobs  BROKEN" in printed
    code, printed = compare_with(tmp_path, results, "--promised", "float")
    assert code == 0 and "other logprobs" in printed
    row["alone_is_together"] = False
    code, printed = compare_with(tmp_path, results, "--promised", "float")
    assert code == 1 and "alone it gets other bits than together  BROKEN" in printed
    assert compare_with(tmp_path, results, "--promised", "float", "--invariant", "float")[0] == 0


def test_speeds_and_sizes_have_bounds(tmp_path: Path) -> None:
    results: dict[str, Any] = {
        "errors": {},
        "bench": {"8B: tg64": [100.0, 102.0]},
        "warm_up": {"seconds": 5.0, "captured_sizes": 60},
    }
    (tmp_path / "before.json").write_text(json.dumps(results))
    assert compare_with(tmp_path, results)[0] == 0
    assert compare_with(tmp_path, results | {"bench": {"8B: tg64": [100.0, 100.1]}})[0] == 0
    code, printed = compare_with(tmp_path, results | {"bench": {"8B: tg64": [99.0, 99.9]}})
    assert code == 1 and "-1.53 %" in printed
    code, printed = compare_with(tmp_path, results | {"warm_up": {"seconds": 5.0, "captured_sizes": 65}})
    assert code == 1 and "60 -> 65  BROKEN" in printed
    assert compare_with(tmp_path, results | {"errors": {"bits": "it failed"}})[0] == 1


@pytest.mark.slow
def test_bench_and_warm_up(tmp_path: Path) -> None:
    benches = "llama-tiny -p 8 -n 4 -r 1"
    options = ("--benches", benches, "--shape", "llama-tiny", "--rounds", "1")
    results = run_on_itself(tmp_path, "--parts", "bench,warm_up", *options)
    assert list(results["bench"]) == [f"{benches}: pp8", f"{benches}: tg4"]
    assert results["warm_up"]["captured_sizes"] == 0, "nothing is captured on a CPU"
