"""The modelled time of products: near what was measured, and ordered as kernels are."""

from __future__ import annotations

import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.bench.product_times import GpuLimits, ProductMethod, make_time_of, modelled_seconds, modelled_time
from bminf_lite.checkpoint.recipe import Scheme

MEASURED = {
    (4096, 4096): ((54.4, 129), (7.2, 39.9)),
    (1024, 4096): ((20.2, 37.3), (6.6, 15.3)),
    (14336, 4096): ((161, 454), (18.6, 131)),
    (4096, 14336): ((168, 399), (18.8, 130)),
}
"""Microseconds of w8a8 and w8a16 with 2,048 rows and with 16, by outputs and inputs: docs/torch.md, an H200."""


@pytest.mark.parametrize("shape", MEASURED)
@pytest.mark.parametrize("rows", [2048, 16])
def test_the_model_is_near_what_was_measured(shape: tuple[int, int], rows: int) -> None:
    for scheme, microseconds in zip((Scheme.W8A8, Scheme.W8A16), MEASURED[shape][rows == 16], strict=True):
        found = 1e6 * modelled_seconds(ProductMethod(*shape, scheme), rows, GpuLimits())
        assert found == pytest.approx(microseconds, rel=0.15 if rows == 2048 else 0.3)


def test_more_exact_methods_take_longer() -> None:
    methods = [
        ProductMethod(4096, 14336, Scheme.W8A8),
        ProductMethod(4096, 14336, Scheme.W8A8, rotation=64),
        ProductMethod(4096, 14336, Scheme.W8A8, outliers=8),
        ProductMethod(4096, 14336, Scheme.W8A16),
    ]
    times = [modelled_time(method).request for method in methods]
    assert times == sorted(times)
    head = ProductMethod(128256, 4096, Scheme.W8A8, is_head=True)
    assert modelled_time(head).prompt < modelled_time(head).step


def test_a_cpu_has_modelled_times() -> None:
    name, time_of = make_time_of(CpuBackend())
    assert "modelled" in name and time_of is modelled_time


@pytest.mark.gpu
def test_a_gpu_measures_each_method(cuda_backend: Backend) -> None:
    name, time_of = make_time_of(cuda_backend)
    assert "measured" in name
    for scheme, rotation, outliers in (
        (Scheme.W8A8, 1, 0),
        (Scheme.W8A8, 64, 0),
        (Scheme.W8A8, 1, 4),
        (Scheme.W8A16, 1, 0),
    ):
        method = ProductMethod(192, 128, scheme, rotation, outliers)
        assert time_of(method) is time_of(method)
        assert time_of(method).prompt >= 0
