"""Every kernel compiles for every architecture, keeps what it works on in registers, and takes what Python packs.

NVRTC needs no GPU for that. A plain run compiles one instantiation of each kernel for an architecture that has all of
them. Tests marked ``compile_all`` compile, for every architecture, a share of a selection in which every two template
arguments that can meet do meet on some architecture. All instantiations are thousands and take half an hour: they are
compiled with ``BMINF_LITE_ALL_KERNELS=1`` in the environment.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cubin_info import kernel_info, offsets_and_sizes
from instantiations import CAPABILITIES, families, grouped, pairs, pairwise, tiling, tilings

from bminf_lite.cuda.kernels.attention.heads import LARGE_HEAD_DIM
from bminf_lite.cuda.kernels.constants import DECODE_THREADS, GEMV_THREADS, MAMBA2_MAX_STATE_DIM, GemvInput
from bminf_lite.cuda.kernels.gemv.gemv import LARGE_SHARED_MEMORY, defines_for, pipeline_chunks
from bminf_lite.cuda.kernels.instantiations import KernelFamily
from bminf_lite.cuda.kernels.sources import SOURCES
from bminf_lite.cuda.runtime import compiler
from bminf_lite.cuda.runtime.compiler import Cubin, Usage
from bminf_lite.cuda.runtime.declarations import LETTERS, kernel_name

Instance = tuple[KernelFamily, tuple[object, ...]]

EVERYTHING = bool(os.environ.get("BMINF_LITE_ALL_KERNELS"))
GROUPS = ("sm_75", "sm_80", "sm_86", "sm_89"), ("sm_90a", "sm_100a", "sm_120a")
"""Architectures with the same kernels, but for those of compute capability 9.0 alone. They share the selection."""
AT_ONCE = 24
"""Instantiations in one call of the compiler; two calls run at the same time."""
OCCUPANCY_SPILL = 96
"""Bytes that ptxas may spill on its own account: it uses fewer registers than it may, to fit another block."""
MAY_USE = {
    "attention_decode": 255,
    "gemm_hopper": 240,
    "gemm_hopper_adapted": 240,
    "skinny_gemm_hopper_adapted": 168,
    "latent_attention": 255,
    "float_gemm_hopper": 240,
    "float_gemm": 255,
    "delta_rule": 255,
    "state_space": 255,
}
"""Registers of a thread, in the largest blocks that are launched or as the kernel itself hands them out; 128 where
nothing is said.
"""
TILED = (
    "attention/prefill.cu", "attention/prefill_hopper.cu", "attention/packed_hopper.cu", "attention/prefill_merge.cu",
)  # fmt: skip
"""Each tiling is a family of its own, and the selection is one of tilings."""
SHARED = ("attention/decode.cu", "attention/latent.cu", "attention/latent_few.cu", "gemm/float_gemm.cu")
"""Each architecture compiles a share of the families."""
ADAPTED_SPILL = 384
"""Bytes that ``gemm_hopper_adapted`` may spill with the widest tiles: around the loop over a tile's columns."""
SMALL_SPILL = {
    "shrink_many_rows": 20, "shrink_rows_and_quantize": 8, "grouped_gemm_adapted": 32, "router_many_rows": 72,
    "grouped_gemm_hopper_adapted": 192,
}  # fmt: skip
"""Bytes that these may spill: the first on 7.5, and up to 8 on 8.6 and 8.9, the second from 9.0 on, the third on 9.0,
which has a kernel of its own, the fourth on 12.0, around its loop. The last loads four registers around the loop over a
tile's columns, for each of seven heights.
"""
CHOICE_SPILL = 124
"""Bytes that the second product of few tokens may spill on 9.0 where a lane of the warp that chooses has 16 experts."""
RECURRENT_SPILL = 512
"""Bytes that a scan of chunks may spill: addresses that wait for the end of a chunk. NVRTC 13.0 spills up to 452."""
LARGE_STATE_SPILL = 1408
"""The same where a thread holds 64 elements of a state (256 rows). NVRTC 13.0 spills up to 1,324, on 7.5."""
NEVER_SPILL = ("sampling/sample.cu", "gemm/dp4a.cu")
SAMPLING_SPILL = 8
"""Bytes that ``best_token`` may spill on 9.0 where logits are adjusted, to count the drafts before a row."""
DECODE_SPILL = 96
"""Bytes that decode attention may spill where two blocks share an SM, all of them outside the loops over the cache.

NVRTC 12.9 and 13.0 spill up to 64, 13.5 up to 88.
"""
LARGE_HEAD_SPILL = 176
"""The same for heads of 512 elements where blocks find their items, all of them between segments."""
PREFILL_SPILL = {"attention/prefill.cu": 96, "attention/prefill_hopper.cu": 496}
"""Bytes that prefill attention may spill: the accumulators of heads of 128 and 256 leave few registers for the rest.

With ``prefill_hopper.cu`` only heads of 256 over int8 codes spill more than 160, most of them in the warp that finds
work and at the ends of pieces of work.
"""

