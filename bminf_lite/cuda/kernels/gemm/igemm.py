"""Exact int8 products on the GPU: ``acc = x @ w.T``, int8 times int8 summed in int32.

:class:`Igemm` picks the best plan that works on its GPU. A plan is trusted only after it has computed products known
beforehand, bit for bit; one that fails gives way to the next with a warning. Each weight shape has one :class:`Plan`,
which says how weights, activations and results lie in memory (:class:`.layouts.Layout`), lays a weight out once, and
runs the product with addresses alone. After the first run of a shape, a run allocates nothing and waits for nothing,
so it may be captured into a graph.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence

import cupy as cp
import numpy as np

from ....errors import DeviceError
from ...runtime.driver import Device
from ...runtime.kernel import Kernel, Module
from .algorithm_store import AlgorithmStore
from .cublaslt_matmul import Multiplier, NoAlgorithm, Prepared, capturing, timed
from .layouts import Layout
from .plans import PlanKind, Product, Shapes, bucket, kinds_for
from .skinny_gemm import FewRows, tiles_for
from .skinny_gemm_hopper import FewRowsHopper

PREPARED_LIMIT = 256
"""Shapes for which a plan keeps descriptors; those not used for longest are dropped beyond."""
MAX_BATCH = 65535
ALIGNMENT = 16
"""Every operand of a plan must lie at a multiple of this many bytes."""
TRIALS = ((1, 1, 1), (33, 70, 100), (128, 256, 512))
"""Rows, out_features and in_features of the products that a plan must get right."""
FEW_ROWS_TRIALS = ((2, 16, 16), (5, 70, 1000), (8, 4096, 528), (13, 300, 2100), (16, 512, 4096), (27, 2000, 600))
"""The same for the kernel that serves a few rows."""


class Igemm:
    """Int8 products on one GPU.

    ``kinds`` are the plans to try in order, by default those for the GPU's compute capability. ``few_rows`` lets plans
    over plain rows take the kernel for a few rows where it is exact and faster.
    """

    def __init__(
        self, device: Device, multiplier: Multiplier, kinds: Sequence[PlanKind] | None = None, few_rows: bool = True
    ) -> None:
        self.device = device
        self._multiplier = multiplier
        self._kinds = tuple(kinds_for(device.compute_capability) if kinds is None else kinds)
        self._plans: dict[tuple[int, int], Plan] = {}
        self.few_rows = FewRowsHopper(device) if device.compute_capability == (9, 0) else FewRows(device)
        self._may_take_few_rows = few_rows
        self._prepare_batched = functools.lru_cache(PREPARED_LIMIT)(self._prepare_uncached)

    @functools.cached_property
    def kind(self) -> PlanKind:
        """The plan in use: the first that is exact on this GPU. Raises ``DeviceError`` where none is."""
        return self._first_exact(self._kinds)

    @functools.cached_property
    def plain_kind(self) -> PlanKind:
        """The plan for operands that are not laid out beforehand."""
        plain = tuple(kind for kind in self._kinds if Shapes(kind, 1, 1).is_plain)
        return self.kind if self.kind in plain else self._first_exact(plain)

    @functools.cached_property
    def trusts_few_rows(self) -> bool:
        """Whether the kernel for a few rows may be taken and computes every trial exactly that it can."""
        if not self._may_take_few_rows:
            return False
        for rows, out_features, in_features in FEW_ROWS_TRIALS:
            plan = Plan(self, Shapes(self.plain_kind, out_features, in_features), few_rows=True)
            if self.few_rows.supports(rows) and not self._is_exact(plan, rows):
                shape = f"{rows} x {in_features} by {out_features} x {in_features}"
                reason = f"a product of {shape} was wrong"
                warning = f"{self.device.name}: the int8 kernel for a few rows is not used, {reason}"
                warnings.warn(warning, RuntimeWarning, stacklevel=3)
                return False
        return True

    def plan(self, out_features: int, in_features: int) -> Plan:
        """The plan for weights ``[out_features, in_features]``, both at least 1."""
        found = self._plans.get((out_features, in_features))
        if found is None:
            found = Plan(self, Shapes(self.kind, out_features, in_features))
            self._plans[out_features, in_features] = found
        return found

    def check(self, kind: PlanKind) -> str | None:
        """Why ``kind`` cannot be trusted on this GPU, in one line, or None if it computes every trial exactly."""
        failures = (self._trial(kind, *trial) for trial in TRIALS)
        return next((failure for failure in failures if failure is not None), None)

    def speed(self, kind: PlanKind, size: int) -> float:
        """10^12 operations per second that ``kind`` reaches on a product of ``size`` rows, outputs and inputs."""
        plan = Plan(self, Shapes(kind, size, size))
        random = cp.random.RandomState(0)
        w, x = (random.randint(-127, 128, (size, size)).astype(np.int8) for _ in range(2))
        weight, acc = plan.pack_weight(w), cp.empty(plan.result(size).size, np.int32)
        buffer, stream = plan.activation(size).pack(x), cp.cuda.get_current_stream().ptr
        run = functools.partial(plan.run, acc.data.ptr, weight.data.ptr, buffer.data.ptr, size, stream)
        run()
        return 2 * size**3 / timed(run, stream, runs=10) / 1e12

    def matmul(self, a: cp.ndarray, b: cp.ndarray, transpose_a: bool = False, transpose_b: bool = False) -> cp.ndarray:
        """``op(a) @ op(b)`` in int32 on CuPy's current stream, where op transposes the last two axes or does nothing.

        ``op(a)`` is int8 ``[..., m, k]``, ``op(b)`` int8 ``[..., k, n]``; the axes before them broadcast. Returns a new
        int32 array ``[..., m, n]``. Sums are exact for k up to 131,071. Raises ``ValueError`` for other dtypes or
        shapes. Operands are copied where they have to be padded, transposed or made contiguous.
        """
        matrices = a.ndim > 1 and b.ndim > 1 and a.dtype == b.dtype == np.int8
        if not matrices or a.shape[-2 if transpose_a else -1] != b.shape[-1 if transpose_b else -2]:
            raise ValueError(
                f"matmul of {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}: both must be int8 matrices whose "
                f"inner sizes agree"
            )
        x, w = a.swapaxes(-1, -2) if transpose_a else a, b if transpose_b else b.swapaxes(-1, -2)
        (m, k), n = x.shape[-2:], w.shape[-2]
        batch = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        count = math.prod(batch)
        if 0 in (m, n, k, count):
            return cp.zeros((*batch, m, n), np.int32)
        shapes = Shapes(self.plain_kind, n, k)
        out, inner = shapes.padded
        xs, ws = _operand(x, batch, m, inner), _operand(w, batch, out, inner)
        acc = cp.empty((count, m, out), np.int32)
        for first in range(0, count, MAX_BATCH):
            part = slice(first, first + MAX_BATCH)
            self._batched(shapes, acc[part], ws if len(ws) == 1 else ws[part], xs if len(xs) == 1 else xs[part])
        return cp.ascontiguousarray(acc[:, :, :n]).reshape(*batch, m, n)

    def _batched(self, shapes: Shapes, acc: cp.ndarray, w: cp.ndarray, x: cp.ndarray) -> None:
        """``acc[i] = x[i] @ w[i].T`` for contiguous, padded arrays of three axes; an operand of one entry repeats."""
        count, rows, stream = len(acc), acc.shape[1], cp.cuda.get_current_stream().ptr
        w_stride, x_stride = (math.prod(v.shape[1:]) if len(v) > 1 else 0 for v in (w, x))
        prepared = self._prepare_batched(shapes, rows, count, w_stride, x_stride)
        if prepared is None:
            self.launch_dp4a(shapes, acc.data.ptr, w.data.ptr, x.data.ptr, rows, stream, count, w_stride, x_stride)
        else:
            prepared.run(w.data.ptr, x.data.ptr, acc.data.ptr, stream)

    def _prepare_uncached(self, shapes: Shapes, rows: int, count: int, w_stride: int, x_stride: int) -> Prepared | None:
        return self.prepare(shapes, shapes.batched(rows, count, w_stride, x_stride), None)

    def prepare(self, shapes: Shapes, product: Product, key: str | None) -> Prepared | None:
        """The cublasLt product of a plan; None where :meth:`launch_dp4a` computes it."""
        if shapes.kind is PlanKind.DP4A:
            return None
        try:
            return self._multiplier.prepare(product, ALIGNMENT, key)
        except NoAlgorithm as error:
            if not shapes.is_plain:
                raise
            warnings.warn(f"{error}; a slower kernel computes it", RuntimeWarning, stacklevel=4)
            return None

    @property
    def store(self) -> AlgorithmStore:
        """What was measured of products on this GPU, by this process and earlier ones."""
        return self._multiplier.store

    def clear_cache(self, stream: int) -> None:
        """Fill the GPU's cache with something that nobody needs."""
        self._multiplier.clear_workspace(stream)

    def launch_dp4a(
        self, shapes: Shapes, acc: int, w: int, x: int, rows: int, stream: int,
        batch: int = 1, w_stride: int = 0, x_stride: int = 0,
    ) -> None:  # fmt: skip
        """The product by the kernel that runs on every GPU; see :meth:`Plan.run`. Strides count elements."""
        out, inner = shapes.padded
        grid = (-(-out // 64), -(-rows // 64), batch)
        args = (acc, w, x, rows, out, inner // 16, rows * out, w_stride // 16, x_stride // 16)
        self._dp4a_kernel(grid, 256, args, stream=stream)

    @functools.cached_property
    def _dp4a_kernel(self) -> Kernel:
        return Module(self.device, "gemm/dp4a.cu", ["igemm_dp4a"]).kernel("igemm_dp4a", "pppiiiqqq")

    def _first_exact(self, kinds: Sequence[PlanKind]) -> PlanKind:
        reasons = []
        for kind in kinds:
            reason = self.check(kind)
            if reason is None:
                return kind
            reasons.append(f"{kind.value}: {reason}")
            warnings.warn(
                f"{self.device.name}: the int8 plan {kind.value} is not used, {reason}", RuntimeWarning, stacklevel=4
            )
        raise DeviceError(f"{self.device.name}: no int8 plan works; " + "; ".join(reasons))

    def _trial(self, kind: PlanKind, rows: int, out_features: int, in_features: int) -> str | None:
        try:
            exact = self._is_exact(Plan(self, Shapes(kind, out_features, in_features)), rows)
        except NoAlgorithm as error:
            return f"cublasLt has no algorithm for it: {error.__cause__ or error}"
        except DeviceError as error:
            return str(error).splitlines()[0]
        return None if exact else f"a product of {rows} x {in_features} by {out_features} x {in_features} was wrong"

    def _is_exact(self, plan: Plan, rows: int) -> bool:
        shapes = plan.shapes
        random = np.random.default_rng(0)
        codes = random.integers(-128, 128, (shapes.out_features, shapes.in_features), np.int8)
        x = random.integers(-128, 128, (rows, shapes.in_features), np.int8)
        layout, result = plan.activation(rows), plan.result(rows)
        # What lies in an activation's padding must not matter.
        buffer = np.full(layout.size, 85, np.int8)
        buffer[layout.offset(np.arange(rows)[:, None], np.arange(shapes.in_features)).ravel()] = x.ravel()
        w, xs, acc = plan.pack_weight(cp.asarray(codes)), cp.asarray(buffer), cp.full(result.size, -1, np.int32)
        plan.run(acc.data.ptr, w.data.ptr, xs.data.ptr, rows, cp.cuda.get_current_stream().ptr)
        exact = x.astype(np.float64) @ codes.astype(np.float64).T  # quicker than NumPy's product of integers
        return np.array_equal(result.unpack(cp.asnumpy(acc)), exact)


class Plan:
    """Products with weights of one shape. Activations and results lie as :meth:`activation` and :meth:`result` say.

    ``few_rows`` says whether the kernel for a few rows computes those: None for whichever is faster, found by timing
    both once for each number of tiles.
    """

    def __init__(self, igemm: Igemm, shapes: Shapes, few_rows: bool | None = None) -> None:
        self.shapes = shapes
        self._igemm = igemm
        self._few_rows = few_rows
        self._few_rows_faster: dict[int, bool] = {}
        self._prepare = functools.lru_cache(PREPARED_LIMIT)(self._prepare_uncached)
        self._activation = functools.lru_cache(PREPARED_LIMIT)(shapes.activation)
        self._result = functools.lru_cache(PREPARED_LIMIT)(shapes.result)

    @property
    def weight(self) -> Layout:
        """Of the weight after :meth:`pack_weight`, padded: int8, at least ``[out_features, in_features]``."""
        return self.shapes.weight

    def activation(self, rows: int) -> Layout:
        """Of activation codes int8 ``[rows, in_features]``; the padding in the buffer may hold anything."""
        return self._activation(rows)

    def result(self, rows: int) -> Layout:
        """Of the sums int32 ``[rows, out_features]``."""
        return self._result(rows)

    def pack_weight(self, codes: cp.ndarray) -> cp.ndarray:
        """Codes int8 ``[out_features, in_features]`` -> int8 ``[weight.size]``, for :meth:`run`; once per weight.

        Where plain rows need no padding this is a view of ``codes``, not a copy.
        """
        expected = (self.shapes.out_features, self.shapes.in_features)
        if codes.shape != expected or codes.dtype != np.int8:
            raise ValueError(f"a weight {codes.dtype} {list(codes.shape)} for a plan of int8 {list(expected)}")
        if self.shapes.is_plain and self.shapes.padded == expected:
            return cp.ascontiguousarray(codes).reshape(-1)
        padded = cp.zeros(self.shapes.padded, np.int8)
        padded[: expected[0], : expected[1]] = codes
        return padded.reshape(-1) if self.shapes.is_plain else self.weight.pack(padded)

    def run(self, acc: int, w: int, x: int, rows: int, stream: int) -> None:
        """Put the product of ``rows`` activations at ``x`` and the weight at ``w`` into ``acc``, on ``stream``.

        ``acc``, ``w`` and ``x`` are device addresses divisible by 16, ``stream`` a ``cudaStream_t`` as an integer.
        """
        if self.takes_few_rows(w, x, rows, stream):
            self._run_few(acc, w, x, rows, stream)
        else:
            self._run_any(acc, w, x, rows, stream)

    def takes_few_rows(self, w: int, x: int, rows: int, stream: int) -> bool:
        """Whether the kernel for a few rows computes the product, which :meth:`run` describes.

        It is timed on these operands when that has to be found out, with memory from CuPy's current allocator.
        """
        known = self.few_rows_verdict(rows)
        if known is None:
            if capturing(stream):
                return False
            known = self._igemm.trusts_few_rows and self._finds_faster(w, x, rows, stream)
            self._few_rows_faster[tiles_for(rows)] = known
        return known

    def few_rows_verdict(self, rows: int) -> bool | None:
        """What :meth:`takes_few_rows` says, None where that has to be found out."""
        if not self.shapes.is_plain or not self._igemm.few_rows.supports(rows):
            return False
        return self._few_rows if self._few_rows is not None else self._few_rows_faster.get(tiles_for(rows))

    def _finds_faster(self, w: int, x: int, rows: int, stream: int) -> bool:
        """Whether the kernel for a few rows is no slower: as is known, or was found before, or by timing it."""
        if self._igemm.few_rows.is_fastest:
            return True
        out, inner = self.shapes.padded
        key, store = f"few rows {self._igemm.few_rows.version} {tiles_for(rows)} {out}x{inner}", self._igemm.store
        verdict = store.verdict(key)
        if verdict is None:
            verdict = self._is_faster(w, x, rows, stream)
            store.decide(key, verdict)
        return verdict

    def _is_faster(self, w: int, x: int, rows: int, stream: int) -> bool:
        """Whether the kernel for a few rows is no slower, timed on the operands of a real product, read from memory."""
        acc = cp.empty(self.result(rows).size, np.int32)

        def seconds(run: Callable[[int, int, int, int, int], None]) -> float:
            def cold() -> None:
                self._igemm.clear_cache(stream)
                run(acc.data.ptr, w, x, rows, stream)

            cold()  # the first run compiles, or chooses an algorithm
            return timed(cold, stream)

        return seconds(self._run_few) <= seconds(self._run_any)

    def _run_few(self, acc: int, w: int, x: int, rows: int, stream: int) -> None:
        out, inner = self.shapes.padded
        moved = self.shapes.product(rows).nbytes
        self._igemm.few_rows.launch(x, 0, w, 0, 0, acc, out, rows, out, inner, stream, moved=moved)

    def _run_any(self, acc: int, w: int, x: int, rows: int, stream: int) -> None:
        prepared = self._prepare(rows)
        if prepared is None:
            self._igemm.launch_dp4a(self.shapes, acc, w, x, rows, stream)
        elif self.shapes.is_plain:
            prepared.run(w, x, acc, stream)
        else:
            prepared.run(x, w, acc, stream)

    def _prepare_uncached(self, rows: int) -> Prepared | None:
        out, inner = self.shapes.padded
        key = f"int8 {self.shapes.kind.value} {bucket(rows)}x{out}x{inner}"
        return self._igemm.prepare(self.shapes, self.shapes.product(rows), key)


def _operand(x: cp.ndarray, batch: tuple[int, ...], rows: int, inner: int) -> cp.ndarray:
    """``x`` ``[..., r, k]`` as contiguous ``[entries, rows, inner]``, zero-padded; 1 entry where all are the same."""
    own = x.shape[:-2]
    if math.prod(own) == 1:
        x = x.reshape(1, *x.shape[-2:])
    else:
        x = cp.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
    if x.shape[1:] == (rows, inner) and x.flags.c_contiguous and x.data.ptr % ALIGNMENT == 0:
        return x
    padded = cp.zeros((len(x), rows, inner), np.int8)
    padded[:, : x.shape[1], : x.shape[2]] = x
    return padded
