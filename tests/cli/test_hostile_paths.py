"""Paths that the system cannot look up, closed streams and lost folders: one message, and exit code 2 or 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoint
from cli_kit import ENVIRONMENT, PROGRAM, run

NAMES = {"300 characters": "a" * 300, "a NUL": "a\0b", "a surrogate": "a\ud800b", "a long folder": "b" * 300 + "/x"}
COMMANDS = [
    ["generate", "PATH", "hello"],
    ["chat", "PATH"],
    ["inspect", "PATH"],
    ["verify", "PATH"],
    ["plan", "PATH"],
    ["bench", "PATH"],
    ["serve", "PATH"],
    ["fill-blank", "PATH", "a"],
    ["migrate", "PATH", "out"],
    ["migrate", "MODEL", "PATH"],
    ["migrate", "MODEL", "out", "--recipe", "PATH"],
    ["migrate", "MODEL", "out", "--calibrate", "PATH"],
    ["perplexity", "PATH", "TEXT"],
    ["perplexity", "MODEL", "PATH"],
    ["train-draft", "PATH", "out", "TEXT"],
    ["train-draft", "MODEL", "PATH", "TEXT"],
    ["train-draft", "MODEL", "out", "PATH"],
    ["compare", "PATH", "MODEL", "TEXT"],
    ["compare", "MODEL", "PATH", "TEXT"],
    ["compare", "MODEL", "MODEL", "PATH"],
    ["compare", "MODEL", "MODEL", "TEXT", "--report", "PATH"],
    ["generate", "MODEL", "--prompts", "PATH"],
    ["generate", "MODEL", "a", "--json-schema", "PATH"],
    ["convert", "PATH", "out"],
    ["demo", "--keep", "PATH"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("paths") / "model")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_path_that_cannot_be_looked_up_is_wrong_usage(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (text := tmp_path / "text.txt").write_text(tiny_checkpoint.WORDS * 5)
    values = {"PATH": NAMES[name], "MODEL": str(model), "TEXT": str(text)}
    result = run(*(values.get(part, part) for part in command))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, (result.exception, result.output)
    assert "Traceback" not in result.stderr and len(result.stderr) < 3000
    assert os.listdir(tmp_path) == ["text.txt"]


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("arguments", [["--version"], ["doctor"], ["inspect", "MODEL"]], ids=" ".join)
def test_a_closed_stdout_is_reported(model: Path, arguments: list[str]) -> None:
    arguments = [str(model) if part == "MODEL" else part for part in arguments]
    without = ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *arguments]
    found = subprocess.run(without, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=300)
    assert found.returncode == 2
    assert found.stderr == b"error: stdout is closed: connect it to a terminal, a file or a pipe\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse to remove the folder of a process")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["migrate", "model", "out"], 2),
        (["inspect", "model"], 2),
        (["migrate", "MODEL", "out"], 2),
        (["compare", "MODEL", "MODEL", "TEXT", "--report", "report.html"], 2),
        (["inspect", "MODEL"], 0),
    ],
)
def test_a_working_directory_that_was_deleted_is_reported(
    model: Path, tmp_path: Path, arguments: list[str], code: int
) -> None:
    (lost := tmp_path / "lost").mkdir()
    (text := tmp_path / "text.txt").write_text(tiny_checkpoint.WORDS)
    values = {"MODEL": str(model), "TEXT": str(text)}
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    command = ["sh", "-c", script, "sh", str(lost), *PROGRAM, *(values.get(part, part) for part in arguments)]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert found.returncode == code and "Traceback" not in found.stderr, found.stderr
    if code:
        assert "the working directory has been deleted: change to another one, or give an absolute path" in found.stderr
