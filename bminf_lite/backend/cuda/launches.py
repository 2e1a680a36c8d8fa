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
from ..values import AttentionSpec, LayerCache, Norm, Step
from .arrays import PAD, pitch_of
from .deferred import Codes, Gated, Product, Weight

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "gelu": 3}
MATVEC_THREADS = 512
MATVEC_WARPS = MATVEC_THREADS // 32
CHUNK = 512
AMPLE_SHARED = 227 << 10
"""Shared memory per block where two matrix-vector kernels fit side by side with twelve chunks under way per warp."""
WIDEST_ROW = 65536
ROW_THREADS = (8, 32, 128, 256, 512, 1024)
WIDEST_NORM = 4 * 8 * MATVEC_THREADS
"""Up to this many elements, ``matvec`` normalises its input; a thread's share of more does not fit its registers."""
MAX_HEAD_DIM = 256
FORMS = 1024
"""Shapes of rows whose kernels are remembered."""
ROW, HALF_TYPE = int(Order.ROW), np.dtype(np.float16)
CLUSTER = 8
DECODE_HEADS = 8
"""Query heads of one key-value head that a block of the decode kernel takes at most."""
DECODE_SHARE = 128
"""Tokens of a context below which another block does not pay."""
LONG_SPLIT = 1024
"""Tokens of a context for each block, from which on several clusters, which meet in memory, are faster than one."""

# The enumerations of rows.cu, matvec.cu and attention_decode.cu.
NONE, FROM_HALF, FROM_FLOAT, PRODUCT = range(4)
PLAIN, RMS_NORM, LAYER_NORM, GATE = range(4)
CODES, TO_HALF, TO_FLOAT = range(3)
MATVEC_TO_HALF, MATVEC_TO_FLOAT, MATVEC_ADD, MATVEC_GATED, MATVEC_ACTIVATED = range(5)
CAUSAL, BIASED, SOURCE = range(3)


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


