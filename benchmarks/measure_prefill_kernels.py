"""Compare source trees by prefill attention and int8 products: bits, the time of a launch, and what limits it.

    python benchmarks/measure_prefill_kernels.py before=../before "after=.:CLUSTER_WORK=1" --rounds 2 --cases attention
    python benchmarks/measure_prefill_kernels.py now=. "narrow=.:BANDS=(16,)" --cases product

A variant is NAME=FOLDER or NAME=FOLDER:SETTINGS. FOLDER holds a source tree of this package, and SETTINGS are the names
and values of constants of ``cuda/kernels/attention/prefill.py`` and ``cuda/kernels/gemm/gemm_hopper.py``. Each round
runs every variant in a process of its own, so that a GPU that becomes slower affects all. A launch is timed after a
pause ("first"), and in a row of launches that lasts long enough for the GPU to reach its limit of power ("sustained");
for these ``nvidia-smi`` tells clock and power. Prints medians of all rounds, and whose bits differ from those of the
first variant. A case takes one to four seconds. Products are those of compute capability 9.0.
"""

from __future__ import annotations

import abc
import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from variants import Variant, apply_settings

PAUSE, WARM_UP, DURATION = 0.25, 0.2, 0.6
"""Seconds before the first launch, and of launches in a row that do not count, and that do."""
SAMPLING = 40
"""Milliseconds between two readings of clock and power."""
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", f"-lms={SAMPLING}")


@dataclass(frozen=True)
class AttentionCase:
    """``tokens`` new tokens of one sequence behind ``context`` tokens in the cache, and the heads."""

    tokens: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        """As ``--cases`` takes it."""
        return f"attention {self.tokens} @ {self.context}, {self.heads} / {self.kv_heads} x {self.head_dim}"

    @property
    def operations(self) -> int:
        """A multiplication and an addition counted as two, of what a causal mask leaves."""
        scores = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        return 4 * self.head_dim * self.heads * scores

    def prepare(self) -> Launches:
        """Raises ``SystemExit`` if the case cannot be measured here."""
        return Attention(self)


@dataclass(frozen=True)
class ProductCase:
    """``[rows, columns] @ [channels, columns].T`` of int8; ``epilogue``: half, add or gated."""

    rows: int
    channels: int
    columns: int
    epilogue: str = "half"

    @property
    def name(self) -> str:
        """As ``--cases`` takes it."""
        return f"product {self.rows} x {self.columns} by {self.channels}, {self.epilogue}"

    @property
    def operations(self) -> int:
        """A multiplication and an addition counted as two."""
        return 2 * self.rows * self.channels * self.columns

    def prepare(self) -> Launches:
        """Raises ``SystemExit`` if the case cannot be measured here."""
        return Product(self)


Case = AttentionCase | ProductCase
CASES: tuple[Case, ...] = (
    *(AttentionCase(*sizes) for sizes in ((32768, 0), (8192, 24576), (2048, 30720), (8192, 0), (2048, 0), (512, 0))),
    AttentionCase(128, 32640),
    AttentionCase(8192, 24576, head_dim=64),
    AttentionCase(8192, 24576, heads=16, head_dim=256),
    *(
        ProductCase(rows, *weight)
        for rows in (32768, 8192, 2048)
        for weight in ((28672, 4096, "gated"), (4096, 14336, "add"), (4096, 4096, "add"), (6144, 4096))
    ),
    ProductCase(32768, 16384, 2048, "gated"),
    ProductCase(16384, 35840, 5120, "gated"),
)


# ---- in the process of a variant ------------------------------------------------------------------------------------


class Launches(abc.ABC):
    """A kernel of a case over random numbers, the same ones in every variant. ``launch`` writes or adds to ``out``."""

    stream: Any
    out: Any

    @abc.abstractmethod
    def launch(self) -> None:
        """On ``stream``."""

    def milliseconds(self, count: int) -> float:
        """The time of one of ``count`` launches in a row."""
        import cupy as cp

        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record(self.stream)
        for _ in range(count):
            self.launch()
        end.record(self.stream)
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(start, end)) / count

    def digest(self) -> str:
        """A digest of the bits of the first launch's outputs."""
        self.launch()
        self.stream.synchronize()
        return hashlib.sha256(self.out.get().tobytes()).hexdigest()


