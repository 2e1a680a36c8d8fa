"""The conversion of tensors: read a block of rows, quantize it, write it, on several threads.

A block is about a mebibyte of fp32, so its conversion stays in a core's cache, and memory does not grow with the size
of a tensor. Threads suffice, because NumPy, reading and writing release the interpreter's lock. Blocks depend on each
other in one way: the scales of a tensor are fp16 unless a row of any block is too small for that. Then, rarely, the
tensor is converted and written again with fp32 scales.

A thread converts the blocks of one part of a file after another (see :mod:`.checksum`), and hashes each while it is in
the core's cache. So the source is read once, and threads wait for each other once in a part.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..backend.blas_threads import blas_threads
from ..backend.quantization import CODE_MAX, exact_scales, fits_fp16, round_to_codes, row_maxima, rows_per_block
from ..backend.rotation import rotated
from ..errors import checkpoint_error
from .checksum import PART_BYTES, FileChecksums, FileRecord, PartDigest, array_checksum
from .compressed_tensors import pack, packed_width
from .manifest import TensorReport
from .reader import Checkpoint
from .recipe import Scheme
from .tensor_file import DTYPES, TensorInfo
from .weight_rewrite import NO_REWRITE, WeightRewrite
from .writer import CheckpointWriter, TensorDeclaration

LARGEST_WEIGHT = np.float32(2.0**120)
"""256 products of larger ones with activations of 1 exceed fp32."""
STRIP_COLUMNS = 1024
"""Columns of a matrix stored ``[in, out]`` that are converted at once: fewer would make reads too small."""

MXFP4 = "MXFP4"
"""The type of the source, :attr:`.TensorInfo.stored_as`, whose values are few multiples of powers of two."""

Progress = Callable[[int, int, str], None]
"""Called with the bytes of the source that are converted, their total and the name of a tensor."""


@dataclass(frozen=True)
class ConversionTask:
    """A tensor of the source, and how it is converted.

    ``transposed``: from ``[in, out]`` to ``[out, in]``. ``narrowed``: a float tensor from fp32 to fp16. ``repeats``: a
    task before it has the same tensor of the file, as a tied head that becomes a matrix of its own.
    """

    name: str
    info: TensorInfo
    scheme: Scheme
    rewrite: WeightRewrite = NO_REWRITE
    transposed: bool = False
    narrowed: bool = False
    repeats: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.info.shape[::-1] if self.transposed else self.info.shape

    @property
    def packed(self) -> bool:
        """Whether codes are stored four to a word, as other readers expect them without int8 activations."""
        return self.scheme is Scheme.W8A16 and not self.transposed

    @property
    def module(self) -> str:
        """The name of the weight's layer."""
        return self.name.removesuffix(".weight")

    @property
    def scale_name(self) -> str:
        return f"{self.module}.weight_scale"

    @property
    def data_name(self) -> str:
        """The tensor that holds the codes, or the unchanged values."""
        return f"{self.module}.weight_packed" if self.packed else self.name

    def outputs(self) -> dict[str, TensorDeclaration]:
        """The tensors to be written; scales have the widest type that they may get."""
        if self.scheme is Scheme.FLOAT:
            return {self.name: TensorDeclaration("F16" if self.narrowed else self.info.dtype, self.info.shape)}
        rows, columns = self.shape
        others = {self.scale_name: TensorDeclaration("F32", (rows, self.groups))}
        if self.rewrite.outliers is not None:
            count = len(self.rewrite.outliers)
            others[f"{self.module}.outlier_columns"] = TensorDeclaration("I32", (count,))
            others[f"{self.module}.outlier_weight"] = TensorDeclaration("F16", (rows, count))
        if not self.packed:
            return {self.name: TensorDeclaration("I8", (rows, columns)), **others}
        shape = {f"{self.module}.weight_shape": TensorDeclaration("I64", (2,))}
        return {self.data_name: TensorDeclaration("I32", (rows, packed_width(columns))), **shape, **others}

    @property
    def nbytes(self) -> int:
        """The size of :meth:`outputs`."""
        return sum(declared.nbytes for declared in self.outputs().values())

    @property
    def rows(self) -> int:
        """The number of rows of the result, all axes but the last taken together."""
        return math.prod(self.shape[:-1])

    @property
    def groups(self) -> int:
        """The number of groups of columns that have scales of their own."""
        return self.shape[-1] // self.rewrite.group_size if self.rewrite.group_size else 1

    @property
    def has_power_scales(self) -> bool:
        """Whether scales may be powers of two, which hold most blocks of MXFP4 exactly: see :func:`closer_scales`.

        Values that are rotated, or whose codes a calibration has chosen, are no longer those of MXFP4.
        """
        return self.info.stored_as == MXFP4 and self.rewrite.rotation is None and self.rewrite.codes is None

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[-1:])

    @property
    def row_bytes(self) -> int:
        """The size of a row in the source."""
        return self.row_elements * DTYPES[self.info.dtype].itemsize

    @property
    def result_row_bytes(self) -> int:
        """The size of a row of the tensor ``data_name``."""
        return self.outputs()[self.data_name].nbytes // max(self.rows, 1)


