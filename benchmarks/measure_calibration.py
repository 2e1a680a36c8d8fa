"""Time the phases of a calibrated migration, and measure its peak memory on the host and on the device.

    python benchmarks/make_random_checkpoint.py --shape llama-3-8b SOURCE
    python benchmarks/measure_calibration.py SOURCE OUT --recipe auto --samples 128 --device cuda

The migration is that of ``bminf-lite migrate SOURCE OUT --recipe auto --calibrate FILE``. Without ``--calibrate`` the
text is the bundled one, repeated for all samples. OUT is removed at the end.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import bminf_lite
from bminf_lite import backend
from bminf_lite.backend.base import Backend
from bminf_lite.migration.migrate import SAMPLE_TOKENS, migrate

DEMO_TEXT = Path(bminf_lite.__file__).parent / "demo_model" / "heldout.txt"
BYTES_PER_TOKEN = 6
"""More than the bytes of a token of that text."""


class Phases:
    """The times at which phases last reported progress."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ends: dict[str, float] = {}
        self.device_peak = 0

    def listen(self, phase: str) -> Callable[[int, int, str], None]:
        """A progress callback that remembers the time."""
        return lambda done, total, name: self.ends.update({phase: time.perf_counter()})

    def watch(self, create: Callable[..., Backend]) -> Callable[..., Backend]:
        """``create``, whose backends report their peak memory when they close."""

        def watched(*arguments: object) -> Backend:
            ops = create(*arguments)
            close = ops.close

            def closing() -> None:
                self.device_peak = max(self.device_peak, ops.memory().get("peak_reserved", 0))
                close()

            ops.close = closing  # type: ignore[method-assign]
            return ops

        return watched

    def lines(self, end: float) -> list[str]:
        """Seconds of each phase, in their order."""
        found, before = [], self.started
        for phase, time_ in sorted(self.ends.items(), key=lambda item: item[1]):
            found.append(f"{phase}: {time_ - before:.1f} s")
            before = time_
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert peak is not None
        return [
            *found,
            f"the rest: {end - before:.1f} s",
            f"all: {end - self.started:.1f} s",
            f"peak host memory: {int(peak[1]) / 2**20:.2f} GiB",
            f"peak device memory: {self.device_peak / 2**30:.2f} GiB",
        ]


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    phases, create = Phases(), backend.create
    backend.create = phases.watch(create)
    with tempfile.TemporaryDirectory() as folder:
        text = options.calibrate
        if text is None:
            text = Path(folder) / "text.txt"
            content = DEMO_TEXT.read_text(encoding="utf-8")
            needed = (options.samples + 8) * SAMPLE_TOKENS * BYTES_PER_TOKEN
            text.write_text(content * -(-needed // len(content)), encoding="utf-8")
        phases.started = time.perf_counter()
        report = migrate(
            options.source,
            options.out,
            options.recipe,
            calibrate=text,
            samples=options.samples,
            device=options.device,
            calibration_progress=phases.listen("calibrating"),
            progress=phases.listen("quantizing and writing"),
            cost_progress=phases.listen("measuring the cost"),
        )
        end = time.perf_counter()
    backend.create = create
    shutil.rmtree(options.out)
    products = report.calibration["products"]
    print(f"{report.bytes_before / 1e9:.2f} GB -> {report.bytes_after / 1e9:.2f} GB, {options.recipe}")
    print("products:", dict(Counter(p["scheme"] for p in products)), dict(Counter(p["exponent"] for p in products)))
    print(f"cost: ratio {report.cost['ratio']:.5f}, divergence {report.cost['kl']:.6f}")
    print("\n".join(phases.lines(end)))


if __name__ == "__main__":
    main()
