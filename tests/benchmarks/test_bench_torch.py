"""The measurement of decoding, on a tiny shape on the CPU, without a compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity
SCRIPT = """
import sys
from pathlib import Path
import torch
torch.compile = lambda function, **options: function  # also in the processes that decode starts, which import this
import bench_torch

if __name__ == "__main__":
    about = {"gpu": "none", "date": "", "command": "", "driver": "", "cuda": "", "torch": ""}
    to = bench_torch.Recorder(Path(sys.argv[1]), about, prepare=False)
    bench_torch.decode(to, "llama-tiny", "cpu")
    bench_torch.engine(to, "llama-tiny", "cpu")
"""


def test_one_run_has_the_wrapped_model_and_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    import torch_report

    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    script, results = tmp_path / "script.py", tmp_path / "results.json"
    script.write_text(SCRIPT)
    printed = subprocess.run([sys.executable, script, results], capture_output=True, text=True, check=True).stdout
    run = torch_report.Run(json.loads(results.read_text()))
    compiled = "compiled, static cache"
    assert {(case, name) for _, case, name in run.results} == {
        (compiled, "bf16"),
        (compiled, "w8a8"),
        ("eager", "bf16"),
        ("eager", "w8a8"),
        ("engine", "w8a8"),
    }
    wrapped, engine = run.seconds("decode", compiled, "w8a8"), run.seconds("decode", "engine", "w8a8")
    assert wrapped and engine
    assert f"the engine decodes {wrapped / engine:.2f} times as fast as the wrapped model" in printed
    [ratio] = [row["value"] for row in torch_report.summary(run) if row["what"].startswith("the engine against")]
    assert ratio == f"{wrapped / engine:.2f} times"
