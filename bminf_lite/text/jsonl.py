"""UTF-8 text and JSONL, with errors that name the byte or list the lines at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import UsageError, listed

T = TypeVar("T")


def decode_utf8(content: bytes, source: object) -> str:
    """The text, without the byte order mark that some editors write. Raises ``UsageError`` if it is not UTF-8."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is {content[error.start]:#04x}"
        raise UsageError(f"{source}: is not UTF-8 text: {wrong}; convert it to UTF-8") from None


def parse_lines(text: str, source: object, parse: Callable[[dict[str, Any], int], T]) -> list[T]:
    """``parse(value, number)`` for each line, a JSON object; empty lines are skipped.

    Raises ``UsageError``, which lists the lines that are not objects or for which ``parse`` raises ``ValueError``.
    """
    parsed: list[T] = []
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError(f"is {type(value).__name__}, but must be an object")
            parsed.append(parse(value, number))
        except json.JSONDecodeError as error:
            problems.append(f"line {number}: is not JSON: {error.msg} at column {error.colno}")
        except RecursionError:
            problems.append(f"line {number}: nests too deeply")
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise UsageError(listed(source, problems))
    return parsed
