"""Prompts from the command line, from stdin and from a JSONL file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import read_at_most, read_file_or_pipe
from ..text.jsonl import decode_utf8, parse_lines

if TYPE_CHECKING:
    from ..text.chat_template import Message


MAX_PROMPT_BYTES = 1 << 26
"""The size that a prompt on stdin may have: more than any context holds."""


@dataclass(frozen=True)
class Prompt:
    """Text to continue, or messages of a conversation to answer. ``id`` names it in the output."""

    content: str | list[Message]
    id: str | int | None = None

    def as_chat(self, system: str | None) -> Prompt:
        """The prompt as a conversation, which starts with ``system`` unless it has a system message."""
        messages = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return Prompt(messages, self.id)


def read_stdin() -> Prompt:
    """All of stdin as one prompt, without its last newline.

    Raises ``UsageError`` if it is closed, is not UTF-8 or has more than :data:`MAX_PROMPT_BYTES`.
    """
    require_stdin()
    try:
        content = read_at_most(sys.stdin.buffer, MAX_PROMPT_BYTES, "stdin")
    except OSError as error:
        raise UsageError(f"stdin cannot be read: {error.strerror}; give a shorter prompt") from None
    return Prompt(decode_utf8(content, "stdin").removesuffix("\n"))


def require_stdin() -> None:
    """Raise ``UsageError`` if this process was started without a stdin."""
    if sys.stdin is None:
        raise UsageError("stdin is closed: connect it to a terminal, a file or a pipe")


def read_file(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file: an object per line with ``prompt`` or ``messages``, and an optional ``id``.

    The default ``id`` is the line's number. Empty lines are skipped. Raises ``UsageError``, which lists the bad lines.
    """
    prompts = parse_lines(decode_utf8(read_file_or_pipe(path), path), path, _parse)
    if not prompts:
        raise UsageError(f'{path}: holds no prompts; each line is an object such as {{"prompt": "Once"}}')
    return prompts


def _parse(value: dict[str, Any], number: int) -> Prompt:
    """A line's prompt; ``ValueError`` says what is wrong with it."""
    from ..text.chat_template import check_messages

    unknown = sorted(set(value) - {"prompt", "messages", "id"})
    if unknown:
        raise ValueError(f"has unknown keys: {', '.join(unknown)}; known are prompt, messages and id")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("must have either prompt or messages")
    name = value.get("id", number)
    if not isinstance(name, (str, int)):
        raise ValueError(f"id is {name!r}, but must be a string or a whole number")
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise ValueError(f"prompt is {value['prompt']!r}, but must be a string")
        return Prompt(value["prompt"], name)
    check_messages(value["messages"])
    return Prompt(value["messages"], name)
