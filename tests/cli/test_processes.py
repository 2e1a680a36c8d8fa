"""The command line as a process: signals, pipes, closed streams and encodings."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tiny_checkpoint
from cli_kit import ENVIRONMENT, PROGRAM, start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

ENDLESS = ["--device", "cpu", "--max-new-tokens", "1000000"]
TIMEOUT = 60
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself."""
    folder = tmp_path_factory.mktemp("processes") / "model"
    return tiny_checkpoint.write(folder, max_position_embeddings=2**20, generation_config={"eos_token_id": []})


def test_generate_streams_and_ends_on_ctrl_c(model: Path) -> None:
    process = start("generate", model, "hello", *ENDLESS)
    assert process.stdout is not None
    assert process.stdout.read(20)  # text arrives although the completion never ends
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (130, b"\ninterrupted\n")


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, b"\ninterrupted\n"),
        pytest.param(signal.SIGTERM, 143, b"", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, b"", marks=pytest.mark.slow),
    ],
)
def test_migrate_ends_on_a_signal_and_leaves_nothing(tmp_path: Path, number: int, code: int, message: bytes) -> None:
    source = tiny_checkpoint.write(
        tmp_path / "source", hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16
    )
    process = start("migrate", source, tmp_path / "out")
    deadline = time.monotonic() + TIMEOUT
    while not (begun := {p.name for p in tmp_path.iterdir()} - {"source"}) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert begun
    assert "out" not in begun
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (code, message)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_message(arguments: list[str]) -> None:
    with FULL.open("wb") as full:
        process = start(*arguments, stdout=full)
        _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err.count(b"\n")) == (1, 1)
    assert err.startswith(b"error: the output cannot be written: No space left on device; ")


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_the_exit_code_is_right_where_no_message_can_be_written(tmp_path: Path) -> None:
    with FULL.open("wb") as full:
        for arguments, code in ((["inspect", tmp_path / "none"], 1), (["generate", tmp_path, "a", "--top-k", "-1"], 2)):
            process = start(*arguments, stderr=full)
            assert process.communicate(timeout=TIMEOUT)[0] == b""
            assert process.returncode == code


def test_characters_that_the_encoding_of_stdout_lacks_are_escaped(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "source")
    process = start("migrate", source, tmp_path / "é⇒", env=ENVIRONMENT | {"PYTHONIOENCODING": "latin-1"})
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert b"\xe9\\u21d2, recipe w8a8" in out


def test_a_reader_that_closes_the_pipe_ends_the_process_quietly(model: Path) -> None:
    for arguments, count in ((["generate", model, "hello", *ENDLESS], 1), (["doctor", "--json"], 0), (["--help"], 0)):
        process = start(*arguments)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(count)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT) == 1


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]], ids=" ".join)
def test_a_closed_stdin_is_reported(model: Path, command: list[str]) -> None:
    arguments = [*PROGRAM, command[0], str(model), *command[1:], "--device", "cpu"]
    without = ["sh", "-c", 'exec "$@" <&-', "sh", *arguments]
    found = subprocess.run(without, capture_output=True, env=ENVIRONMENT, timeout=TIMEOUT)
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr == b"error: stdin is closed: connect it to a terminal, a file or a pipe\n"
