"""On GPUs with a product that scales its own sums, everything is what it is without it, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.backend.values import Norm
from bminf_lite.cuda.kernels.constants import Epilogue

pytestmark = pytest.mark.gpu

ROWS, FEATURES, INNER = 300, 516, 272


@pytest.fixture
def ops(cuda_backend: Any) -> Any:
    if not cuda_backend.fused.scaled_gemm.supports(ROWS, FEATURES, Epilogue.ADD):
        pytest.skip("this GPU has no such product")
    return cuda_backend


def layer(ops: Any, activation: str, bias: bool) -> list[np.ndarray]:
    """A norm and two products of a feed-forward layer, another product, and the residual stream behind them."""
    random = np.random.default_rng(0)

    def weight(n: int, k: int) -> Any:
        codes = quantize_weight((random.normal(size=(n, k)) / np.sqrt(k)).astype(np.float32))
        return ops.weight([codes], [random.normal(size=n).astype(np.float32)] if bias else ())

    first = ops.array((random.normal(size=(ROWS, FEATURES)) * 3).astype(np.float32))
    residual = ops.linear_add(ops.array(random.normal(size=(ROWS, 64)).astype(np.float16)), weight(FEATURES, 64), first)
    norm = Norm(ops.vector(random.uniform(0.5, 2, FEATURES).astype(np.float32)), 1e-5)
    normed = ops.norm(residual, norm)
    other = ops.linear(normed, weight(FEATURES, FEATURES))
    gated = ops.gated_linear(normed, weight(2 * INNER, FEATURES), activation)
    added = ops.linear_add(gated, weight(FEATURES, INNER), residual)
    codes, scale = ops.quantize(ops.norm(added, norm))
    return [ops.host(v) for v in (other, added, codes, scale)]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "gelu", "relu_squared"])
def test_a_layer_is_the_same_without_it(ops: Any, activation: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = layer(ops, activation, bias)
    monkeypatch.setattr(ops.fused.scaled_gemm, "supports", lambda rows, channels, epilogue: False)
    for a, b in zip(found, layer(ops, activation, bias), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(("rows", "features", "inner"), [(300, 516, 1024), (1500, 4096, 1040), (70, 260, 2000)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "gelu", "relu_squared"])
def test_an_activation_of_the_product_is_that_of_the_next_kernel(
    ops: Any, activation: str, bias: bool, rows: int, features: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    codes = quantize_weight((random.normal(size=(features, inner)) * 2 / np.sqrt(inner)).astype(np.float32))
    weight = ops.weight([codes], [random.normal(size=features).astype(np.float32)] if bias else ())
    values = random.normal(size=(rows, inner)).astype(np.float16)
    values[1, 3], values[2, 5] = np.inf, np.nan
    x, found = ops.array(values), []
    for activates in (True, False):
        monkeypatch.setattr(ops.fused, "activates", lambda rows, weight, is_so=activates: is_so)
        with ops.step(None):
            found.append(ops.host(ops.activated_linear(x, weight, activation)))
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0][3:]).all() and np.isnan(found[0][1:3]).all()


def test_an_activation_is_applied_beside_the_next_tile(ops: Any) -> None:
    hides = ops.fused.scaled_gemm.hides_activation
    assert hides(65536, 4096, 1024)
    assert not hides(65536, 3072, 768), "a stage of the next tile for each piece"
    assert not hides(300, 4096, 1024), "few tiles"


def test_few_rows_are_left_to_others(ops: Any) -> None:
    assert not any(ops.fused.scaled_gemm.supports(rows, FEATURES, Epilogue.ADD) for rows in (1, 32))
