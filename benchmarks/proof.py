"""Prove that a refactoring kept its promises: run two trees of this repository on one machine, and compare them.

    python benchmarks/proof.py run BEFORE AFTER OUT [--parts sizes,goldens,bits,bench,warm_up]
    python benchmarks/proof.py compare OUT/before.json OUT/after.json

A tree is a folder with the package, its configs and its tests, such as ``git archive`` makes. Every measurement of a
tree is a process of its own with the tree on ``PYTHONPATH``. The parts, with the seconds that both trees are expected
to take on an H100; a run prints what they took:

- ``sizes``, 1 s, no GPU: lines by part of the package, and test functions.
- ``goldens``, 60 s, no GPU: the tests that compare with the logits of transformers.
- ``bits``, 90 s in 12 processes: digests of fixed requests for every architecture, recipe and kind of cache.
- ``bench``, 170 s with two rounds: the speeds of :data:`BENCHES`, the trees in turn.
- ``warm_up``, 30 s with two rounds: the time of ``Model.warm_up`` for 256 sequences, and its captured sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proof_compare import compare

HERE = Path(__file__).resolve().parent
BENCHES: dict[str, tuple[str, ...]] = {
    "8B": ("llama-3-8b", "-p", "0", "-n", "64", "-b", "1,16,256", "-r", "5"),
    "8B prompts": ("llama-3-8b", "-p", "512,2048", "-n", "0", "-r", "10"),
    "8B w8a16": ("llama-3-8b", "--recipe", "w8a16", "-p", "0", "-n", "64", "-b", "1,16,256", "-r", "5"),
    "1B": ("llama-3.2-1b", "-p", "512", "-n", "128", "-b", "1,16", "-r", "5"),
    "GPT-2 XL": ("gpt2-xl", "-p", "512", "-n", "128", "-b", "1,16", "-r", "5"),
    "CPM-2": ("cpm-2", "-p", "256", "-n", "64", "-d", "256", "-b", "1,16", "-r", "5"),
    "Gemma 3 27B": ("gemma-3-27b", "-p", "512", "-n", "64", "-b", "1,16", "-r", "3"),
}
"""Each benchmark, by its name: a shape, and options of ``bminf-lite bench``."""
LANGUAGES = (".py", ".cu", ".cuh", ".html", ".j2", ".toml")
Trees = dict[str, Path]
Results = dict[str, dict[str, Any]]


def start(tree: Path, *command: str) -> subprocess.Popen[str]:
    """Start Python with ``command`` in a tree; the package is the tree's."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    """What a process prints. Raises ``CalledProcessError`` if it fails."""
    printed, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, printed)
    return printed


def run_bits(trees: Trees, arguments: argparse.Namespace) -> Results:
    """Digests by case. Both trees read the same checkpoints, which this script's own tree writes."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = ["--models", arguments.models] if arguments.models else []
        output(start(HERE.parent, str(HERE / "proof_checkpoints.py"), folder, "--recipes", arguments.recipes, *chosen))
        found: Results = {}
        for name, tree in trees.items():
            worker = [str(HERE / "proof_bits.py"), f"{folder}/cases.json", "--device", arguments.device]
            worker += ["--kv-caches", arguments.kv_caches]
            processes = [start(tree, *worker, "--worker", f"{i}/{arguments.jobs}") for i in range(arguments.jobs)]
            rows = [json.loads(line) for process in processes for line in output(process).splitlines()]
            found[name] = {row.pop("case"): row for row in sorted(rows, key=lambda row: str(row["case"]))}
    return found


def run_bench(trees: Trees, arguments: argparse.Namespace) -> Results:
    """Tokens per second of each round by test. The trees take turns, and change the order in each round."""
    found: Results = {name: {} for name in trees}
    for bench in arguments.benches.split(","):
        shape, *options = BENCHES[bench] if bench in BENCHES else bench.split()
        for turn in range(arguments.rounds):
            for name in list(trees)[:: -1 if turn % 2 else 1]:
                command = ["-m", "bminf_lite", "bench", "--shape", shape, "--device", arguments.device, "-o", "json"]
                try:
                    report = json.loads(output(start(trees[name], *command, *options)))
                except (subprocess.CalledProcessError, ValueError) as error:  # the others are still worth measuring
                    print(f"bench {bench}, {name}: {error}", file=sys.stderr)
                    report = {"tests": [{"test": "failed", "tokens_per_second": 0.0}]}
                for test in report["tests"]:
                    found[name].setdefault(f"{bench}: {test['test']}", []).append(test["tokens_per_second"])
    return found


def run_warm_up(trees: Trees, arguments: argparse.Namespace) -> Results:
    """The round with the shortest warm-up: in the first one, kernels may be compiled."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(arguments.rounds):
        for name, tree in trees.items():
            command = [str(HERE / "proof_warm_up.py"), "--shape", arguments.shape, "--device", arguments.device]
            rounds[name].append(json.loads(output(start(tree, *command))))
    return {name: min(found, key=lambda row: float(row["seconds"])) for name, found in rounds.items()}


