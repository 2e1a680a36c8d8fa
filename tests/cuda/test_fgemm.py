"""Float products on the GPU, against fp64 products of the same rounded operands."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

SHAPES = [(1, 1, 1), (2, 3, 5), (31, 33, 32), (33, 31, 97), (17, 64, 4096), (1, 4096, 4096), (128, 14336, 512)]
DTYPES = [("float16", "float16"), ("float16", "float32"), ("float32", "float32")]


@pytest.fixture(scope="module")
def fgemm(matmul_context):
    from bminf_lite.cuda.kernels.gemm.fgemm import FloatGemm

    return FloatGemm(matmul_context)


def random_values(dtype: str, *shape: int) -> cp.ndarray:
    return cp.random.RandomState(sum(shape)).standard_normal(shape).astype(dtype)


def assert_close(result: cp.ndarray, x: cp.ndarray, w: cp.ndarray) -> None:
    """Against fp64: rounding of the result to its own type, and of each fp32 sum of k products."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    expected, magnitude, k = x @ w, abs(x) @ abs(w), x.shape[-1]
    rounding = 2.0**-11 if result.dtype == np.float16 else 2.0**-24
    # Every partial sum rounds by half a unit in the last place at most; sums in blocks stay far below k of them.
    bound = 1.01 * rounding * abs(expected) + 2.0**-24 * min(k, 256) * magnitude + 2.0**-25
    assert (abs(result - expected) <= bound).all()


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize("mnk", SHAPES, ids=str)
def test_matmul_with_every_transposition(fgemm, dtype, out_dtype, mnk):
    m, n, k = mnk
    x, w = random_values(dtype, m, k), random_values(dtype, k, n)
    for transpose_x in (False, True):
        for transpose_w in (False, True):
            stored_x = cp.ascontiguousarray(x.T) if transpose_x else x
            stored_w = cp.ascontiguousarray(w.T) if transpose_w else w
            result = fgemm.matmul(stored_x, stored_w, transpose_x, transpose_w, out_dtype)
            assert result.dtype == out_dtype and result.shape == (m, n)
            assert_close(result, x, w)


@pytest.mark.parametrize(
    ("batch_x", "batch_w"), [((), (3,)), ((3,), ()), ((2, 1), (3,)), ((2, 3), (2, 3)), ((0,), (1,))], ids=str
)
def test_matmul_broadcasts_batches(fgemm, batch_x, batch_w):
    x, w = random_values("float16", *batch_x, 7, 33), random_values("float16", *batch_w, 33, 5)
    result = fgemm.matmul(x, w, out_dtype=np.float32)
    assert result.shape == (*np.broadcast_shapes(batch_x, batch_w), 7, 5)
    if result.size:
        assert_close(result, x, w)


def test_operands_at_any_address(fgemm):
    memory = random_values("float16", 4000)
    x, w = memory[1 : 1 + 7 * 33].reshape(7, 33), memory[1001 : 1001 + 33 * 5].reshape(33, 5)
    assert_close(fgemm.matmul(x, w), x, w)


def test_fp16_sums_are_kept_in_fp32(fgemm):
    """4096 products of 1 by 1 and one of 2**-11: a sum in fp16 would lose the small one, and stop at 2048."""
    x, w = cp.ones((1, 4097), np.float16), cp.ones((4097, 1), np.float16)
    x[0, -1] = 2.0**-11
    assert fgemm.matmul(x, w, out_dtype=np.float32)[0, 0] == 4096 + 2.0**-11


def test_fp32_products_are_not_tf32(fgemm):
    x = cp.full((16, 16), 1 + 2.0**-20, np.float32)
    assert (fgemm.matmul(x, cp.eye(16, dtype=np.float32)) == x).all()


def test_the_same_operands_give_the_same_bits(fgemm):
    x, w = random_values("float16", 64, 4096), random_values("float16", 4096, 64)
    first = fgemm.matmul(x, w)
    assert all((fgemm.matmul(x, w) == first).all() for _ in range(5))


@pytest.mark.parametrize(
    ("x", "w", "out"),
    [("float16", "float32", None), ("float32", "float32", "float16"), ("int8", "int8", None), ("float64",) * 3],
)
def test_other_dtypes_and_sizes_are_refused(fgemm, x, w, out):
    with pytest.raises(ValueError, match="both must be fp16, bf16 or fp32"):
        fgemm.matmul(cp.ones((2, 2), x), cp.ones((2, 2), w), out_dtype=out)
    with pytest.raises(ValueError, match="inner sizes agree"):
        fgemm.matmul(cp.ones((2, 3), np.float16), cp.ones((2, 3), np.float16))
