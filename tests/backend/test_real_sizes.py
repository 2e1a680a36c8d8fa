"""Products and norms of the sizes of real models, on the GPU, against the reference that rounds where it does."""

from __future__ import annotations

import numpy as np
import pytest
from checked import repeats
from random_values import random_int8, random_rows
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight

pytestmark = pytest.mark.gpu

REAL_SHAPES = [(4096, 6144), (14336, 4096), (4099, 1031), *repeats((4096, 28672), (4096, 128256))]


@pytest.mark.parametrize("tokens", [1, 3, 33, 512, *repeats(2, 16)])
@pytest.mark.parametrize(("width", "outputs"), REAL_SHAPES)
def test_real_products(cuda_backend, tokens, width, outputs):
    """Every 61st output channel and the last ones; the others are like them."""
    rng = np.random.default_rng(tokens)
    part = random_int8(rng, outputs, width, True)
    some = np.unique(np.r_[0:outputs:61, outputs - 33 : outputs])
    x = random_rows(rng, tokens, width, np.float16)
    y = cuda_backend.host(cuda_backend.linear(cuda_backend.array(x), cuda_backend.weight([part]), fp32=True))
    reference = Backend(np.float16)
    weight = reference.weight([Int8Weight(part.codes[some], part.scale[some])])
    np.testing.assert_array_equal(y[:, some], reference.linear(x, weight, fp32=True))


@pytest.mark.parametrize("tokens", [1, 16, 256, *repeats(5)])
@pytest.mark.parametrize(("width", "outputs"), [(4096, 14336), (4099, 517), *repeats((2048, 8192))])
@pytest.mark.parametrize("dynamic", [True, False])
def test_real_gated_products(cuda_backend, tokens, width, outputs, dynamic):
    rng = np.random.default_rng(tokens)
    parts = [random_int8(rng, outputs, width, dynamic) for _ in range(2)]
    some = np.unique(np.r_[0:outputs:31, outputs - 33 : outputs])
    x = random_rows(rng, tokens, width, np.float16) * np.float16(0.05)
    y = cuda_backend.host(cuda_backend.gated_linear(cuda_backend.array(x), cuda_backend.weight(parts), "silu"))
    reference = Backend(np.float16)
    kept = [Int8Weight(p.codes[some], p.scale[some], dynamic) for p in parts]
    gate, up = np.split(np.abs(reference.linear(x, reference.weight(kept), fp32=True)), 2, axis=1)
    expected = reference.gated_linear(x, reference.weight(kept), "silu")
    sums = np.abs(x.astype(np.float32)).sum(axis=1, keepdims=True) * 1e-4
    assert_close(y[:, some], expected, "gated_linear", np.float16, (gate + sums) * (up + sums))
