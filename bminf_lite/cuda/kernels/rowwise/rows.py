"""The work between two products in one pass over memory: reading rows, adding, normalising, gating, quantizing.

These are the launchers of ``rows.cu``, and of ``layer_norm_many_rows.cu`` and ``norm_unaligned.cu`` for some norms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ....backend.values import Norm
from ....errors import DeviceError
from ...runtime.cublaslt import Order
from ...runtime.kernel import Kernel
from ..arrays import PAD, address, ceil_div, is_padded, nbytes_of, pitch_of, pointer_and_pitch, round_up
from ..constants import UNALIGNED_NORM_THREADS, Rotated, RowOp, Source, Target
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together, numbers
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

MAX_ROW_WIDTH = 65536
ROW_THREADS = (8, 32, 128, 256, 512, 1024)
MAX_NORM_WIDTH = 4 * 8 * 512
"""Elements of a row that one block normalises in its registers."""
QK_THREADS = 512
QK_VECTORS = (1, 2, 4)
WIDE = 4096
"""Above this width, reads of weight and bias from L2 bound a LayerNorm of many rows."""
ROWS_EACH = 4
"""Rows per SM from which on keeping weight and bias in shared memory is faster."""
RESIDENT_THREADS = 1024
"""Threads on an SM in blocks that take several rows."""
RESERVED_SHARED = 16384
"""Bytes of an SM's shared memory that are left to its blocks beside what they rotate in."""
IN_MEMORY_FROM = 64
"""From this size of blocks on, rows are rotated in shared memory: smaller ones take few exchanges between lanes."""
KERNEL_CACHE_SIZE = 1024
"""Shapes whose kernels are kept; beyond that, the least recently used is dropped."""
NONE, FROM_HALF, FROM_FLOAT, FROM_INT32 = map(int, Source)
CODES, TO_HALF, TO_FLOAT, ADD_TO_FLOAT, CODES_AND_HALF, CODES_AND_FLOAT = map(int, Target)
IDENTITY, RMS_NORM, LAYER_NORM = map(int, (RowOp.IDENTITY, RowOp.RMS_NORM, RowOp.LAYER_NORM))
NOT_ROTATED, BETWEEN_LANES, IN_MEMORY = map(int, Rotated)
GATE, ACTIVATE = int(RowOp.GATE_SILU), int(RowOp.ACTIVATE_SILU)
ROW = int(Order.ROW)
HALF_TYPE = np.dtype(np.float16)


RowSource = tuple[tuple[int, int, int, int, int], int, int]
"""The rows that a kernel reads: addresses of the values or of an int32 product, its row scales, column scales and bias
(0 for none), and the pitch; a :class:`Source`; an :class:`Order`. A plain tuple, because every launch makes one.
"""
RowTarget = tuple[tuple[int, int, int], int, int]
"""The rows that a kernel writes: addresses of the codes or values and of the codes' scales (0 for none), and the pitch;
a :class:`Target`; an :class:`Order`.
"""
NO_ROWS: RowSource = ((0, 0, 0, 0, 0), NONE, ROW)
"""No rows: the kernel reads only the residual stream."""