class Attention(Launches):
    """Prefill attention over an fp16 cache."""

    def __init__(self, case: AttentionCase) -> None:
        import cupy as cp

        from bminf_lite.cuda.kernels.attention.heads import Scores
        from bminf_lite.cuda.kernels.attention.prefill import COUNTERS, PrefillAttention
        from bminf_lite.cuda.kernels.constants import BLOCK_SIZE, ScoreKind
        from bminf_lite.cuda.runtime.driver import Device

        self.prefill = PrefillAttention(Device(0))
        self.stream = cp.cuda.Stream(non_blocking=True)
        rng, total, width = np.random.default_rng(7), case.tokens + case.context, case.heads * case.head_dim
        blocks = -(-total // BLOCK_SIZE) + 1
        pool, row = (blocks, case.kv_heads, BLOCK_SIZE, case.head_dim), (case.tokens, width)
        self.keys, self.values, self.q = (
            cp.asarray(rng.standard_normal(size, np.float32).astype(np.float16)) for size in (pool, pool, row)
        )
        self.out = cp.zeros(row, cp.float16)
        self.cu_seqlens, self.context_lens = (
            cp.asarray([0, case.tokens], cp.int32),
            cp.asarray([case.context], cp.int32),
        )
        self.table = cp.arange(1, blocks, dtype=cp.int32)
        self.counters = cp.zeros(COUNTERS, cp.int32)
        self.shape = {
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "tokens": case.tokens,
            "batch_size": 1,
            "max_query_len": case.tokens,
            "max_context_len": total,
        }
        self.scratch = cp.zeros(max(16, self.prefill.scratch_bytes(**self.shape)), cp.uint8)
        self.scores, self.num_blocks, self.width = Scores(ScoreKind.PLAIN, case.head_dim**-0.5), blocks, width
        cp.cuda.Device().synchronize()

    def launch(self) -> None:
        self.prefill.launch(
            self.q.data.ptr,
            self.width,
            self.keys.data.ptr,
            self.values.data.ptr,
            self.out.data.ptr,
            self.width,
            self.cu_seqlens.data.ptr,
            self.context_lens.data.ptr,
            self.table.data.ptr,
            **self.shape,
            table_pitch=len(self.table),
            num_blocks=self.num_blocks,
            scores=self.scores,
            window=None,
            counters=self.counters.data.ptr,
            scratch=self.scratch.data.ptr,
            scratch_bytes=self.scratch.nbytes,
            stream=self.stream.ptr,
        )


class Product(Launches):
    """An int8 product with scales of its rows and channels."""

    def __init__(self, case: ProductCase) -> None:
        import cupy as cp

        from bminf_lite.cuda.kernels.constants import Epilogue
        from bminf_lite.cuda.kernels.gemm.gemm_hopper import ScaledGemm
        from bminf_lite.cuda.runtime.driver import Device

        device = Device(0)
        self.case, self.gemm = case, ScaledGemm(device)
        if not self.gemm.supported:
            sys.exit(f"error: {device.name}: gemm_hopper.cu needs a GPU of compute capability 9.0")
        self.epilogue = {"half": Epilogue.TO_HALF, "add": Epilogue.ADD, "gated": Epilogue.GATED}[case.epilogue]
        self.stream, rng = cp.cuda.Stream(non_blocking=True), np.random.default_rng(7)
        self.x, self.weight = (
            cp.asarray(rng.integers(-127, 128, (n, case.columns), np.int8)) for n in (case.rows, case.channels)
        )
        # Outputs of about one, as a gate has them.
        self.x_scales, self.w_scales = (cp.full(n, 2e-3, np.float32) for n in (case.rows, case.channels))
        self.width = case.channels // 2 if self.epilogue is Epilogue.GATED else case.channels
        self.out = cp.zeros((case.rows, self.width), cp.float32 if self.epilogue is Epilogue.ADD else cp.float16)
        cp.cuda.Device().synchronize()

    def launch(self) -> None:
        case = self.case
        self.gemm.launch(
            (self.x.data.ptr, case.columns),
            self.x_scales.data.ptr,
            (self.weight.data.ptr, case.columns),
            self.w_scales.data.ptr,
            0,
            (self.out.data.ptr, self.width),
            rows=case.rows,
            channels=case.channels,
            in_features=case.columns,
            epilogue=self.epilogue,
            stream=self.stream.ptr,
        )


class Meter:
    """Clock (MHz) and power (W) while it is open, if there is an ``nvidia-smi``."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, float, float]] = []
        self._process = None
        if shutil.which(QUERY[0]):
            self._process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=[self._process], daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # a line cut by the end, or a value that this GPU does not tell
                continue
            self.readings.append((time.monotonic(), clock, power))

    def medians(self, start: float, end: float) -> tuple[float, float]:
        """Between two times of ``time.monotonic``; NaN where nothing was read."""
        found = [reading[1:] for reading in self.readings if start <= reading[0] <= end] or [(float("nan"),) * 2]
        clocks, powers = zip(*found, strict=True)
        return statistics.median(clocks), statistics.median(powers)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def measure(case: Case, meter: Meter) -> dict[str, Any]:
    """``digest``, and of a launch ``first`` and ``sustained`` in ms, with ``clock`` and ``power`` of the latter."""
    launches = case.prepare()
    digest = launches.digest()
    time.sleep(PAUSE)
    first = launches.milliseconds(1)
    launches.milliseconds(1 + int(WARM_UP * 1e3 / first))
    start = time.monotonic()
    sustained = launches.milliseconds(1 + int(DURATION * 1e3 / first))
    clock, power = meter.medians(start, time.monotonic())
    return {"digest": digest, "first": first, "sustained": sustained, "clock": clock, "power": power}


def work(names: list[str], settings: dict[str, Any]) -> None:
    """Print the result of each case as JSON, with the launchers' constants set."""
    from bminf_lite.cuda.kernels.attention import prefill
    from bminf_lite.cuda.kernels.gemm import gemm_hopper
    from bminf_lite.cuda.runtime.driver import Device
    from bminf_lite.errors import BminfError

    apply_settings((prefill, gemm_hopper), settings)
    try:
        Device(0).make_current()
    except BminfError as error:
        sys.exit(f"error: {error}")
    meter = Meter()
    try:
        print(json.dumps({case.name: measure(case, meter) for case in chosen(names)}))
    finally:
        meter.close()


# ---- all variants ----------------------------------------------------------------------------------------------------


def chosen(names: list[str]) -> list[Case]:
    """The cases whose names start with one of ``names``, or all. Raises ``SystemExit`` if there is none."""
    found = [case for case in CASES if not names or any(case.name.startswith(name) for name in names)]
    if not found:
        sys.exit(f"error: no case has a name that starts with one of {names}; there are {[c.name for c in CASES]}")
    return found


def report(case: Case, results: dict[str, list[dict[str, Any]]]) -> str:
    """A line for each variant: medians of its rounds, and whether its bits are those of the first."""
    lines = [case.name]
    expected = next(rounds[0]["digest"] for rounds in results.values())
    for name, rounds in results.items():
        first, sustained, clock, power = (
            statistics.median(r[key] for r in rounds) for key in ("first", "sustained", "clock", "power")
        )
        differs = any(r["digest"] != expected for r in rounds)
        lines.append(
            f"  {name:16}{sustained:10.4f} ms sustained{case.operations / sustained / 1e9:7.0f} TOPS{clock:7.0f} MHz"
            f"{power:6.0f} W{first:10.4f} ms at first{'   OTHER BITS' if differs else ''}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="NAME=FOLDER:SETTINGS")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=[], metavar="NAME", help="how the names of cases start")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        work(args.cases, json.loads(args.settings))
        return
    if not args.variants:
        parser.error("give one variant at least, NAME=FOLDER")
    variants, cases = [Variant.parse(text) for text in args.variants], chosen(args.cases)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for _ in range(args.rounds):
        for variant in variants:
            for name, result in (variant.run(__file__, "--work", "--cases", *args.cases) or {}).items():
                results.setdefault(name, {}).setdefault(variant.name, []).append(result)
    if not results:
        sys.exit(1)  # each variant has said why
    for case in cases:
        if case.name in results:
            print(report(case, results[case.name]), flush=True)


if __name__ == "__main__":
    main()
