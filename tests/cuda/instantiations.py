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
from bminf_lite.cuda.kernels.attention.prefill import AttentionMask
from bminf_lite.cuda.kernels.gemm import gemm_hopper as scaled_gemm
from bminf_lite.cuda.kernels.gemm.skinny_gemm import Epilogue
from bminf_lite.cuda.kernels.sampling import sampler as sampling
from bminf_lite.cuda.runtime.compiler import SOURCES

Capability = tuple[int, int]
CAPABILITIES: dict[str, Capability] = {
    "sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9),
    "sm_90": (9, 0), "sm_90a": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0),
}  # fmt: skip
LARGE_SHARED_MEMORY = ("sm_90", "sm_90a", "sm_100")
"""Architectures with 227 KiB of shared memory a block."""
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
ROW, COL32 = 1, 2
ROW_SIZES = {(8, 1), (32, 1), (128, 1), (256, 1), (512, 1), (512, 2), (512, 4), (512, 8), (512, 16)}
ROW_SHAPES = {
    True: ROW_SIZES | {(8, 2), (32, 2), (128, 2), (256, 2), (1024, 2)},
    False: ROW_SIZES | {(8, 2), (8, 4), (32, 2), (32, 4), (128, 2), (128, 4), (256, 4)},
}
"""Threads of a row and vectors of a thread, by whether ``transform`` reads an int32 product."""

_COMMON = (SOURCES / "common/common.cuh").read_text()
ACTIVATIONS = len(re.findall("=", re.findall(r"enum Activation \{.*?\}", _COMMON)[0]))
NONE, FROM_HALF, FROM_FLOAT, FROM_INT32 = range(4)
IDENTITY, RMS_NORM, LAYER_NORM, GATE = range(4)
CODES, TO_HALF, TO_FLOAT = range(3)
GATED, ACTIVATED, TO_INT32 = 3, 4, 5
TILE_CONFIGS_BY_ARGUMENTS, MANY = {tile_config.arguments: tile_config for tile_config in scaled_gemm.TILE_CONFIGS}, 1024


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
            "gemv": _gemv, "gemv_float": _gemv_float, "transform": _transform, "dequantize": _dequantize,
            "softmax": _softmax, "skinny_gemm": _skinny_gemm, "bminf::skinny_gemm_hopper": _skinny_gemm,
            "bminf::gemm_hopper": _gemm_hopper,
        }  # fmt: skip
        return self.name not in rule or rule[self.name](*arguments)

    def all(self) -> Iterator[tuple[object, ...]]:
        """Every possible combination."""
        return filter(self.possible, itertools.product(*self.values))

    def expression(self, arguments: tuple[object, ...]) -> str:
        """As CUDA C++ names it."""
        return f"{self.name}<{', '.join(map(str, arguments))}>" if arguments else self.name


def _gemv(source: int, vectors: int, epilogue: int, activation: int, unit: int) -> bool:
    return (epilogue in (GATED, ACTIVATED) or activation == 0) and (source == 0 or vectors <= 4)


def _skinny_gemm(tiles: int, epilogue: int, activation: int) -> bool:
    return epilogue in (GATED, ACTIVATED) or activation == 0


def _gemv_float(source: int, vectors: int, kind: str, epilogue: int, activation: int) -> bool:
    return _gemv(source, vectors, epilogue, activation, 1)


def _transform(source: int, prepare: int, target: int, size: tuple[int, int], in_order: int, out_order: int) -> bool:
    sources = {
        RMS_NORM: (NONE, FROM_INT32),
        LAYER_NORM: (NONE, FROM_INT32),
        IDENTITY: (FROM_HALF, FROM_FLOAT, FROM_INT32),
    }
    return (
        source in sources.get(prepare, (FROM_HALF, FROM_INT32))
        and size in ROW_SHAPES[source == FROM_INT32]
        and (size[1] <= 4 or prepare not in (RMS_NORM, LAYER_NORM))
        and (in_order == ROW or source == FROM_INT32)
        and (out_order == ROW or target == CODES)
    )


def _softmax(kind: str, whole: str, size: tuple[int, int], cluster: int) -> bool:
    return cluster == 1 or size == (512, 4)


def _dequantize(kind: str, order: int, add: str, target: str) -> bool:
    return (kind == "int" or order == ROW) and (add == "false" or target == "float")


def _gemm_hopper(epilogue: int, activation: int, bias: str, tile_config: str) -> bool:
    serves = TILE_CONFIGS_BY_ARGUMENTS[tile_config].serves(Epilogue(epilogue), stages=MANY)
    return serves and (epilogue == GATED or activation == 0)


