"""Runs a command of the command line in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from bminf_lite.cli import main


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def output(*arguments: object) -> str:
    """What a command that succeeds prints, with nothing on stderr."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout
