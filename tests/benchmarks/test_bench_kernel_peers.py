"""Kernels beside PyTorch's, on small sizes on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from bminf_lite.bench import cases as plain
from bminf_lite.bench import profiler as instruments

pytestmark = pytest.mark.parity


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch", reason="torch is not installed")
    import bench_kernel_peers

    monkeypatch.setattr(plain, "WIDTHS", (64, 96))
    monkeypatch.setattr(plain, "MATRICES", ())
    monkeypatch.setattr(instruments, "plain_cases", lambda xp, ops: plain.plain_cases(xp, ops, elements=2000))
    return bench_kernel_peers


def test_a_table(peers, capsys: pytest.CaptureFixture[str]) -> None:
    peers.main(["--device", "cpu", "--no-compile"])
    lines = capsys.readouterr().out.splitlines()
    assert "ours us" in lines[0] and "torch, ours is faster" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[2:8]] == ["softmax", "rms_norm", "quantize"] * 2


def test_they_compute_what_is_compared(peers) -> None:
    import torch

    x = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    gain = np.full(64, 1.5, np.float32)
    given, factor = torch.from_numpy(x), torch.from_numpy(gain)
    np.testing.assert_allclose(peers.softmax(given), plain.softmax(np, x), rtol=1e-5)
    np.testing.assert_allclose(peers.rms_norm(given, factor), plain.rms_norm(np, x, gain), atol=4e-3)
    np.testing.assert_allclose(peers.layer_norm(given, factor), plain.layer_norm(np, x, gain, gain), atol=8e-3)
    codes, scales = peers.quantize(given.half())
    expected, expected_scales = plain.quantize(np, x.astype(np.float16))
    assert (codes.numpy() == expected).all()
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)
    both, _ = peers.rms_norm_and_quantize(given, factor)
    assert np.abs(both.numpy().astype(int) - plain.quantize(np, plain.rms_norm(np, x, gain))[0]).max() <= 1


def test_inputs_fit(peers) -> None:
    case = plain.KernelCase("igemm", "32 x 48 x 64", lambda _: None, 1)
    x, w = peers.inputs(case, "cpu")
    assert tuple(x.shape) == (32, 64) and tuple(w.shape) == (64, 48)
    assert tuple(peers.PEERS["igemm"](x, w).shape) == (32, 48)
