"""The work of a migration: read a block of rows, quantize it, write it, on several threads.

A block is about a mebibyte of fp32, so that everything that happens to it happens in a core's cache, and memory does
not grow with the size of a tensor. Threads suffice: NumPy, reading, writing and hashing all release the interpreter's
lock. Blocks are independent but for one thing: the scales of a tensor are fp16 unless one of its rows is too small for
that, which is known when the last block has been seen. Then the tensor is converted again with fp32 scales, over what
was written; that is rare.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from ..backend.quantization import exact_scales, fits_fp16, round_to_codes, row_maxima, rows_per_block
from ._errors import checkpoint_error
from .compressed_tensors import pack, packed_width
from .manifest import TensorReport
from .reader import Checkpoint
from .recipe import Scheme
from .tensor_file import DTYPES, TensorInfo
from .weight_rewrite import UNTREATED, Treatment
from .writer import CheckpointWriter, Declared

Progress = Callable[[int, int, str], None]
"""Called with the bytes of the source that are done, all of them, and the name of the tensor at work."""


@dataclass(frozen=True)
class Planned:
    """A tensor of the source and what becomes of it."""

    name: str
    info: TensorInfo
    scheme: Scheme
    treatment: Treatment = UNTREATED

    @property
    def module(self) -> str:
        """The layer that a weight belongs to."""
        return self.name.removesuffix(".weight")

    @property
    def scale_name(self) -> str:
        """The tensor that holds the scales."""
        return f"{self.module}.weight_scale"

    @property
    def data_name(self) -> str:
        """The tensor that holds the codes, or the unchanged values."""
        return f"{self.module}.weight_packed" if self.scheme is Scheme.W8A16 else self.name

    def outputs(self) -> dict[str, Declared]:
        """The tensors to be written for it; the scales with the widest type that they may get."""
        if self.scheme is Scheme.FLOAT:
            return {self.name: Declared(self.info.dtype, self.info.shape)}
        rows, columns = self.info.shape
        others = {self.scale_name: Declared("F32", (rows, 1))}
        if self.treatment.outliers is not None:
            count = len(self.treatment.outliers)
            others[f"{self.module}.outlier_columns"] = Declared("I32", (count,))
            others[f"{self.module}.outlier_weight"] = Declared("F16", (rows, count))
        if self.scheme is Scheme.W8A8:
            return {self.name: Declared("I8", (rows, columns)), **others}
        shape = {f"{self.module}.weight_shape": Declared("I64", (2,))}
        return {self.data_name: Declared("I32", (rows, packed_width(columns))), **shape, **others}

    @property
    def rows(self) -> int:
        """How many rows the tensor has, all axes but the last taken together."""
        return math.prod(self.info.shape[:-1])

    @property
    def row_elements(self) -> int:
        """The length of a row."""
        return math.prod(self.info.shape[-1:])

    @property
    def row_bytes(self) -> int:
        """The size of a row in the source."""
        return self.row_elements * DTYPES[self.info.dtype].itemsize


@dataclass(frozen=True)
class Block:
    """Rows ``start`` to ``stop`` of a tensor; ``wide``: with fp32 scales."""

    plan: Planned
    start: int
    stop: int
    wide: bool = False

    @property
    def nbytes(self) -> int:
        """Its size in the source."""
        return (self.stop - self.start) * self.plan.row_bytes


@dataclass(frozen=True)
class Converted:
    """What a block gave, each per row: scales, and sums of squares of weights and errors in units of the scale.

    Empty for a block that is copied. ``bad_row`` is the first row of the tensor with a NaN or an infinity; ``misfit``
    says that the scales need fp32. Either way the block was not written.
    """

    scale: np.ndarray = field(default_factory=lambda: np.empty(0, np.float16))
    signal: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    noise: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    bad_row: int | None = None
    misfit: bool = False


class Converter:
    """Converts the tensors of ``source`` and writes them with ``writer``. A context manager that ends its threads."""

    def __init__(self, source: Checkpoint, writer: CheckpointWriter, workers: int, progress: Progress | None = None):
        self.source = source
        self.writer = writer
        self.workers = workers
        self.progress = progress
        self._pool = ThreadPoolExecutor(workers, "convert")
        self._scratch = threading.local()

    def __enter__(self) -> Converter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, plans: Sequence[Planned]) -> list[TensorReport]:
        """Convert everything, in the given order.

        Raises :class:`CheckpointError` that lists every tensor with a NaN or an infinity.
        """
        total, done = sum(plan.info.nbytes for plan in plans), 0
        reports, bad = [], []
        parts: list[Converted] = []
        for block, part in self._convert_all(block for plan in plans for block in _blocks(plan)):
            parts.append(part)
            done += block.nbytes
            if self.progress:
                self.progress(done, total, block.plan.name)
            if block.stop < block.plan.rows:
                continue
            bad_rows = [part.bad_row for part in parts if part.bad_row is not None]
            if bad_rows:
                bad.append(f"tensor {block.plan.name!r} holds a NaN or an infinity, first in row {bad_rows[0]}")
            else:
                reports.append(self._finish(block.plan, parts))
            parts = []
        if bad:
            raise checkpoint_error(self.source.path, bad, "no int8 scale fits such a row: export the checkpoint again")
        return reports

    def _finish(self, plan: Planned, parts: list[Converted]) -> TensorReport:
        """Bring the parts of a tensor together, after converting it again if its scales need fp32."""
        if plan.scheme is Scheme.FLOAT:
            return _report(plan, plan.info.nbytes)
        if any(part.misfit for part in parts):
            parts = [part for _, part in self._convert_all(_blocks(plan, wide=True))]
        scale, signal, noise = (np.concatenate([getattr(p, f) for p in parts]) for f in ("scale", "signal", "noise"))
        self.writer.write_late(plan.scale_name, scale[:, None])
        if plan.scheme is Scheme.W8A16:
            self.writer.write(f"{plan.module}.weight_shape", np.array(plan.info.shape, np.int64))
        if plan.treatment.outliers is not None:
            self.writer.write(f"{plan.module}.outlier_columns", plan.treatment.outliers)
        size = sum(declared.nbytes for declared in plan.outputs().values())
        return _report(plan, size - 4 * scale.size + scale.nbytes, scale, signal, noise)

    def _convert_all(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Converted]]:
        """Convert on all threads, a few blocks ahead, and yield the results in order."""
        pending: deque[tuple[Block, Future[Converted]]] = deque()
        for block in blocks:
            pending.append((block, self._pool.submit(self._convert, block)))
            if len(pending) > 4 * self.workers:
                block, future = pending.popleft()
                yield block, future.result()
        for block, future in pending:
            yield block, future.result()

    def _convert(self, block: Block) -> Converted:
        plan = block.plan
        raw = self._buffer("raw", block.nbytes, np.uint8)
        self.source.read_into(plan.name, raw.data, block.start * plan.row_bytes)
        values = raw.view(DTYPES[plan.info.dtype]).reshape(block.stop - block.start, plan.row_elements)
        _multiply(values, plan.treatment, block)
        return self._copy(block, values) if plan.scheme is Scheme.FLOAT else self._quantize(block, values)

    def _copy(self, block: Block, values: np.ndarray) -> Converted:
        finite = np.isfinite(values)
        if not finite.all():
            return Converted(bad_row=block.start + int(np.argmin(finite.all(axis=1))))
        self.writer.write(block.plan.name, values, block.start * block.plan.row_bytes)
        return Converted()

    def _quantize(self, block: Block, values: np.ndarray) -> Converted:
        if values.dtype != np.float32:
            widened = self._buffer("fp32", values.size, np.float32).reshape(values.shape)
            np.copyto(widened, values)
            values = widened
        kept = self._take_outliers(block.plan, values)
        row_max = row_maxima(values)
        finite = np.isfinite(row_max) & np.isfinite(kept).all(axis=1)
        if not finite.all():
            return Converted(bad_row=block.start + int(np.argmin(finite)))
        scale = _given_scales(block) if block.plan.treatment.codes is not None else exact_scales(row_max)
        if not block.wide:
            if not fits_fp16(scale):
                return Converted(misfit=True)
            scale = scale.astype(np.float16)
        ratio = self._buffer("ratio", values.size, np.float32).reshape(values.shape)
        rounded = self._buffer("rounded", values.size, np.float32).reshape(values.shape)
        codes = self._buffer("codes", values.size, np.int8).reshape(values.shape)
        round_to_codes(values, scale, ratio, rounded)
        if block.plan.treatment.codes is not None:
            np.copyto(rounded, block.plan.treatment.codes[block.start : block.stop])
        np.copyto(codes, rounded, casting="unsafe")
        stored = pack(codes) if block.plan.scheme is Scheme.W8A16 else codes
        self.writer.write(block.plan.data_name, stored, block.start * stored.shape[1])
        if kept.size:
            self.writer.write(f"{block.plan.module}.outlier_weight", kept, block.start * kept.shape[1] * kept.itemsize)
        signal = np.einsum("ij,ij->i", ratio, ratio)
        np.subtract(ratio, rounded, out=ratio)
        return Converted(scale, signal, np.einsum("ij,ij->i", ratio, ratio))

    def _take_outliers(self, plan: Planned, values: np.ndarray) -> np.ndarray:
        """The columns of ``values`` ``[rows, in]`` that stay fp16, ``[rows, n]``; zeros are left behind."""
        if plan.treatment.outliers is None:
            return np.empty((len(values), 0), np.float16)
        with np.errstate(over="ignore"):
            kept = values[:, plan.treatment.outliers].astype(np.float16)
        values[:, plan.treatment.outliers] = 0
        return kept

    def _buffer(self, name: str, size: int, dtype: type) -> np.ndarray:
        """Memory of this thread, used again for every block: fresh pages would cost more than the arithmetic."""
        buffers = self._scratch.__dict__
        if name not in buffers or buffers[name].size < size:
            buffers[name] = np.empty(size, dtype)
        return buffers[name][:size]


def _given_scales(block: Block) -> np.ndarray:
    """The scales that a calibration computed for the rows of a block, fp32."""
    treatment, rows = block.plan.treatment, slice(block.start, block.stop)
    assert treatment.scale is not None
    scale = treatment.scale[rows].astype(np.float32)
    return scale if treatment.row_factors is None else scale * treatment.row_factors[rows]


def _multiply(values: np.ndarray, treatment: Treatment, block: Block) -> None:
    """Move the factors of a calibration into rows ``[rows, in]``; powers of two are exact in every float type."""
    with np.errstate(over="ignore"):
        if treatment.row_factors is not None:
            values *= treatment.row_factors[block.start : block.stop, None].astype(values.dtype)
        if treatment.column_factors is not None:
            values *= treatment.column_factors.astype(values.dtype)


def _blocks(plan: Planned, wide: bool = False) -> Iterator[Block]:
    step = rows_per_block(plan.row_elements)
    for start in range(0, max(plan.rows, 1), step):
        yield Block(plan, start, min(start + step, plan.rows), wide)


def _report(plan: Planned, size: int, *per_row: np.ndarray) -> TensorReport:
    """The report of a tensor that takes ``size`` bytes now; ``per_row`` are its scales, signal and noise."""
    report = TensorReport(plan.name, plan.info.shape, plan.info.dtype, plan.scheme, plan.info.nbytes, size)
    if not per_row or per_row[0].size == 0:
        return report
    scale, signal, noise = (array.astype(np.float64) for array in per_row)
    report = replace(report, scale_min=float(scale.min()), scale_max=float(scale.max()))
    if not noise.any():
        return report
    ratio = np.divide(signal, noise, out=np.full_like(signal, np.inf), where=noise > 0)
    worst = int(np.argmin(ratio))
    weighted = scale**2
    return replace(
        report,
        snr_db=decibels((weighted * signal).sum() / (weighted * noise).sum()),
        worst_row=worst,
        worst_row_snr_db=decibels(ratio[worst]),
    )


def decibels(ratio: float) -> float:
    """A ratio of powers in decibels."""
    return 10 * math.log10(ratio)
