"""Warm up a model of random weights with the package that is on ``PYTHONPATH``; print seconds and captured sizes.

    PYTHONPATH=TREE python proof_warm_up.py --shape llama-3-8b --max-batch 256 --device cuda

A size is captured by one call of ``Backend.capture``, so the calls are counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any


def measure(shape: str, max_batch: int, device: str) -> dict[str, Any]:
    """Seconds of ``Model.warm_up`` for ``max_batch`` sequences, the sizes that it captures, and bytes that it takes."""
    from bminf_lite import backend
    from bminf_lite.api import Model
    from bminf_lite.bench.model import random_model, read_shape

    ops: Any = backend.create(device)
    capture, sizes = ops.capture, 0

    def counted(work: Callable[[], Any]) -> Callable[[], Any]:
        nonlocal sizes
        sizes += 1
        captured: Callable[[], Any] = capture(work)
        return captured

    ops.capture = counted
    bench_model = random_model(shape, read_shape(shape), ops, max_batch=max_batch)
    with Model(bench_model.network, bench_model.engine_config) as model:
        start = time.perf_counter()
        model.warm_up()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "captured_sizes": sizes, "used_bytes": model.memory().get("used", 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.shape, arguments.max_batch, arguments.device)))


if __name__ == "__main__":
    main()