@dataclass(frozen=True)
class RowBlock:
    """Rows ``start`` to ``stop`` of a tensor; ``fp32_scale``: with fp32 scales."""

    task: ConversionTask
    start: int
    stop: int
    fp32_scale: bool = False

    @property
    def nbytes(self) -> int:
        """The size in the source."""
        return (self.stop - self.start) * self.task.row_bytes

    @property
    def offset(self) -> int:
        """Where the block begins in its file, if the tensor lies there as it is read."""
        return self.task.info.offset + self.start * self.task.row_bytes


@dataclass(frozen=True)
class ConvertedBlock:
    """The result of a block, per row or group of columns: scales, and sums of squares of weights and errors in scales.

    Empty for a block that is copied, which has a ``checksum`` if it is a whole tensor. ``bad_row`` is the first row of
    the tensor with a NaN, an infinity or a value beyond :data:`LARGEST_WEIGHT`, which is ``bad_value``.
    ``needs_fp32_scale`` says that the scales do not fit fp16. Both mean that the block was not written.
    ``exact`` counts the values of MXFP4 that the codes hold exactly.
    """

    scale: np.ndarray = field(default_factory=lambda: np.empty(0, np.float16))
    signal: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    noise: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    bad_row: int | None = None
    bad_value: float = math.nan
    needs_fp32_scale: bool = False
    checksum: str = ""
    exact: int = 0


