"""Every kernel compiles for every architecture, and keeps what it works on in registers. NVRTC needs no GPU for that.

All instantiations are thousands and take half an hour. Without further ado, each architecture compiles its share of a
selection in which every two template arguments that can meet do meet on some architecture, and kernels whose own tests
compile them for every architecture are left to these. With ``BMINF_LITE_ALL_KERNELS=1`` in the environment it is
everything.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from instantiations import CAPABILITIES, Family, families, grouped, pairs, pairwise

from bminf_lite.cuda.runtime import compiler
from bminf_lite.cuda.runtime.compiler import Cubin, Usage

pytestmark = pytest.mark.usefixtures("nvrtc")

EVERYTHING = bool(os.environ.get("BMINF_LITE_ALL_KERNELS"))
SHARES = 4
"""Of the selection, an architecture compiles every so many-th instantiation, beginning with its own number."""
AT_ONCE = 24
"""Instantiations in one call of the compiler; two calls run at the same time."""
OCCUPANCY_SPILL = 64
"""Bytes that ptxas may spill on its own account: it uses fewer registers than it may, to fit another block."""
MAY_USE = {"attention_decode": 255, "bminf::gemm_hopper": 240}
"""Registers of a thread, in the largest blocks that are launched or as the kernel itself hands them out; 128 where
nothing is said.
"""
ELSEWHERE = ("attention/prefill.cu", "attention/prefill_hopper.cu", "sampling/sample.cu", "gemm/dp4a.cu")


def allowed_spill(family: Family, arguments: tuple[object, ...], usage: Usage) -> float:
    """Bytes a thread. A row of over 32,768 elements has 128 of them in each thread's registers."""
    if family.name == "transform" and arguments[3][1] == 16:  # type: ignore[index]
        return float("inf")
    return OCCUPANCY_SPILL if usage.registers < MAY_USE.get(family.name, 128) else 0


def selection(arch: str) -> list[tuple[Family, tuple[object, ...]]]:
    """What is compiled for ``arch``."""
    offset, chosen = list(CAPABILITIES).index(arch) % SHARES, []
    for family in families(arch):
        if family.source in ELSEWHERE and not EVERYTHING:
            continue
        combinations = list(family.all()) if EVERYTHING else pairwise(family)
        few = EVERYTHING or len(combinations) <= SHARES
        chosen += [(family, arguments) for arguments in (combinations if few else combinations[offset::SHARES])]
    return chosen


def compiled(arch: str, chosen: list[tuple[Family, tuple[object, ...]]]) -> dict[str, Usage]:
    """What each of ``chosen`` uses, by expression."""
    calls = [
        (source, names[i : i + AT_ONCE], defines)
        for (source, defines), names in grouped(chosen).items()
        for i in range(0, len(names), AT_ONCE)
    ]

    def work(call: tuple[str, list[str], tuple[str, ...]]) -> Cubin:
        return compiler.compile(call[0], arch, call[1], call[2])

    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(work, calls))
    for (source, names, _), cubin in zip(calls, cubins, strict=True):
        assert set(cubin.usage) == set(names), source
    return {name: usage for cubin in cubins for name, usage in cubin.usage.items()}


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_compiles_without_spills(arch: str) -> None:
    if int(re.sub(r"\D", "", arch)) not in compiler.architectures():
        pytest.skip(f"this NVRTC is too old for {arch}")
    chosen = selection(arch)
    found = compiled(arch, chosen)
    spilled = {
        family.expression(arguments): usage
        for family, arguments in chosen
        for usage in [found[family.expression(arguments)]]
        if max(usage.spill_stores, usage.spill_loads) > allowed_spill(family, arguments, usage)
    }
    assert not spilled


def test_every_kernel_is_among_them() -> None:
    """A kernel that somebody adds must be added to tests/cuda/instantiations.py too."""
    sources = {f"{f.parent.name}/{f.name}": f.read_text() for f in Path(str(compiler.SOURCES)).rglob("*.cu")}
    kernels = {
        (name, kernel)
        for name, text in sources.items()
        for kernel in re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\s*\(", text)
    }
    known = {
        (family.source, re.sub(r"^bminf::|<.*", "", family.name)) for arch in CAPABILITIES for family in families(arch)
    }
    assert kernels == known


def test_the_selection_covers_every_two_arguments() -> None:
    """Over the architectures together, of those that have the same kernels."""
    for archs in (("sm_75", "sm_80", "sm_86", "sm_89"), ("sm_90", "sm_90a", "sm_100", "sm_120")):
        taken: dict[str, set[object]] = {}
        for arch in archs:
            for family, arguments in selection(arch):
                assert family.possible(arguments)
                taken.setdefault(family.name, set()).update(pairs(arguments))
        for family in families(archs[0]):
            if family.source not in ELSEWHERE:
                assert {pair for arguments in family.all() for pair in pairs(arguments)} <= taken[family.name]
