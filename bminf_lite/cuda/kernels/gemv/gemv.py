"""One row, or a few rows of tensors, times an int8 weight: the launchers of ``gemv.cu`` and ``gemv_codes.cu``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....backend.values import Norm
from ...runtime.driver import shared_memory_per_block
from ...runtime.kernel import Kernel
from ..arrays import WeightRows, address, ceil_div, nbytes_of, round_up
from ..constants import GEMV_CHUNK, GEMV_THREADS, Activation, Epilogue, GemvInput
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together, numbers
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE, norm_arguments

if TYPE_CHECKING:
    import cupy as cp

WARPS = GEMV_THREADS // 32
LARGE_SHARED_MEMORY = 227 << 10
"""With at least this shared memory per block, blocks of two kernels fit an SM with twelve chunks in flight per warp."""
MAX_FUSED_NORM_WIDTH = 4 * 8 * GEMV_THREADS
"""``gemv`` normalises inputs of up to this many elements; a thread's part of more does not fit its registers."""
MAX_FUSED_SUM_WIDTH = 2 * 8 * GEMV_THREADS
"""``gemv`` adds a norm to rows of up to this many elements: two blocks with larger parts do not fit an SM."""
LONG_CODES = 20 << 10
"""Rows of more codes leave so little shared memory that two blocks fit an SM only with shorter pipelines."""
VECTORS = (1, 2, 4, 8)
ROWS = ((GEMV_THREADS // 2, 1), *((GEMV_THREADS, vectors) for vectors in VECTORS))
"""How many threads of ``gemv`` hold how many vectors of a row each: ``ROW_THREADS`` and ``VECTORS`` of the template."""
MAX_WIDTH = VECTORS[-1] * 8 * GEMV_THREADS
CODE_ROWS = (1, 2, 3, 4)
"""Rows of a product by ``gemv_codes``."""
UNITS = (4, 2, 1)
"""Chunks in a unit of ``gemv``."""
UNIT_OVERHEAD = 1.6
"""The time that a unit takes beside its chunks, in times of a chunk."""
ENGINE_INPUTS = tuple(kind for kind in GemvInput if kind != GemvInput.BFLOAT16)
SUMS = (GemvInput.SUM, GemvInput.RMS_NORM_OF_SUM)
TENSOR_EPILOGUES = {GemvInput.HALF: Epilogue.TO_HALF, GemvInput.BFLOAT16: Epilogue.TO_BFLOAT16}
"""The input and the epilogue of rows of other libraries' tensors, whose results have the type of the input."""
EPILOGUES = (Epilogue.TO_HALF, Epilogue.TO_FLOAT, Epilogue.ADD, Epilogue.GATED, Epilogue.ACTIVATED)


def pipeline_chunks(shared: int, codes: int = 0) -> int:
    """Chunks in flight per warp, if a block has ``shared`` bytes of shared memory and a row's codes take ``codes``."""
    return 12 if shared >= LARGE_SHARED_MEMORY and codes <= LONG_CODES else 8


def defines_for(chunks: int) -> tuple[str, ...]:
    """The macros of a kernel with ``chunks`` chunks in flight per warp."""
    return (f"PIPELINE_CHUNKS={chunks}",)


@dataclass(frozen=True)
class RowAddend:
    """A row fp32 ``[k]`` whose norm, an RMSNorm, is added to the input, and where the sum is written, fp32 ``[k]``.

    Both are padded. The sum must not lie where the input does.
    """

    x: cp.ndarray
    norm: Norm
    out: cp.ndarray


class Gemv:
    """One row times an int8 weight of plain rows with dynamic activations: fp16 or a norm of fp32, rotated or not."""

    source = "gemv/gemv.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        shared = shared_memory_per_block(capability)
        early = BOOLEANS if capability >= (9, 0) else BOOLEANS[:1]
        rows = tuple(map(Together, ROWS))
        values = (INPUTS, rows, NUMBERS, ACTIVATION_NUMBERS, UNITS[::-1], early)
        tensors = (
            numbers([GemvInput.BFLOAT16]),
            rows,
            numbers(TENSOR_EPILOGUES.values())[-1:],
            (0,),
            UNITS[::-1],
            BOOLEANS[:1],
        )
        for chunks in sorted({pipeline_chunks(shared), pipeline_chunks(shared, LONG_CODES + 1)}):
            defines = defines_for(chunks)
            yield KernelFamily(cls.source, "gemv", tensors, defines=defines)
            yield KernelFamily(cls.source, "gemv", values, _possible_row, defines)

    def launch(
        self, step: StepContext, x: cp.ndarray, norm: Norm | None, weight: WeightRows, out: cp.ndarray,
        epilogue: int, activation: int = 0, rotation: int = 1, addend: RowAddend | None = None, early: bool = False,
        shares: bool = False,
    ) -> None:  # fmt: skip
        """``out`` from one row ``x``; ``activation`` for a gated or activated epilogue.

        ``x`` is fp32 if it is normalised by ``norm`` or has an ``addend``, which is added first; else fp16 or fp32.
        A norm, or fp16 values, may be transformed in blocks of ``rotation`` elements.
        ``early``: ``x`` is complete before the kernel can start (:meth:`StepContext.reads`). With a norm and an
        activation the kernel then computes beside its predecessor. ``shares``: the next product reads the same norm.
        Of a stored product it may then start when the row that is normalised is complete.

        There is one block per SM. Behind a kernel with another number of blocks, two of these blocks could land on one
        SM and leave another idle. In that case a block requests more than half of an SM's shared memory, so that two do
        not fit.
        """
        launcher, (n, pitch) = self._launcher, (weight.out_features, weight.pitch)
        if addend is not None:
            assert norm is None or not norm.center
            kind = SUM if norm is None else RMS_NORM_OF_SUM
        elif norm is None and x.dtype == np.float32:
            kind = FLOAT
        else:
            kind = input_of(norm)
        kind = ROTATED_KINDS[kind] if rotation > 1 else kind
        can_be_early = launcher.has_clusters and kind in EARLY_INPUTS
        early = early and can_be_early and epilogue in ACTIVATED_EPILOGUES
        starts_late = shares and can_be_early and epilogue == Epilogue.TO_HALF
        kernel, grid, shared = self._plan(kind, n, pitch, epilogue, activation, early or starts_late)
        norm_weight, norm_bias, eps = norm_arguments(norm)
        if not step.one_block_per_sm and launcher.has_clusters:
            shared = max(shared, launcher.half_shared)
        args = (
            x.data.ptr, norm_weight, norm_bias, eps, 1 / weight.in_features, rotation, rotation**-0.5,
            weight.matrix.data.ptr, address(weight.scale), address(weight.bias), out.data.ptr, n, weight.in_features,
            pitch, *addend_arguments(addend),
        )  # fmt: skip
        bytes_moved = weight.nbytes + nbytes_of(x, out, *((addend.x, addend.out) if addend is not None else ()))
        kernel(grid, GEMV_THREADS, args, shared, launcher.stream, True, None, bytes_moved)
        step.one_block_per_sm = True
        if starts_late:
            step.starts_late()

    def launch_tensor(
        self, stream: int, source: GemvInput, x: int, weight: int, scale: int, bias: int, out: int, n: int, k: int
    ) -> None:
        """``out`` from a row of ``k`` elements of another library's tensor, in its type; not dependent.

        ``k`` is a multiple of 16, at most :data:`MAX_WIDTH`. Arguments are addresses, aligned to 16 bytes.
        """
        kernel, grid, shared = self._plan(source, n, k, TENSOR_EPILOGUES[source], 0, False)
        args = (x, 0, 0, 0.0, 1 / k, 1, 1.0, weight, scale, bias, out, n, k, k, *addend_arguments(None))
        kernel(grid, GEMV_THREADS, args, shared, stream)

    def _find_plan(
        self, source: int, n: int, pitch: int, epilogue: int, activation: int, early: bool
    ) -> tuple[Kernel, int, int]:
        """The kernel, its number of blocks, and the bytes of shared memory that it needs."""
        num_sms, matrices = self._launcher.num_sms, 2 if epilogue == Epilogue.GATED else 1
        rows = ceil_div(n // matrices, num_sms) * matrices
        unit = best_unit(rows, pitch)
        template = int(source), *row_of(pitch), int(epilogue), int(activation), unit, BOOLEANS[early]
        expression = f"gemv<{', '.join(map(str, template))}>"
        codes = round_up(pitch, GEMV_CHUNK * unit)
        chunks = pipeline_chunks(self._launcher.max_shared, codes)
        kernel = self._launcher.kernel(self.source, expression, False, defines_for(chunks))
        pipelines = WARPS * chunks * GEMV_CHUNK if self._launcher.has_clusters else 0
        return kernel, min(num_sms, n // matrices), pipelines + codes + 4 * rows


class GemvCodes:
    """A few rows of another library's tensor times an int8 weight, without quantizing the rows."""

    source = "gemv/gemv_codes.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "gemv_codes", (("float", "__half", "__nv_bfloat16"), CODE_ROWS))

    def supports(self, rows: int, k: int, itemsize: int) -> bool:
        """Whether the rows fit the shared memory of a block, and can be read in vectors."""
        return rows <= CODE_ROWS[-1] and k % 16 == 0 and rows * k * itemsize <= self._launcher.max_shared

    def launch(
        self, stream: int, kind: str, x: int, weight: int, scale: int, bias: int, out: int, rows: int, n: int, k: int,
        itemsize: int,
    ) -> None:  # fmt: skip
        """``out = scale * (x @ weight.T) + bias``, ``[rows, n]`` contiguous; addresses aligned to 16 bytes."""
        kernel = self._launcher.kernel(self.source, f"gemv_codes<{kind}, {rows}>")
        grid = min(2 * self._launcher.num_sms, ceil_div(n, WARPS))
        kernel(grid, GEMV_THREADS, (x, weight, scale, bias, out, n, k), rows * k * itemsize, stream)


def row_of(pitch: int) -> tuple[int, int]:
    """The element of :data:`ROWS` for rows of ``pitch`` elements."""
    return next(row for row in ROWS if pitch <= 8 * math.prod(row))


def input_of(norm: Norm | None) -> int:
    """The ``GemvInput`` of a row, or of a norm of a row."""
    return HALF if norm is None else LAYER_NORM if norm.center else RMS_NORM


def addend_arguments(addend: RowAddend | None) -> tuple[int, int, float, int]:
    """The row, the norm's weight and epsilon, and the sum."""
    if addend is None:
        return 0, 0, 0.0, 0
    return addend.x.data.ptr, address(addend.norm.weight), addend.norm.eps, addend.out.data.ptr


def best_unit(rows: int, pitch: int) -> int:
    """Chunks in a unit of ``gemv``: small units leave fewer warps idle at the end, large ones have less overhead."""

    def cost(unit: int) -> float:
        units = rows * ceil_div(ceil_div(pitch, GEMV_CHUNK), unit)
        return ceil_div(units, WARPS) * (unit + UNIT_OVERHEAD)

    return min(UNITS, key=cost)


HALF, RMS_NORM, LAYER_NORM, ROTATED, FLOAT, SUM, RMS_NORM_OF_SUM, *ROTATED_NORMS = map(int, ENGINE_INPUTS)
ROTATED_KINDS = dict(zip((HALF, RMS_NORM, LAYER_NORM, RMS_NORM_OF_SUM), (ROTATED, *ROTATED_NORMS), strict=True))
"""The rotated kind of each kind of input that can be rotated."""
INPUTS, NUMBERS, ACTIVATION_NUMBERS = numbers(ENGINE_INPUTS), numbers(EPILOGUES), numbers(Activation)
EARLY_INPUTS = (RMS_NORM, LAYER_NORM, *ROTATED_NORMS[:2])
ACTIVATED_EPILOGUES = (Epilogue.GATED, Epilogue.ACTIVATED)


def _possible(
    source: int, vectors: int, epilogue: int, activation: int, unit: int = 1, early: str = BOOLEANS[0]
) -> bool:
    has_activation = epilogue in ACTIVATED_EPILOGUES
    can_be_early = (has_activation or epilogue == Epilogue.TO_HALF) and source in EARLY_INPUTS
    if early == BOOLEANS[1] and not can_be_early:
        return False
    sums = dict.fromkeys((SUM, RMS_NORM_OF_SUM, ROTATED_NORMS[2]), MAX_FUSED_SUM_WIDTH)
    widest = {HALF: MAX_WIDTH, ROTATED: MAX_WIDTH, **sums}
    is_wide = vectors * 8 * GEMV_THREADS > widest.get(source, MAX_FUSED_NORM_WIDTH)
    return (has_activation or activation == 0) and not is_wide


def _possible_row(source: int, row: tuple[int, int], epilogue: int, activation: int, unit: int, early: str) -> bool:
    return _possible(source, row[1], epilogue, activation, unit, early)
