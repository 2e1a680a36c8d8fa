"""The profiler of an NVIDIA GPU: device time by events on the backend's stream, per step and per kernel launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, cast

import cupy as cp
import numpy as np

from ..backend.cuda.backend import CudaBackend
from ..backend.cuda.deferred import QuantizedActivations, Weight
from ..backend.quantization import Int8Weight
from ..backend.random_matrix import RandomMatrix
from ..backend.values import Norm
from ..cuda.kernels.arrays import PAD, ceil_div, round_up
from ..cuda.kernels.constants import Epilogue
from ..cuda.kernels.gemm.layouts import Layout
from ..cuda.kernels.sources import load
from ..cuda.runtime import libraries
from ..cuda.runtime.cublaslt import Order
from ..memory.device import measure_speeds
from .cases import GEMM_ROWS, MATRICES, WIDTHS, KernelCase, cycle, gemv, layer_norm, quantize, rms_norm, softmax
from .profiler import Ceilings, Profiler, Span, T

RUNS_AT_ONCE = 10
"""Runs of a kernel per graph."""
HOLD_READS = 100
"""Reads of the whole buffer that keep the GPU busy for 20 ms or more while the host launches a step."""
SETTLE_SECONDS = 0.5
"""Time of reads, of which the fastest count: by then the GPU's clocks have risen."""
GEMM_SIZE = 8192
ELEMENTS = 1 << 26
"""Elements of the matrices for row kernels: 128 to 256 MiB, several times the size of a GPU's cache."""
WEIGHT_BYTES = 256 << 20
"""Bytes of all weights that a timed product uses in turn, which exceed the GPU's cache."""


