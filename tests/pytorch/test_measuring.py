"""Measuring and comparing: what is counted, and that a difference is found."""

from __future__ import annotations

import time

import pytest
import torch
from torch_kit import random

from bminf_lite.torch import ops
from bminf_lite.torch.measuring import bandwidth, compare, measure, sweep


def test_a_wait_is_measured():
    found = measure(lambda: time.sleep(2e-3), seconds=0.02)
    assert found.seconds >= 2e-3 and found.spread >= 0 and found.bandwidth_share is None
    assert "us" in str(found)


def test_too_few_batches_are_refused():
    with pytest.raises(ValueError, match="batches is 2"):
        measure(lambda: None, batches=2)


def test_the_share_of_the_bandwidth_is_that_of_the_measured_time():
    x = torch.empty(1 << 22)
    measured = measure(torch.clone, x, bytes_moved=2 * x.nbytes)
    assert measured.bandwidth_share == pytest.approx(2 * x.nbytes / measured.seconds / bandwidth(x.device))


def test_a_comparison_covers_results_and_gradients():
    x, weight = random(4, 16), random(16, seed=1)

    def wrong(x, weight):
        return ops.rms_norm(x, weight * 1.5)

    def reference(x, weight):
        return torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)

    good = compare(ops.rms_norm, reference, x, weight, rtol=1e-4, atol=1e-5)
    assert good.agrees and [a.name for a in good.agreements] == [
        "result",
        "gradient of argument 0",
        "gradient of argument 1",
    ]
    assert good.speedup > 0
    bad = compare(wrong, reference, x, weight, rtol=1e-4, atol=1e-5)
    assert not bad.agrees and not any(a.agrees for a in bad.agreements)


def test_first_results_missing_gradients_and_shapes_are_compared():
    x = random(4, 16)
    assert [a.name for a in compare(ops.quantize_rows, ops.quantize_rows, x, rtol=0, atol=0.1).agreements] == ["result"]
    for ours, expected in ((torch.Tensor.detach, [True, False]), (lambda x: x[:1], [False, False])):
        found = compare(ours, torch.clone, torch.ones(4, 16), rtol=0, atol=1)
        assert [a.agrees for a in found.agreements] == expected


def test_an_operation_in_place_is_compared_on_a_copy():
    x = random(4, 16)
    before = x.clone()
    found = compare(ops.softmax_, lambda x: torch.softmax(x, -1), x.clone(), rtol=1e-5, atol=1e-6, gradients=True)
    assert found.agrees and torch.equal(x, before)


def test_a_sweep_is_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    found = sweep(
        {"ours": ops.softmax, "torch": lambda x: torch.softmax(x, -1)},
        lambda size: (random(8, size),),
        (16, 64),
        bytes_moved=lambda size: 8 * size * 8,
    )
    found.plot(tmp_path / "softmax.png", size_name="columns")
    assert (tmp_path / "softmax.png").stat().st_size > 1000
    assert {name: len(values) for name, values in found.by_function.items()} == {"ours": 2, "torch": 2}
