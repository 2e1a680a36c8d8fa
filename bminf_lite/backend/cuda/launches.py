"""Launches of the kernels in ``cuda/kernels``: which instantiation serves a shape, with what grid and shared memory.

Every method puts work on one stream and returns; arrays are padded as :mod:`.arrays` says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cupy as cp
import numpy as np

from ...cuda.kernels.attention.prefill import HALF, INT8
from ...cuda.kernels.gemm.layouts import Layout, round_up
from ...cuda.runtime.cublaslt import Order
from ...cuda.runtime.driver import Device, DeviceAttribute
from ...cuda.runtime.kernel import Dimensions, Kernel, Module
from ...errors import DeviceError
from ..values import AttentionSpec, ForwardBatch, LayerCache, Norm
from .arrays import PAD, pitch_of
from .deferred import DeferredGate, DeferredMatmul, QuantizedActivations, Weight

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "gelu": 3}
GEMV_THREADS = 512
GEMV_WARPS = GEMV_THREADS // 32
CHUNK = 512
LARGE_SHARED_MEMORY = 227 << 10
"""Shared memory per block where two matrix-vector kernels fit side by side with twelve chunks under way per warp."""
MAX_ROW_WIDTH = 65536
ROW_THREADS = (8, 32, 128, 256, 512, 1024)
MAX_FUSED_NORM_WIDTH = 4 * 8 * GEMV_THREADS
"""Up to this many elements, ``gemv`` normalises its input; a thread's share of more does not fit its registers."""
MAX_HEAD_DIM = 256
KERNEL_CACHE_SIZE = 1024
"""Shapes of rows whose kernels are remembered."""
ROW, HALF_TYPE = int(Order.ROW), np.dtype(np.float16)
CLUSTER = 8
DECODE_HEADS = 8
"""Query heads of one key-value head that a block of the decode kernel takes at most."""
MIN_TOKENS_PER_SPLIT = 128
"""Tokens of a context below which another block does not pay."""
TOKENS_PER_CLUSTER = 1024
"""Tokens of a context for each block, from which on several clusters, which meet in memory, are faster than one."""

# The enumerations of rows.cu, matvec.cu and attention_decode.cu.
NONE, FROM_HALF, FROM_FLOAT, FROM_INT32 = range(4)
IDENTITY, RMS_NORM, LAYER_NORM, GATE = range(4)
CODES, TO_HALF, TO_FLOAT = range(3)
GEMV_TO_HALF, GEMV_TO_FLOAT, GEMV_ADD, GEMV_GATED, GEMV_ACTIVATED = range(5)
CAUSAL, BIASED, CROSS = range(3)


def address(x: cp.ndarray | None) -> int:
    """The address of an array, 0 for none."""
    return 0 if x is None else x.data.ptr


