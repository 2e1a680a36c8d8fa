"""Time single kernels and PyTorch's in one run at the same sizes: eager, and compiled (on a GPU by Triton).

    python benchmarks/bench_kernel_peers.py [--device cuda|cpu] [--no-compile]

Takes the kernels of ``bminf-lite bench --kernels`` that have a peer in :data:`PEERS`. Needs torch (extra ``parity``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bminf_lite import backend
from bminf_lite.bench.cases import KernelCase
from bminf_lite.bench.profiler import Profiler
from bminf_lite.bench.report import markdown_table
from bminf_lite.bench.runner import make_profiler

RUNS = 10
ROUNDS = 7


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token int8 of fp16 or fp32 rows."""
    x = x.float()
    a = x.abs().amax(-1, keepdim=True)
    return (x * (127 / a)).round().clamp(-127, 127).to(torch.int8), a / 127


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """fp32 rows -> fp16."""
    return F.rms_norm(x, x.shape[-1:], gain, 1e-5).half()


def layer_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """fp32 rows -> fp16."""
    return F.layer_norm(x, x.shape[-1:], gain, gain, 1e-5).half()


def rms_norm_and_quantize(x: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 rows -> codes and scales."""
    return quantize(rms_norm(x, gain))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """fp32 rows."""
    return F.softmax(x, -1)


PEERS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "quantize": quantize,
    "rms_norm and quantize": rms_norm_and_quantize,
    "igemm": torch._int_mm,
}


def inputs(case: KernelCase, device: str) -> tuple[torch.Tensor, ...]:
    """Random inputs of the case's shape, in the types of our kernel."""
    sizes = [int(size) for size in case.shape.split(" x ")]
    if case.kernel == "igemm":
        rows, n, k = sizes
        x, w = (torch.randint(-127, 128, (count, k), dtype=torch.int8, device=device) for count in (rows, n))
        return x, w.t()
    x = torch.randn(*sizes, device=device, dtype=torch.float16 if case.kernel == "quantize" else torch.float32)
    return (x, torch.ones(sizes[1], device=device)) if "norm" in case.kernel else (x,)


def seconds(function: Callable[..., Any], arguments: tuple[torch.Tensor, ...]) -> float:
    """Seconds of one call, the median of rounds of :data:`RUNS` calls; on a GPU by a captured graph, as for ours."""

    def several() -> None:
        for _ in range(RUNS):
            function(*arguments)

    several()
    if not arguments[0].is_cuda:
        return median(host_seconds(several) for _ in range(ROUNDS)) / RUNS
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        several()
    graph.replay()
    return median(device_seconds(graph.replay) for _ in range(ROUNDS)) / RUNS


def host_seconds(work: Callable[[], Any]) -> float:
    """Seconds of work that is complete when it returns."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def device_seconds(work: Callable[[], Any]) -> float:
    """Seconds of work on a GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def compare(profiler: Profiler, device: str, compiled: bool) -> list[dict[str, str]]:
    """A row of the table for each case with a peer."""
    rows = []
    for case in profiler.kernels():
        if case.kernel not in PEERS:
            continue
        ours = profiler.median_seconds(case.run)
        row = {"kernel": case.kernel, "shape": case.shape, "ours us": f"{1e6 * ours:.1f}"}
        peer, arguments = PEERS[case.kernel], inputs(case, device)
        ways = {"torch": peer} | ({"compiled": torch.compile(peer, dynamic=False)} if compiled else {})
        for name, function in ways.items():
            if case.kernel == "igemm" and (name == "compiled" or arguments[0].shape[0] <= 16):  # which _int_mm refuses
                row |= {f"{name} us": "", f"{name}, ours is faster": ""}
                continue
            theirs = seconds(function, arguments)
            row |= {f"{name} us": f"{1e6 * theirs:.1f}", f"{name}, ours is faster": f"{theirs / ours:.2f} times"}
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--no-compile", action="store_true", help="PyTorch's eager kernels alone")
    options = parser.parse_args(arguments)
    ops = backend.create(options.device)
    try:
        rows = compare(make_profiler(ops), options.device, not options.no_compile)
        print(markdown_table(rows))
        print(f"\n{ops.describe()}, torch {torch.__version__}")
    finally:
        ops.close()


if __name__ == "__main__":
    main()
