"""What a GPU's kernels make of every fp16 number by the activation functions, rounded to fp16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.functions import ACTIVATIONS

pytestmark = pytest.mark.gpu

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FEW = 0.001
"""The share of numbers, at most, that are rounded to the neighbour of the definition's result."""


def of_every_number(ops: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """What the GPU and the definition make of each."""
    from bminf_lite.backend.cuda.deferred import DeferredActivation  # needs CuPy

    rows = ops.array(EVERY.reshape(512, 128))
    with ops.step(None):
        got = ops.host(ops.materializer.to_half(DeferredActivation(rows, name, gated=False))).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        return got, ACTIVATIONS[name](EVERY.astype(np.float32)).astype(np.float16)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_nan_stays_one_and_nothing_else_becomes_one(cuda_backend: Any, name: str) -> None:
    got, expected = of_every_number(cuda_backend, name)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))


@pytest.mark.parametrize("name", ["relu", "relu_squared"])
def test_every_number_is_that_of_the_definition(cuda_backend: Any, name: str) -> None:
    np.testing.assert_array_equal(*of_every_number(cuda_backend, name))


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_every_number_is_within_one_place(cuda_backend: Any, name: str) -> None:
    got, expected = of_every_number(cuda_backend, name)
    numbers = ~np.isnan(expected)
    places = [
        np.where(x < 0, -1, 1) * (x.view(np.int16) & 0x7FFF).astype(int) for x in (got[numbers], expected[numbers])
    ]
    apart = np.abs(places[0] - places[1])
    assert apart.max() <= 1 and np.mean(apart > 0) <= FEW, (apart.max(), np.count_nonzero(apart))