class CudaProfiler(Profiler):
    """Measures a GPU: time by events, kernels by the device's observer, memory by the arena."""

    ops: CudaBackend

    def __init__(self, ops: CudaBackend, ceiling_bytes: int = 1 << 30):
        super().__init__(ops, ceiling_bytes)

    def time(self, work: Callable[[], T]) -> tuple[float, T]:
        start, end = cp.cuda.Event(), cp.cuda.Event()
        if self.meet is not None:
            self.ops.stream.synchronize()
            self.meet()
        start.record(self.ops.stream)
        result = work()
        end.record(self.ops.stream)
        end.synchronize()
        return cp.cuda.get_elapsed_time(start, end) / 1e3, result

    def versions(self) -> dict[str, str]:
        found = {name: libraries.text(libraries.load(name).version) for name in ("cuda", "nvrtc", "cublasLt")}
        return super().versions() | {"driver": libraries.driver_release(), "cupy": cp.__version__} | found

    def reset_peaks(self) -> None:
        self.ops.arena.reset_peaks()

    def peaks(self) -> tuple[int, int | None]:
        return self.ops.arena.peak_used, self.ops.arena.peak_reserved

    def allocated(self, run: Callable[[int], Any]) -> int:
        with self.ops.arena.measure() as meter:
            run(0)
        return meter.peak

    def streamed_bytes(self) -> int:
        return self.ops.loader.streamed_bytes + self.ops.expert_cache().get("copied_bytes", 0)

    # -- limits -------------------------------------------------------------------------------------------------------

    def ceilings(self) -> Ceilings:
        """Measure reads by ``read_all``, copies and the host link by the driver, int8 products by the backend."""
        runtime, stream = cp.cuda.runtime, self.ops.stream.ptr
        data = self._random(self.ceiling_bytes // 1024, 1024, np.int8)
        target = self.ops.arrays.empty(data.shape, data.dtype)
        copy = (target.data.ptr, data.data.ptr, data.nbytes, runtime.memcpyDeviceToDevice, stream)
        read, settled = cycle(self._reader(data), ()), time.perf_counter() + SETTLE_SECONDS
        read_seconds = self.plain_seconds(read)
        while time.perf_counter() < settled:
            read_seconds = min(read_seconds, self.plain_seconds(read))
        copy_seconds = self.plain_seconds(cycle(runtime.memcpyAsync, copy))
        size = GEMM_SIZE
        product_seconds = self.plain_seconds(self._gemm(size, size, size))
        link = measure_speeds(self.ops.device).link
        return Ceilings(data.nbytes / read_seconds, 2 * data.nbytes / copy_seconds, 2 * size**3 / product_seconds, link)

    def _reader(self, data: cp.ndarray) -> Callable[[], None]:
        kernel = load(self.ops.device, "rowwise/bandwidth.cu", "read_all")
        out, grid = self.ops.arrays.zeros((1,), np.int32), 4 * self.ops.kernels.num_sms

        def read() -> None:
            arguments = (data.data.ptr, data.nbytes // 16, out.data.ptr)
            kernel(grid, 512, arguments, stream=self.ops.stream.ptr, bytes_moved=data.nbytes)

        return read

    # -- inside a step ------------------------------------------------------------------------------------------------

    def trace(self, step: Callable[[], Any]) -> list[Span]:
        """The launches of one ``step()`` in order, run without a graph, each between two events.

        The events keep kernels from overlapping, and a pair of them takes a few microseconds. The GPU is kept busy
        until the host has launched the whole step, so that the gaps show the GPU's time and not the host's.
        """
        step()
        hold = self._reader(self._random(self.ceiling_bytes // 1024, 1024, np.int8))
        seen: list[tuple[str, int, cp.cuda.Event, cp.cuda.Event]] = []

        @contextmanager
        def observer(name: str, bytes_moved: int, stream: int) -> Iterator[None]:
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(self.ops.stream)
            yield
            end.record(self.ops.stream)
            seen.append((name, bytes_moved, start, end))

        for _ in range(HOLD_READS):
            hold()
        self.ops.device.observer = observer
        try:
            step()
        finally:
            self.ops.device.observer = None
        self.ops.stream.synchronize()
        starts = [start for _, _, start, _ in seen[1:]]
        gaps = [cp.cuda.get_elapsed_time(s[3], start) / 1e3 for s, start in zip(seen, starts, strict=False)]
        return [
            Span(name.removeprefix("bminf::"), cp.cuda.get_elapsed_time(start, end) / 1e3, bytes_moved, gap)
            for (name, bytes_moved, start, end), gap in zip(seen, [*gaps, 0.0], strict=True)
        ]

    # -- kernels ------------------------------------------------------------------------------------------------------

    def median_seconds(self, run: Callable[[int], Any], runs: int = 7) -> float:
        """Seconds per run in a graph of several runs, without the host's time."""

        def several() -> None:
            for i in range(RUNS_AT_ONCE):
                run(i)

        work = self.ops.capture(several)
        for _ in range(3):  # the third call captures the graph
            work()
        return median(self.time(work)[0] for _ in range(runs)) / RUNS_AT_ONCE

    def plain_seconds(self, run: Callable[[int], Any]) -> float:
        """Seconds per run, by events around several runs; for work that takes the GPU longer than the host."""

        def several() -> None:
            with self.ops.arrays.current():
                for i in range(RUNS_AT_ONCE):
                    run(i)

        return self.min_seconds(several) / RUNS_AT_ONCE

    def kernels(self) -> Iterator[KernelCase]:
        for width in WIDTHS:
            yield from self._row_cases(ELEMENTS // width, width)
        for rows in GEMM_ROWS:
            yield from self._projection_cases(rows, MATRICES[0][0])
        for n, k in MATRICES:
            yield from self._gemv_cases(n, k)
            for rows in GEMM_ROWS:
                x, w = self._random(rows, k, np.int8), self._random(n, k, np.int8)
                plain = cycle(lambda a, b: a.astype("f") @ b.astype("f").T, (x, w))
                product, nbytes = self._gemm(rows, n, k, WEIGHT_BYTES), n * k + rows * k + 4 * rows * n
                yield KernelCase("igemm", f"{rows} x {n} x {k}", product, nbytes, 2 * rows * n * k, plain)
                yield from self._finished_cases(rows, n, k)

    def _finished_cases(self, rows: int, n: int, k: int) -> Iterator[KernelCase]:
        """Int8 products with a fused epilogue, if a kernel supports it, over several weights in turn."""
        weights = [self._weight(n, k, seed) for seed in range(ceil_div(WEIGHT_BYTES, n * k))]
        plan, fused, arrays = weights[0].plan, self.ops.fused, self.ops.arrays
        assert plan is not None
        layout, scales = plan.activation(rows), arrays.empty((rows,), np.float32)
        codes = QuantizedActivations(layout, self._random(1, layout.size, np.int8).data, scales.data)
        with arrays.current():
            scales.fill(1e-2)
        outputs = {
            "igemm to fp16": (Epilogue.TO_HALF, arrays.rows(rows, n, np.float16)),
            "igemm, added to fp32": (Epilogue.ADD, arrays.zeros((rows, round_up(n, PAD)), np.float32)[:, :n]),
            "igemm, gated": (Epilogue.GATED, arrays.rows(rows, n // 2, np.float16)),
        }
        for name, (epilogue, out) in outputs.items():
            if fused.supports(codes, weights[0], epilogue):
                run = cycle(fused.multiply, *((codes, weight, out, epilogue) for weight in weights))
                bytes_moved = n * k + rows * k + out.nbytes * (2 if epilogue is Epilogue.ADD else 1)
                yield KernelCase(name, f"{rows} x {n} x {k}", run, bytes_moved, 2 * rows * n * k)

    def _row_cases(self, rows: int, width: int) -> Iterator[KernelCase]:
        """Softmax, norms of the residual stream, and quantization; all but softmax write to preallocated arrays."""
        arrays, transform, shape = self.ops.arrays, self.ops.materializer.write_rows, f"{rows} x {width}"
        half = self._random(rows, width, np.float16)
        with arrays.current():
            residual = half.astype(np.float32)
        weight, bias = (self.ops.vector(np.full(width, v, np.float32)) for v in (1.5, 0.25))
        out, codes = arrays.rows(rows, width, np.float16), arrays.rows(rows, width, np.int8)
        layout = Layout(Order.ROW, rows, width, round_up(width, PAD))
        coded = QuantizedActivations(layout, codes.data, arrays.empty((rows,), np.float32).data)
        rms, layer = Norm(weight, 1e-5), Norm(weight, 1e-5, bias, center=True)
        size = rows * width
        yield KernelCase(
            "softmax", shape, cycle(self.ops.softmax, (residual,)), 8 * size, plain=cycle(softmax, (cp, residual))
        )
        yield KernelCase("softmax, in place", shape, lambda _: self.ops.softmax(residual, out=residual), 8 * size)
        with arrays.current():
            residual[...] = half
        yield KernelCase(
            "rms_norm",
            shape,
            cycle(transform, (None, out, residual, rms)),
            6 * size,
            plain=cycle(rms_norm, (cp, residual, weight)),
        )
        yield KernelCase(
            "layer_norm",
            shape,
            cycle(transform, (None, out, residual, layer)),
            6 * size,
            plain=cycle(layer_norm, (cp, residual, weight, bias)),
        )
        yield KernelCase(
            "quantize", shape, cycle(transform, (half, coded)), 3 * size, plain=cycle(quantize, (cp, half))
        )
        yield KernelCase(
            "rms_norm and quantize",
            shape,
            cycle(transform, (None, coded, residual, rms)),
            5 * size,
            plain=cycle(lambda *a: quantize(cp, rms_norm(*a)), (cp, residual, weight)),
        )
        yield KernelCase(
            "rms_norm to fp32, in place", shape, lambda _: self.ops.norm(residual, rms, out=residual), 8 * size
        )

    def _projection_cases(self, rows: int, width: int) -> Iterator[KernelCase]:
        """A square fp16 projection with quantization, into a new array and in place."""
        weight = self._weight(width, width, 0, 1 / (73.6 * width**0.5))  # results as large as inputs, run after run
        x, nbytes, operations = self._random(rows, width, np.float16), width * (width + 4 * rows), 2 * rows * width**2
        shape = f"{rows} x {width} x {width}"
        yield KernelCase(
            "projection",
            shape,
            lambda _: self.ops.linear(x, weight, out=self.ops.arrays.rows(rows, width, np.float16)),
            nbytes,
            operations,
        )
        run = cycle(self.ops.linear, (x, weight, False, x))
        yield KernelCase("projection, in place", shape, run, nbytes, operations)

    def _gemv_cases(self, n: int, k: int) -> Iterator[KernelCase]:
        """One row times a weight, over several weights in turn, as in a model's layers."""
        weights = [self._weight(n, k, seed) for seed in range(ceil_div(WEIGHT_BYTES, n * k))]
        if not weights[0].is_row_major:
            return
        x, out, step = self._random(1, k, np.float16), self.ops.arrays.rows(1, n, np.float16), self.ops.kernels.step
        plain = [(cp, x, w.matrix.reshape(-1, w.pitch)[:n, :k], w.scale) for w in weights]
        run = cycle(self.ops.kernels.gemv.launch, *((step, x, None, w, out, Epilogue.TO_HALF) for w in weights))
        yield KernelCase("matvec", f"1 x {n} x {k}", run, n * k, plain=cycle(gemv, *plain))

    def _gemm(self, rows: int, n: int, k: int, in_all: int = 0) -> Callable[[int], None]:
        """An int8 product from codes to int32 sums, over weights of ``in_all`` bytes in turn."""
        weights = [self._weight(n, k, seed) for seed in range(max(1, ceil_div(in_all, n * k)))]
        plan = weights[0].plan
        assert plan is not None
        x = self._random(1, plan.activation(rows).size, np.int8)
        acc = self.ops.arrays.empty((plan.result(rows).size,), np.int32)

        def run(i: int) -> None:
            w = weights[i % len(weights)].matrix
            plan.run(acc.data.ptr, w.data.ptr, x.data.ptr, rows, self.ops.stream.ptr)

        with self.ops.arrays.current():
            run(0)  # chooses an algorithm, which cannot be captured
        return run

    def _weight(self, n: int, k: int, seed: int, scale: float = 1e-4) -> Weight:
        codes = cast(np.ndarray, RandomMatrix((n, k), np.int8, seed))
        return self.ops.weight([Int8Weight(codes, np.full(n, scale, np.float32))])

    def _random(self, rows: int, columns: int, dtype: type) -> cp.ndarray:
        matrix = self.ops.arrays.rows(rows, columns, dtype)
        self.ops.kernels.pointwise.fill_random(matrix, seed=0)
        return matrix
