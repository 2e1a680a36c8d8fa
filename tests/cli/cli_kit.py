"""Runs a command of the command line in this process or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import bminf_lite
from bminf_lite.cli import main

PROGRAM = [sys.executable, "-c", "from bminf_lite.cli import main; main()"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(bminf_lite.__file__).parents[1])}


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def output(*arguments: object) -> str:
    """What a command that succeeds prints, with nothing on stderr."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


def start(*arguments: object, program: Sequence[str] = PROGRAM, **options: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        **({"env": ENVIRONMENT} | pipes | options),
        # A test runner in the background has SIGINT ignored, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