def run_goldens(trees: Trees, arguments: argparse.Namespace) -> Results:
    """Whether the golden tests of each tree pass, and pytest's last line."""
    found: Results = {}
    command = ("-m", "pytest", "-p", "no:cacheprovider", "tests/models/test_goldens.py")
    for name, process in {name: start(tree, *command) for name, tree in trees.items()}.items():
        printed, _ = process.communicate()
        last = next((line for line in reversed(printed.splitlines()) if " in " in line), printed[-200:])
        found[name] = {"passed": process.returncode == 0, "summary": last}
    return found


def run_sizes(trees: Trees, arguments: argparse.Namespace) -> Results:
    """Lines by top-level part of the package, lines of tests, and functions that are tests."""
    found: Results = {}
    for name, tree in trees.items():
        lines: Counter[str] = Counter()
        for path in sorted((tree / "bminf_lite").rglob("*")):
            if path.suffix in LANGUAGES and "configs" not in path.parts:
                part = path.relative_to(tree / "bminf_lite").parts[0]
                lines[f"bminf_lite/{part}"] += len(path.read_text().splitlines())
        tests = 0
        for path in sorted((tree / "tests").rglob("*.py")):
            text = path.read_text()
            lines["tests"] += len(text.splitlines())
            tests += len(re.findall(r"^ *def test_", text, re.MULTILINE))
        found[name] = {"lines": dict(lines), "test_functions": tests}
    return found


RUNNERS: dict[str, Callable[[Trees, argparse.Namespace], Results]] = {
    "sizes": run_sizes,
    "goldens": run_goldens,
    "bits": run_bits,
    "bench": run_bench,
    "warm_up": run_warm_up,
}


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen parts; a part that fails does not stop the others. The files are written after every part."""
    trees = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: Results = {name: {"seconds": {}, "errors": {}} for name in trees}
    for part in arguments.parts.split(","):
        began = time.perf_counter()
        try:
            found = RUNNERS[part](trees, arguments)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            found = {}
            print(f"{part}: {error}", file=sys.stderr)
        for name in trees:
            results[name]["seconds"][part] = time.perf_counter() - began
            if name in found:
                results[name][part] = found[name]
            else:
                results[name]["errors"][part] = "it failed"
            (arguments.out / f"{name}.json").write_text(json.dumps(results[name], indent=1))
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return int(any(results[name]["errors"] for name in trees))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run parts on two trees")
    for name in ("before", "after", "out"):
        runs.add_argument(name, type=Path)
    runs.add_argument("--parts", default=",".join(RUNNERS), help=f"of {', '.join(RUNNERS)}, in this order")
    runs.add_argument("--device", default="cuda")
    runs.add_argument("--models", help="of bits, separated by commas; all by default")
    runs.add_argument("--recipes", default="w8a8,w8a16,float", help="of bits")
    runs.add_argument("--kv-caches", default="fp16,int8", help="of bits")
    runs.add_argument("--jobs", type=int, default=12, help="processes of bits at once")
    runs.add_argument("--benches", default=",".join(BENCHES), help="names of BENCHES, or a shape and options of bench")
    runs.add_argument("--rounds", type=int, default=2, help="of bench and of warm_up")
    runs.add_argument("--shape", default="llama-3-8b", help="of warm_up")
    runs.set_defaults(do=run)
    compares = commands.add_parser("compare", help="print what differs; exit with 1 if a promise is broken")
    compares.add_argument("before", type=Path)
    compares.add_argument("after", type=Path)
    compares.add_argument("--promised", default="w8a8", help="recipes whose bits must be equal in both trees")
    compares.add_argument("--invariant", default="w8a8", help="recipes whose requests get alone what they get together")
    compares.set_defaults(
        do=lambda a: compare(a.before, a.after, a.promised.split(","), a.invariant.split(",")),
    )
    arguments = parser.parse_args()
    return int(arguments.do(arguments))


if __name__ == "__main__":
    sys.exit(main())
