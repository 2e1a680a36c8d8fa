"""``tools/gpu_check.sh`` on a machine without a GPU, with an interpreter that only records its arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bminf_lite.cli import main

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tools" / "gpu_check.sh"


def check(*arguments: object, python: object = sys.executable) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHON": str(python)})


def summary(folder: Path) -> dict[str, str]:
    """The verdict on each part."""
    lines = [line.split(maxsplit=3) for line in (folder / "summary.txt").read_text().splitlines()]
    return {line[0]: line[3] for line in lines}


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path: Path) -> None:
    result = check("-p", "demo doctor", "-t", "0.01", tmp_path / "report")
    assert result.returncode == 1, result.stderr
    assert summary(tmp_path / "report") == {"demo": "over 0.01 s", "doctor": "over 0.01 s"}


def test_every_command_of_every_part_is_known(tmp_path: Path) -> None:
    """Options of ``bminf-lite``, scripts and folders of tests, as the script names them."""
    recorder = tmp_path / "python"
    recorder.write_text(
        f'#!/bin/bash\nIFS=$\'\\t\'; echo "$*" >> {tmp_path}/calls; [ "$1" != - ] || cat > {os.devnull}\n'
    )
    recorder.chmod(0o755)
    result = check(tmp_path / "report", python=recorder)
    verdicts = summary(tmp_path / "report")
    assert result.returncode == 1 and verdicts.pop("doctor") == "failed (1)"
    assert {part for part, verdict in verdicts.items() if verdict != "ok"} <= {
        "versions",
        "memcheck",
        "racecheck",
        "initcheck",
    }, "these need a GPU or compute-sanitizer"
    calls = [line.split("\t") for line in (tmp_path / "calls").read_text().splitlines()]
    commands = [call[2:] for call in calls if call[:1] == ["-c"] and "bminf_lite.cli" in call[1]]
    assert len(commands) > 15
    for command in commands:
        assert main.get_command(None, command[0]) is not None, command
        help_text = CliRunner().invoke(main, [command[0], "--help"]).output
        assert all(option in help_text for option in command if option.startswith("-")), command
    for tool in (call[0] for call in calls if call[0].startswith(("benchmarks/", "tools/"))):
        assert (REPOSITORY / tool).is_file()
    for word in re.findall(r"tests/[\w/.:]+", SCRIPT.read_text()):
        path, _, test = word.partition("::")
        assert (REPOSITORY / path).exists() and f"def {test}" in (test and (REPOSITORY / path).read_text()) + "def ", (
            word
        )


@pytest.mark.parametrize("arguments", [[], ["-p", "no-such-part", "folder"], ["-x"], ["a", "b"]])
def test_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    assert check(*(tmp_path / a if a == "folder" else a for a in arguments)).returncode == 2
