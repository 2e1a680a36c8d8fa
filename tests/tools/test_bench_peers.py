"""The comparison with transformers, on a tiny shape on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def peers():
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    import bench_peers

    return bench_peers


def test_everything_runs_in_turn(peers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    arguments = ["--shape", "llama-tiny", "-p", "8,16", "-n", "4", "-r", "2", "--device", "cpu", "--no-compile"]
    rows = peers.main([*arguments, "-o", "json", "--plot", str(tmp_path / "x.png")])
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert [(r["prompt"], r["peer"]) for r in rows] == [
        (p, peer) for p in (8, 16) for peer in ("transformers bf16, eager", peers.ENGINE)
    ]
    assert all(r["tokens_per_second"] > 0 and r["first_token_ms"] > 0 for r in rows)
    assert all(r["times_faster_decode"] == 1 for r in rows if r["peer"] == peers.ENGINE)
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert "times" in peers.table(rows)


def test_a_static_cache_gives_the_same_tokens(peers) -> None:
    """What is compiled on a GPU is this step with this cache; here it runs uncompiled."""
    import torch

    other = peers.Transformers(peers.read_shape("llama-tiny"), "cpu", torch.float32)
    other.compiled = other.model.forward
    chosen: list[torch.Tensor] = []
    real = other._next

    def record(*arguments):
        chosen.append(real(*arguments))
        return chosen[-1]

    other._next = record
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        chosen.clear()
        first, token = other.run(2, 6, 5, compiled)
        assert first > 0 and token > 0
        runs.append(torch.cat(chosen, 1).tolist())
    assert runs[0] == runs[1] and len(runs[0][0]) == 5
