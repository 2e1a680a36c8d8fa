"""The kernel that computes products everywhere compiles for every architecture, without spilling registers."""

from __future__ import annotations

import pytest

from bminf_lite.cuda.runtime import compiler
from bminf_lite.errors import DeviceError


@pytest.mark.parametrize("arch", ["sm_61", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_it_compiles(arch, tmp_path):
    try:
        known = compiler.architectures()
    except DeviceError as error:
        pytest.skip(str(error))
    if int(arch[3:].rstrip("a")) not in known:
        pytest.skip(f"this NVRTC cannot compile for {arch}")
    usage = compiler.compile("gemm/dp4a.cu", arch, ["igemm_dp4a"], cache=tmp_path).usage["igemm_dp4a"]
    assert usage.spill_stores == usage.spill_loads == usage.stack == 0
    assert usage.registers <= 128