class Converter:
    """Converts the tensors of ``source`` and writes them with ``writer``. A context manager that ends its threads.

    ``checksums`` gets the checksums of the scales and of small tensors that are copied, by the names of the results.
    ``row_norms`` gets the norm of each row of int8 matrices, fp32 ``[out]``, by name.
    """

    def __init__(self, source: Checkpoint, writer: CheckpointWriter, workers: int, progress: Progress | None = None):
        self.source = source
        self.writer = writer
        self.workers = workers
        self.progress = progress
        self.checksums: dict[str, str] = {}
        self.row_norms: dict[str, np.ndarray] = {}
        self._scales: dict[str, np.ndarray] = {}
        self._pool = ThreadPoolExecutor(workers, "convert")
        self._scratch = threading.local()
        self._sources = FileChecksums(source.files(), source.path, self._pool)

    def __enter__(self) -> Converter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[ConversionTask]) -> list[TensorReport]:
        """Convert everything, in the given order.

        Raises :class:`CheckpointError` that lists every tensor with a NaN or an infinity.
        """
        total, done = sum(task.info.nbytes for task in tasks), 0
        reports, bad = [], []
        parts: list[ConvertedBlock] = []
        with blas_threads.for_product(1, 1, 1):  # BLAS gets one thread in each thread of the pool
            for block, part in self._convert_all(block for task in tasks for block in _blocks(task)):
                parts.append(part)
                done += block.nbytes
                if self.progress:
                    self.progress(done, total, block.task.name)
                if block.stop < block.task.rows:
                    continue
                wrong = next((part for part in parts if part.bad_row is not None), None)
                if wrong is not None:
                    bad.append(_bad_text(block.task, wrong))
                else:
                    reports.append(self._finish(block.task, parts))
                parts = []
        if bad:
            raise checkpoint_error(self.source.path, bad, "such a model computes nothing: export the checkpoint again")
        return reports

    def scale_rows(self, name: str, factors: np.ndarray) -> None:
        """Multiply the scales of a matrix by powers of two, fp32 ``[out]``, after :meth:`run`; they are fp32 then."""
        self._write_scale(name, self._scales[name].astype(np.float32) * factors[:, None])

    def _write_scale(self, name: str, scale: np.ndarray) -> None:
        """Write scales ``[out, groups]``."""
        tensor = f"{name.removesuffix('.weight')}.weight_scale"
        self._scales[name] = scale
        self.writer.write_late(tensor, scale)
        self.checksums[tensor] = array_checksum(scale)

    def source_records(self) -> list[FileRecord]:
        """The checksums of the source's files, after :meth:`run`."""
        return self._sources.records()

    def result_checksums(self, files: Sequence[Path], folder: Path) -> FileChecksums:
        """The checksums of ``files`` in ``folder``, whose computation has begun."""
        checksums = FileChecksums(files, folder, self._pool)
        checksums.start()
        return checksums

    def _finish(self, task: ConversionTask, parts: list[ConvertedBlock]) -> TensorReport:
        """Complete a tensor, after converting it again if its scales need fp32."""
        if task.scheme is Scheme.FLOAT:
            if parts[0].checksum:
                self.checksums[task.name] = parts[0].checksum
            return tensor_report(task, task.nbytes)
        if any(part.needs_fp32_scale for part in parts):
            parts = [part for _, part in self._convert_all(_blocks(task, fp32_scale=True))]
        scale, signal, noise = (np.concatenate([getattr(p, f) for p in parts]) for f in ("scale", "signal", "noise"))
        norms = (scale.astype(np.float32) * np.sqrt(signal)).reshape(-1, task.groups)
        self.row_norms[task.name] = norms[:, 0] if task.groups == 1 else np.sqrt((norms**2).sum(axis=1))
        self._write_scale(task.name, scale.reshape(-1, task.groups))
        if task.packed:
            self.writer.write(f"{task.module}.weight_shape", np.array(task.shape, np.int64))
        if task.rewrite.outliers is not None:
            self.writer.write(f"{task.module}.outlier_columns", task.rewrite.outliers)
        report = tensor_report(task, task.nbytes - 4 * scale.size + scale.nbytes, scale, signal, noise)
        if not task.has_power_scales:
            return report
        return replace(report, exact_share=sum(part.exact for part in parts) / max(math.prod(task.shape), 1))

    def _convert_all(self, blocks: Iterable[RowBlock]) -> Iterator[tuple[RowBlock, ConvertedBlock]]:
        """Convert a few parts of files ahead on all threads, and yield the results in order."""
        pending: deque[Future[list[tuple[RowBlock, ConvertedBlock]]]] = deque()
        for (file, part), group in itertools.groupby(blocks, lambda b: (b.task.info.file, b.offset // PART_BYTES)):
            pending.append(self._pool.submit(self._convert_part, list(group), self._sources.take_part(file, part)))
            if len(pending) > 2 * self.workers:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()

    def _convert_part(
        self, blocks: Sequence[RowBlock], digest: PartDigest | None
    ) -> list[tuple[RowBlock, ConvertedBlock]]:
        """Convert the blocks that begin in one part of a file, hash the part, and begin to write the results."""
        converted = [(block, self._convert(block, digest)) for block in blocks]
        for task, group in itertools.groupby(blocks, lambda block: block.task):
            rows = [(block.start, block.stop) for block in group]
            first, size = rows[0][0] * task.result_row_bytes, (rows[-1][1] - rows[0][0]) * task.result_row_bytes
            self.writer.start_writeback(task.data_name, first, size)
        if digest is not None:
            digest.digest()
        return converted

    def _convert(self, block: RowBlock, digest: PartDigest | None) -> ConvertedBlock:
        task = block.task
        raw = self._buffer("raw", block.nbytes, np.uint8)
        if task.transposed:
            self._read_columns(block, raw)
        else:
            self.source.read_into(task.name, raw.data, block.start * task.row_bytes)
            if digest is not None and self.source.is_verbatim(task.name):
                digest.update(raw.data, block.offset)
        values = raw.view(DTYPES[task.info.dtype]).reshape(block.stop - block.start, task.row_elements)
        _apply_factors(values, task.rewrite, block)
        return self._copy(block, values) if task.scheme is Scheme.FLOAT else self._quantize(block, values)

    def _read_columns(self, block: RowBlock, raw: np.ndarray) -> None:
        """Fill ``raw`` with columns of the source as rows, for a matrix that is stored ``[in, out]``."""
        task = block.task
        dtype, (inputs, outputs) = DTYPES[task.info.dtype], task.info.shape
        strip = self._buffer("strip", block.nbytes, np.uint8).reshape(inputs, -1)
        for row in range(inputs):
            self.source.read_into(task.name, strip[row].data, (row * outputs + block.start) * dtype.itemsize)
        raw.view(dtype).reshape(-1, inputs)[...] = strip.view(dtype).T

    def _copy(self, block: RowBlock, values: np.ndarray) -> ConvertedBlock:
        fits = np.isfinite(values) if values.dtype == np.float16 else np.abs(values) <= LARGEST_WEIGHT
        if not fits.all():
            return _bad_block(block, values, fits.all(axis=1))
        if block.task.narrowed:
            values = values.astype(np.float16)
        self.writer.write(block.task.name, values, block.start * block.task.result_row_bytes)
        whole = block.nbytes == block.task.info.nbytes
        return ConvertedBlock(checksum=array_checksum(values) if whole else "")

    def _quantize(self, block: RowBlock, values: np.ndarray) -> ConvertedBlock:
        task = block.task
        if values.dtype != np.float32:
            widened = self._buffer("fp32", values.size, np.float32).reshape(values.shape)
            np.copyto(widened, values)
            values = widened
        if block.task.rewrite.rotation is not None:
            stored_fits = row_maxima(values) <= LARGEST_WEIGHT
            if not stored_fits.all():
                return _bad_block(block, values, stored_fits)  # which names the value in the file
            values = rotated(values, block.task.rewrite.rotation)
        kept = self._extract_outliers(block.task, values)
        rows = len(values)
        values = values.reshape(rows * task.groups, -1)  # each group of columns is quantized as a row of its own
        row_max = row_maxima(values)
        fits = (row_max <= LARGEST_WEIGHT).reshape(rows, -1).all(axis=1) & np.isfinite(kept).all(axis=1)
        if not fits.all():
            return _bad_block(block, values.reshape(rows, -1), fits)
        scale = _calibrated_scales(block) if block.task.rewrite.codes is not None else exact_scales(row_max)
        if task.has_power_scales:
            scale = closer_scales(values, scale)
        if not block.fp32_scale:
            if not fits_fp16(scale):
                return ConvertedBlock(needs_fp32_scale=True)
            scale = scale.astype(np.float16)
        ratio = self._buffer("ratio", values.size, np.float32).reshape(values.shape)
        rounded = self._buffer("rounded", values.size, np.float32).reshape(values.shape)
        codes = self._buffer("codes", values.size, np.int8).reshape(values.shape)
        round_to_codes(values, scale, ratio, rounded)
        if block.task.rewrite.codes is not None:
            np.copyto(rounded, block.task.rewrite.codes[block.start : block.stop])
        np.copyto(codes, rounded, casting="unsafe")
        codes = codes.reshape(rows, -1)
        stored = pack(codes) if block.task.packed else codes
        self.writer.write(block.task.data_name, stored, block.start * stored.shape[1])
        if kept.size:
            self.writer.write(f"{block.task.module}.outlier_weight", kept, block.start * kept.shape[1] * kept.itemsize)
        signal = _sums_of_squares(ratio)
        np.subtract(ratio, rounded, out=ratio)
        exact = ratio.size - np.count_nonzero(ratio) if task.has_power_scales else 0
        return ConvertedBlock(scale, signal, _sums_of_squares(ratio), exact=int(exact))

    def _extract_outliers(self, task: ConversionTask, values: np.ndarray) -> np.ndarray:
        """Replace the columns of ``values`` ``[rows, in]`` that stay fp16 by zeros, and return them, ``[rows, n]``."""
        if task.rewrite.outliers is None:
            return np.empty((len(values), 0), np.float16)
        with np.errstate(over="ignore"):
            kept = values[:, task.rewrite.outliers].astype(np.float16)
        values[:, task.rewrite.outliers] = 0
        return kept

    def _buffer(self, name: str, size: int, dtype: type) -> np.ndarray:
        """Memory of this thread, reused for every block: fresh pages would cost more than the arithmetic."""
        buffers: dict[str, np.ndarray] = self._scratch.__dict__
        if name not in buffers or buffers[name].size < size:
            buffers[name] = np.empty(size, dtype)
        return buffers[name][:size]


def _bad_block(block: RowBlock, values: np.ndarray, fits: np.ndarray) -> ConvertedBlock:
    """The result of a block with rows that do not fit."""
    row = int(np.argmin(fits))
    largest = values[row][np.argmax(np.abs(values[row].astype(np.float32)))]  # a NaN, if there is one
    return ConvertedBlock(bad_row=block.start + row, bad_value=float(largest))


def _bad_text(task: ConversionTask, wrong: ConvertedBlock) -> str:
    where = f", first in row {wrong.bad_row}" if len(task.shape) > 1 else ""
    if math.isfinite(wrong.bad_value) and abs(wrong.bad_value) > LARGEST_WEIGHT:
        return f"tensor {task.name!r} holds {wrong.bad_value:.3g}{where}, and sums of such values are infinite"
    return f"tensor {task.name!r} holds a NaN or an infinity{where}"


def _sums_of_squares(rows: np.ndarray) -> np.ndarray:
    """The sum of squares of each row, fp32 ``[rows, in]`` -> fp32 ``[rows]``, by BLAS."""
    sums: np.ndarray = np.matmul(rows[:, None, :], rows[:, :, None])[:, 0, 0]
    return sums


def closer_scales(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Of each row the scale, or the next power of two above it, whichever is closer: ``[rows, in]``, fp32 ``[rows]``.

    A value of MXFP4 is ``k * 2 ** (e - 1)`` with a whole ``|k| <= 12`` and the exponent ``e`` of its block. So the
    power holds blocks exactly whose exponent is at most 3 below the largest of the row: ``12 * 2 ** 3 < 127``.
    """
    mantissa, exponent = np.frexp(scale)
    power: np.ndarray = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))

    def error(scales: np.ndarray) -> np.ndarray:
        ratio = values / scales[:, None]
        return _sums_of_squares(ratio - np.clip(np.rint(ratio), -CODE_MAX, CODE_MAX)) * scales.astype(np.float64) ** 2

    return np.where(error(power) <= error(scale), power, scale).astype(np.float32)


def _calibrated_scales(block: RowBlock) -> np.ndarray:
    """The scales that a calibration computed for the rows of a block, fp32."""
    rewrite, rows = block.task.rewrite, slice(block.start, block.stop)
    assert rewrite.scale is not None
    scale = rewrite.scale[rows].astype(np.float32)
    return scale if rewrite.row_factors is None else scale * rewrite.row_factors[rows]


def _apply_factors(values: np.ndarray, rewrite: WeightRewrite, block: RowBlock) -> None:
    """Multiply rows ``[rows, in]`` by the factors of a calibration; powers of two are exact in every float type."""
    by_row, by_column = rewrite.row_factors, rewrite.column_factors
    if block.task.transposed:
        by_row, by_column = by_column, by_row
    with np.errstate(over="ignore"):
        if by_row is not None:
            values *= by_row[block.start : block.stop, None].astype(values.dtype)
        if by_column is not None:
            values *= by_column.astype(values.dtype)


def _blocks(task: ConversionTask, fp32_scale: bool = False) -> Iterator[RowBlock]:
    step = rows_per_block(task.row_elements)
    if task.transposed:
        step = max(step, STRIP_COLUMNS)
    for start in range(0, max(task.rows, 1), step):
        yield RowBlock(task, start, min(start + step, task.rows), fp32_scale)


def tensor_report(task: ConversionTask, size: int, *per_row: np.ndarray) -> TensorReport:
    """The report of a tensor of ``size`` bytes; ``per_row`` are its scales, signal and noise."""
    before = 0 if task.repeats else task.info.stored_bytes or task.info.nbytes
    report = TensorReport(task.name, task.info.shape, task.info.dtype, task.scheme, before, size)
    if not per_row or per_row[0].size == 0:
        return report
    scale, signal, noise = (array.astype(np.float64) for array in per_row)
    report = replace(report, scale_min=float(scale.min()), scale_max=float(scale.max()))
    if not noise.any():
        return report
    ratio = np.divide(signal, noise, out=np.full_like(signal, np.inf), where=noise > 0)
    worst, weighted = int(np.argmin(ratio)), scale**2
    snr = decibels((weighted * signal).sum() / (weighted * noise).sum())
    return replace(report, snr_db=snr, worst_row=worst // task.groups, worst_row_snr_db=decibels(ratio[worst]))


def decibels(ratio: float) -> float:
    """A ratio of powers in decibels."""
    return 10 * math.log10(ratio)
