"""Every instantiation that the launchers in ``cuda/kernels`` can need, and selections of them."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from bminf_lite.cuda.kernels.attention.copy_blocks import CopyBlocks
from bminf_lite.cuda.kernels.attention.decode import AttentionDecode
from bminf_lite.cuda.kernels.attention.latent import HeadProducts, LatentAttentionKernels, LatentRows
from bminf_lite.cuda.kernels.attention.prefill import PrefillAttention
from bminf_lite.cuda.kernels.attention.prepare_heads import PrepareHeads
from bminf_lite.cuda.kernels.collective.all_reduce import AllReduce
from bminf_lite.cuda.kernels.collective.divided_rows import DividedRowKernels
from bminf_lite.cuda.kernels.experts.layer import ExpertKernels
from bminf_lite.cuda.kernels.gemm.float_gemm import FloatGemmSync
from bminf_lite.cuda.kernels.gemm.float_gemm_hopper import FloatGemmHopper
from bminf_lite.cuda.kernels.gemm.gemm_hopper import ScaledGemm
from bminf_lite.cuda.kernels.gemm.skinny_float_gemm_hopper import SkinnyFloatGemmHopper
from bminf_lite.cuda.kernels.gemm.skinny_gemm import SkinnyGemm
from bminf_lite.cuda.kernels.gemm.skinny_gemm_hopper import SkinnyGemmHopper
from bminf_lite.cuda.kernels.gemv.gemv import Gemv, GemvCodes
from bminf_lite.cuda.kernels.instantiations import Capability, KernelFamily
from bminf_lite.cuda.kernels.recurrent.delta_net import DeltaNetKernels
from bminf_lite.cuda.kernels.recurrent.mamba2 import Mamba2Kernels
from bminf_lite.cuda.kernels.rowwise.adapters import AdapterKernels
from bminf_lite.cuda.kernels.rowwise.calibration import CalibrationKernels
from bminf_lite.cuda.kernels.rowwise.gptq import GPTQKernels
from bminf_lite.cuda.kernels.rowwise.layer_inputs import LayerInputKernels
from bminf_lite.cuda.kernels.rowwise.pointwise import PointwiseKernels
from bminf_lite.cuda.kernels.rowwise.pooling import PoolingKernels
from bminf_lite.cuda.kernels.rowwise.rows import RowKernels
from bminf_lite.cuda.kernels.rowwise.short_convolution import ShortConvolutionKernels
from bminf_lite.cuda.kernels.rowwise.softmax import Softmax
from bminf_lite.cuda.kernels.rowwise.tensor_rows import TensorRows
from bminf_lite.cuda.kernels.sampling.sampler import Sampler

T = TypeVar("T")
LAUNCHERS = (
    Gemv, GemvCodes, RowKernels, Softmax, PointwiseKernels, AdapterKernels, CalibrationKernels, GPTQKernels,
    PrepareHeads, CopyBlocks, AttentionDecode, PrefillAttention, SkinnyGemm, SkinnyGemmHopper, ScaledGemm,
    FloatGemmSync, SkinnyFloatGemmHopper, FloatGemmHopper, Sampler, TensorRows, ExpertKernels,
    ShortConvolutionKernels, LatentRows, HeadProducts, LatentAttentionKernels, DeltaNetKernels, Mamba2Kernels,
    PoolingKernels, LayerInputKernels, AllReduce, DividedRowKernels,
)  # fmt: skip
ALONE = KernelFamily("rowwise/bandwidth.cu", "read_all"), KernelFamily("gemm/dp4a.cu", "igemm_dp4a")
"""Kernels without a choice: the benchmark's, and the product that runs everywhere."""
CAPABILITIES: dict[str, Capability] = {
    "sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90a": (9, 0), "sm_100a": (10, 0),
    "sm_120a": (12, 0),
}  # fmt: skip
"""The compute capability of each architecture that the package compiles for."""


def families(arch: str) -> Iterator[KernelFamily]:
    """All kernels for ``arch``."""
    for launcher in LAUNCHERS:
        yield from launcher.instantiations(CAPABILITIES[arch])
    yield from ALONE


@functools.cache
def pairwise(family: KernelFamily) -> list[tuple[object, ...]]:
    """A few combinations in which every two values that can meet do meet (greedily, so not the fewest)."""
    return covering({arguments: pairs(arguments) for arguments in family.all()}) or list(family.all())


def covering(remaining: dict[T, set[Any]]) -> list[T]:
    """A few keys whose values have everything that all values have: always the first key that adds the most.

    What a key adds only falls, so a key that adds as much as it did when it was entered into the heap comes next.
    """
    missing = set().union(*remaining.values())
    heap = [(-len(values), place) for place, values in enumerate(remaining.values())]
    heapq.heapify(heap)
    keys, chosen = list(remaining), []
    while missing:
        entered, place = heap[0]
        added = remaining[keys[place]] & missing
        if len(added) < -entered:
            heapq.heapreplace(heap, (-len(added), place))
            continue
        heapq.heappop(heap)
        chosen.append(keys[place])
        missing -= added
    return chosen


def tiling(family: KernelFamily) -> set[tuple[object, ...]]:
    """Each two template arguments of a family that is one instantiation, with the kernel's name."""
    kernel, _, arguments = family.name.removesuffix(">").partition("<")
    return {(kernel, *pair) for pair in pairs(tuple(arguments.split(", ")))}


@functools.cache
def tilings(group: tuple[str, ...], sources: tuple[str, ...]) -> dict[str, list[KernelFamily]]:
    """For each architecture of a group a share of the families of ``sources`` that are one instantiation each.

    Together they have every two template arguments that meet on one of the architectures.
    """
    owners: dict[KernelFamily, list[str]] = {}
    for arch in group:
        for family in dict.fromkeys(families(arch)):
            if family.source in sources and not family.values:
                owners.setdefault(family, []).append(arch)
    shares: dict[str, list[KernelFamily]] = {arch: [] for arch in group}
    for family in covering({family: tiling(family) for family in owners}):
        min((shares[arch] for arch in owners[family]), key=len).append(family)
    return shares


def pairs(arguments: tuple[object, ...]) -> set[tuple[tuple[int, object], ...]]:
    """Each two of the arguments with their places, or the one there is."""
    placed = list(enumerate(arguments))
    return set(itertools.combinations(placed, min(2, len(placed))))


def grouped(chosen: Iterable[tuple[KernelFamily, tuple[object, ...]]]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Expressions by source and macros: what one call of the compiler takes."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for family, arguments in chosen:
        expressions = groups.setdefault((family.source, family.defines), [])
        if (expression := family.expression(arguments)) not in expressions:
            expressions.append(expression)
    return groups
