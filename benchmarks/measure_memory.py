"""Measure the GPU memory that a model under a limit uses, as another process sees it.

    python benchmarks/measure_memory.py --shape llama-3-8b --memory-limit 4GiB

Loads random weights of a shape under the limit, processes a prompt of the planned context less 64 tokens, and decodes
64 tokens. Another process samples the GPU's used memory every millisecond. Prints for each stage the largest increase
in used memory, and the part of it that the arena has reserved, to which the limit applies. The rest is the CUDA
context, the libraries and the kernels' code. No other program may use the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from bminf_lite.cuda.doctor import require_usable
from bminf_lite.errors import DeviceError

STAGES = ("open", "load", "prompt", "decode")
DECODED = 64
GIB = 1 << 30


def sample(stage: Synchronized[int], peaks: Any, counts: Any) -> None:
    """Record the most bytes in use and the number of samples of each stage, until the stage is negative."""
    from bminf_lite.cuda.runtime.driver import Device

    device = Device(0)
    while (now := stage.value) >= 0:
        free, total = device.memory()
        peaks[now] = max(peaks[now], total - free)
        counts[now] += 1
        time.sleep(1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--memory-limit", default="4GiB", metavar="SIZE")
    args = parser.parse_args()
    try:
        require_usable(0)
    except DeviceError as error:
        sys.exit(f"error: {error}")
    spawn = multiprocessing.get_context("spawn")
    stage, peaks, counts = spawn.Value("i", 0), spawn.Array("q", len(STAGES) + 1), spawn.Array("q", len(STAGES) + 1)
    sampler = spawn.Process(target=sample, args=(stage, peaks, counts), daemon=True)
    sampler.start()
    while counts[0] < 10:  # until the sampler's own context counts as memory in use before
        time.sleep(0.01)
    before, reserved = peaks[0], []

    def begin(number: int) -> None:
        """Begin the next stage after three more samples of this one."""
        seen = counts[stage.value]
        while counts[stage.value] < seen + 3:
            time.sleep(1e-3)
        stage.value = number

    from bminf_lite import backend
    from bminf_lite.bench.model import random_model, read_shape
    from bminf_lite.bench.session import Session

    stage.value = 1
    ops: Any = backend.create("cuda", args.memory_limit)
    reserved.append(ops.arena.peak_reserved)
    begin(2)
    bench_model = random_model(args.shape, read_shape(args.shape), ops)
    assert bench_model.plan is not None
    reserved.append(ops.arena.peak_reserved)
    begin(3)
    session = Session(bench_model, 1, bench_model.plan.context)
    past = session.fill_context(bench_model.plan.context - DECODED)
    reserved.append(ops.arena.peak_reserved)
    begin(4)
    session.prepare_decode(past)
    session.decode(DECODED)
    reserved.append(ops.arena.peak_reserved)
    begin(-1)
    sampler.join()
    print(
        f"limit {ops.arena.limit / GIB:.3f} GiB, context {bench_model.plan.context:,}, planned "
        f"{bench_model.plan.total_bytes / GIB:.3f} GiB, "
        f"{len(bench_model.plan.streamed)} layers streamed"
    )
    for name, peak, arena, count in zip(STAGES, peaks[1:], reserved, counts[1:], strict=True):
        used = (peak - before) / GIB
        print(
            f"{name:7} in use {used:.3f} GiB, of the arena {arena / GIB:.3f} GiB, the rest "
            f"{used - arena / GIB:.3f} GiB; {count:,} samples"
        )
    session.close()
    ops.close()


if __name__ == "__main__":
    main()
