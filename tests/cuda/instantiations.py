"""Every instantiation of the kernels in ``cuda/kernels`` that the package can launch on some compute capability.

The rules are those of ``backend/cuda/launches.py`` and of ``attention/prefill.py``, ``gemm/skinny_gemm.py`` and
``sampling/sampler.py`` in ``cuda/kernels``, written down a second time as sets of values, so that they can be
enumerated without a GPU.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bminf_lite.cuda.kernels.attention import prefill as attention
from bminf_lite.cuda.kernels.attention.prefill import Visible
from bminf_lite.cuda.kernels.gemm import gemm_hopper as scaled_gemm
from bminf_lite.cuda.kernels.gemm.skinny_gemm import Output
from bminf_lite.cuda.kernels.sampling import sampler as sampling
from bminf_lite.cuda.runtime.compiler import SOURCES

Capability = tuple[int, int]
CAPABILITIES: dict[str, Capability] = {
    "sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9),
    "sm_90": (9, 0), "sm_90a": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0),
}  # fmt: skip
AMPLE_SHARED = ("sm_90", "sm_90a", "sm_100")
"""Architectures with 227 KiB of shared memory a block."""
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
ROW, COL32 = 1, 2
FEW_ROWS = {(8, 1), (32, 1), (128, 1), (256, 1), (512, 1), (512, 2), (512, 4), (512, 8), (512, 16)}
ROW_SHAPES = {
    True: FEW_ROWS | {(8, 2), (32, 2), (128, 2), (256, 2), (1024, 2)},
    False: FEW_ROWS | {(8, 2), (8, 4), (32, 2), (32, 4), (128, 2), (128, 4), (256, 4)},
}
"""Threads of a row and vectors of a thread, by whether ``transform`` reads an int32 product."""

_COMMON = (SOURCES / "common/common.cuh").read_text()
ACTIVATIONS = len(re.findall("=", re.findall(r"enum Activation \{.*?\}", _COMMON)[0]))
NONE, FROM_HALF, FROM_FLOAT, PRODUCT = range(4)
PLAIN, RMS_NORM, LAYER_NORM, GATE = range(4)
CODES, TO_HALF, TO_FLOAT = range(3)
GATED, ACTIVATED, SUMS = 3, 4, 5
TILINGS_BY_ARGUMENTS, MANY = {tiling.arguments: tiling for tiling in scaled_gemm.TILINGS}, 1024


@dataclass(frozen=True)
class Family:
    """The instantiations of one kernel: its name, and the values of its template's arguments, all combinations that
    ``possible`` are."""

    source: str
    name: str
    values: tuple[Sequence[object], ...]
    defines: tuple[str, ...] = ()

    def possible(self, arguments: tuple[object, ...]) -> bool:
        """Whether the package launches this combination."""
        rule = {
            "matvec": _matvec, "matvec_float": _matvec_float, "transform": _transform, "finish": _finish,
            "softmax": _softmax, "few_rows": _few_rows, "bminf::few_rows_hopper": _few_rows,
            "bminf::gemm_hopper": _gemm_hopper,
        }  # fmt: skip
        return self.name not in rule or rule[self.name](*arguments)

    def all(self) -> Iterator[tuple[object, ...]]:
        """Every possible combination."""
        return filter(self.possible, itertools.product(*self.values))

    def expression(self, arguments: tuple[object, ...]) -> str:
        """As CUDA C++ names it."""
        return f"{self.name}<{', '.join(map(str, arguments))}>" if arguments else self.name


def _matvec(source: int, vectors: int, output: int, activation: int, unit: int) -> bool:
    return (output in (GATED, ACTIVATED) or activation == 0) and (source == 0 or vectors <= 4)


def _few_rows(tiles: int, output: int, activation: int) -> bool:
    return output in (GATED, ACTIVATED) or activation == 0


def _matvec_float(source: int, vectors: int, kind: str, output: int, activation: int) -> bool:
    return _matvec(source, vectors, output, activation, 1)


def _transform(source: int, prepare: int, target: int, size: tuple[int, int], in_order: int, out_order: int) -> bool:
    sources = {RMS_NORM: (NONE, PRODUCT), LAYER_NORM: (NONE, PRODUCT), PLAIN: (FROM_HALF, FROM_FLOAT, PRODUCT)}
    return (
        source in sources.get(prepare, (FROM_HALF, PRODUCT))
        and size in ROW_SHAPES[source == PRODUCT]
        and (size[1] <= 4 or prepare not in (RMS_NORM, LAYER_NORM))
        and (in_order == ROW or source == PRODUCT)
        and (out_order == ROW or target == CODES)
    )


def _softmax(kind: str, whole: str, size: tuple[int, int], cluster: int) -> bool:
    return cluster == 1 or size == (512, 4)


def _finish(kind: str, order: int, add: str, target: str) -> bool:
    return (kind == "int" or order == ROW) and (add == "false" or target == "float")


def _gemm_hopper(output: int, activation: int, bias: str, tiling: str) -> bool:
    serves = TILINGS_BY_ARGUMENTS[tiling].serves(Output(output), stages=MANY)
    return serves and (output == GATED or activation == 0)


def families(arch: str) -> Iterator[Family]:
    """All kernels for ``arch``. Tensor-core layouts, and with them COL32, end before compute capability 9.0."""
    capability = CAPABILITIES[arch]
    hopper = capability >= (9, 0)
    orders = (ROW,) if hopper else (ROW, COL32)
    vectors, outputs, sources = (1, 2, 4, 8), range(5), range(3)
    activations = range(ACTIVATIONS)
    ring = (f"RING_CHUNKS={12 if arch in AMPLE_SHARED else 8}",)
    sizes = tuple(Pair(s) for s in sorted(ROW_SHAPES[True] | ROW_SHAPES[False]))
    prepare = range(GATE + ACTIVATIONS)
    yield Family("gemv/gemv.cu", "matvec", (sources, vectors, outputs, activations, (1, 2, 4)), ring)
    weights = ("bminf::int8", "__half")
    yield Family("gemv/gemv_float.cu", "matvec_float", (sources, vectors, weights, outputs, activations))
    yield Family("rowwise/rows.cu", "transform", (range(4), prepare, range(3), sizes, orders, orders))
    yield Family("rowwise/rows.cu", "finish", (("int", "float"), orders, ("false", "true"), ("float", "__half")))
    alone = tuple(s for s in sizes if s in ROW_SHAPES[False] and s[1] <= 4)
    kinds, booleans = ("float", "__half"), ("true", "false")
    yield Family("rowwise/softmax.cu", "softmax", (kinds, booleans, alone, (1, 2, 4, 8) if hopper else (1,)))
    yield Family("rowwise/softmax.cu", "softmax_any", (kinds, booleans))
    yield Family("rowwise/norm_unaligned.cu", "norm_any", (booleans,))
    yield Family("rowwise/layer_norm_many_rows.cu", "layer_norm_many", (booleans, kinds, (512, 1024)))
    yield from (Family("rowwise/rows.cu", name, ()) for name in ("embed", "last_rows", "widen"))
    yield Family("rowwise/random.cu", "fill_random", (("bminf::int8", "__half"),))
    for name in ("split_columns", "add_columns"):
        yield Family("rowwise/outliers.cu", name, (("__half", "float"),))
    floats = ("__half", "bf16", "float")
    for name in ("row_magnitudes", "row_codes", "column_magnitudes", "take_columns", "to_half"):
        yield Family("rowwise/calibration.cu", name, (floats,))
    yield Family("rowwise/calibration.cu", "take_rows", (("__half", "float"),))
    yield from (Family("rowwise/calibration.cu", name, ()) for name in ("divide_rows", "row_squares"))
    yield Family("rowwise/bandwidth.cu", "read_all", ())
    yield Family("gemm/dp4a.cu", "igemm_dp4a", ())
    yield Family("attention/prepare_heads.cu", "prepare", (("false", "true"), orders, attention.ELEMENTS))
    clusters = (1, 2, 4, 8) if hopper else (1,)
    yield Family("attention/decode.cu", "attend", ((64, 128, 256), clusters, range(3), attention.ELEMENTS))
    yield Family("rowwise/pointwise.cu", "activate_rows", (("false", "true"), orders, activations))
    yield Family("rowwise/pointwise.cu", "add_positions", ())
    if capability >= (8, 0):
        much = arch in (*AMPLE_SHARED, "sm_80")
        for tiles, warps, steps in (((1, 2), 16 if much else 8, 4), ((4,), 8 if much else 4, 8)):
            ring = (f"RING_WARPS={warps}", "RING_SLOTS=2", f"RING_STEPS={steps}")
            yield Family("gemm/skinny_gemm.cu", "few_rows", (tiles, range(SUMS + 1), activations), ring)
    yield from (Family(sampling.SOURCE, name, (), sampling.DEFINES) for name in sampling.KERNELS)
    if arch == "sm_90a":
        values = ((0, 2, GATED), activations, ("false", "true"), tuple(TILINGS_BY_ARGUMENTS))
        yield Family("gemm/gemm_hopper.cu", "bminf::gemm_hopper", values)
        yield Family("gemm/skinny_gemm_hopper.cu", "bminf::few_rows_hopper", ((1, 2, 4), range(SUMS + 1), activations))
    if arch != "sm_90":  # the package compiles for sm_90a there, whose instructions the kernel needs
        for depth, small, kind in itertools.product(HEAD_SIZES, (False, True), attention_kinds()):
            tiling = attention.tiling_for(capability, -(-depth // 16) * 16, small, *kind)
            elements = attention.ELEMENTS if kind[0] is not Visible.WITHIN else (attention.HALF,)
            yield from (Family(tiling.source, tiling.expression(element), ()) for element in elements)


def attention_kinds() -> list[tuple[Visible, bool]]:
    """What a query may see, and whether scores may then have a bias."""
    return [(Visible.CAUSAL, False), (Visible.CAUSAL, True), (Visible.SOURCE, False), (Visible.WITHIN, False),
            (Visible.WITHIN, True)]  # fmt: skip


class Pair(tuple[int, int]):
    """Two template arguments whose values belong together."""

    def __str__(self) -> str:
        return f"{self[0]}, {self[1]}"


@functools.cache
def pairwise(family: Family) -> list[tuple[object, ...]]:
    """A few combinations in which every two values that can meet do meet (greedily, so not the fewest)."""
    remaining = {arguments: pairs(arguments) for arguments in family.all()}
    missing = set().union(*remaining.values())
    chosen = []
    while missing:
        best = max(remaining, key=lambda arguments: len(missing & remaining[arguments]))
        chosen.append(best)
        missing -= remaining.pop(best)
    return chosen or list(family.all())


def pairs(arguments: tuple[object, ...]) -> set[tuple[tuple[int, object], ...]]:
    """Each two of the arguments with their places, or the one there is."""
    placed = list(enumerate(arguments))
    return set(itertools.combinations(placed, min(2, len(placed))))


def grouped(chosen: Iterable[tuple[Family, tuple[object, ...]]]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Expressions by source and macros: what one call of the compiler takes."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for family, arguments in chosen:
        expressions = groups.setdefault((family.source, family.defines), [])
        if (expression := family.expression(arguments)) not in expressions:
            expressions.append(expression)
    return groups