def vectors_for(columns: int, threads: int) -> int:
    """Vectors of eight elements, a power of two, that each of ``threads`` needs to cover a padded row."""
    needed = -(-round_up(columns, PAD) // (threads * 8))
    return 1 << (needed - 1).bit_length()


def row_shape(columns: int, vectors: int) -> tuple[int, int]:
    """Threads of a row, and the vectors of each: ``vectors`` at most, or with the most threads as many as it takes.

    Where rows are many, more vectors mean more loads under way; where they are few, fewer mean a shorter way through.
    """
    for threads in ROW_THREADS if vectors == 2 else ROW_THREADS[:-1]:
        if vectors_for(columns, threads) <= vectors:
            return threads, vectors_for(columns, threads)
    return 512, vectors_for(columns, 512)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


class CoreKernels:
    """The kernels of one GPU, on one stream."""

    def __init__(self, device: Device, stream: cp.cuda.Stream):
        self.device = device
        self.stream = stream.ptr
        self.num_sms = device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        self.has_clusters = device.compute_capability >= (9, 0)
        most_shared = device.attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.half_shared = most_shared // 2  # of which, with what every block takes beside it, only one fits
        self.pipeline_chunks = 12 if most_shared >= LARGE_SHARED_MEMORY else 8
        self.pipeline_bytes = GEMV_WARPS * self.pipeline_chunks * CHUNK if device.compute_capability >= (9, 0) else 0
        self._kernel = functools.cache(self._load)
        self._transform_kernel = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_transform)
        self._one_block_per_sm_before = False  # whether the kernel launched last has one block on each multiprocessor
        self._written_caches: set[int] | None = (
            None  # caches that the present step has written; None before its first kernel
        )

    def _load(self, source: str, expression: str, signature: str, cache: bool) -> Kernel:
        defines = [f"PIPELINE_CHUNKS={self.pipeline_chunks}"] if source == "gemv/gemv.cu" else []
        return Module(self.device, source, [expression], defines).kernel(expression, signature, cache)

    def _launch(
        self, source: str, expression: str, signature: str, grid: Dimensions, block: int, args: tuple[object, ...],
        shared: int = 0, cluster: int | None = None, one_block_per_sm: bool = False, bytes_moved: int = 0,
        cache: bool = False, dependent: bool = True,
    ) -> None:  # fmt: skip
        """Launch a kernel, which may start before its predecessor has ended if it is ``dependent``.

        ``one_block_per_sm``: its blocks are as many as the multiprocessors, of which each is to have one. Behind a
        kernel with fewer blocks, two of them would share a multiprocessor and elsewhere there would be none, which made
        decoding of an 8B model on an H200 half as fast: there it takes more than half of the shared memory.
        ``bytes_moved`` is how many bytes the kernel must read and write. ``cache``: see :meth:`Module.kernel`; for a
        kernel that fills the GPU, as its neighbours then cannot run beside it.
        """
        if one_block_per_sm and not self._one_block_per_sm_before and self.has_clusters:
            shared = max(shared, self.half_shared)
        kernel = self._kernel(source, expression, signature, cache)
        self._start(kernel, grid, block, args, shared, cluster, bytes_moved, dependent)
        self._one_block_per_sm_before = one_block_per_sm

    def _start(
        self, kernel: Kernel, grid: Dimensions, block: int, args: tuple[object, ...], shared: int = 0,
        cluster: int | None = None, bytes_moved: int = 0, dependent: bool = True,
    ) -> None:  # fmt: skip
        """Launch a kernel of which several blocks may share a multiprocessor; else as :meth:`_launch`."""
        kernel(grid, block, args, shared, self.stream, dependent, cluster, bytes_moved)
        self._one_block_per_sm_before = False

    def _nbytes_of(self, *values: cp.ndarray | QuantizedActivations | DeferredMatmul | DeferredGate | None) -> int:
        """Bytes of what a kernel reads and writes, if anyone wants to know."""
        return 0 if self.device.observer is None else nbytes_of(*values)

    # -- one row times a weight ----------------------------------------------------------------------------------------

    def gemv(
        self, x: cp.ndarray, norm: Norm | None, weight: Weight, out: cp.ndarray, epilogue: int, activation: int = 0
    ) -> None:
        """One row, fp16 or normalised fp32, times an int8 weight of plain rows with dynamic activations."""
        n, pitch = weight.out_features, weight.pitch
        matrices = 2 if epilogue == GEMV_GATED else 1
        rows = ceil_div(n // matrices, self.num_sms) * matrices
        grid = min(self.num_sms, n // matrices)
        vectors = vectors_for(pitch, GEMV_THREADS)
        unit = best_unit(rows, pitch)
        expression = f"gemv<{norm_kind(norm, 0)}, {vectors}, {epilogue}, {activation}, {unit}>"
        norm_weight, norm_bias, eps = norm_arguments(norm)
        self._launch(
            "gemv/gemv.cu",
            expression,
            "pppfppppiii",
            grid,
            GEMV_THREADS,
            (
                x.data.ptr,
                norm_weight,
                norm_bias,
                eps,
                weight.matrix.data.ptr,
                address(weight.scale),
                address(weight.bias),
                out.data.ptr,
                n,
                weight.in_features,
                pitch,
            ),
            shared=self.pipeline_bytes + round_up(pitch, CHUNK * unit) + 4 * rows,
            one_block_per_sm=True,
            bytes_moved=weight.nbytes + nbytes_of(x, out),
        )

    def gemv_float(
        self, x: cp.ndarray, norm: Norm | None, weight: Weight, out: cp.ndarray, epilogue: int, activation: int = 0
    ) -> None:
        """A few rows, fp16 or normalised fp32, times a weight in fp16, or in int8 with float activations."""
        outputs = weight.out_features // (2 if epilogue == GEMV_GATED else 1)
        vectors = vectors_for(weight.pitch, GEMV_THREADS)
        kind = "bminf::int8" if weight.scale is not None else "__half"
        expression = f"gemv_float<{norm_kind(norm, 0)}, {vectors}, {kind}, {epilogue}, {activation}>"
        norm_weight, norm_bias, eps = norm_arguments(norm)
        grid = min(2 * self.num_sms, ceil_div(outputs, GEMV_WARPS))
        self._launch(
            "gemv/gemv_float.cu", expression, "pqppfppppqiii", (grid, x.shape[0]), GEMV_THREADS,
            (x.data.ptr, pitch_of(x), norm_weight, norm_bias, eps, weight.matrix.data.ptr, address(weight.scale),
             address(weight.bias), out.data.ptr, pitch_of(out), weight.out_features, weight.in_features, weight.pitch),
            shared=2 * weight.pitch, bytes_moved=x.shape[0] * weight.nbytes + nbytes_of(x, out),
        )  # fmt: skip

    # -- over rows -----------------------------------------------------------------------------------------------------

    def transform(
        self,
        source: cp.ndarray | DeferredMatmul | DeferredGate | None,
        out: cp.ndarray | QuantizedActivations,
        residual: cp.ndarray | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Read rows, add them to the residual stream, normalise or gate them, and write codes or values.

        With ``norm``, ``residual`` is normalised, after adding ``source`` to it where there is one.
        """
        rows, k = (residual if residual is not None else source).shape  # type: ignore[union-attr]
        if isinstance(source, DeferredGate):
            assert norm is None
            (data, from_kind, order), prepare = read_arguments(source.source), GATE + ACTIVATIONS[source.activation]
        else:
            (data, from_kind, order), prepare = read_arguments(source), norm_kind(norm, IDENTITY)
        if isinstance(out, QuantizedActivations):
            target, out_order = CODES, int(out.layout.order)
            written = out.values.ptr, out.scales.ptr, out.layout.ld
        else:
            target, out_order = TO_HALF if out.dtype == HALF_TYPE else TO_FLOAT, ROW
            written = out.data.ptr, 0, pitch_of(out)
        kernel, grid, block = self._transform_kernel(rows, k, from_kind, prepare, target, order, out_order)
        self._start(
            kernel, grid, block,
            (*data, *pointer_and_pitch(residual), *norm_arguments(norm), *written, rows, k),
            bytes_moved=self._nbytes_of(source, residual, out, residual if source is not None else None),
        )  # fmt: skip

    def _find_transform(
        self, rows: int, k: int, source: int, prepare: int, target: int, order: int, out_order: int
    ) -> tuple[Kernel, int, int]:
        """The kernel for :meth:`transform`, how many blocks, and the threads of each."""
        if k > MAX_ROW_WIDTH:
            raise DeviceError(f"rows of {k:,} elements; the kernels take {MAX_ROW_WIDTH:,} at most")
        fills_gpu = rows > self.num_sms
        threads, vectors = row_shape(k, 1 if not fills_gpu else 2 if source == FROM_INT32 else 4)
        expression = f"transform<{source}, {prepare}, {target}, {threads}, {vectors}, {order}, {out_order}>"
        kernel = self._kernel("rowwise/rows.cu", expression, "ppppqpqppfppqii", fills_gpu)
        return kernel, ceil_div(rows * threads, max(threads, 128)), max(threads, 128)

    def dequantize(
        self,
        acc: cp.ndarray,
        layout: Layout,
        x_scale: cp.cuda.MemoryPointer | None,
        weight: Weight,
        out: cp.ndarray,
        add: bool = False,
    ) -> None:
        """Scale sums (int32, or fp32 of a float product), add the bias, and write them or add them to ``out``."""
        rows, n = out.shape
        kind = "int" if acc.dtype == cp.int32 else "float"
        target = "__half" if out.dtype == cp.float16 else "float"
        expression = f"dequantize<{kind}, {int(layout.order)}, {'true' if add else 'false'}, {target}>"
        self._launch(
            "rowwise/rows.cu", expression, "ppppqpqii", ceil_div(rows * ceil_div(n, 8), 256), 256,
            (acc.data.ptr, 0 if x_scale is None else x_scale.ptr, address(weight.scale), address(weight.bias),
             layout.ld, out.data.ptr, pitch_of(out), rows, n),
            bytes_moved=acc.nbytes + nbytes_of(out, out if add else None), cache=rows > self.num_sms,
        )  # fmt: skip

    def embed(self, tokens: cp.ndarray, table: cp.ndarray, out: cp.ndarray) -> None:
        """Rows of an fp16 table into fp32: what a step begins with."""
        self._written_caches = set()
        arguments = (tokens.data.ptr, table.data.ptr, pitch_of(table), out.data.ptr, pitch_of(out), out.shape[1])
        self._launch("rowwise/rows.cu", "embed", "ppqpqi", len(out), 256, arguments, bytes_moved=2 * nbytes_of(out))

    def last_rows(self, cu_seqlens: cp.ndarray, x: cp.ndarray, out: cp.ndarray) -> None:
        """The last row of each sequence, fp32."""
        arguments = (cu_seqlens.data.ptr, x.data.ptr, pitch_of(x), out.data.ptr, pitch_of(out), x.shape[1])
        self._launch("rowwise/rows.cu", "last_rows", "ppqpqi", len(out), 256, arguments, bytes_moved=2 * nbytes_of(out))

    def int8_to_half(self, codes: cp.ndarray, out: cp.ndarray) -> None:
        """int8 codes as fp16 numbers, a multiple of 16 of them."""
        grid = ceil_div(codes.size, 16 * 256)
        arguments = (codes.data.ptr, out.data.ptr, codes.size)
        self._launch(
            "rowwise/rows.cu",
            "int8_to_half",
            "ppq",
            grid,
            256,
            arguments,
            bytes_moved=nbytes_of(codes, out),
            cache=True,
        )

    def fill_random(self, out: cp.ndarray, seed: int) -> None:
        """The rows and columns of a ``RandomMatrix`` with that seed, int8 or fp16."""
        (rows, columns), kind = out.shape, "bminf::int8" if out.dtype == cp.int8 else "__half"
        arguments = (out.data.ptr, pitch_of(out), rows, columns, seed)
        grid = ceil_div(rows * ceil_div(columns, 8), 256)
        self._launch(
            "rowwise/random.cu", f"fill_random<{kind}>", "pqiiQ", grid, 256, arguments, bytes_moved=nbytes_of(out)
        )

    # -- attention -----------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """No kernel launched from now on reads anything before its predecessors have ended, until the next step."""
        self._written_caches = None

    def _unwritten_this_step(self, cache: LayerCache, written: bool) -> bool:
        """Whether ``cache`` is as it was before the present step; ``written``: the next kernel writes to it."""
        if self._written_caches is None:
            return False
        untouched = cache.keys.data.ptr not in self._written_caches
        if written:
            self._written_caches.add(cache.keys.data.ptr)
        return untouched

    def prepare_heads(
        self,
        qkv: cp.ndarray | DeferredMatmul,
        spec: AttentionSpec,
        cache: LayerCache,
        batch: ForwardBatch,
        q: cp.ndarray,
    ) -> None:
        """Norm and rotation of a step's heads; queries go to ``q`` ``[T, heads, head_pitch]``, others to the cache."""
        data, kind, order = read_arguments(qkv)
        expression = f"prepare_heads<{'true' if kind == FROM_INT32 else 'false'}, {order}, {element_of(cache)}>"
        self._unwritten_this_step(cache, written=True)
        self._launch(
            "attention/prepare_heads.cu",
            expression,
            "ppppqpppffpppipppiiiiipp",
            q.shape[0],
            256,
            (
                *data,
                *head_arguments(spec),
                address(batch.cu_seqlens),
                address(batch.context_lens),
                address(batch.slots),
                batch.batch_size,
                q.data.ptr,
                cache.keys.data.ptr,
                cache.values.data.ptr,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                head_pitch_of(cache),
                cache.capacity,
                address(cache.key_scales),
                address(cache.value_scales),
            ),
            bytes_moved=self._nbytes_of(qkv, q),
        )

    def split_kv(self, spec: AttentionSpec, batch: ForwardBatch, max_context_len: int) -> KVSplit:
        """How the blocks of the decode kernel share a context of ``max_context_len`` tokens at most."""
        context_len = max_context_len if spec.window is None else min(max_context_len, spec.window)
        most = max(1, self.num_sms // (batch.batch_size * spec.kv_heads * head_groups(spec)))
        useful = min(most, ceil_div(context_len, MIN_TOKENS_PER_SPLIT))
        if not self.has_clusters:
            return KVSplit(1, useful)
        cluster = min(CLUSTER, 1 << (useful.bit_length() - 1))
        return KVSplit(
            cluster, cluster * max(1, min(ceil_div(context_len, cluster * TOKENS_PER_CLUSTER), most // cluster))
        )

    def attention_decode(
        self, qkv: cp.ndarray, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch, split: KVSplit,
        partials: cp.ndarray | None, arrival_counts: cp.ndarray, out: cp.ndarray, lengths: cp.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Attention of one new token per sequence; see ``attention_decode.cu``.

        With ``lengths``, ``qkv`` holds queries only and ``cache`` encoded sources of that many tokens.
        """
        head_pitch = head_pitch_of(cache)
        depth = padded_head_dim(spec)
        warps = (8 if depth <= 128 else 4) // (1 if self.device.compute_capability >= (8, 0) else 2)
        groups = spec.kv_heads * head_groups(spec)
        kind = CROSS if lengths is not None else BIASED if spec.bias is not None else CAUSAL
        max_context_len = batch.max_context_len if lengths is None else cache.capacity
        expression = f"attention_decode<{depth}, {split.cluster}, {kind}, {element_of(cache)}>"
        self._launch(
            "attention/decode.cu",
            expression,
            "pqpppffpppppppqiiiiiifpippp",
            (split.blocks, groups, batch.batch_size),
            32 * warps,
            (
                qkv.data.ptr,
                pitch_of(qkv),
                *head_arguments(spec),
                address(batch.context_lens),
                address(batch.slots),
                cache.keys.data.ptr,
                cache.values.data.ptr,
                address(partials),
                arrival_counts.data.ptr,
                out.data.ptr,
                pitch_of(out),
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                head_pitch,
                cache.capacity,
                spec.window or 0,
                spec.scale,
                *bias_arguments(spec),
                address(lengths),
                address(cache.key_scales),
                address(cache.value_scales),
            ),
            shared=warps * 2 * decode_tile_bytes(depth, cache),
            cluster=split.cluster if split.cluster > 1 else None,
            dependent=self._unwritten_this_step(cache, kind != CROSS),
            bytes_moved=nbytes_of(qkv, out)
            + batch.batch_size * max_context_len * spec.kv_heads * 2 * head_bytes(cache),
        )


@dataclass(frozen=True)
class KVSplit:
    """Of attention over the cache for one new token: blocks per cluster, blocks per context."""

    cluster: int
    blocks: int

    def partial_elements(self, spec: AttentionSpec, batch: ForwardBatch) -> int:
        """fp32 numbers that the clusters of a context exchange; 0 where there is one."""
        clusters = self.blocks // self.cluster
        return (
            0
            if clusters == 1
            else batch.batch_size * spec.heads * clusters * (2 * self.cluster + padded_head_dim(spec))
        )


def nbytes_of(*values: cp.ndarray | QuantizedActivations | DeferredMatmul | DeferredGate | None) -> int:
    """Bytes of what a kernel reads and writes."""
    total = 0
    for value in values:
        value = value.source if isinstance(value, DeferredGate) else value
        total += 0 if value is None else value.acc.nbytes if isinstance(value, DeferredMatmul) else value.nbytes
    return total


def pointer_and_pitch(x: cp.ndarray | None) -> tuple[int, int]:
    """The address and the pitch of a padded matrix, zeros for none."""
    return (0, 0) if x is None else (x.data.ptr, x.strides[0] // x.itemsize)


def head_pitch_of(cache: LayerCache) -> int:
    """Elements from one token's head to the next token's in the cache: the head size, padded."""
    return cache.keys.strides[2] // cache.keys.itemsize


def head_groups(spec: AttentionSpec) -> int:
    """Blocks of the decode kernel for the query heads of one key-value head."""
    return ceil_div(spec.heads // spec.kv_heads, DECODE_HEADS)


def head_bytes(cache: LayerCache) -> int:
    """Bytes of one token's key or value head, with its scale if it has one."""
    return cache.keys.strides[2] + (0 if cache.key_scales is None else cache.key_scales.itemsize)


def element_of(cache: LayerCache) -> str:
    """What the cache holds, as the kernels name it."""
    return HALF if cache.key_scales is None else INT8


def padded_head_dim(spec: AttentionSpec) -> int:
    """The head size that the decode kernel is compiled for."""
    return max(64, 1 << (spec.head_dim - 1).bit_length())


def decode_tile_bytes(depth: int, cache: LayerCache) -> int:
    """Bytes of the keys or the values that a warp of the decode kernel takes at once; ``Tile`` in its sources."""
    return depth * cache.keys.itemsize * (32 if cache.key_scales is not None or depth == 64 else 16)


def best_unit(rows: int, pitch: int) -> int:
    """Chunks in a unit of ``gemv``: few idle warps at the end of a block's share against the work per unit."""

    def cost(unit: int) -> float:
        units = rows * ceil_div(ceil_div(pitch, CHUNK), unit)
        return ceil_div(units, GEMV_WARPS) * (unit + 0.7)

    return min((4, 2, 1), key=cost)


def norm_kind(norm: Norm | None, otherwise: int) -> int:
    """The kernels' number for a norm."""
    return otherwise if norm is None else LAYER_NORM if norm.center else RMS_NORM


def norm_arguments(norm: Norm | None) -> tuple[int, int, float]:
    """Weight, bias and epsilon."""
    return (0, 0, 0.0) if norm is None else (address(norm.weight), address(norm.bias), norm.eps)


def read_arguments(source: cp.ndarray | DeferredMatmul | None) -> tuple[tuple[int, int, int, int, int], int, int]:
    """How a kernel reads a source: data, scales, bias and pitch; the kind; the order of its layout."""
    if source is None:
        return (0, 0, 0, 0, 0), NONE, ROW
    if isinstance(source, DeferredMatmul):
        weight = source.weight
        factors = source.x_scale.ptr, address(weight.scale), address(weight.bias)
        return (source.acc.data.ptr, *factors, source.layout.ld), FROM_INT32, int(source.layout.order)
    kind = FROM_HALF if source.dtype == HALF_TYPE else FROM_FLOAT
    return (source.data.ptr, 0, 0, 0, pitch_of(source)), kind, ROW


def bias_arguments(spec: AttentionSpec) -> tuple[int, int]:
    """The biases of the scores, and up to which distance there are some."""
    return (0, 0) if spec.bias is None else (address(spec.bias.values), spec.bias.max_distance)


def head_arguments(spec: AttentionSpec) -> tuple[int, int, int, float, float]:
    """Gains, frequencies, epsilon and the rotation's scale."""
    norm = spec.q_norm or spec.k_norm
    return (
        address(spec.q_norm.weight) if spec.q_norm else 0,
        address(spec.k_norm.weight) if spec.k_norm else 0,
        address(spec.rope.frequencies) if spec.rope else 0,
        norm.eps if norm else 0.0,
        spec.rope.scale if spec.rope else 1.0,
    )
