"""The GPU's check, on a machine that may have none: parts that fail are told and do not stop the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.sh"


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_part_that_fails_or_takes_too_long_is_told_and_the_rest_runs(tmp_path: Path) -> None:
    result = check("-p", "demo doctor", "-t", "0.01", tmp_path / "report")
    assert result.returncode == 1, result.stderr
    lines = (tmp_path / "report" / "summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["demo", "doctor"]
    assert all(line.endswith("over 0.01 s") for line in lines), lines


def test_a_report_of_each_part(tmp_path: Path) -> None:
    result = check("-p", "demo", tmp_path)
    assert result.returncode == 0, (tmp_path / "demo.err").read_text()
    assert "Perplexity" in (tmp_path / "demo.txt").read_text()
    assert (tmp_path / "summary.txt").read_text().split()[-1] == "ok"


@pytest.mark.parametrize("arguments", [[], ["-p", "no-such-part", "folder"], ["-x"], ["a", "b"]])
def test_wrong_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(*(tmp_path / a if a == "folder" else a for a in arguments)).returncode == 2
