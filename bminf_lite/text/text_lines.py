"""Files of many texts: a text per line, or JSONL with a ``text`` and perhaps an ``id`` per line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import read_file_or_pipe
from .jsonl import decode_utf8, parse_lines


@dataclass(frozen=True)
class TextLine:
    """A text and what names it: its ``id`` in the file, or the number of its line."""

    id: str | int
    text: str


def read_text_lines(path: Path) -> list[TextLine]:
    """The texts of a file: its lines that are not empty, or of ``.jsonl`` those of its objects.

    Raises ``UsageError`` for a file that cannot be read, is not UTF-8 or holds no text, and lists bad lines.
    """
    try:
        content = read_file_or_pipe(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    text = decode_utf8(content, path)
    if path.suffix.lower() == ".jsonl":
        found = parse_lines(text, path, _parse)
    else:
        numbered = ((number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1))
        found = [TextLine(number, line) for number, line in numbered if line.strip()]
    if not found:
        raise UsageError(f"{path}: holds no text; give a text per line, or JSONL with a text per line")
    return found


def _parse(value: dict[str, Any], number: int) -> TextLine:
    name, text = value.get("id", number), value.get("text")
    if not isinstance(text, str):
        raise ValueError(f'text is {text!r}; each line is an object such as {{"text": "Once upon a time"}}')
    if not isinstance(name, (str, int)):
        raise ValueError(f"id is {name!r}, but must be a string or a whole number")
    return TextLine(name, text)
