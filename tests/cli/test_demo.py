"""``bminf-lite demo`` on a part of the held-out text."""

from __future__ import annotations

import importlib
import re
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bminf_lite import backend
from bminf_lite.cli import main


def run_demo(monkeypatch: pytest.MonkeyPatch, device: str) -> Result:
    """The demo with fewer tokens, on ``device``."""
    module = importlib.import_module("bminf_lite.cli.demo")
    create = backend.create
    for name, value in (("WINDOW", 256), ("SCORED_TOKENS", 256), ("NEW_TOKENS", 12)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(backend, "create", lambda *_: create(device))
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.stderr
    return result


def test_the_demo_shows_sizes_text_speed_and_quality(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module("bminf_lite.cli.demo")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run_demo(monkeypatch, "cpu")
    assert re.search(r"before +13\.1 MB", result.stdout)
    assert re.search(r"after +3\.8 MB", result.stdout)
    assert module.PROMPT in result.stdout
    assert re.search(r"\d+ tokens, \d+ tokens per second", result.stdout)
    int8, plain = (float(re.search(rf"{name} +([\d.]+)", result.stdout)[1]) for name in ("int8", "float"))  # type: ignore[index]
    assert int8 == pytest.approx(plain, rel=0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_the_demo_tells_compiling_from_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run_demo(monkeypatch, "cuda").stdout
    before, after = shown.split("\nCompletion on ")
    assert "NumPy" not in after and "Kernels" not in after
    assert "Kernels" not in before or re.search(r"Kernels were compiled and chosen in [\d.]+ s", before)
    assert re.search(r"float +[\d.]+  \([\d,]+ tokens per second(; kernels were compiled in [\d.]+ s before)?\)", after)
    int8, plain = (float(re.search(rf"{name} +([\d.]+)", shown)[1]) for name in ("int8", "float"))  # type: ignore[index]
    assert int8 == pytest.approx(plain, rel=0.02)


class SlowAtFirst:
    """A model on a GPU whose first run of each kind compiles kernels."""

    device = "cuda:0"

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.seconds = 0.0

    def generate(self, prompt: str, **options: object) -> None:
        self.run("generate")

    def logits(self, ids: list[int]) -> None:
        self.run("logits")

    def run(self, name: str) -> None:
        if name not in self.runs:
            self.seconds += 0.1
        self.runs.append(name)


def test_kernels_are_compiled_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("bminf_lite.cli.demo")
    model = SlowAtFirst()
    monkeypatch.setattr(time, "perf_counter", lambda: model.seconds)
    assert module.warm_up(model, [1, 2, 3]) == pytest.approx(0.2)
    assert set(model.runs) == {"generate", "logits"}
    assert module.warm_up(model, [1, 2, 3]) == 0