ROW_SPILL = 24
"""Bytes that a kernel over rows of up to 32,768 elements may spill, of which a thread holds 64; on sm_120a it does."""
ROTATED_SPILL = 48
"""Bytes that ``gemv`` may spill, once a launch, where a thread holds 64 elements of a rotated row (over 16,384).

NVRTC 12.9 and 13.0 spill up to 32, 13.5 up to 36.
"""


def allowed_spill(family: KernelFamily, arguments: tuple[object, ...], usage: Usage) -> float:
    """Bytes a thread. A row of over 32,768 elements has 128 of them in each thread's registers."""
    if family.source in NEVER_SPILL:
        return SAMPLING_SPILL if family.name == "best_token" else 0
    if family.source in PREFILL_SPILL:
        return PREFILL_SPILL[family.source]
    if family.source.startswith("recurrent/"):
        return LARGE_STATE_SPILL if arguments[0] == MAMBA2_MAX_STATE_DIM else RECURRENT_SPILL
    if kernel_name(family.name) == "gemm_hopper_adapted":
        return ADAPTED_SPILL
    if kernel_name(family.name) in ("few_tokens_down", "few_tokens_down_adapted") and arguments[0] == 16:
        return CHOICE_SPILL
    if kernel_name(family.name) in SMALL_SPILL:
        return SMALL_SPILL[kernel_name(family.name)]
    if family.name == "transform" and arguments[3][1] == 16:  # type: ignore[index]
        return float("inf")
    if family.name == "transform" and arguments[3] == (512, 8):
        return ROW_SPILL
    if family.name == "gemv" and arguments[:2] == (GemvInput.ROTATED, (GEMV_THREADS, 8)):
        return ROTATED_SPILL
    if family.name == "attention_decode" and arguments[0][0] > LARGE_HEAD_DIM:  # type: ignore[index]
        return LARGE_HEAD_SPILL
    if usage.registers >= MAY_USE.get(kernel_name(family.name), 128):
        return 0
    return DECODE_SPILL if family.source == "attention/decode.cu" else OCCUPANCY_SPILL


def selection(arch: str) -> list[Instance]:
    """What is compiled for ``arch`` where everything is not."""
    (group,) = (group for group in GROUPS if arch in group)
    turns = itertools.count(group.index(arch))
    chosen: list[Instance] = [(family, ()) for family in tilings(group, TILED)[arch]]
    for family in families(arch):
        if family.source in TILED or (family.source in SHARED and next(turns) % len(group)):
            continue
        combinations = pairwise(family)
        if len(combinations) > len(group):
            combinations = combinations[group.index(arch) :: len(group)]
        chosen += [(family, arguments) for arguments in combinations]
    return chosen


def one_of_each(arch: str) -> list[Instance]:
    """One instantiation of each kernel, with small numbers as arguments: a small tile takes little time to compile."""
    found: dict[str, tuple[int, Instance]] = {}
    for family in families(arch):
        for arguments in family.all():
            size = sum(map(int, re.findall(r"\b\d+\b", family.expression(arguments))))
            name = kernel_name(family.name)
            if name not in found or size < found[name][0]:
                found[name] = size, (family, arguments)
    return [instance for _, instance in found.values()]


def compiled(arch: str, chosen: Sequence[Instance]) -> dict[str, tuple[Cubin, Usage]]:
    """Each of ``chosen`` by expression."""
    calls = [
        (source, names[i : i + AT_ONCE], defines)
        for (source, defines), names in grouped(chosen).items()
        for i in range(0, len(names), AT_ONCE)
    ]

    def work(call: tuple[str, list[str], tuple[str, ...]]) -> Cubin:
        return compiler.compile(call[0], arch, call[1], call[2], sources=SOURCES)

    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(work, calls))
    for (source, names, _), cubin in zip(calls, cubins, strict=True):
        assert set(cubin.usage) == set(names), source
    return {name: (cubin, usage) for cubin in cubins for name, usage in cubin.usage.items()}


def check_spills(chosen: Sequence[Instance], found: dict[str, tuple[Cubin, Usage]]) -> None:
    spilled = {}
    for family, arguments in chosen:
        name = family.expression(arguments)
        usage = found[name][1]
        if max(usage.spill_stores, usage.spill_loads) > allowed_spill(family, arguments, usage):
            spilled[name] = usage
    assert not spilled


def skip_if_unknown(arch: str) -> None:
    if int(re.sub(r"\D", "", arch)) not in compiler.architectures():
        pytest.skip(f"this NVRTC is too old for {arch}")


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
def test_one_of_each_compiles_and_takes_what_python_packs() -> None:
    """On an architecture that has all kernels, in 15 to 30 seconds. ``compile_all`` has every instantiation."""
    skip_if_unknown("sm_90a")
    chosen = one_of_each("sm_90a")
    found = compiled("sm_90a", chosen)
    check_spills(chosen, found)
    check_parameters(chosen, found)


