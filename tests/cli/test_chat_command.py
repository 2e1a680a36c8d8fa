"""``bminf-lite chat``: a dialogue, line by line."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cpm_kit
import pytest
import tiny_checkpoint
from cli_kit import ENVIRONMENT, run, start
from click.testing import Result

import bminf_lite
from bminf_lite.api import Model
from bminf_lite.engine.outputs import Piece
from bminf_lite.errors import OutOfMemory

pty = pytest.importorskip("pty")
OPTIONS = ["--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("chat") / "model", max_position_embeddings=256)


def chat(model: Path, lines: list[str], *options: str) -> Result:
    text = "".join(f"{line}\n" for line in lines)
    return run("chat", model, "--device", "cpu", *OPTIONS, *options, stdin=text)


def answers(model: Path, lines: list[str], system: str | None = None, **options: object) -> str:
    """What the API answers, the dialogue growing."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    said = ""
    with bminf_lite.load(model, device="cpu") as loaded:
        for line in lines:
            messages.append({"role": "user", "content": line})
            text = loaded.generate(messages, max_new_tokens=6, **options).text
            messages.append({"role": "assistant", "content": text})
            said += text + "\n"
    return said


def test_each_answer_continues_the_dialogue(model: Path) -> None:
    result = chat(model, ["hi", "", "/quit", "what is new?"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == answers(model, ["hi", "what is new?"])
    assert result.stderr == "error: there is no /quit; the only command is /clear\n"


def test_clear_forgets_and_options_are_those_of_generate(model: Path) -> None:
    options = ["--temperature", "1", "--seed", "3", "--presence-penalty", "0.5", "--system", "be kind"]
    result = chat(model, ["hi", "/clear", "what is new?"], *options)
    sampling = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}
    expected = [answers(model, [line], "be kind", **sampling) for line in ("hi", "what is new?")]
    assert result.stdout == "".join(expected), result.stderr


def test_a_dialogue_longer_than_the_context_loses_its_start(model: Path) -> None:
    result = chat(model, ["x" * 80] * 4)
    assert result.exit_code == 0
    assert "forgotten: the first 2 messages" in result.stderr and result.stdout.count("\n") >= 4


def test_old_messages_are_forgotten_until_an_answer_has_room(model: Path) -> None:
    """With 256 tokens of context, three messages of 60 leave too little room for an answer of 100."""
    result = chat(model, ["x" * 60] * 3, "--max-new-tokens", "100")
    assert result.exit_code == 0 and "forgotten: the first 2 messages" in result.stderr
    assert "cut:" not in result.stderr


def test_an_answer_that_the_context_cuts_is_reported(model: Path) -> None:
    result = chat(model, ["x" * 200], "--max-new-tokens", "100")
    assert result.stderr == "(cut: the model's context of 256 tokens is full)\n"


def test_out_of_memory_in_an_answer_does_not_end_the_dialogue(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, calls = Model.stream, []

    def scarce(self: Model, *arguments: Any, **options: Any) -> Iterator[Piece]:
        calls.append(1)
        for piece in stream(self, *arguments, **options):
            yield piece
            if len(calls) == 2:
                raise OutOfMemory("no room for 9 tokens")

    expected = answers(model, ["hi", "what is new?"])
    monkeypatch.setattr(Model, "stream", scarce)
    result = chat(model, ["hi", "tell me everything", "what is new?"])
    assert result.exit_code == 0 and result.stderr == "error: no room for 9 tokens\n"
    first, last = expected.splitlines(keepends=True)
    assert result.stdout.startswith(first) and result.stdout.endswith(last) and len(calls) == 3


def test_ctrl_c_before_an_answer_begins_forgets_its_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = Model.encode, []

    def interrupted(self: Model, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first call is before the dialogue
            raise KeyboardInterrupt
        return encode(self, *arguments, **options)

    expected = answers(model, ["what is new?"])
    monkeypatch.setattr(Model, "encode", interrupted)
    result = chat(model, ["hi", "what is new?"])
    assert (result.exit_code, result.stdout) == (0, "\n" + expected), result.stderr


@pytest.mark.parametrize(("line", "words"), [(b"x" * 400, "shorten it by"), (b"caf\xe9", "is byte 0xe9")])
def test_an_invalid_line_does_not_end_the_dialogue(model: Path, line: bytes, words: str) -> None:
    result = run("chat", model, "--device", "cpu", *OPTIONS, stdin=line + b"\nhi\n")
    assert result.exit_code == 0 and words in result.stderr
    assert result.stdout == answers(model, ["hi"])


def test_errors_that_no_line_can_change_appear_before_the_first(model: Path, tmp_path: Path) -> None:
    result = chat(tiny_checkpoint.write(tmp_path / "model", chat_template=None), ["hi"])
    assert result.exit_code == 2 and "chat template" in result.stderr and result.stdout == ""
    result = chat(model, ["hi"], "--system", "x" * 400)
    assert result.exit_code == 2 and "shorten it by" in result.stderr and result.stdout == ""
    assert chat(tmp_path / "none", ["hi"], "--top-p", "0").exit_code == 2


def test_eva(tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    model = cpm_kit.write(tmp_path / "eva", "eva")
    result = chat(model, ["你好", "今天天气不错"])
    assert result.stdout == answers(model, ["你好", "今天天气不错"]), result.stderr


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, *arguments: str):
        self.primary, secondary = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), secondary)
        self.process = start("chat", *arguments, env=ENVIRONMENT | {"TERM": "dumb"}, **streams)
        os.close(secondary)
        self.shown = ""

    def read(self, seconds: float = 300) -> None:
        """Wait until more is shown."""
        ready, _, _ = select.select([self.primary], [], [], seconds)
        assert ready, f"nothing comes after {self.shown!r}"
        self.shown += os.read(self.primary, 4096).decode(errors="replace")

    def read_until(self, text: str) -> None:
        """Wait until a text is shown, from where the last call left off."""
        while text not in self.shown:
            self.read()
        self.shown = self.shown.split(text, 1)[1]

    def interrupt(self) -> None:
        """Ctrl-C, and wait for the prompt that follows.

        A signal that comes after readline has shown its prompt, and before it reads keys, waits for a key.
        """
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                self.read(5)
                break
        self.read_until("\r\n> ")

    def type(self, text: str) -> None:
        os.write(self.primary, text.encode())


def test_ctrl_c_stops_an_answer_and_ctrl_d_the_program(tmp_path: Path) -> None:
    """At a real terminal: an endless answer is cut off, another is begun, and the end of input is a clean exit."""
    model = tiny_checkpoint.write(
        tmp_path / "model", max_position_embeddings=2**20, generation_config={"eos_token_id": []}
    )
    options = ("--max-new-tokens", "1000000", "--temperature", "1", "--seed", "1")
    terminal = Terminal(str(model), "--device", "cpu", *options)
    try:
        terminal.read_until("Ctrl-D ends.")
        terminal.read_until("\r\n> ")
        terminal.interrupt()  # at the prompt there is nothing to stop
        for _ in range(2):
            terminal.type("hi\n")
            terminal.read_until("hi")
            while len(terminal.shown) < 20:  # an answer is under way
                terminal.read()
            terminal.interrupt()
        terminal.type("\x04")
        assert terminal.process.wait(300) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.primary)
