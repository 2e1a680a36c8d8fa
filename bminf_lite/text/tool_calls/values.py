"""Values that models write as text or as Python does, in calls whose arguments are not JSON: turned into JSON."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

MAX_LITERAL = 10_000
"""Characters of a literal of Python that is parsed; a longer text that is not JSON is a string."""

_NAMES = {"true": True, "false": False, "null": None}


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema names; empty if it names none."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, list):
        return frozenset(kind)
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return frozenset(["string"])
    parts = schema.get("anyOf") or schema.get("oneOf") or ()
    return frozenset[str]().union(*(types_of(part) for part in parts if isinstance(part, Mapping)))


def json_of_parameter(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON of a parameter's text: a string if its schema allows one, else the value that the text is."""
    types = types_of(schema)
    if "string" in types:
        return "null" if "null" in types and text == "null" else _dumped(text)
    return json_of_literal(text)


def json_of_literal(text: str) -> str:
    """The JSON of a text that is JSON or a literal of Python; of another text, the JSON of a string."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        try:
            return _dumped(_value(_parsed(text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return _dumped(text)
    return text


def json_of_braces(text: str, mark: str) -> str:
    """The JSON of a value in braces, whose strings stand within ``mark``; another text becomes a string."""
    reader = _BracesReader(text, mark)
    try:
        return _dumped(reader.whole())
    except (ValueError, RecursionError):
        return _dumped(text.strip())


def member_of_braces(text: str, mark: str) -> tuple[str, str] | None:
    """The name and the text of the value of a member, whose name may be within ``mark``; None for what is none."""
    text = text.strip()
    if text.startswith(mark):
        key, closing, value = text[len(mark) :].partition(mark)
        value = value.lstrip()
        return (key, value[1:]) if closing and value.startswith(":") else None
    key, colon, value = text.partition(":")
    return (key.rstrip(), value) if colon else None


class _BracesReader:
    """Reads one value of Gemma's form of objects. Raises ``ValueError`` for what is none."""

    def __init__(self, text: str, mark: str):
        self._text, self._mark, self._at = text, mark, 0

    def whole(self) -> Any:
        """The value that the text is."""
        value = self._value()
        if self._next():
            raise ValueError
        return value

    def _next(self) -> str:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        first = self._next()
        if self._text.startswith(self._mark, self._at):
            start = self._at + len(self._mark)
            end = self._text.index(self._mark, start)
            self._at = end + len(self._mark)
            return self._text[start:end]
        if first == "[":
            return [self._value() for _ in self._items("]")]
        if first == "{":
            members: dict[str, Any] = {}
            for _ in self._items("}"):
                key = self._key()
                members[key] = self._value()
            return members
        end = self._at
        while end < len(self._text) and self._text[end] not in ",]}":
            end += 1
        literal, self._at = self._text[self._at : end].strip(), end
        if not literal:
            raise ValueError
        try:
            return json.loads(literal, parse_constant=_refuse)
        except ValueError:
            return literal

    def _key(self) -> str:
        """A member's name and the colon behind it."""
        self._next()
        if self._text.startswith(self._mark, self._at):
            key = self._value()
            if self._next() != ":":
                raise ValueError
        else:
            start, self._at = self._at, self._text.index(":", self._at)
            key = self._text[start : self._at].strip()
        self._at += 1
        return str(key)

    def _items(self, closing: str) -> Iterator[None]:
        """Stop before each item in brackets, and behind the ``closing`` one."""
        self._at += 1
        if self._next() == closing:
            self._at += 1
            return
        while True:
            yield
            mark = self._next()
            self._at += 1
            if mark == closing:
                return
            if mark != ",":
                raise ValueError


def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_LITERAL:
        raise ValueError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of odd literals, such as "1if"
        return ast.parse(text, mode="eval").body


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            return {str(key.value): _value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]
    raise ValueError


def _dumped(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(constant)
