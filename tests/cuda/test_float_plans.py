"""Every product with float activations has a launch on compute capability 9.0, whose memory a block can have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bminf_lite.cuda.kernels.constants import Epilogue, GemvInput
from bminf_lite.cuda.kernels.gemm.float_gemm_hopper import FloatGemmHopper
from bminf_lite.cuda.kernels.gemm.float_operands import KINDS, WeightKind
from bminf_lite.cuda.kernels.gemm.skinny_float_gemm_hopper import MAX_NORM_WIDTH, SkinnyFloatGemmHopper

SHARED = 227 << 10
LAUNCHER: Any = SimpleNamespace(
    num_sms=132, max_shared=SHARED, half_shared=0, kernel=lambda *name: name, device=None, stream=0
)
FEATURES = (8, 40, 512, 1000, 2048, 8192, 28672)
OUTPUTS = (2, 128, 4096, 14336, 32000, 128256)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_shape_has_a_plan_of_two_stages(kind: WeightKind) -> None:
    skinny, many = SkinnyFloatGemmHopper(LAUNCHER), FloatGemmHopper(LAUNCHER)
    for k in FEATURES:
        for n in OUTPUTS:
            for epilogue in (int(Epilogue.TO_HALF), int(Epilogue.GATED)):
                for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64):
                    normed = (GemvInput.RMS_NORM,) if rows == 1 and k <= MAX_NORM_WIDTH else ()
                    for source in (GemvInput.HALF, *normed):
                        plan = skinny._find_plan(rows, n, k, kind, int(source), epilogue, 0)
                        assert plan.numbers[3] >= 2 and plan.shared <= SHARED, (rows, n, k)
                for rows in (65, 500):
                    found = many._find_plan(rows, n, k, kind, epilogue, 0, None)
                    assert found.numbers[-1] >= 2 and found.shared <= SHARED, (rows, n, k)
