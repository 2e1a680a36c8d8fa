"""Time and peak memory of a migration, and of reading its source and writing its result alone.

    python benchmarks/measure_migration.py --gigabytes 2 --folder /tmp/measure

The command makes a random fp32 checkpoint of LLaMA's architecture in ``--folder``, and runs each measurement in a
process of its own, ``--repeat`` times in turn. "plain" reads the source through a small buffer and writes as many bytes
as the migrated checkpoint has, in blocks, synced to the disk. Both read from the page cache, or with ``--cold`` from
the disk. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bminf_lite import models
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.writer import CheckpointWriter, TensorDeclaration

BLOCK = 1 << 20
HIDDEN, INNER, VOCAB = 2048, 8192, 32000


def make_checkpoint(folder: Path, gigabytes: float, shard_bytes: int) -> None:
    """A random fp32 checkpoint with as many layers as come closest to the size."""
    layer = 4 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * INNER)
    layers = max(1, round((gigabytes * 1e9 - 8 * VOCAB * HIDDEN) / layer))
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    architecture = models.find(config)
    parameters = architecture.spec(architecture.parse(config)).parameters
    declared = {name: TensorDeclaration("F32", parameter.shape) for name, parameter in parameters.items()}
    writer = CheckpointWriter(folder, declared, set(), shard_bytes)
    random = np.random.default_rng(0)
    for name, parameter in parameters.items():
        writer.write(name, random.standard_normal(parameter.shape, np.float32) * np.float32(0.02))
    writer.finish()


def run_plain(source: Path, out: Path, size: int) -> None:
    """Read every file of the source, and write and sync ``size`` bytes."""
    buffer = memoryview(bytearray(BLOCK))
    for path in sorted(source.iterdir()):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    out.mkdir()
    with open(out / "plain", "wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(buffer[: size - start])
        os.fsync(file.fileno())


def prepare(source: Path, cold: bool) -> None:
    """Flush pending writes, then put the source into the page cache, or evict it."""
    os.sync()
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                buffer = bytearray(BLOCK)
                while file.readinto(buffer):
                    pass


def child(what: str, source: Path, out: Path, size: int) -> None:
    """One measurement: prints seconds, seconds of all cores together, and peak memory in bytes."""
    start, start_cpu = time.perf_counter(), time.process_time()
    if what == "plain":
        run_plain(source, out, size)
    else:
        migrate(source, out)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    # getrusage would include the parent's peak from before exec.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": int(peak[1]) * 1024}))


def summary(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """A line for each measurement, and their ratio."""
    seconds = {what: [run["seconds"] for run in runs] for what, runs in results.items()}
    lines = []
    for what, runs in results.items():
        times = f"median {statistics.median(seconds[what]):.2f} s, fastest {min(seconds[what]):.2f} s"
        cpu = statistics.median(run["cpu"] for run in runs)
        peak = max(run["peak"] for run in runs) / 2**20
        lines.append(f"{what}: {times}, {cpu:.2f} core-seconds, peak memory {peak:.0f} MiB")
    median, fastest = (f(seconds["plain"]) / f(seconds["migrate"]) for f in (statistics.median, min))
    return [*lines, f"plain / migrate: {median:.0%} of the medians, {fastest:.0%} of the fastest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard-gigabytes", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    source, out = args.folder / "source", args.folder / "out"
    if args.child:
        child(args.child[0], source, out, int(args.child[1]))
        return
    make_checkpoint(source, args.gigabytes, int(args.shard_gigabytes * 1e9))
    try:
        report = migrate(source, out, dry_run=True)
        results: dict[str, list[dict[str, float]]] = {"plain": [], "migrate": []}
        for _ in range(args.repeat):
            for what, found in results.items():
                prepare(source, args.cold)
                command = [sys.executable, __file__, "--folder", str(args.folder)]
                command += ["--child", what, str(report.bytes_after)]
                found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
                shutil.rmtree(out)
        largest = max(tensor.bytes_before for tensor in report.tensors)
        print(f"source {report.bytes_before / 1e9:.2f} GB, result {report.bytes_after / 1e9:.2f} GB")
        print(f"largest tensor {largest / 2**20:.0f} MiB")
        for line in summary(results):
            print(line)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