def check_parameters(chosen: Sequence[Instance], found: dict[str, tuple[Cubin, Usage]]) -> None:
    """Each of ``chosen`` takes the parameters that Python packs, and at least a block of one thread."""
    for family, arguments in chosen:
        expression = family.expression(arguments)
        cubin, _ = found[expression]
        info = kernel_info(cubin.image, cubin.symbols[expression])
        signature = SOURCES.declarations(family.source)[kernel_name(expression)].signature
        expected = offsets_and_sizes(signature)
        if len(info.parameters) == len(expected):
            assert letters(cubin.symbols[expression]) in (signature, None), expression
        for start, size in info.parameters:  # a struct has several of Python's
            inside = [one for one in expected if start <= one[0] < start + size]
            assert inside[0][0] == start and start + size in (sum(inside[-1]), -(-sum(inside[-1]) // 8) * 8)
            expected = expected[expected.index(inside[-1]) + 1 :]
        assert not expected, signature
        assert 0 < info.max_threads <= 1024


def letters(symbol: str) -> str | None:
    """A kernel's signature from its mangled name, by the C++ runtime; None where there is none."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        return None
    demangle.restype, demangle.argtypes = ctypes.c_char_p, (ctypes.c_char_p, *[ctypes.c_void_p] * 3)
    text = demangle(symbol.encode(), None, None, None).decode()
    types = text[text.rindex("(") + 1 : -1].split(", ")
    return "".join("p" if t.endswith("*") else LETTERS.get(t.removeprefix("bminf::"), "?") for t in types)


@pytest.mark.compile_all
@pytest.mark.timeout(1800)  # the compiler alone takes 100 to 300 s of one core, more beside other tests
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", CAPABILITIES)
def test_compiles_without_spills_and_takes_what_python_packs(arch: str) -> None:
    skip_if_unknown(arch)
    chosen = [(family, a) for family in families(arch) for a in family.all()] if EVERYTHING else selection(arch)
    found = compiled(arch, chosen)
    check_spills(chosen, found)
    check_parameters(chosen, found)


@pytest.mark.usefixtures("nvrtc")
def test_products_of_one_row_start_beside_attention() -> None:
    """The warps that a quarter of an SM has fit its registers: of attention and of the product before or behind it."""
    registers, allocated, quarters = 65536, 8 * 32, 4
    attention = [f"attention_decode<128, 128, 16384, 4, 2, {unit}, 1, 0, __half, false>" for unit in (4, 8)]
    norms = ("1, 512, 1", "1, 512, 2", "2, 256, 1", "2, 512, 1")  # RMSNorm, LayerNorm
    norms += ("8, 512, 1", "8, 512, 2", "9, 256, 1", "9, 512, 1")  # the same, rotated
    products = [f"gemv<{row}, 0, 0, 4, false>" for row in norms]  # TO_HALF
    products += [f"gemv<0, 512, {vectors}, 2, 0, 4, false>" for vectors in (1, 2, 4)]  # fp16, ADD
    products += [f"gemv<3, 512, {vectors}, 2, 0, 4, false>" for vectors in (1, 2)]  # the same, rotated
    taken = []
    for source, names, threads, defines in (
        ("attention/decode.cu", attention, DECODE_THREADS, ()),
        ("gemv/gemv.cu", products, GEMV_THREADS, defines_for(pipeline_chunks(LARGE_SHARED_MEMORY))),
    ):
        usage = compiler.compile(source, "sm_90a", names, defines, sources=SOURCES).usage.values()
        warps = -(-threads // 32 // quarters)
        taken.append(warps * max(-(-32 * each.registers // allocated) * allocated for each in usage))
    assert sum(taken) <= registers // quarters


def test_every_kernel_is_some_launchers() -> None:
    """A kernel without a launcher is never compiled here."""
    folder = Path(str(SOURCES.folder))
    sources = [file.relative_to(folder).as_posix() for file in folder.rglob("*.cu")]
    kernels = {(source, name) for source in sources for name in SOURCES.declarations(source)}
    known = {(family.source, kernel_name(family.name)) for arch in CAPABILITIES for family in families(arch)}
    assert kernels == known


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_selection_covers_every_two_arguments(group: tuple[str, ...]) -> None:
    """Over the architectures of a group together, of the kernels that all of them have."""
    taken: dict[str, set[object]] = {}
    shared = set.intersection(*({family.name for family in families(arch)} for arch in group))
    for arch in group:
        for family, arguments in selection(arch):
            taken.setdefault(family.name, set()).update(pairs(arguments))
    for family in families(group[0]):
        missing = {pair for arguments in family.all() for pair in pairs(arguments)} - taken.get(family.name, set())
        assert family.name not in shared or family.source in (*TILED, *SHARED) or not missing, family.name


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_tilings_of_a_selection_have_every_two_arguments(group: tuple[str, ...]) -> None:
    """Of prefill attention, on some architecture of the group."""
    taken, every = set(), set()
    for arch in group:
        chosen, known = ({f for f in some if f.source in TILED} for some in (dict(selection(arch)), families(arch)))
        assert chosen <= known
        taken |= {pair for family in chosen for pair in tiling(family)}
        every |= {pair for family in known for pair in tiling(family)}
    assert taken == every
