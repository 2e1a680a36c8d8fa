"""Measuring on an NVIDIA GPU: by events on the backend's stream, and launch by launch, without tools beside CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, cast

import cupy as cp
import numpy as np

from ..backend.cuda.arrays import PAD
from ..backend.cuda.backend import CudaBackend
from ..backend.cuda.deferred import Codes, Weight
from ..backend.cuda.launches import MATVEC_TO_HALF, ceil_div
from ..backend.quantization import Int8Weight
from ..backend.random_matrix import RandomMatrix
from ..backend.values import Norm
from ..cuda.kernels.gemm.layouts import Layout, round_up
from ..cuda.kernels.gemm.skinny_gemm import Output
from ..cuda.runtime import libraries
from ..cuda.runtime.cublaslt import Order
from ..cuda.runtime.kernel import Kernel, Module
from ..memory.device import measure_speeds
from .cases import MATRICES, PRODUCT_ROWS, WIDTHS, Case, in_turn, layer_norm, matvec, quantize, rms_norm, softmax
from .instruments import Ceilings, Instruments, Span

RUNS_AT_ONCE = 10
"""Runs of a kernel in one recording."""
HOLD_READS = 100
"""Reads of the whole buffer that keep the GPU busy while the host launches a step: 20 ms or more."""
PRODUCT_SIZE = 8192
ELEMENTS = 1 << 26
"""Of the matrices that row kernels are timed on: 128 to 256 MiB, several times what a GPU's cache holds."""
WEIGHT_BYTES = 256 << 20
"""Of the weights that products are timed on, in turn: so much that no cache holds them."""


