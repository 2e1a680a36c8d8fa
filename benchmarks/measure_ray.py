"""Batches: replicas on a Ray cluster of this machine, beside processes started by hand that each answer a part.

    python benchmarks/measure_ray.py MODEL --rows 4096 --replicas 2 [--device cpu] [--rounds 3]
    python benchmarks/measure_ray.py bminf_lite/demo_model --rows 512 --rounds 2

The second one is a short run with four blocks for each replica. A round runs one after the other. Speeds and CPU
seconds are of the time from the first block that is complete to the last one: loading and the start of a cluster do not
count; the whole time of each is printed too. CPU seconds are those of all processes, Ray's included. They are what
other load on the machine changes least. Needs the extra ``ray`` and psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

COMMAND = "import sys; from bminf_lite.cli import main; main(sys.argv[1:])"


def cpu_seconds(seen: dict[int, float], models: set[int], processes: list[subprocess.Popen[bytes]]) -> None:
    """Note the CPU seconds of processes and what they have started, and which of them are replicas."""
    for process in processes:
        try:
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.Error:
            continue
        for one in tree:
            try:
                times, command = one.cpu_times(), " ".join(one.cmdline()[:1])
            except psutil.Error:  # it has ended
                continue
            seen[one.pid] = times.user + times.system
            if "Replica" in command:
                models.add(one.pid)


def run(commands: list[list[str]], outs: list[Path], block_rows: int) -> tuple[float, float, float]:
    """Rows per second, and rows per CPU second, between the first and the last block; the seconds of all."""
    began = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", COMMAND, *c], stderr=subprocess.DEVNULL, env=environment)
        for c in commands
    ]
    seen: dict[int, float] = {}
    models: set[int] = set()
    samples: list[tuple[float, float, float]] = []
    while any(process.poll() is None for process in processes):
        cpu_seconds(seen, models, processes)
        samples.append((time.time(), sum(seen.values()), sum(seen[pid] for pid in models)))
        time.sleep(0.25)
    seconds = time.time() - began
    if any(process.returncode for process in processes):
        raise SystemExit(f"a command has failed: {commands}")
    times = sorted(path.stat().st_mtime for out in outs for path in out.glob("rows-*.jsonl"))
    count, ends = (len(times) - 1) * block_rows, [times[0], times[-1]]
    at, all_cpu, model_cpu = zip(*samples, strict=True)
    cpu, of_models = (float(np.diff(np.interp(ends, at, values))[0]) for values in (all_cpu, model_cpu))
    span = times[-1] - times[0]
    if models:
        print(f"  other processes than replicas: {(cpu - of_models) / span:.3f} CPU seconds per second", flush=True)
        print(f"  replicas: {count / of_models:.1f} rows per CPU second", flush=True)
    return count / span, count / cpu, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--block-rows", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    share = options.rows // options.replicas
    common = [
        "--device",
        options.device,
        "--max-batch",
        str(options.max_batch),
        "--block-rows",
        str(options.block_rows),
    ]
    rates: dict[str, list[float]] = {"by hand": [], "on Ray": []}
    efficiencies: dict[str, list[float]] = {"by hand": [], "on Ray": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [
            {"prompt": f"{i} and the file", "max_tokens": options.tokens + i % 17, "temperature": 0, "ignore_eos": True}
            for i in range(share * options.replicas)
        ]
        names = ["all.jsonl", *(f"part-{k}.jsonl" for k in range(options.replicas))]
        parts = [rows, *(rows[k * share : (k + 1) * share] for k in range(options.replicas))]
        for name, part in zip(names, parts, strict=True):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        for number in range(options.rounds):
            outs = [folder / f"hand-{number}-{k}" for k in range(options.replicas)]
            hand = [
                ["batch", options.model, str(folder / name), str(out), *common]
                for name, out in zip(names[1:], outs, strict=True)
            ]
            out = folder / f"ray-{number}"
            on_ray = ["batch", options.model, str(folder / names[0]), str(out), *common, "--ray", "local"]
            on_ray += ["--replicas", str(options.replicas)]
            for kind, commands, places in (("by hand", hand, outs), ("on Ray", [on_ray], [out])):
                rate, efficiency, seconds = run(commands, places, options.block_rows)
                rates[kind].append(rate)
                efficiencies[kind].append(efficiency)
                print(f"{kind}: {rate:.1f} rows/s, {efficiency:.1f} rows per CPU second; {seconds:.1f} s in all")
    for name, found in (("rows/s", rates), ("rows per CPU second", efficiencies)):
        ratio = statistics.median(b / a for a, b in zip(found["by hand"], found["on Ray"], strict=True))
        print(f"on Ray: {100 * ratio:.1f} % of the {name} of processes by hand (median of {options.rounds})")


if __name__ == "__main__":
    main()
