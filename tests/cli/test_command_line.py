"""What every command promises: help with an example, exit codes, and messages without tracebacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import tiny_checkpoint
from cli_kit import run
from click.testing import CliRunner
from safetensors.numpy import save_file

from bminf_lite import __version__, api
from bminf_lite.checkpoint.recipe import built_in_recipes
from bminf_lite.cli import main
from bminf_lite.errors import CheckpointError, DeviceError, OutOfMemory, UsageError

COMMANDS = main.list_commands(click.Context(main))


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda c: " ".join(c) or "group")
def test_help_has_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0 and "Example" in result.stdout
    assert " ".join(["bminf-lite", *command]) in result.stdout
    assert result.stderr == ""


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0 and __version__ in result.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("bminf-lite gen", ["plain,generate"]),
        ("bminf-lite generate m --device cu", ["plain,cuda"]),
        ("bminf-lite migrate m out --recipe ", [f"plain,{name}" for name in built_in_recipes()]),
        ("bminf-lite migrate m out --recipe mine", ["file,mine"]),
    ],
)
def test_the_tab_key_completes_commands_and_values(typed: str, offered: list[str]) -> None:
    words = typed.split(" ")
    environment = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_BMINF_LITE_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(main, [], env=environment)
    assert sorted(line for line in result.stdout.splitlines() if line) == sorted(offered)


@pytest.mark.parametrize("arguments", [["no-such-command"], ["generate"], ["generate", "m", "x", "--no-such-option"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Usage:")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """A command ``fail`` that raises the given exception."""

    def make(error: BaseException) -> None:
        @click.command()
        def fail() -> None:
            raise error

        monkeypatch.setattr(main, "get_command", lambda *_: fail)

    return make


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckpointError("a.safetensors: is empty"), 1, "error: a.safetensors: is empty\n"),
        (DeviceError("no GPU"), 1, "error: no GPU\n"),
        (OutOfMemory("6 GiB are not enough"), 1, "error: 6 GiB are not enough\n"),
        (UsageError("top_p is 2"), 2, "error: top_p is 2\n"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 1, "error: No such file or directory: x.json\n"),
        (
            OSError(28, "No space left on device"),
            1,
            "error: the output cannot be written: No space left on device; make room, or write it elsewhere\n",
        ),
        (
            MemoryError("no 46 TiB"),
            1,
            "error: the host's memory does not suffice (no 46 TiB); take a smaller model, batch or context\n",
        ),
        (ZeroDivisionError("oh"), 1, "error: ZeroDivisionError: oh (run again with --debug for the traceback)\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (KeyboardInterrupt("a remedy"), 130, "\ninterrupted; a remedy\n"),
    ],
)
def test_an_exception_is_one_message(failing, error: BaseException, code: int, message: str) -> None:
    failing(error)
    result = CliRunner().invoke(main, ["fail"])
    assert (result.exit_code, result.stderr, result.stdout) == (code, message, "")


def test_debug_shows_the_traceback_before_and_after_the_command(failing, tmp_path) -> None:
    result = CliRunner().invoke(main, ["generate", str(tmp_path / "none"), "x", "--device", "cpu", "--debug"])
    assert result.exit_code == 1 and "Traceback" in result.stderr
    failing(UsageError("top_p is 2"))
    result = CliRunner().invoke(main, ["--debug", "fail"])
    assert result.exit_code == 2 and "Traceback" in result.stderr and "UsageError: top_p is 2" in result.stderr


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_help_imports_no_array_library() -> None:
    code = f"""
import contextlib, io, sys
from bminf_lite.cli import main
for command in {COMMANDS!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([command, "--help"])
print(sorted({{"numpy", "cupy", "torch", "tokenizers"}} & set(sys.modules)))
"""
    assert run_python(code).strip() == "[]"


def test_names_are_imported_when_they_are_used() -> None:
    code = """
import sys
import bminf_lite
heavy = {"numpy", "cupy", "cupyx", "torch", "transformers", "tokenizers", "jinja2", "click"}
print(sorted(heavy & set(sys.modules)))
missing = [name for name in bminf_lite.__all__ if getattr(bminf_lite, name, None) is None]
print(missing, set(bminf_lite.__all__) <= set(dir(bminf_lite)), "cupy" in sys.modules, "torch" in sys.modules)
print(hasattr(bminf_lite, "no_such_name"))
"""
    assert run_python(code).split("\n")[:3] == ["[]", "[] True False False", "False"]


def test_python_m_is_the_same_program() -> None:
    command = [sys.executable, "-m", "bminf_lite", "--version"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout == f"bminf-lite, version {__version__}\n"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("factor", "norm"), [(1e36, 1.0), (1e38, 1e30), (1.0, np.nan)])
def test_numbers_that_overflow_end_in_a_message_and_never_in_a_warning(
    tmp_path: Path, text: Path, factor: float, norm: float
) -> None:
    tensors = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
    for name, values in tensors.items():
        values *= np.float32(norm if "norm" in name else factor if "_proj" in name else 1)
    folder = tiny_checkpoint.write(tmp_path / "float")
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    migrated = run("migrate", folder, tmp_path / "int8")
    if not np.isfinite(norm):
        assert "norm.weight' holds a NaN" in migrated.stderr
    elif factor > 1e37:
        assert "and sums of such values are infinite" in migrated.stderr
    else:
        assert migrated.exception is None
    cpu = ("--tokens", 40, "--device", "cpu")
    commands: list[list[object]] = [["generate", folder, "a", *cpu[2:]], ["perplexity", folder, text, *cpu]]
    if migrated.exit_code == 0:
        commands += [["compare", tmp_path / "int8", folder, text, *cpu]]
    for command in commands:
        result = run(*command)
        assert "Warning" not in result.stderr and isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code == 0 or "hold a NaN or an infinity" in result.stderr
    assert result.exit_code == 1


def test_serve_loads_the_model_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="the extra serve is not installed")
    given: dict[str, object] = {}

    def load(path: Path, **options: object) -> None:
        given.update(options)
        raise UsageError("enough")

    monkeypatch.setattr(api, "load", load)
    arguments = ("--port", 0, "--http-workers", 1, "--max-num-batched-tokens", 4096, "--max-batch", 7)
    result = run("serve", "a-model", "--device", "cpu", *arguments)
    assert result.exit_code == 2 and "enough" in result.stderr, result.stderr
    assert (given["max_num_batched_tokens"], given["max_batch"]) == (4096, 7)
    result = run("serve", "a-model", "--max-adapter-rank", 8)
    assert result.exit_code == 2 and "give --adapter or --max-adapters too" in result.stderr
