"""Small batches on a GPU: whichever kernel takes a product, a row gets what it gets alone, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from checked import repeats
from random_values import random_int8

pytestmark = pytest.mark.gpu

SHAPES = [(64, 96), (4096, 256), (272, 1000), (1056, 4096)]  # in, out; gates have halves of whole groups, or not


@pytest.fixture(params=["few rows", "few rows on any GPU", "any rows"])
def chosen(request, cuda_backend, monkeypatch):
    """The backend, with a kernel for a few rows taking what it can: the GPU's best, the common one, or none."""
    from bminf_lite.cuda.kernels.gemm.igemm import GemmPlan
    from bminf_lite.cuda.kernels.gemm.skinny_gemm import SkinnyGemm

    def verdict(plan, rows):
        few = request.param != "any rows"
        return few and plan.layouts.is_row_major and plan._igemm.skinny_gemm.supports(rows)

    monkeypatch.setattr(GemmPlan, "skinny_gemm_choice", verdict)
    if request.param == "few rows on any GPU":
        monkeypatch.setattr(cuda_backend.int8_gemm, "skinny_gemm", SkinnyGemm(cuda_backend.device))
    return cuda_backend


def results(ops, x: np.ndarray, residual: np.ndarray, weight) -> list[np.ndarray]:
    """What each operation with a product gives for fp16 rows ``x``."""
    operations = (
        lambda v: ops.linear(v, weight),
        lambda v: ops.linear(v, weight, fp32=True),
        lambda v: ops.linear_add(v, weight, ops.array(residual)),
        lambda v: ops.gated_linear(v, weight, "silu"),
        lambda v: ops.activated_linear(v, weight, "relu"),
    )
    return [ops.host(operation(ops.array(x))).copy() for operation in operations]


@pytest.mark.parametrize("rows", [2, 9, 17, 32, 64, *repeats(7, 8, 16, 33, 48)])
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_of_a_batch_gets_what_it_gets_alone(chosen, rows, width, outputs, with_bias):
    rng = np.random.default_rng(rows * width)
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    weight = chosen.weight([random_int8(rng, outputs, width, True)], [bias])
    x = rng.standard_normal((rows, width)).astype(np.float16)
    x[rng.integers(rows)] = 0
    residual = rng.standard_normal((rows, outputs)).astype(np.float32)
    together = results(chosen, x, residual, weight)
    for row in range(0, rows, 5):
        alone = results(chosen, x[row : row + 1], residual[row : row + 1], weight)
        for batch, single in zip(together, alone, strict=True):
            np.testing.assert_array_equal(batch[row], single[0])
