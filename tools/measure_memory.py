"""What of a GPU's memory a model under a limit uses, seen by another process.

    python tools/measure_memory.py --shape llama-3-8b --memory-limit 4GiB

Random weights of a shape are loaded under the limit; then come a prompt of all the context that the plan has room for,
less 64 tokens, and those 64 decoded. Meanwhile another process asks the driver every millisecond how much of the GPU is
in use. Prints, for each stage, the most that was in use beyond what was before, and what the arena, which the limit
bounds, had reserved of it: the rest is the CUDA context, the libraries and the kernels' code. Nothing else may use the
GPU meanwhile.
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
    """Until the stage is negative: the most bytes in use, and how often that was asked, by stage."""
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
    while counts[0] < 10:  # its own context is there, and nothing else
        time.sleep(0.01)
    before, reserved = peaks[0], []

    def begin(number: int) -> None:
        """The next stage, when the end of this one has been seen."""
        seen = counts[stage.value]
        while counts[stage.value] < seen + 3:
            time.sleep(1e-3)
        stage.value = number

    from bminf_lite import backend
    from bminf_lite.bench.model import random_model
    from bminf_lite.bench.session import Session
    from bminf_lite.bench.shapes import read_shape

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
    print(f"limit {ops.arena.limit / GIB:.3f} GiB, context {bench_model.plan.context:,}, planned "
          f"{bench_model.plan.total_bytes / GIB:.3f} GiB, "
          f"{len(bench_model.plan.streamed)} layers streamed")  # fmt: skip
    for name, peak, arena, count in zip(STAGES, peaks[1:], reserved, counts[1:], strict=True):
        used = (peak - before) / GIB
        print(f"{name:7} in use {used:.3f} GiB, of the arena {arena / GIB:.3f} GiB, the rest "
              f"{used - arena / GIB:.3f} GiB; asked {count:,} times")  # fmt: skip
    session.close()
    ops.close()


if __name__ == "__main__":
    main()
