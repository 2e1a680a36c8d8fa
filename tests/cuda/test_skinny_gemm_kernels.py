"""The products of a few rows that finish their outputs themselves equal the definition's arithmetic, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from checked import repeats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scaled_operands import CUPY_EPILOGUES, RELU, ScaledOperands

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.cuda.kernels.constants import Epilogue  # noqa: E402
from bminf_lite.cuda.kernels.gemm.skinny_gemm import GROUP, SkinnyGemm  # noqa: E402
from bminf_lite.cuda.kernels.gemm.skinny_gemm_hopper import SkinnyGemmHopper  # noqa: E402

SHAPES = [
    (2, 32, 16),
    (16, 4096, 4096),
    (9, 96, 14336),  # fewer tiles than blocks
    (5, 6144, 272),  # clusters with one tile and with two
    (16, 13312, 528),  # with three and more, whose sums take turns in shared memory
    *repeats((32, 4352, 7424), (31, 13344, 400), (24, 4256, 1000)),  # activations that do not stay in shared memory
    (64, 6144, 4096),
    *repeats((33, 4352, 528), (48, 96, 14336), (49, 13312, 272), (64, 13344, 4400)),
    (57, 13344, 4096),  # 64 rows that just stay in shared memory, with as few stages as there can be
]


@pytest.fixture(scope="module", params=[SkinnyGemm, SkinnyGemmHopper])
def kernel(request, device):
    if request.param is SkinnyGemmHopper and device.compute_capability != (9, 0):
        pytest.skip("this GPU lacks the instructions")
    made = request.param(device)
    if not made.supports(2):
        pytest.skip("the kernel needs compute capability 8.0")
    return made


class Case(ScaledOperands):
    """``outputs`` columns of a result that ``epilogue`` makes."""

    def __init__(self, rows: int, outputs: int, in_features: int, epilogue: Epilogue, bias: bool, seed: int = 0):
        super().__init__(rows, outputs * (2 if epilogue is Epilogue.GATED else 1), in_features, bias, seed)
        self.outputs, self.epilogue = outputs, epilogue

    def run(self, kernel: SkinnyGemm) -> np.ndarray:
        """What the kernel writes; nothing beside its result may change."""
        dtype = {Epilogue.TO_INT32: np.int32, Epilogue.TO_FLOAT: np.float32, Epilogue.ADD: np.float32}.get(
            self.epilogue, np.float16
        )
        whole = np.full((self.rows + 1, self.outputs + 8), 85, dtype)
        if self.epilogue is Epilogue.ADD:
            whole[: self.rows, : self.outputs] = self.before
        pitch, groups = -(-self.in_features // 16) * 16, -(-self.channels // GROUP) * GROUP
        columns = (0, pitch - self.in_features)
        x, w = (np.pad(m, ((0, n - len(m)), columns)) for m, n in ((self.x, self.rows), (self.w, groups)))
        out, x, w = cp.asarray(whole), cp.asarray(x), cp.asarray(w)
        scales = [cp.asarray(v) for v in (self.x_scale, self.w_scale)]
        bias = None if self.bias is None else cp.asarray(self.bias)
        kernel.launch(
            x.data.ptr,
            scales[0].data.ptr,
            w.data.ptr,
            scales[1].data.ptr,
            0 if bias is None else bias.data.ptr,
            out.data.ptr,
            self.outputs + 8,
            self.rows,
            self.channels,
            pitch,
            cp.cuda.get_current_stream().ptr,
            self.epilogue,
            RELU if self.epilogue in (Epilogue.GATED, Epilogue.ACTIVATED) else 0,
        )
        found = cp.asnumpy(out)
        assert (found[self.rows] == 85).all() and (found[:, self.outputs :] == 85).all()
        return found[: self.rows, : self.outputs]


@pytest.mark.parametrize("epilogue", CUPY_EPILOGUES)
@pytest.mark.parametrize(("rows", "outputs", "in_features"), SHAPES)
def test_outputs_are_the_definition_s(kernel, rows, outputs, in_features, epilogue):
    if rows > kernel.max_rows:
        pytest.skip("more rows than the kernel takes")
    case = Case(rows, outputs, in_features, epilogue, bias=epilogue is not Epilogue.TO_INT32)
    np.testing.assert_array_equal(case.run(kernel), case.expected(case.epilogue))


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(2, 64),
    st.integers(1, 40),
    st.integers(1, 700),
    st.sampled_from(CUPY_EPILOGUES),
    st.booleans(),
    st.data(),
)
def test_any_shape(kernel, rows, groups, in_features, epilogue, bias, data):
    rows = min(rows, kernel.max_rows)
    missing = 0 if epilogue is Epilogue.GATED else data.draw(st.integers(0, GROUP - 1))
    case = Case(
        rows, groups * GROUP - missing, in_features, epilogue, bias and epilogue is not Epilogue.TO_INT32, seed=groups
    )
    np.testing.assert_array_equal(case.run(kernel), case.expected(case.epilogue))


@pytest.mark.parametrize("epilogue", [Epilogue.TO_HALF, Epilogue.GATED])
def test_a_scale_that_is_no_number_stays_in_its_row(kernel, epilogue):
    case = Case(16, 256, 256, epilogue, bias=False)
    case.x_scale[7] = np.nan
    found = case.run(kernel)
    others = np.arange(16) != 7
    np.testing.assert_array_equal(found[others], case.expected(case.epilogue)[others])
    if epilogue is Epilogue.TO_HALF:
        assert np.isnan(found[7]).all()


def test_the_largest_sums_are_exact(kernel):
    case = Case(8, 64, 131056, Epilogue.TO_INT32, bias=False)
    case.x[:], case.w[:] = -128, -128
    assert (case.run(kernel) == 131056 * 2**14).all()