class Launches:
    """The kernels of one GPU, on one stream."""

    def __init__(self, device: Device, stream: cp.cuda.Stream):
        self.device = device
        self.stream = stream.ptr
        self.multiprocessors = device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        self.clusters = device.compute_capability >= (9, 0)
        most_shared = device.attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.half_shared = most_shared // 2  # of which, with what every block takes beside it, only one fits
        self.ring_chunks = 12 if most_shared >= AMPLE_SHARED else 8
        self.ring_bytes = MATVEC_WARPS * self.ring_chunks * CHUNK if device.compute_capability >= (9, 0) else 0
        self._kernel = functools.cache(self._load)
        self._transform_kernel = functools.lru_cache(FORMS)(self._find_transform)
        self._spread = False  # whether the kernel launched last has one block on each multiprocessor
        self._written: set[int] | None = None  # caches that the present step has written; None before its first kernel

    def _load(self, source: str, expression: str, signature: str, cache: bool) -> Kernel:
        defines = [f"RING_CHUNKS={self.ring_chunks}"] if source == "gemv/gemv.cu" else []
        return Module(self.device, source, [expression], defines).kernel(expression, signature, cache)

    def _launch(
        self, source: str, expression: str, signature: str, grid: Dimensions, block: int, args: tuple[object, ...],
        shared: int = 0, cluster: int | None = None, one_per_multiprocessor: bool = False, moved: int = 0,
        cache: bool = False, dependent: bool = True,
    ) -> None:  # fmt: skip
        """Launch a kernel, which may start before its predecessor has ended if it is ``dependent``.

        ``one_per_multiprocessor``: its blocks are as many as the multiprocessors, of which each is to have one. Behind
        a kernel with fewer blocks, two of them would share a multiprocessor and elsewhere there would be none, which
        made decoding of an 8B model on an H200 half as fast: there it takes more than half of the shared memory.
        ``moved`` is how many bytes the kernel must read and write. ``cache``: see :meth:`Module.kernel`; for a kernel
        that fills the GPU, as its neighbours then cannot run beside it.
        """
        if one_per_multiprocessor and not self._spread and self.clusters:
            shared = max(shared, self.half_shared)
        kernel = self._kernel(source, expression, signature, cache)
        self._start(kernel, grid, block, args, shared, cluster, moved, dependent)
        self._spread = one_per_multiprocessor

    def _start(
        self, kernel: Kernel, grid: Dimensions, block: int, args: tuple[object, ...], shared: int = 0,
        cluster: int | None = None, moved: int = 0, dependent: bool = True,
    ) -> None:  # fmt: skip
        """Launch a kernel of which several blocks may share a multiprocessor; else as :meth:`_launch`."""
        kernel(grid, block, args, shared, self.stream, dependent, cluster, moved)
        self._spread = False

    def _size_of(self, *values: cp.ndarray | Codes | Product | Gated | None) -> int:
        """Bytes of what a kernel reads and writes, if anyone wants to know."""
        return 0 if self.device.observer is None else size_of(*values)

    # -- one row times a weight ----------------------------------------------------------------------------------------

    def matvec(
        self, x: cp.ndarray, norm: Norm | None, weight: Weight, out: cp.ndarray, output: int, activation: int = 0
    ) -> None:
        """One row, fp16 or normalised fp32, times an int8 weight of plain rows with dynamic activations."""
        n, pitch = weight.out_features, weight.pitch
        matrices = 2 if output == MATVEC_GATED else 1
        rows = ceil_div(n // matrices, self.multiprocessors) * matrices
        grid = min(self.multiprocessors, n // matrices)
        vectors = vectors_for(pitch, MATVEC_THREADS)
        unit = best_unit(rows, pitch)
        expression = f"matvec<{norm_kind(norm, 0)}, {vectors}, {output}, {activation}, {unit}>"
        gain, shift, eps = norm_arguments(norm)
        self._launch(
            "gemv/gemv.cu", expression, "pppfppppiii", grid, MATVEC_THREADS,
            (x.data.ptr, gain, shift, eps, weight.matrix.data.ptr, address(weight.scale), address(weight.bias),
             out.data.ptr, n, weight.in_features, pitch),
            shared=self.ring_bytes + round_up(pitch, CHUNK * unit) + 4 * rows, one_per_multiprocessor=True,
            moved=weight.nbytes + size_of(x, out),
        )  # fmt: skip

    def matvec_float(
        self, x: cp.ndarray, norm: Norm | None, weight: Weight, out: cp.ndarray, output: int, activation: int = 0
    ) -> None:
        """A few rows, fp16 or normalised fp32, times a weight in fp16, or in int8 with float activations."""
        outputs = weight.out_features // (2 if output == MATVEC_GATED else 1)
        vectors = vectors_for(weight.pitch, MATVEC_THREADS)
        kind = "bminf::int8" if weight.scale is not None else "__half"
        expression = f"matvec_float<{norm_kind(norm, 0)}, {vectors}, {kind}, {output}, {activation}>"
        gain, shift, eps = norm_arguments(norm)
        grid = min(2 * self.multiprocessors, ceil_div(outputs, MATVEC_WARPS))
        self._launch(
            "gemv/gemv_float.cu", expression, "pqppfppppqiii", (grid, x.shape[0]), MATVEC_THREADS,
            (x.data.ptr, pitch_of(x), gain, shift, eps, weight.matrix.data.ptr, address(weight.scale),
             address(weight.bias), out.data.ptr, pitch_of(out), weight.out_features, weight.in_features, weight.pitch),
            shared=2 * weight.pitch, moved=x.shape[0] * weight.nbytes + size_of(x, out),
        )  # fmt: skip

    # -- over rows -----------------------------------------------------------------------------------------------------

    def transform(
        self,
        source: cp.ndarray | Product | Gated | None,
        out: cp.ndarray | Codes,
        residual: cp.ndarray | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Read rows, add them to the residual stream, normalise or gate them, and write codes or values.

        With ``norm``, ``residual`` is normalised, after adding ``source`` to it where there is one.
        """
        rows, k = (residual if residual is not None else source).shape  # type: ignore[union-attr]
        if isinstance(source, Gated):
            assert norm is None
            (data, from_kind, order), prepare = read_arguments(source.source), GATE + ACTIVATIONS[source.activation]
        else:
            (data, from_kind, order), prepare = read_arguments(source), norm_kind(norm, PLAIN)
        if isinstance(out, Codes):
            target, out_order = CODES, int(out.layout.order)
            written = out.values.ptr, out.scales.ptr, out.layout.ld
        else:
            target, out_order = TO_HALF if out.dtype == HALF_TYPE else TO_FLOAT, ROW
            written = out.data.ptr, 0, pitch_of(out)
        kernel, grid, block = self._transform_kernel(rows, k, from_kind, prepare, target, order, out_order)
        self._start(
            kernel, grid, block,
            (*data, *place_of(residual), *norm_arguments(norm), *written, rows, k),
            moved=self._size_of(source, residual, out, residual if source is not None else None),
        )  # fmt: skip

    def _find_transform(
        self, rows: int, k: int, source: int, prepare: int, target: int, order: int, out_order: int
    ) -> tuple[Kernel, int, int]:
        """The kernel for :meth:`transform`, how many blocks, and the threads of each."""
        if k > WIDEST_ROW:
            raise DeviceError(f"rows of {k:,} elements; the kernels take {WIDEST_ROW:,} at most")
        many = rows > self.multiprocessors
        threads, vectors = row_shape(k, 1 if not many else 2 if source == PRODUCT else 4)
        expression = f"transform<{source}, {prepare}, {target}, {threads}, {vectors}, {order}, {out_order}>"
        kernel = self._kernel("rowwise/rows.cu", expression, "ppppqpqppfppqii", many)
        return kernel, ceil_div(rows * threads, max(threads, 128)), max(threads, 128)

    def finish(
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
        expression = f"finish<{kind}, {int(layout.order)}, {'true' if add else 'false'}, {target}>"
        self._launch(
            "rowwise/rows.cu", expression, "ppppqpqii", ceil_div(rows * ceil_div(n, 8), 256), 256,
            (acc.data.ptr, 0 if x_scale is None else x_scale.ptr, address(weight.scale), address(weight.bias),
             layout.ld, out.data.ptr, pitch_of(out), rows, n),
            moved=acc.nbytes + size_of(out, out if add else None), cache=rows > self.multiprocessors,
        )  # fmt: skip

    def embed(self, tokens: cp.ndarray, table: cp.ndarray, out: cp.ndarray) -> None:
        """Rows of an fp16 table into fp32: what a step begins with."""
        self._written = set()
        arguments = (tokens.data.ptr, table.data.ptr, pitch_of(table), out.data.ptr, pitch_of(out), out.shape[1])
        self._launch("rowwise/rows.cu", "embed", "ppqpqi", len(out), 256, arguments, moved=2 * size_of(out))

    def last_rows(self, starts: cp.ndarray, x: cp.ndarray, out: cp.ndarray) -> None:
        """The last row of each sequence, fp32."""
        arguments = (starts.data.ptr, x.data.ptr, pitch_of(x), out.data.ptr, pitch_of(out), x.shape[1])
        self._launch("rowwise/rows.cu", "last_rows", "ppqpqi", len(out), 256, arguments, moved=2 * size_of(out))

    def widen(self, codes: cp.ndarray, out: cp.ndarray) -> None:
        """int8 codes as fp16 numbers, a multiple of 16 of them."""
        grid = ceil_div(codes.size, 16 * 256)
        arguments = (codes.data.ptr, out.data.ptr, codes.size)
        self._launch("rowwise/rows.cu", "widen", "ppq", grid, 256, arguments, moved=size_of(codes, out), cache=True)

    def fill_random(self, out: cp.ndarray, seed: int) -> None:
        """The rows and columns of a ``RandomMatrix`` with that seed, int8 or fp16."""
        (rows, columns), kind = out.shape, "bminf::int8" if out.dtype == cp.int8 else "__half"
        arguments = (out.data.ptr, pitch_of(out), rows, columns, seed)
        grid = ceil_div(rows * ceil_div(columns, 8), 256)
        self._launch("rowwise/random.cu", f"fill_random<{kind}>", "pqiiQ", grid, 256, arguments, moved=size_of(out))

    # -- attention -----------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """No kernel launched from now on reads anything before its predecessors have ended, until the next step."""
        self._written = None

    def _untouched(self, cache: LayerCache, written: bool) -> bool:
        """Whether ``cache`` is as it was before the present step; ``written``: the next kernel writes to it."""
        if self._written is None:
            return False
        untouched = cache.keys.data.ptr not in self._written
        if written:
            self._written.add(cache.keys.data.ptr)
        return untouched

    def prepare_heads(
        self, qkv: cp.ndarray | Product, spec: AttentionSpec, cache: LayerCache, step: Step, q: cp.ndarray
    ) -> None:
        """Norm and rotation of a step's heads; queries go to ``q`` ``[T, heads, head_pitch]``, others to the cache."""
        data, kind, order = read_arguments(qkv)
        expression = f"prepare<{'true' if kind == PRODUCT else 'false'}, {order}, {element_of(cache)}>"
        self._untouched(cache, written=True)
        self._launch(
            "attention/prepare_heads.cu", expression, "ppppqpppffpppipppiiiiipp", q.shape[0], 256,
            (*data, *head_arguments(spec), address(step.starts), address(step.past), address(step.slots), step.count,
             q.data.ptr, cache.keys.data.ptr, cache.values.data.ptr,
             spec.heads, spec.kv_heads, spec.head_dim, head_pitch_of(cache), cache.capacity,
             address(cache.key_scales), address(cache.value_scales)),
            moved=self._size_of(qkv, q),
        )  # fmt: skip

    def split_context(self, spec: AttentionSpec, step: Step, reach: int) -> Split:
        """How the blocks of the decode kernel share a context of ``reach`` tokens at most."""
        reach = reach if spec.window is None else min(reach, spec.window)
        most = max(1, self.multiprocessors // (step.count * spec.kv_heads * head_groups(spec)))
        useful = min(most, ceil_div(reach, DECODE_SHARE))
        if not self.clusters:
            return Split(1, useful)
        cluster = min(CLUSTER, 1 << (useful.bit_length() - 1))
        return Split(cluster, cluster * max(1, min(ceil_div(reach, cluster * LONG_SPLIT), most // cluster)))

    def attend_one(
        self, qkv: cp.ndarray, spec: AttentionSpec, cache: LayerCache, step: Step, split: Split,
        parts: cp.ndarray | None, arrived: cp.ndarray, out: cp.ndarray, lengths: cp.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Attention of one new token per sequence; see ``attention_decode.cu``.

        With ``lengths``, ``qkv`` holds queries only and ``cache`` encoded sources of that many tokens.
        """
        head_pitch = head_pitch_of(cache)
        depth = decode_depth(spec)
        warps = (8 if depth <= 128 else 4) // (1 if self.device.compute_capability >= (8, 0) else 2)
        groups = spec.kv_heads * head_groups(spec)
        kind = SOURCE if lengths is not None else BIASED if spec.bias is not None else CAUSAL
        reach = step.reach if lengths is None else cache.capacity
        expression = f"attend<{depth}, {split.cluster}, {kind}, {element_of(cache)}>"
        self._launch(
            "attention/decode.cu", expression, "pqpppffpppppppqiiiiiifpippp", (split.blocks, groups, step.count),
            32 * warps,
            (qkv.data.ptr, pitch_of(qkv), *head_arguments(spec), address(step.past), address(step.slots),
             cache.keys.data.ptr, cache.values.data.ptr, address(parts), arrived.data.ptr, out.data.ptr, pitch_of(out),
             spec.heads, spec.kv_heads, spec.head_dim, head_pitch, cache.capacity, spec.window or 0, spec.scale,
             *bias_arguments(spec), address(lengths), address(cache.key_scales), address(cache.value_scales)),
            shared=warps * 2 * decode_tile(depth, cache),
            cluster=split.cluster if split.cluster > 1 else None, dependent=self._untouched(cache, kind != SOURCE),
            moved=size_of(qkv, out) + step.count * reach * spec.kv_heads * 2 * head_bytes(cache),
        )  # fmt: skip


@dataclass(frozen=True)
class Split:
    """Of attention over the cache for one new token: blocks per cluster, blocks per context."""

    cluster: int
    blocks: int

    def part_elements(self, spec: AttentionSpec, step: Step) -> int:
        """fp32 numbers that the clusters of a context exchange; 0 where there is one."""
        clusters = self.blocks // self.cluster
        return 0 if clusters == 1 else step.count * spec.heads * clusters * (2 * self.cluster + decode_depth(spec))


def size_of(*values: cp.ndarray | Codes | Product | Gated | None) -> int:
    """Bytes of what a kernel reads and writes."""
    total = 0
    for value in values:
        value = value.source if isinstance(value, Gated) else value
        total += 0 if value is None else value.acc.nbytes if isinstance(value, Product) else value.nbytes
    return total


def place_of(x: cp.ndarray | None) -> tuple[int, int]:
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


def decode_depth(spec: AttentionSpec) -> int:
    """The head size that the decode kernel is compiled for."""
    return max(64, 1 << (spec.head_dim - 1).bit_length())


def decode_tile(depth: int, cache: LayerCache) -> int:
    """Bytes of the keys or the values that a warp of the decode kernel takes at once; ``Tile`` in its sources."""
    return depth * cache.keys.itemsize * (32 if cache.key_scales is not None or depth == 64 else 16)


def best_unit(rows: int, pitch: int) -> int:
    """Chunks in a unit of ``matvec``: few idle warps at the end of a block's share against the work per unit."""

    def cost(unit: int) -> float:
        units = rows * ceil_div(ceil_div(pitch, CHUNK), unit)
        return ceil_div(units, MATVEC_WARPS) * (unit + 0.7)

    return min((4, 2, 1), key=cost)


def norm_kind(norm: Norm | None, otherwise: int) -> int:
    """The kernels' number for a norm."""
    return otherwise if norm is None else LAYER_NORM if norm.center else RMS_NORM


def norm_arguments(norm: Norm | None) -> tuple[int, int, float]:
    """Gain, shift and epsilon."""
    return (0, 0, 0.0) if norm is None else (address(norm.gain), address(norm.bias), norm.eps)


def read_arguments(source: cp.ndarray | Product | None) -> tuple[tuple[int, int, int, int, int], int, int]:
    """How a kernel reads a source: data, scales, bias and pitch; the kind; the order of its layout."""
    if source is None:
        return (0, 0, 0, 0, 0), NONE, ROW
    if isinstance(source, Product):
        weight = source.weight
        factors = source.x_scale.ptr, address(weight.scale), address(weight.bias)
        return (source.acc.data.ptr, *factors, source.layout.ld), PRODUCT, int(source.layout.order)
    kind = FROM_HALF if source.dtype == HALF_TYPE else FROM_FLOAT
    return (source.data.ptr, 0, 0, 0, pitch_of(source)), kind, ROW


def bias_arguments(spec: AttentionSpec) -> tuple[int, int]:
    """The biases of the scores, and up to which distance there are some."""
    return (0, 0) if spec.bias is None else (address(spec.bias.values), spec.bias.reach)


def head_arguments(spec: AttentionSpec) -> tuple[int, int, int, float, float]:
    """Gains, frequencies, epsilon and the rotation's scale."""
    norm = spec.q_norm or spec.k_norm
    return (
        address(spec.q_norm.gain) if spec.q_norm else 0,
        address(spec.k_norm.gain) if spec.k_norm else 0,
        address(spec.rope.frequencies) if spec.rope else 0,
        norm.eps if norm else 0.0,
        spec.rope.scale if spec.rope else 1.0,
    )
