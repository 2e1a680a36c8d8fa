"""Int8 products on the GPU equal NumPy's, bit for bit, whatever the shape and by whichever plan."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from checked import repeats

from bminf_lite.cuda.kernels.gemm.plans import GemmKind, GemmLayouts, bucket
from bminf_lite.cuda.kernels.gemm.tensor_core_plans import gemm_layouts
from bminf_lite.cuda.runtime.cublaslt import Algorithm
from bminf_lite.errors import DeviceError

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.cuda.kernels.gemm import cublaslt_matmul as matmul  # noqa: E402
from bminf_lite.cuda.kernels.gemm.cublaslt_matmul import MatmulContext, NoAlgorithm  # noqa: E402
from bminf_lite.cuda.kernels.gemm.igemm import GemmPlan, Int8Gemm  # noqa: E402
from bminf_lite.cuda.kernels.gemm.skinny_gemm import SkinnyGemm  # noqa: E402
from bminf_lite.cuda.runtime.graphs import CudaGraph  # noqa: E402

SHAPES = [  # rows, out_features, in_features
    (1, 1, 1),
    (2, 3, 5),
    (7, 13, 11),
    (31, 33, 32),
    (33, 31, 97),
    (32, 32, 33),
    (127, 129, 130),
    (1, 4096, 4096),
    *repeats((17, 4096, 14336), (300, 14336, 4096), (3, 128256, 4096)),
]


@pytest.fixture(scope="module")
def igemm(device, matmul_context):
    return Int8Gemm(device, matmul_context)


def random_codes(*shape: int) -> cp.ndarray:
    return cp.random.RandomState(sum(shape)).randint(-128, 128, shape).astype(np.int8)


def exact(x: cp.ndarray, w: cp.ndarray) -> cp.ndarray:
    """``x @ w`` for int8 codes: fp64 sums of integers below 2**53 are exact."""
    return (x.astype(np.float64) @ w.astype(np.float64)).astype(np.int32)


def run_plan(plan, x: cp.ndarray, codes: cp.ndarray, stream: int = 0) -> cp.ndarray:
    """The plan's product, with the activation's padding full of garbage."""
    rows = len(x)
    layout, result = plan.activation(rows), plan.result(rows)
    buffer = cp.full(layout.size, -77, np.int8)
    offsets = layout.offset(cp.arange(rows)[:, None], cp.arange(x.shape[1]))
    buffer[offsets.ravel()] = x.ravel()
    weight, acc = plan.pack_weight(codes), cp.full(result.size, -1, np.int32)
    plan.run(acc.data.ptr, weight.data.ptr, buffer.data.ptr, rows, stream)
    return result.unpack(acc)


@pytest.mark.parametrize("kind", [GemmKind.ROW_MAJOR, GemmKind.DP4A])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_a_plan_is_exact(device, matmul_context, kind, rows, out_features, in_features):
    x, codes = random_codes(rows, in_features), random_codes(out_features, in_features)
    plan = Int8Gemm(device, matmul_context, [kind]).plan(out_features, in_features)
    assert (run_plan(plan, x, codes) == exact(x, codes.T)).all()


def test_extreme_codes_do_not_overflow(igemm):
    x = cp.full((17, 131071), -128, np.int8)
    acc = run_plan(igemm.plan(33, 131071), x, cp.full((33, 131071), -128, np.int8))
    assert (acc == 131071 * 128 * 128).all()


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("mnk", [(1, 1, 1), (5, 3, 2), (31, 33, 32), (33, 31, 97), (64, 128, 256)], ids=str)
@pytest.mark.parametrize("kinds", [(), (GemmKind.DP4A,)], ids=["best", "dp4a"])
def test_matmul_with_every_transposition(device, matmul_context, igemm, mnk, transpose_a, transpose_b, kinds):
    m, n, k = mnk
    chosen = Int8Gemm(device, matmul_context, kinds) if kinds else igemm
    a, b = random_codes(m, k), random_codes(k, n)
    stored_a = cp.ascontiguousarray(a.T) if transpose_a else a
    stored_b = cp.ascontiguousarray(b.T) if transpose_b else b
    result = chosen.matmul(stored_a, stored_b, transpose_a, transpose_b)
    assert result.dtype == np.int32 and result.flags.c_contiguous
    assert (result == exact(a, b)).all()


@pytest.mark.parametrize(
    ("batch_a", "batch_b"),
    [((), (3,)), ((3,), ()), ((2, 1), (3,)), ((2, 3), (2, 3)), ((4,), (1, 1)), ((0,), (1,)), ((70000,), ())],
    ids=str,
)
@pytest.mark.parametrize("kinds", [(), (GemmKind.DP4A,)], ids=["best", "dp4a"])
def test_matmul_broadcasts_batches(device, matmul_context, igemm, batch_a, batch_b, kinds):
    chosen = Int8Gemm(device, matmul_context, kinds) if kinds else igemm
    a, b = random_codes(*batch_a, 3, 17), random_codes(*batch_b, 17, 5)
    result = chosen.matmul(a, b)
    assert result.shape == (*np.broadcast_shapes(batch_a, batch_b), 3, 5)
    assert (result == exact(a, b)).all()


def test_matmul_of_strided_views(igemm):
    whole_a, whole_b = random_codes(20, 40), random_codes(40, 60)
    a, b = whole_a[1::2, ::2], whole_b[::2, 3::3]
    assert (igemm.matmul(a, b) == exact(a, b)).all()


@pytest.mark.parametrize(
    ("a", "b"), [((3, 4), (5, 6)), ((3,), (3, 4)), ((2, 3, 4), (3, 4, 5))], ids=["inner", "vector", "batch"]
)
def test_matmul_refuses_what_does_not_fit(igemm, a, b):
    with pytest.raises(ValueError, match=r"matmul of int8|broadcast"):
        igemm.matmul(random_codes(*a), random_codes(*b))


def test_matmul_refuses_other_dtypes(igemm):
    with pytest.raises(ValueError, match="float32"):
        igemm.matmul(cp.ones((2, 2), np.float32), random_codes(2, 2))


def test_a_plan_that_fails_gives_way_with_a_warning(device, matmul_context):
    """COL32 products are refused by cublasLt from compute capability 9.0 on."""
    if device.compute_capability < (9, 0):
        pytest.skip("this GPU runs COL32 products")
    chosen = Int8Gemm(device, matmul_context, [GemmKind.COL32_2R_4R4, GemmKind.COL4_4R2_8C, GemmKind.ROW_MAJOR])
    with pytest.warns(RuntimeWarning) as caught:
        assert chosen.kind is GemmKind.ROW_MAJOR
    assert [str(w.message).split(" is not used")[0].split()[-1] for w in caught] == ["col32_2r_4r4", "col4_4r2_8c"]
    x, codes = random_codes(33, 65), random_codes(31, 65)
    assert (run_plan(chosen.plan(31, 65), x, codes) == exact(x, codes.T)).all()
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in (chosen.check(GemmKind.COL32_2R_4R4) or "")


def test_no_working_plan_is_an_error(device, matmul_context):
    if device.compute_capability < (9, 0):
        pytest.skip("this GPU runs COL32 products")
    chosen = Int8Gemm(device, matmul_context, [GemmKind.COL32_2R_4R4])
    with pytest.warns(RuntimeWarning), pytest.raises(DeviceError, match="no int8 plan works"):
        chosen.plan(1, 1)


def test_an_inexact_plan_is_not_trusted(device, matmul_context, monkeypatch):
    chosen = Int8Gemm(device, matmul_context, [GemmKind.ROW_MAJOR, GemmKind.DP4A])
    multiply = type(chosen)._is_exact
    monkeypatch.setattr(
        chosen, "_is_exact", lambda plan, rows: plan.layouts.kind is GemmKind.DP4A and multiply(chosen, plan, rows)
    )
    with pytest.warns(RuntimeWarning, match="plain is not used, a product of 1 x 1 by 1 x 1 was wrong"):
        assert chosen.kind is GemmKind.DP4A


@pytest.mark.filterwarnings("error")
def test_the_first_choice_for_this_gpu_works(igemm):
    assert igemm.kind is igemm._kinds[0]


def test_a_plain_weight_without_padding_is_not_copied(igemm):
    if not igemm.plan(64, 64).layouts.is_row_major:
        pytest.skip("this GPU lays weights out")
    codes = random_codes(64, 64)
    assert igemm.plan(64, 64).pack_weight(codes).data.ptr == codes.data.ptr
    with pytest.raises(ValueError, match=r"\[64, 65\]"):
        igemm.plan(64, 64).pack_weight(random_codes(64, 65))


@pytest.mark.parametrize("kind", list(GemmKind))
def test_a_weight_is_laid_out_as_the_plan_says(igemm, kind):
    plan = GemmPlan(igemm, gemm_layouts(kind, 45, 71))
    codes = random_codes(45, 71)
    padded = plan.weight.unpack(plan.pack_weight(codes))
    assert padded.shape == plan.layouts.padded
    assert (padded[:45, :71] == codes).all() and (padded != 0).sum() == (codes != 0).sum()


def test_a_shape_that_cublaslt_refuses_is_computed_by_the_other_kernel(device, matmul_context, monkeypatch):
    chosen = Int8Gemm(device, matmul_context, [GemmKind.ROW_MAJOR])
    plan = chosen.plan(33, 65)

    def refuse(*_):
        raise NoAlgorithm("refused")

    monkeypatch.setattr(matmul_context, "prepare", refuse)
    x, codes = random_codes(70, 65), random_codes(33, 65)
    with pytest.warns(RuntimeWarning, match="refused; a slower kernel computes it"):
        assert (run_plan(plan, x, codes) == exact(x, codes.T)).all()
    with pytest.warns(RuntimeWarning, match="refused"):
        assert (chosen.matmul(x, codes, transpose_b=True) == exact(x, codes.T)).all()


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("kind", [GemmKind.ROW_MAJOR, GemmKind.DP4A])
def test_products_are_captured_into_a_graph(device, matmul_context, seen, kind):
    rows, out, inner = 40 + seen, 256, 512
    plan = Int8Gemm(device, matmul_context, [kind]).plan(out, inner)
    codes, x = random_codes(out, inner), random_codes(rows, inner)
    weight, acc = plan.pack_weight(codes), cp.zeros((rows, out), np.int32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()

    def product():
        plan.run(acc.data.ptr, weight.data.ptr, x.data.ptr, rows, stream.ptr)

    if seen:
        product()
        stream.synchronize()
        acc.fill(0)
        cp.cuda.Device().synchronize()
    used = cp.get_default_memory_pool().used_bytes()
    graph = CudaGraph(product, stream.ptr)
    assert cp.get_default_memory_pool().used_bytes() == used
    for seed in range(2):
        x[...] = random_codes(rows + seed, inner)[:rows]
        cp.cuda.Device().synchronize()
        graph.replay(stream.ptr)
        stream.synchronize()
        assert (acc == exact(x, codes.T)).all()


def test_algorithms_are_timed_once_and_remembered(device, tmp_path, monkeypatch):
    timings = []
    measure = matmul.timed
    monkeypatch.setattr(matmul, "timed", lambda *args: timings.append(1) or measure(*args))
    x, codes = random_codes(100, 256), random_codes(512, 256)
    for start in range(2):
        plan = Int8Gemm(device, MatmulContext.open(device, cp.cuda.alloc, tmp_path), [GemmKind.ROW_MAJOR]).plan(
            512, 256
        )
        before = len(timings)
        for rows in (100, 100, 98):
            assert (run_plan(plan, x[:rows], codes) == exact(x[:rows], codes.T)).all()
        assert (len(timings) > before) == (start == 0)
        if start == 0:
            assert len(timings) - before <= matmul.PROPOSALS, "98 rows share what 100 rows learnt"


def test_a_poisoned_store_costs_no_result(device, tmp_path):
    matmul_context = MatmulContext.open(device, cp.cuda.alloc, tmp_path)
    matmul_context.store.put(f"int8 plain {bucket(50)}x64x64", Algorithm((0xDEADBEEF,) * 8))
    x, codes = random_codes(50, 64), random_codes(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            run_plan(Int8Gemm(device, matmul_context, [GemmKind.ROW_MAJOR]).plan(64, 64), x, codes) == exact(x, codes.T)
        ).all()


@pytest.mark.parametrize("rows", [2, 9, 17, 32, *repeats(3, 7, 8, 15, 16, 24, 31)])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(17, 15), (129, 14336), *repeats((16, 16), (4096, 4096), (28672, 1000), (128256, 64))],
)
def test_a_few_rows(igemm, rows, out_features, in_features):
    """By the kernel of their own, whether it is faster or not."""
    if not igemm.skinny_gemm.supports(rows):
        pytest.skip("the kernel needs compute capability 8.0")
    plan = GemmPlan(igemm, GemmLayouts(GemmKind.ROW_MAJOR, out_features, in_features), skinny_gemm=True)
    x, codes = random_codes(rows, in_features), random_codes(out_features, in_features)
    cp.testing.assert_array_equal(run_plan(plan, x, codes), exact(x, codes.T))


def test_the_kernel_for_a_few_rows_is_trusted_only_when_exact(device, matmul_context, monkeypatch):
    igemm, broken = (Int8Gemm(device, matmul_context, [GemmKind.ROW_MAJOR], skinny_gemm=True) for _ in range(2))
    assert igemm.skinny_gemm_verified
    monkeypatch.setattr(broken, "_is_exact", lambda plan, rows: rows != 13)
    if broken.skinny_gemm.supports(13):
        with pytest.warns(RuntimeWarning, match="few rows is not used"):
            assert not broken.skinny_gemm_verified


def test_which_kernel_is_faster_is_found_once_and_remembered(device, tmp_path, monkeypatch):
    timings, verdicts = [], []
    measure = GemmPlan._is_faster
    monkeypatch.setattr(GemmPlan, "_is_faster", lambda *args: timings.append(1) or measure(*args))
    x, w = cp.zeros((8, 256), np.int8), cp.zeros((512, 256), np.int8)
    for _ in range(2):
        igemm = Int8Gemm(
            device, MatmulContext.open(device, cp.cuda.alloc, tmp_path), [GemmKind.ROW_MAJOR], skinny_gemm=True
        )
        igemm.skinny_gemm = SkinnyGemm(device)
        plan, stream = igemm.plan(512, 256), cp.cuda.get_current_stream().ptr
        verdicts += [plan.uses_skinny_gemm(w.data.ptr, x.data.ptr, rows, stream) for rows in (8, 5)]
    assert len(set(verdicts)) == 1
    assert len(timings) == igemm.skinny_gemm.supports(8)


def test_the_fastest_kernel_is_not_timed(device, matmul_context, monkeypatch):
    monkeypatch.setattr(GemmPlan, "_is_faster", lambda *args: pytest.fail("timed"))
    igemm = Int8Gemm(device, matmul_context, [GemmKind.ROW_MAJOR], skinny_gemm=True)
    if not igemm.skinny_gemm.is_fastest:
        pytest.skip("this GPU has none")
    assert igemm.plan(512, 256).uses_skinny_gemm(0, 0, 16, cp.cuda.get_current_stream().ptr)