def array_source(x: cp.ndarray) -> RowSource:
    """Rows of fp16 or fp32 values."""
    return (x.data.ptr, 0, 0, 0, x.strides[0] // x.itemsize), FROM_HALF if x.dtype == HALF_TYPE else FROM_FLOAT, ROW


def array_target(x: cp.ndarray) -> RowTarget:
    """Rows of fp16 or fp32 values."""
    return (x.data.ptr, 0, x.strides[0] // x.itemsize), TO_HALF if x.dtype == HALF_TYPE else TO_FLOAT, ROW


def sum_target(x: cp.ndarray) -> RowTarget:
    """Rows of fp32 values to which a norm is added."""
    return (x.data.ptr, 0, x.strides[0] // x.itemsize), ADD_TO_FLOAT, ROW


class RowKernels:
    """The kernels over rows that every step needs."""

    source = "rowwise/rows.cu"
    persistent_source = "rowwise/layer_norm_many_rows.cu"
    unaligned_source = "rowwise/norm_unaligned.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._transform_kernel = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_transform)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        orders, kinds = orders_for(capability), ("float", "__half")
        sizes = sorted({*row_shapes(2), *row_shapes(4)})
        row_sizes = tuple(Together(size) for size in sizes)
        yield KernelFamily(
            cls.source,
            "transform",
            (numbers(Source), numbers(RowOp), numbers(Target), row_sizes, orders, orders, numbers(Rotated)),
            _possible_transform,
        )
        yield KernelFamily(cls.source, "dequantize", (("int", "float"), orders, BOOLEANS, kinds), _possible_dequantize)
        yield KernelFamily(cls.source, "gather_rows")
        yield KernelFamily(cls.source, "embed", (BOOLEANS,))
        yield KernelFamily(cls.source, "norm_qk", (QK_VECTORS,))
        yield KernelFamily(cls.unaligned_source, "norm_multi_pass", (BOOLEANS[::-1],))
        yield KernelFamily(cls.persistent_source, "layer_norm_persistent", (BOOLEANS[::-1], kinds, (512, 1024)))

    def transform(
        self, step: StepContext | None, source: RowSource, target: RowTarget, rows: int, k: int,
        residual: cp.ndarray | None = None, norm: Norm | None = None, activation: int | None = None,
        bytes_moved: int = 0, rotation: int = 1, scale: float = 1.0, gated: bool = True,
        half: cp.ndarray | None = None, values: cp.ndarray | None = None, counter: int = 0,
    ) -> None:  # fmt: skip
        """Read ``rows`` of ``k`` elements, add them to ``residual``, normalise or activate them, and write the result.

        With ``norm``, ``residual`` fp32 is normalised after ``source`` was added to it, unless that is ``NO_ROWS``.
        With ``activation`` that is applied; rows of a ``gated`` one have ``2 k`` elements: gate and up. What becomes
        codes or fp16 may be rotated before, in blocks of ``rotation`` elements, at most ``MAX_ROTATION``. The sums of a
        ``sum_target`` are multiplied by ``scale``. A norm alone that becomes codes in rows also goes to the padded fp16
        rows ``half``, not rotated, if there are any; then ``counter`` is the address of an int32 to which 1 is added
        when a row is written, or 0. A norm of ``residual`` and fp16 rows that becomes codes in rows also goes to the
        fp32 rows ``values``, of the pitch of ``residual``, which then stays as it is.
        """
        read, source_kind, order = source
        written, target_kind, out_order = target
        if half is not None:
            assert norm is not None and source_kind == NONE and target_kind == CODES and out_order == ROW
            read, target_kind = (half.data.ptr, counter, 0, 0, pitch_of(half)), CODES_AND_HALF
        if values is not None:
            assert norm is not None and source_kind == FROM_HALF and target_kind == CODES and out_order == ROW
            assert residual is not None and pitch_of(values) == pitch_of(residual)
            read, target_kind = (read[0], values.data.ptr, *read[2:]), CODES_AND_FLOAT
        if norm is None:
            row_op = IDENTITY if activation is None else (GATE if gated else ACTIVATE) + activation
        elif norm.center:
            row_op = LAYER_NORM
            is_plain = source_kind == NONE and target_kind in (TO_HALF, TO_FLOAT) and rotation == 1
            if is_plain and self._prefers_persistent(rows, k):
                assert residual is not None
                self._layer_norm_persistent(step, residual, norm, target, rows, k, bytes_moved)
                return
        else:
            row_op = RMS_NORM
        assert scale == 1 or target_kind == ADD_TO_FLOAT
        factor = rotation**-0.5 if target_kind != ADD_TO_FLOAT else scale
        kernel, grid, block, shared = self._transform_kernel(
            rows, k, source_kind, row_op, target_kind, order, out_order, rotation
        )
        kernel(
            grid,
            block,
            (*read, *pointer_and_pitch(residual), *norm_arguments(norm), *written, rows, k, rotation, factor),
            shared,
            self._launcher.stream,
            True,
            None,
            bytes_moved,
        )
        if step is not None:
            step.one_block_per_sm = False

    def _find_transform(
        self, rows: int, k: int, source: int, row_op: int, target: int, order: int, out_order: int, rotation: int
    ) -> tuple[Kernel, int, int, int]:
        """The kernel for :meth:`transform`, its number of blocks, the threads per block, and its shared memory."""
        if k > MAX_ROW_WIDTH:
            raise DeviceError(f"rows of {k:,} elements; the kernels support at most {MAX_ROW_WIDTH:,}")
        fills_gpu = rows > self._launcher.num_sms
        threads, vectors = row_shape(k, max_vectors(source) if fills_gpu else 1, rotation)
        block, rotated, shared = max(threads, 128), BETWEEN_LANES if rotation > 1 else NOT_ROTATED, 0
        if rotation >= IN_MEMORY_FROM and rotates_in_memory(source, row_op, target, threads, vectors):
            each = bytes_of_a_warp(row_op)
            if each * (RESIDENT_THREADS // 32) + RESERVED_SHARED <= self._launcher.max_shared:
                rotated, shared = IN_MEMORY, each * (block // 32)
        expression = f"transform<{source}, {row_op}, {target}, {threads}, {vectors}, {order}, {out_order}, {rotated}>"
        # Copies to shared memory take no cache line, loads do.
        kernel = self._launcher.kernel(self.source, expression, fills_gpu and not (shared and loops_over(row_op)))
        blocks = ceil_div(rows * threads, block)
        is_half = (source, target) == (FROM_HALF, CODES) and loops_over(row_op)
        if rotation > 1 and is_half and loops(threads, vectors):
            blocks = min(blocks, self._launcher.num_sms * (RESIDENT_THREADS // block))
        return kernel, blocks, block, shared

    def norm(self, step: StepContext | None, x: cp.ndarray, norm: Norm, out: cp.ndarray) -> None:
        """A norm of fp32 rows of any width and alignment, fp32; ``out`` may be ``x``."""
        rows, k = x.shape
        if k <= MAX_NORM_WIDTH and is_padded(x) and is_padded(out):
            self.transform(step, NO_ROWS, array_target(out), rows, k, x, norm, bytes_moved=nbytes_of(x, out))
            return
        norm_weight, norm_bias, eps = norm_arguments(norm)
        self._launcher.launch(
            step,
            self.unaligned_source,
            f"norm_multi_pass<{'true' if norm.center else 'false'}>",
            rows,
            UNALIGNED_NORM_THREADS,
            (x.data.ptr, pitch_of(x), norm_weight, norm_bias, eps, out.data.ptr, pitch_of(out), k, in_vectors(x, out)),
            bytes_moved=nbytes_of(x, out),
            cache=rows > self._launcher.num_sms,
        )

    def _prefers_persistent(self, rows: int, k: int) -> bool:
        """Whether keeping weight and bias in shared memory is faster, and there is room for them."""
        launcher = self._launcher
        return (
            WIDE < k <= MAX_NORM_WIDTH
            and rows >= ROWS_EACH * launcher.num_sms
            and launcher.half_shared > 4 * MAX_NORM_WIDTH
        )

    def _layer_norm_persistent(
        self,
        step: StepContext | None,
        x: cp.ndarray,
        norm: Norm,
        target: RowTarget,
        rows: int,
        k: int,
        bytes_moved: int,
    ) -> None:
        """LayerNorms of fp32 rows, padded, as fp16 or fp32."""
        threads = 512 if k <= MAX_NORM_WIDTH // 2 else 1024
        norm_weight, norm_bias, eps = norm_arguments(norm)
        (data, _, pitch), target_kind, _ = target
        has_bias, kind = "true" if norm_bias else "false", "__half" if target_kind == TO_HALF else "float"
        self._launcher.launch(
            step,
            self.persistent_source,
            f"layer_norm_persistent<{has_bias}, {kind}, {threads}>",
            self._launcher.num_sms * (1024 // threads),
            threads,
            (x.data.ptr, pitch_of(x), norm_weight, norm_bias, eps, data, pitch, rows, k),
            shared=4 * round_up(k, PAD) * (2 if norm_bias else 1),
            bytes_moved=bytes_moved,
            cache=True,
        )

    def dequantize(
        self,
        step: StepContext | None,
        sums: cp.ndarray,
        order: int,
        pitch: int,
        x_scale: int,
        w_scale: cp.ndarray | None,
        bias: cp.ndarray | None,
        out: cp.ndarray,
        add: bool = False,
    ) -> None:
        """Scale sums (int32, or fp32 of a float product), add the bias, and write them or add them to ``out``.

        ``order`` and ``pitch`` are those of the sums' layout, ``x_scale`` an address, 0 for none.
        """
        rows, n = out.shape
        kind = "int" if sums.dtype == np.int32 else "float"
        target = "__half" if out.dtype == HALF_TYPE else "float"
        expression = f"dequantize<{kind}, {order}, {'true' if add else 'false'}, {target}>"
        self._launcher.launch(
            step,
            self.source,
            expression,
            ceil_div(rows * ceil_div(n, 8), 256),
            256,
            (sums.data.ptr, x_scale, address(w_scale), address(bias), pitch, out.data.ptr, pitch_of(out), rows, n),
            bytes_moved=nbytes_of(sums, out, out if add else None),
            cache=rows > self._launcher.num_sms,
        )

    def embed(
        self, step: StepContext, tokens: cp.ndarray, table: cp.ndarray, out: cp.ndarray, scale: float = 1.0
    ) -> None:
        """Rows of an fp16 table, multiplied by ``scale``, into fp32: the first kernel of a step."""
        arguments = (tokens.data.ptr, table.data.ptr, pitch_of(table), out.data.ptr, pitch_of(out), out.shape[1], scale)
        expression = f"embed<{BOOLEANS[scale != 1]}>"
        self._launcher.launch(step, self.source, expression, len(out), 256, arguments, bytes_moved=2 * nbytes_of(out))

    @staticmethod
    def supports_norm_qk(width: int, q_norm: Norm, k_norm: Norm) -> bool:
        """Whether :meth:`norm_qk` supports rows of ``width`` elements: RMSNorms of whole vectors."""
        q, k = len(q_norm.weight), len(k_norm.weight)
        parts = q, k, width - q - k
        is_rms = not (q_norm.center or k_norm.center)
        return is_rms and all(part % 8 == 0 for part in parts) and max(parts) <= MAX_NORM_WIDTH

    def norm_qk(self, step: StepContext, x: cp.ndarray, q_norm: Norm, k_norm: Norm, out: cp.ndarray) -> None:
        """Rows fp32 of queries, keys and values, the first two normalised, as fp16; both arrays are padded."""
        rows, width = x.shape
        q, k = len(q_norm.weight), len(k_norm.weight)
        vectors = vectors_for(max(q, k, width - q - k), QK_THREADS)
        self._launcher.launch(
            step, self.source, f"norm_qk<{vectors}>", (3, rows), QK_THREADS,
            (x.data.ptr, pitch_of(x), address(q_norm.weight), q_norm.eps, address(k_norm.weight), k_norm.eps,
             out.data.ptr, pitch_of(out), q, k, width - q - k),
            bytes_moved=nbytes_of(x, out), cache=rows > self._launcher.num_sms,
        )  # fmt: skip

    def gather_rows(self, step: StepContext, rows: cp.ndarray, x: cp.ndarray, out: cp.ndarray, before: int = 0) -> None:
        """The rows ``rows - before`` of ``x``, fp32 or fp16; ``rows`` is int32."""
        each = 4 // x.itemsize  # elements of a word
        words = pitch_of(x) // each, out.data.ptr, pitch_of(out) // each, ceil_div(out.shape[1], each)
        arguments = (rows.data.ptr, before, x.data.ptr, *words)
        self._launcher.launch(
            step, self.source, "gather_rows", len(out), 256, arguments, bytes_moved=2 * nbytes_of(out)
        )


def orders_for(capability: Capability) -> tuple[int, ...]:
    """Orders in which a product may leave its sums; cublasLt has COL32 up to compute capability 8.9."""
    return (ROW,) if capability >= (9, 0) else (ROW, int(Order.COL32))


def max_vectors(source: int) -> int:
    """The most vectors per thread of ``transform`` for many rows: int32 sums take more registers."""
    return 2 if source == FROM_INT32 else 4


def loops(threads: int, vectors: int) -> bool:
    """Whether a block of ``transform`` that rotates fp16 rows takes several of them, one after another."""
    return threads >= 32 and vectors <= 4


def loops_over(row_op: int) -> bool:
    """Whether this is so for rows on which ``row_op`` is done before: nothing, or an activation."""
    return row_op == IDENTITY or row_op >= ACTIVATE


def rotates_in_memory(source: int, row_op: int, target: int, threads: int, vectors: int) -> bool:
    """Whether there is a ``transform`` that rotates such rows in shared memory: of many rows that become codes."""
    from_half = (source, target) == (FROM_HALF, CODES) and loops_over(row_op)
    of_stream = (source == NONE and target in (CODES, CODES_AND_HALF)) or target == CODES_AND_FLOAT
    is_norm = row_op in (RMS_NORM, LAYER_NORM) and of_stream
    return (from_half or is_norm) and threads >= 32 and vectors == 4


def bytes_of_a_warp(row_op: int) -> int:
    """Shared memory in which a warp rotates 1,024 elements, see ``rotation.cuh``; of fp16 rows the next one's too."""
    return 1024 * 4 + 1024 * 2 if loops_over(row_op) else 32 * 36 * 4


def vectors_for(columns: int, threads: int) -> int:
    """Vectors of eight elements, a power of two, that each of ``threads`` needs to cover a padded row."""
    needed = -(-round_up(columns, PAD) // (threads * 8))
    return 1 << (needed - 1).bit_length()


def row_shape(columns: int, vectors: int, rotation: int = 1) -> tuple[int, int]:
    """Threads per row, and vectors per thread: at most ``vectors``, unless the largest number of threads needs more.

    With many rows, more vectors put more loads in flight. With few rows, fewer vectors give a lower latency. A block of
    ``rotation`` elements must lie in one vector of neighbouring threads.
    """
    for threads in ROW_THREADS if vectors == 2 else ROW_THREADS[:-1]:
        if vectors_for(columns, threads) <= vectors and rotation <= 8 * threads:
            return threads, vectors_for(columns, threads)
    return 512, vectors_for(columns, 512)


@functools.cache
def row_shapes(vectors: int) -> set[tuple[int, int]]:
    """Every :func:`row_shape` of few rows, and of many rows with at most ``vectors``."""
    return {row_shape(k, v) for k in range(PAD, MAX_ROW_WIDTH + 1, PAD) for v in (1, vectors)}


def norm_arguments(norm: Norm | None) -> tuple[int, int, float]:
    """Weight, bias and epsilon."""
    return (0, 0, 0.0) if norm is None else (address(norm.weight), address(norm.bias), norm.eps)


def row_step(x: cp.ndarray | None) -> int:
    """Elements from one row to the next; 0 for a vector, which serves all rows."""
    return pitch_of(x) if x is not None and x.ndim == 2 else 0


def in_vectors(*arrays: cp.ndarray) -> bool:
    """Whether rows are aligned for loads of eight elements."""
    width = {1: 8, 2: 16, 4: 16}
    return all(
        a.data.ptr % width[a.itemsize] == 0 and (row_step(a) * a.itemsize) % width[a.itemsize] == 0 for a in arrays
    )


def _possible_transform(
    source: int, row_op: int, target: int, size: tuple[int, int], in_order: int, out_order: int, rotated: int
) -> bool:
    is_norm = row_op in (RMS_NORM, LAYER_NORM)
    if is_norm:
        sources: tuple[int, ...] = (FROM_HALF,) if target == CODES_AND_FLOAT else (NONE, FROM_INT32)
    else:
        sources = (FROM_HALF, FROM_FLOAT, FROM_INT32) if row_op == IDENTITY else (FROM_HALF, FROM_INT32)
    threads, vectors = size
    return (
        source in sources
        and (row_op < ACTIVATE or target in (CODES, TO_HALF))
        and size in row_shapes(max_vectors(source))
        and not (is_norm and threads * vectors * 8 > MAX_NORM_WIDTH)
        and (in_order == ROW or source == FROM_INT32)
        and (out_order == ROW or target == CODES)
        and (rotated == NOT_ROTATED or target in (CODES, TO_HALF, CODES_AND_HALF, CODES_AND_FLOAT))
        and (rotated != IN_MEMORY or rotates_in_memory(source, row_op, target, threads, vectors))
        and (target != CODES_AND_HALF or (source == NONE and is_norm))
        and (target != CODES_AND_FLOAT or is_norm)
        and (target != ADD_TO_FLOAT or (source == NONE and is_norm))
    )


def _possible_dequantize(kind: str, order: int, add: str, target: str) -> bool:
    return (kind == "int" or order == ROW) and (add == "false" or target == "float")
