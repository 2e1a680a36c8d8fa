"""The examples run, and say what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from bminf_lite import backend

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTS = {
    "log_probabilities.py": "nats  The file is closed",
    "migrate_and_generate.py": "files are as migration wrote them",
    "own_recipe.py": "mine    divergence 0.000",
    "plan_memory.py": "--- 6GiB",
    "stream_several.py": "'The module",
    "what_int8_costs.py": "same most likely token",
}


def test_every_example_is_tested_and_described() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTS.keys()
    described = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{path.name}]({path.name})" in described for path in EXAMPLES.glob("*[py|ipynb]"))
    assert all(len(path.read_text().splitlines()) <= 30 for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    create = backend.create
    monkeypatch.setattr(backend, "create", lambda *_: create("cpu"))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert PRINTS[name] in capsys.readouterr().out