class CudaInstruments(Instruments):
    """Of a GPU: device time by events, kernels by the device's observer, memory by the arena."""

    ops: CudaBackend

    def __init__(self, ops: CudaBackend, ceiling_bytes: int = 1 << 30):
        super().__init__(ops, ceiling_bytes)

    def time(self, work: Callable[[], Any]) -> tuple[float, Any]:
        start, end = cp.cuda.Event(), cp.cuda.Event()
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
        return self.ops.loader.streamed_bytes

    # -- limits -------------------------------------------------------------------------------------------------------

    def ceilings(self) -> Ceilings:
        """Read by a kernel that does nothing else, copy and link by the driver, and int8 products by the backend's best
        plan.
        """
        runtime, stream = cp.cuda.runtime, self.ops.stream.ptr
        data = self._random(self.ceiling_bytes // 1024, 1024, np.int8)
        target = self.ops.arrays.empty(data.shape, data.dtype)
        copy = (target.data.ptr, data.data.ptr, data.nbytes, runtime.memcpyDeviceToDevice, stream)
        read_seconds = self.plain_seconds_each(in_turn(self._reader(data), ()))
        copy_seconds = self.plain_seconds_each(in_turn(runtime.memcpyAsync, copy))
        size = PRODUCT_SIZE
        product_seconds = self.plain_seconds_each(self._product(size, size, size))
        link = measure_speeds(self.ops.device).link
        return Ceilings(data.nbytes / read_seconds, 2 * data.nbytes / copy_seconds, 2 * size**3 / product_seconds, link)

    def _reader(self, data: cp.ndarray) -> Callable[[], None]:
        kernel: Kernel = Module(self.ops.device, "rowwise/bandwidth.cu", ["read_all"]).kernel("read_all", "pqp")
        out, grid = self.ops.arrays.zeros((1,), np.int32), 4 * self.ops.launches.multiprocessors

        def read() -> None:
            arguments = (data.data.ptr, data.nbytes // 16, out.data.ptr)
            kernel(grid, 512, arguments, stream=self.ops.stream.ptr, moved=data.nbytes)

        return read

    # -- inside a step ------------------------------------------------------------------------------------------------

    def trace(self, step: Callable[[], Any]) -> list[Span]:
        """The launches of one ``step()`` in order, as it is run without a graph, each between two events.

        The events keep kernels from overlapping, and a pair takes a few microseconds of its own where a kernel is
        shorter. The GPU is kept busy until everything is launched, so that the gaps are its own and not the host's.
        """
        step()
        hold = self._reader(self._random(self.ceiling_bytes // 1024, 1024, np.int8))
        seen: list[tuple[str, int, cp.cuda.Event, cp.cuda.Event]] = []

        @contextmanager
        def observer(name: str, moved: int, stream: int) -> Iterator[None]:
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(self.ops.stream)
            yield
            end.record(self.ops.stream)
            seen.append((name, moved, start, end))

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
            Span(name.removeprefix("bminf::"), cp.cuda.get_elapsed_time(start, end) / 1e3, moved, gap)
            for (name, moved, start, end), gap in zip(seen, [*gaps, 0.0], strict=True)
        ]

    # -- kernels ------------------------------------------------------------------------------------------------------

    def seconds_each(self, run: Callable[[int], Any], runs: int = 7) -> float:
        """By recordings of several runs, so that the host's time does not count."""

        def several() -> None:
            for i in range(RUNS_AT_ONCE):
                run(i)

        work = self.ops.repeated(several)
        for _ in range(3):  # the third records
            work()
        return median(self.time(work)[0] for _ in range(runs)) / RUNS_AT_ONCE

    def plain_seconds_each(self, run: Callable[[int], Any]) -> float:
        """By events around several runs; on the matrices of :data:`ELEMENTS` the GPU takes longer than the host."""

        def several() -> None:
            with self.ops.arrays.current():
                for i in range(RUNS_AT_ONCE):
                    run(i)

        return self.best(several) / RUNS_AT_ONCE

    def kernels(self) -> Iterator[Case]:
        for width in WIDTHS:
            yield from self._row_cases(ELEMENTS // width, width)
        for rows in PRODUCT_ROWS:
            yield from self._projection_cases(rows, MATRICES[0][0])
        for n, k in MATRICES:
            yield from self._matvec_cases(n, k)
            for rows in PRODUCT_ROWS:
                x, w = self._random(rows, k, np.int8), self._random(n, k, np.int8)
                plain = in_turn(lambda a, b: a.astype("f") @ b.astype("f").T, (x, w))
                product, nbytes = self._product(rows, n, k, WEIGHT_BYTES), n * k + rows * k + 4 * rows * n
                yield Case("igemm", f"{rows} x {n} x {k}", product, nbytes, 2 * rows * n * k, plain)
                yield from self._finished_cases(rows, n, k)

    def _finished_cases(self, rows: int, n: int, k: int) -> Iterator[Case]:
        """Int8 products from codes to what an operation gives, where one kernel does both, with weights in turn."""
        weights = [self._weight(n, k, seed) for seed in range(ceil_div(WEIGHT_BYTES, n * k))]
        plan, fused, arrays = weights[0].plan, self.ops.fused, self.ops.arrays
        assert plan is not None
        layout, scales = plan.activation(rows), arrays.empty((rows,), np.float32)
        codes = Codes(layout, self._random(1, layout.size, np.int8).data, scales.data)
        with arrays.current():
            scales.fill(1e-2)
        outputs = {
            "igemm to fp16": (Output.HALF, arrays.rows(rows, n, np.float16)),
            "igemm, added to fp32": (Output.ADD, arrays.zeros((rows, round_up(n, PAD)), np.float32)[:, :n]),
            "igemm, gated": (Output.GATED, arrays.rows(rows, n // 2, np.float16)),
        }
        for name, (output, out) in outputs.items():
            if fused.takes(codes, weights[0], output):
                run = in_turn(fused.multiply, *((codes, weight, out, output) for weight in weights))
                moved = n * k + rows * k + out.nbytes * (2 if output is Output.ADD else 1)
                yield Case(name, f"{rows} x {n} x {k}", run, moved, 2 * rows * n * k)

    def _row_cases(self, rows: int, width: int) -> Iterator[Case]:
        """Softmax, norms of the residual stream, and quantization; new results only where there is one in place too."""
        arrays, transform, shape = self.ops.arrays, self.ops.launches.transform, f"{rows} x {width}"
        half = self._random(rows, width, np.float16)
        with arrays.current():
            residual = half.astype(np.float32)
        gain, bias = (self.ops.vector(np.full(width, v, np.float32)) for v in (1.5, 0.25))
        out, codes = arrays.rows(rows, width, np.float16), arrays.rows(rows, width, np.int8)
        layout = Layout(Order.ROW, rows, width, round_up(width, PAD))
        coded = Codes(layout, codes.data, arrays.empty((rows,), np.float32).data)
        rms, layer = Norm(gain, 1e-5), Norm(gain, 1e-5, bias, center=True)
        size = rows * width
        yield Case("softmax", shape, in_turn(self.ops.softmax, (residual,)), 8 * size,
                   plain=in_turn(softmax, (cp, residual)))  # fmt: skip
        yield Case("softmax, in place", shape, lambda _: self.ops.softmax(residual, out=residual), 8 * size)
        with arrays.current():
            residual[...] = half
        yield Case("rms_norm", shape, in_turn(transform, (None, out, residual, rms)), 6 * size,
                   plain=in_turn(rms_norm, (cp, residual, gain)))  # fmt: skip
        yield Case("layer_norm", shape, in_turn(transform, (None, out, residual, layer)), 6 * size,
                   plain=in_turn(layer_norm, (cp, residual, gain, bias)))  # fmt: skip
        yield Case("quantize", shape, in_turn(transform, (half, coded)), 3 * size,
                   plain=in_turn(quantize, (cp, half)))  # fmt: skip
        yield Case("rms_norm and quantize", shape, in_turn(transform, (None, coded, residual, rms)),
                   5 * size, plain=in_turn(lambda *a: quantize(cp, rms_norm(*a)), (cp, residual, gain)))  # fmt: skip
        yield Case("rms_norm to fp32, in place", shape, lambda _: self.ops.norm(residual, rms, out=residual), 8 * size)

    def _projection_cases(self, rows: int, width: int) -> Iterator[Case]:
        """A square projection from fp16 to fp16, quantizing included, and the same written over its input."""
        weight = self._weight(width, width, 0, 1 / (73.6 * width**0.5))  # results as large as inputs, run after run
        x, nbytes, operations = self._random(rows, width, np.float16), width * (width + 4 * rows), 2 * rows * width**2
        shape = f"{rows} x {width} x {width}"
        yield Case("projection", shape, lambda _: self.ops.linear(
            x, weight, out=self.ops.arrays.rows(rows, width, np.float16)), nbytes, operations)  # fmt: skip
        run = in_turn(self.ops.linear, (x, weight, False, x))
        yield Case("projection, in place", shape, run, nbytes, operations)

    def _matvec_cases(self, n: int, k: int) -> Iterator[Case]:
        """One row times a weight, over several weights in turn, as a model's layers are."""
        weights = [self._weight(n, k, seed) for seed in range(ceil_div(WEIGHT_BYTES, n * k))]
        if not weights[0].is_plain:
            return
        x, out = self._random(1, k, np.float16), self.ops.arrays.rows(1, n, np.float16)
        plain = [(cp, x, w.matrix.reshape(-1, w.pitch)[:n, :k], w.scale) for w in weights]
        yield Case("matvec", f"1 x {n} x {k}", in_turn(self.ops.launches.matvec, *(
            (x, None, w, out, MATVEC_TO_HALF) for w in weights)), n * k, plain=in_turn(matvec, *plain))  # fmt: skip

    def _product(self, rows: int, n: int, k: int, in_all: int = 0) -> Callable[[int], None]:
        """An int8 product from codes to int32 sums, over so many weights in turn that they have ``in_all`` bytes."""
        weights = [self._weight(n, k, seed) for seed in range(max(1, ceil_div(in_all, n * k)))]
        plan = weights[0].plan
        assert plan is not None
        x = self._random(1, plan.activation(rows).size, np.int8)
        acc = self.ops.arrays.empty((plan.result(rows).size,), np.int32)

        def run(i: int) -> None:
            w = weights[i % len(weights)].matrix
            plan.run(acc.data.ptr, w.data.ptr, x.data.ptr, rows, self.ops.stream.ptr)

        with self.ops.arrays.current():
            run(0)  # chooses an algorithm, which cannot be recorded
        return run

    def _weight(self, n: int, k: int, seed: int, scale: float = 1e-4) -> Weight:
        codes = cast(np.ndarray, RandomMatrix((n, k), np.int8, seed))
        return self.ops.weight([Int8Weight(codes, np.full(n, scale, np.float32))])

    def _random(self, rows: int, columns: int, dtype: type) -> cp.ndarray:
        matrix = self.ops.arrays.rows(rows, columns, dtype)
        self.ops.launches.fill_random(matrix, seed=0)
        return matrix
