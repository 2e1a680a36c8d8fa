"""Makes a model's weights for one GPU: in its memory, or in host memory from which they are streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import cupy as cp
import ml_dtypes
import numpy as np

from ...cuda.kernels.arrays import PAD, round_up
from ...cuda.kernels.gemm.float_operands import GROUPS
from ...cuda.kernels.gemm.igemm import Int8Gemm
from ...cuda.kernels.rowwise.calibration import BF16, KINDS, FloatMatrix
from ...errors import DeviceError
from ...memory.arena import Arena
from ...memory.staging import Columns, Uploader, UploadsStopped
from ...memory.streaming import StreamedBlocks
from ..communicator import RankFailed
from ..quantization import HostWeight, Int8Weight, int8_parts, stack_biases, stack_outliers
from ..random_matrix import RandomMatrix
from ..side_products import Adapter
from ..stored_matrix import StoredMatrix
from ..values import Array, Placement
from .arrays import Allocator, Arrays
from .deferred import LowRank, Outliers, Weight
from .kernels import Kernels
from .streamed_weights import FileStaging, SlotLink, host_table

T = TypeVar("T")
runtime = cp.cuda.runtime
FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
"""Types that the GPU rounds to fp16."""
NARROW_BYTES = 64 << 20
"""Bytes of a matrix that are on the GPU at a time while it is rounded to fp16."""
TABLE_BYTES = 16 << 20
"""Bytes of a table that are on the GPU at a time while it is copied to pinned memory."""


class Loader:
    """Makes weights with ``arrays``; ``int8_gemm`` defines the layout of int8 weights."""

    def __init__(self, arena: Arena, arrays: Arrays, kernels: Kernels, int8_gemm: Int8Gemm):
        self.arena = arena
        self.arrays = arrays
        self.kernels = kernels
        self.int8_gemm = int8_gemm
        self._matrices: Allocator = arena
        self._links: list[SlotLink] = []
        self._layers = 0
        self.file_staging = FileStaging()
        self._uploader: Uploader | None = None
        self._receiving: list[cp.ndarray] = []
        """What is written by uploads that are not finished: its memory stays, also if what it was for has failed."""
        self._depth = 0  # of nested ``uploading``

    @property
    def streamed_bytes(self) -> int:
        """Bytes of layers in all copies that were queued so far."""
        return sum(link.copied_bytes for link in self._links)

    def close(self) -> None:
        """Wait for the queued copies, then free the host's memory."""
        for link in self._links:
            link.close()
        self.file_staging.close()

    def abort(self) -> None:
        """Let no rank wait for this one's uploads; see :meth:`.Communicator.abort`."""
        self.file_staging.abort()

    def reset(self) -> None:
        """Begin anew, as all ranks do."""
        self.file_staging.reset()
        if self._uploader is not None:
            self._uploader.reset()

    def weight(self, parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None] = ()) -> Weight:
        """See :meth:`Backend.weight`."""
        with self.uploading():
            stacked = stack_biases(parts, biases)
            bias = None if stacked is None else self.arrays.vector(stacked)
            n, k = sum(p.shape[0] for p in parts), parts[0].shape[1]
            quantized = int8_parts(parts)
            if quantized and not _has_kernel(quantized[0]):
                raise DeviceError(
                    "a GPU has no kernel for scales of groups of columns in w8a8, and in w8a16 only for groups whose "
                    f"size is a power of two, {GROUPS[0]} or more: load the model on the CPU (device='cpu'), or "
                    "migrate its float source with another recipe"
                )
            padded = round_up(n, PAD), round_up(k, PAD)
            if not quantized:
                values: list[Any] = [p if isinstance(p, StoredMatrix) else np.asarray(p) for p in parts]
                return Weight(self._stack(values, padded, np.float16, self._matrices), None, bias, n, k, padded[1])
            side_products = self._outliers(quantized)
            size = min(quantized[0].group_size, GROUPS[-1])
            if size:
                scale = self._group_scales(quantized, size)
            else:
                scale = self.arrays.vector(np.concatenate([p.scale.astype(np.float32) for p in quantized]))
            codes = [p.codes for p in quantized]
            plan = self.int8_gemm.plan(n, k) if quantized[0].dynamic else None
            if plan is not None:
                padded = plan.layouts.padded
            if plan is None or plan.layouts.is_row_major:
                data = self._stack(codes, padded, np.int8, self._matrices)
            else:
                with self.arrays.current():
                    plain = self._stack(codes, padded, np.int8, self.arena)
                    self.finish_uploads()
                    packed = plan.pack_weight(plain[:n, :k])
                    with self.arrays.within(self._matrices):
                        data = self.arrays.empty(packed.shape, np.int8)
                    data[...] = packed
            rotation = quantized[0].rotation
            return Weight(data, scale, bias, n, k, padded[1], plan, side_products, rotation, size)

    def adapted(self, base: Weight, adapter: Adapter) -> Weight:
        """See :meth:`Backend.adapted`."""
        adapter.check(base.shape)
        rank, k = adapter.a.shape
        with self.uploading(), np.errstate(over="ignore"):
            shape = round_up(rank, PAD), round_up(k, PAD)
            down = Weight(self._stack([adapter.a], shape, np.float16, self.arena), None, None, rank, k, shape[1])
            scale = self.arrays.vector(np.full(rank, adapter.scale, np.float32))
            low_rank = LowRank(down, scale, self._padded_rows(_transposed_half(adapter.b)))
        return replace(base, side_products=(*base.side_products, low_rank))

    def _group_scales(self, parts: Sequence[Int8Weight], size: int) -> cp.ndarray:
        """Scales of groups of ``size`` columns, ``[groups, out]`` in padded rows: fp16 if the host has them so.

        Wider groups have their scale several times.
        """
        dtype = np.float16 if all(part.scale.dtype == np.float16 for part in parts) else np.float32
        stacked = np.concatenate([part.scale.astype(dtype) for part in parts])
        each = np.repeat(stacked, parts[0].group_size // size, axis=1)[:, : -(-parts[0].shape[1] // size)]
        values = np.zeros((each.shape[1], round_up(len(each), PAD)), dtype)
        values[:, : len(each)] = each.T
        return self.arrays.upload(values)[:, : len(each)]

    def _outliers(self, parts: Sequence[Int8Weight]) -> tuple[Outliers, ...]:
        stacked = stack_outliers(parts)
        if stacked is None:
            return ()
        values = self._padded_rows(_transposed_half(stacked.values))
        return (Outliers(self.arrays.upload(stacked.index.astype(np.int32)), values),)

    def matrix(self, values: Any) -> FloatMatrix:
        """A float matrix from the host or a file, in its own type."""
        kind = KINDS.get(values.dtype, BF16)
        dtype = np.dtype(np.uint16) if kind == BF16 else values.dtype
        data = self.arrays.empty(values.shape, dtype)
        if isinstance(values, StoredMatrix):
            self._read_file(values, data)
            self.finish_uploads()
        else:
            data.set(np.ascontiguousarray(values).view(dtype), self.arrays.stream)
        return FloatMatrix(data, kind)

    def blocks(self, build: Callable[[int], T], count: int, place: Placement) -> Iterable[T]:
        """See :meth:`Backend.blocks`; ``place`` counts the layers of all stacks."""
        with self.uploading():
            first = self._layers
            self._layers += count
            streamed = [index - first for index in place.streamed if first <= index < first + count]
            if not streamed:
                return [build(index) for index in range(count)]
            slots = [self.arena.allocate(place.slot_size) for _ in range(place.slots)]
            link = SlotLink(self.arrays.device, self.arrays.stream, slots)
            self._links.append(link)
            built = []
            for index in range(count):
                if index not in streamed:
                    built.append(build(index))
                    continue
                matrices = self._matrices = link.scratch_in_next_slot()
                try:
                    built.append(build(index))
                finally:
                    self._matrices = self.arena
                self.finish_uploads()
                link.keep(matrices)
            self.arrays.stream.synchronize()
            return StreamedBlocks(built, streamed, link, place.slots)

    def table(self, values: np.ndarray, on_host: bool) -> Array:
        """See :meth:`Backend.table`; in pinned host memory if ``on_host`` and the system can pin it."""
        with self.uploading():
            rows, columns = values.shape
            table = host_table(rows, round_up(columns, PAD), self.arrays.device) if on_host else None
            if table is None:
                return self._padded_rows(values)[:, :columns]
            at_once = max(1, TABLE_BYTES // (2 * table.shape[1]))
            for first in range(0, rows, at_once):
                block = self._padded_rows(values[first : first + at_once])
                self.finish_uploads()
                target, stream = table[first:].data.ptr, self.arrays.stream.ptr
                runtime.memcpyAsync(target, block.data.ptr, block.nbytes, runtime.memcpyDeviceToHost, stream)
            return table[:, :columns]

    def _padded_rows(self, values: np.ndarray) -> cp.ndarray:
        """A host matrix in fp16 with padded rows, never in a slot."""
        rows, columns = values.shape
        return self._stack([values], (rows, round_up(columns, PAD)), np.float16, self.arena)

    def half_matrix(self, values: Any) -> cp.ndarray:
        """A float matrix in fp16 with padded rows, where the matrices of the present layer lie."""
        rows, columns = values.shape
        with self.uploading():
            return self._stack([values], (rows, round_up(columns, PAD)), np.float16, self._matrices)

    def zeros(self, shape: tuple[int, ...], dtype: type) -> cp.ndarray:
        """Zeros where the matrices of the present layer lie."""
        with self.arrays.within(self._matrices):
            return self.arrays.zeros(shape, dtype)

    def matrix_rows(self, values: np.ndarray, rows: int, dtype: type) -> cp.ndarray:
        """A host matrix in ``dtype``, int8 or fp16, padded with zeros to ``rows`` rows, never in a slot.

        See :meth:`finish_uploads`.
        """
        return self._stack([values], (rows, round_up(values.shape[1], PAD)), dtype, self.arena)

    def _stack(
        self, parts: Sequence[np.ndarray], shape: tuple[int, int], dtype: type, allocator: Allocator
    ) -> cp.ndarray:
        """Host matrices of the same width, one below the other, padded with zeros to ``shape``."""
        n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        with self.arrays.within(allocator):
            data = self.arrays.empty(shape, dtype) if shape == (n, k) else self.arrays.zeros(shape, dtype)
        first = 0
        with np.errstate(over="ignore"), self.arrays.current():
            for part in parts:
                self.upload(part, data[first : first + part.shape[0]], k)
                first += part.shape[0]
        return data

    def upload(self, part: np.ndarray, place: cp.ndarray, k: int) -> None:
        """Copy a host matrix into the first ``k`` columns of rows on the device, converted to their type."""
        whole = place.shape[1] == k
        if isinstance(part, RandomMatrix):
            self.kernels.pointwise.fill_random(place[:, :k], part.seed, part.row_words, part.unit)
        elif place.dtype == np.float16 and part.dtype != place.dtype and part.dtype in FLOATS:
            self._narrow(part, place)
        elif isinstance(part, StoredMatrix) and whole and part.dtype == place.dtype:
            self._read_file(part, place)
        else:
            values: np.ndarray = np.ascontiguousarray(np.asarray(part).astype(place.dtype, copy=False))
            if whole:
                place.set(values, self.arrays.stream)
            else:
                place[:, :k] = cp.asarray(values)

    def _narrow(self, part: Any, place: cp.ndarray) -> None:
        """Round a float matrix to fp16 on the device, some rows at a time to bound the memory."""
        rows, k = part.shape
        step = max(1, NARROW_BYTES // max(k * part.dtype.itemsize, 1))
        for first in range(0, rows, step):
            self.kernels.calibration.to_half(self.matrix(part[first : first + step]), place[first : first + step])

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Finish uploads when the outermost of nested ``with`` ends, so that those of several matrices overlap."""
        self._depth += 1
        try:
            yield
            if self._depth == 1:
                self.finish_uploads()
        except BaseException:
            if self._depth == 1 and self._uploader is not None:
                self._uploader.cancel()
                self._receiving.clear()
            raise
        finally:
            self._depth -= 1

    def finish_uploads(self) -> None:
        """Wait until what is read from files has been queued on the stream, whose later work may then use it."""
        if self._uploader is not None:
            try:
                self._uploader.finish()
            except UploadsStopped as error:
                raise RankFailed(str(error)) from error
            finally:
                self._receiving.clear()

    def _read_file(self, part: StoredMatrix, to: cp.ndarray) -> None:
        """Start to copy a matrix from a file to the first bytes of ``to``, row behind row."""
        self._receiving.append(to)
        if self._uploader is None:
            self._uploader = self.file_staging.uploader(self.arrays.device, self.arrays.stream)
        whole, itemsize = part.whole, part.dtype.itemsize
        pitch = 0 if whole is None else whole.shape[1] * itemsize
        if whole is None or pitch > self._uploader.staging.buffer_bytes or not part.nbytes:
            self._uploader.upload(part.read, part.nbytes, to.data.ptr)
            return
        columns = Columns(part.first * itemsize, part.shape[1] * itemsize, pitch)
        try:
            self._uploader.upload_columns(whole.read, part.shape[0], columns, to.data.ptr)
        except UploadsStopped as error:
            raise RankFailed(str(error)) from error


def _has_kernel(part: Int8Weight) -> bool:
    """Whether a GPU computes products with the scales of a weight: of rows, or in w8a16 of groups."""
    size = part.group_size
    return not (size or part.input_group_size) or (
        not part.dynamic and not part.input_group_size and size >= GROUPS[0] and size & (size - 1) == 0
    )


def _transposed_half(values: np.ndarray) -> np.ndarray:
    """A host matrix ``[out, n]`` as fp16 ``[n, out]``."""
    return np.ascontiguousarray(np.asarray(values).T.astype(np.float16))
