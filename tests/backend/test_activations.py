"""What a GPU's kernels make of every fp16 number by SiLU and the exact GELU, rounded to fp16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.functions import ACTIVATIONS

pytestmark = pytest.mark.gpu

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FEW = 0.001
"""The share of numbers, at most, that are rounded to the neighbour of the definition's result."""


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_every_number_is_within_one_place(cuda_backend: Any, name: str) -> None:
    from bminf_lite.backend.cuda.deferred import DeferredActivation  # needs CuPy

    rows = cuda_backend.array(EVERY.reshape(512, 128))
    with cuda_backend.step(None):
        got = cuda_backend.host(cuda_backend.materializer.to_half(DeferredActivation(rows, name, gated=False))).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = ACTIVATIONS[name](EVERY.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    numbers = ~np.isnan(expected)
    places = [
        np.where(x < 0, -1, 1) * (x.view(np.int16) & 0x7FFF).astype(int) for x in (got[numbers], expected[numbers])
    ]
    apart = np.abs(places[0] - places[1])
    assert apart.max() <= 1 and np.mean(apart > 0) <= FEW, (apart.max(), np.count_nonzero(apart))
