"""The command line as a process: signals, pipes, and which stream gets what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_checkpoint

import bminf_lite

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

ENDLESS = ["--device", "cpu", "--max-new-tokens", "1000000"]
TIMEOUT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself."""
    folder = tmp_path_factory.mktemp("processes") / "model"
    return tiny_checkpoint.write(folder, max_position_embeddings=2**20, generation_config={"eos_token_id": []})


def start(*arguments: object, stdin: int | None = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from bminf_lite.cli import main; main()", *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(bminf_lite.__file__).parents[1])},
        # A test runner in the background has SIGINT ignored, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_generate_streams_and_ends_on_ctrl_c(model: Path) -> None:
    process = start("generate", model, "hello", *ENDLESS)
    assert process.stdout is not None
    assert process.stdout.read(20)  # text arrives although the completion never ends
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (130, b"\ninterrupted\n")


def test_generate_ends_quietly_when_its_reader_leaves(model: Path) -> None:
    process = start("generate", model, "hello", *ENDLESS)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(TIMEOUT) == 1


def test_generate_reads_stdin(model: Path) -> None:
    options = ["--device", "cpu", "--max-new-tokens", "4", "--stats"]
    process = start("generate", model, "-", *options, stdin=subprocess.PIPE)
    out, err = process.communicate("à bientôt\n".encode(), timeout=TIMEOUT)
    assert process.returncode == 0
    with bminf_lite.load(model, device="cpu") as loaded:
        expected = loaded.generate("à bientôt", max_new_tokens=4)
    assert out.decode() == f"{expected}\n"
    assert b"tokens/s" in err


def test_a_failure_has_one_message_and_no_traceback(tmp_path: Path) -> None:
    process = start("generate", tmp_path / "none", "hello", "--device", "cpu")
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert out == b""
    assert err.startswith(b"error: ")
    assert b"Traceback" not in err


def test_migrate_ends_on_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(
        tmp_path / "source", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16
    )
    process = start("migrate", source, tmp_path / "out")
    deadline = time.monotonic() + TIMEOUT
    while not (begun := {p.name for p in tmp_path.iterdir()} - {"source"}) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert begun
    assert "out" not in begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (130, b"\ninterrupted\n")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
