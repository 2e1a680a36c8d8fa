"""Layers that normalise the residual stream behind each part: many rows of a product are added by the norm's kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.backend.rotation import rotated
from bminf_lite.backend.values import Norm

pytestmark = pytest.mark.gpu

INNER = 96


def weight_of(ops: Backend, rng: np.random.Generator, outputs: int, inputs: int, rotation: int) -> Any:
    """A weight of random codes, that reads its input rotated in blocks of ``rotation``, with a bias."""
    values = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
    codes = quantize_weight(rotated(values, rotation))
    weight = Int8Weight(codes.codes, codes.scale, True, rotation=rotation)
    return ops.weight([weight], [rng.standard_normal(outputs).astype(np.float32)])


def layers(ops: Backend, rows: int, width: int, rotation: int, center: bool) -> list[np.ndarray]:
    """Two layers of two parts, and what of them remains: the last stream, and its norm where a product reads it."""
    rng = np.random.default_rng(rows)

    def norm(stream: Any) -> Any:
        bias = ops.vector(rng.standard_normal(width).astype(np.float32)) if center else None
        return ops.norm(stream, Norm(ops.vector(rng.uniform(0.5, 2, width).astype(np.float32)), 1e-5, bias, center))

    with ops.step(None):  # type: ignore[arg-type]
        stream = norm(ops.array((3 * rng.standard_normal((rows, width))).astype(np.float32)))
        for _ in range(2):
            heads = ops.linear(stream, weight_of(ops, rng, width, width, rotation))
            stream = norm(ops.linear_add(heads, weight_of(ops, rng, width, width, 1), stream))
            hidden = ops.activated_linear(stream, weight_of(ops, rng, INNER, width, rotation), "relu")
            stream = norm(ops.linear_add(hidden, weight_of(ops, rng, width, INNER, 1), stream))
        end = ops.linear(stream, weight_of(ops, rng, INNER, width, 1), fp32=True)
        last = ops.linear_add(hidden, weight_of(ops, rng, width, INNER, 1), stream)
        return [np.array(ops.host(x)) for x in (end, last)]


@pytest.mark.parametrize("center", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    ("rows", "width", "rotation"),
    [(65, 64, 1), (300, 1024, 256), (300, 384, 128), (70, 768, 1), (300, 1040, 16), (300, 4096, 256), (150, 72, 8)],
)
def test_the_bits_are_those_of_products_that_add_themselves(
    cuda_backend: Any, rows: int, width: int, rotation: int, center: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = layers(cuda_backend, rows, width, rotation, center)
    monkeypatch.setattr(f"{FUSED}.leaves_sum", lambda product: False)
    for one, other in zip(found, layers(cuda_backend, rows, width, rotation, center), strict=True):
        np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))


FUSED = "bminf_lite.backend.cuda.int8_products"


def test_many_rows_are_added_by_the_norm(cuda_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the GPU has the product of many rows."""
    added = list[bool]()
    quantize = type(cuda_backend.materializer)._quantize_norm_of_sum

    def watched(*arguments: Any) -> bool:
        added.append(quantize(*arguments))
        return added[-1]

    monkeypatch.setattr(type(cuda_backend.materializer), "_quantize_norm_of_sum", watched)
    layers(cuda_backend, 300, 64, 16, True)
    assert added == ([True] * 4 if cuda_backend.fused.scaled_gemm.supported else [])