def families(arch: str) -> Iterator[Family]:
    """All kernels for ``arch``. Tensor-core layouts, and with them COL32, end before compute capability 9.0."""
    capability = CAPABILITIES[arch]
    hopper = capability >= (9, 0)
    orders = (ROW,) if hopper else (ROW, COL32)
    vectors, outputs, sources = (1, 2, 4, 8), range(5), range(3)
    activations = range(ACTIVATIONS)
    pipeline = (f"PIPELINE_CHUNKS={12 if arch in LARGE_SHARED_MEMORY else 8}",)
    sizes = tuple(Pair(s) for s in sorted(ROW_SHAPES[True] | ROW_SHAPES[False]))
    prepare = range(GATE + ACTIVATIONS)
    yield Family("gemv/gemv.cu", "gemv", (sources, vectors, outputs, activations, (1, 2, 4)), pipeline)
    yield Family(
        "gemv/gemv_float.cu", "gemv_float", (sources, vectors, ("bminf::int8", "__half"), outputs, activations)
    )
    yield Family("rowwise/rows.cu", "transform", (range(4), prepare, range(3), sizes, orders, orders))
    yield Family("rowwise/rows.cu", "dequantize", (("int", "float"), orders, ("false", "true"), ("float", "__half")))
    alone = tuple(s for s in sizes if s in ROW_SHAPES[False] and s[1] <= 4)
    kinds, booleans = ("float", "__half"), ("true", "false")
    yield Family("rowwise/softmax.cu", "softmax", (kinds, booleans, alone, (1, 2, 4, 8) if hopper else (1,)))
    yield Family("rowwise/softmax.cu", "softmax_two_pass", (kinds, booleans))
    yield Family("rowwise/norm_unaligned.cu", "norm_multi_pass", (booleans,))
    yield Family("rowwise/layer_norm_many_rows.cu", "layer_norm_persistent", (booleans, kinds, (512, 1024)))
    yield from (Family("rowwise/rows.cu", name, ()) for name in ("embed", "last_rows", "int8_to_half"))
    yield Family("rowwise/random.cu", "fill_random", (("bminf::int8", "__half"),))
    for name in ("split_columns", "add_columns"):
        yield Family("rowwise/outliers.cu", name, (("__half", "float"),))
    floats = ("__half", "bf16", "float")
    for name in ("row_absmax", "row_codes", "column_absmax", "take_columns", "to_half"):
        yield Family("rowwise/calibration.cu", name, (floats,))
    yield Family("rowwise/calibration.cu", "take_rows", (("__half", "float"),))
    yield from (Family("rowwise/calibration.cu", name, ()) for name in ("divide_rows", "row_squares"))
    yield Family("rowwise/bandwidth.cu", "read_all", ())
    yield Family("gemm/dp4a.cu", "igemm_dp4a", ())
    yield Family("attention/prepare_heads.cu", "prepare_heads", (("false", "true"), orders, attention.ELEMENTS))
    clusters = (1, 2, 4, 8) if hopper else (1,)
    yield Family("attention/decode.cu", "attention_decode", ((64, 128, 256), clusters, range(3), attention.ELEMENTS))
    yield Family("rowwise/pointwise.cu", "activate_rows", (("false", "true"), orders, activations))
    yield Family("rowwise/pointwise.cu", "add_positions", ())
    if capability >= (8, 0):
        much = arch in (*LARGE_SHARED_MEMORY, "sm_80")
        for tiles, warps, steps in (((1, 2), 16 if much else 8, 4), ((4,), 8 if much else 4, 8)):
            pipeline = (f"PIPELINE_WARPS={warps}", "PIPELINE_STAGES=2", f"PIPELINE_STEPS={steps}")
            yield Family("gemm/skinny_gemm.cu", "skinny_gemm", (tiles, range(TO_INT32 + 1), activations), pipeline)
    yield from (Family(sampling.SOURCE, name, (), sampling.DEFINES) for name in sampling.KERNELS)
    if arch == "sm_90a":
        values = ((0, 2, GATED), activations, ("false", "true"), tuple(TILE_CONFIGS_BY_ARGUMENTS))
        yield Family("gemm/gemm_hopper.cu", "bminf::gemm_hopper", values)
        yield Family(
            "gemm/skinny_gemm_hopper.cu", "bminf::skinny_gemm_hopper", ((1, 2, 4), range(TO_INT32 + 1), activations)
        )
    if arch != "sm_90":  # the package compiles for sm_90a there, whose instructions the kernel needs
        for depth, small, kind in itertools.product(HEAD_SIZES, (False, True), attention_kinds()):
            tile_config = attention.tile_config_for(capability, -(-depth // 16) * 16, small, *kind)
            elements = attention.ELEMENTS if kind[0] is not AttentionMask.BIDIRECTIONAL else (attention.HALF,)
            yield from (Family(tile_config.source, tile_config.expression(element), ()) for element in elements)


def attention_kinds() -> list[tuple[AttentionMask, bool]]:
    """What a query may see, and whether scores may then have a bias."""
    return [
        (AttentionMask.CAUSAL, False),
        (AttentionMask.CAUSAL, True),
        (AttentionMask.CROSS, False),
        (AttentionMask.BIDIRECTIONAL, False),
        (AttentionMask.BIDIRECTIONAL, True),
    ]


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
