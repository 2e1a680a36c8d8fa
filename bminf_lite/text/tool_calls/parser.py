"""Finds the calls of functions in a model's text while it arrives."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Generator, Mapping
from typing import Any, NamedTuple

from ..reasoning import Content
from ..stop_strings import overlap
from .formats import CALL_ID, ToolFormat
from .values import json_of_braces, json_of_literal, json_of_parameter, member_of_braces


class CallBegin(NamedTuple):
    """A call of the function ``name`` begins; ``call`` counts the calls of an answer from 0.

    ``id`` is the call's id, if the model writes one: its chat template expects to see it again. Else it is empty.
    """

    call: int
    name: str
    id: str = ""


class ArgumentsDelta(NamedTuple):
    """More text of a call's arguments: those of a call joined are a JSON object, if the model wrote one."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """The call is complete, or the text ends."""

    call: int


Event = Content | CallBegin | ArgumentsDelta | CallEnd


_SPACE = " \t\r\n"
_NAME = string.ascii_letters + string.digits + "_.-"
_LITERAL = string.ascii_letters + string.digits + "+-."
_ARGUMENTS = ("arguments", "parameters")
_FENCE = "```json"
_CALL = "call:"


class ToolCallParser:
    """Separates the calls in an answer from the text around them, while it arrives.

    The events, joined, depend on the text alone, not on how it is cut into pieces. White space beside a call is
    dropped, and so are marks behind a call that are not where they should be. Text that begins like a call and is none
    is content, unless a mark has begun it and the text is cut there: what is left of a call is neither.

    A call is certain once the function's name is known. From then on its arguments pass through as they are written,
    even if they are not valid JSON or the text ends within them. Arguments that are a string hold JSON, and absent ones
    are ``{}``. After ``form.begin`` any name makes a call; without it, where the form allows that, it must be one of
    ``names``. Arguments that are not written as JSON are turned into JSON, each when it is complete; ``schemas`` of the
    functions' arguments, by name, tell which of them are strings.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], schemas: Mapping[str, Mapping[str, Any]] | None = None
    ):
        self._form = form
        self._names = frozenset(names)
        self._schemas = schemas or {}
        self._text = ""  # what is not consumed
        self._ended = False
        self._is_in_call = False  # behind a mark or a call, until it is clear what follows
        self._events: list[Event] = []
        self._space = ""  # at the end of the content so far
        self._is_after_call = False
        self._count = 0
        self._machine = self._run()
        next(self._machine)

    @property
    def call_count(self) -> int:
        """Calls so far, with one that is not complete."""
        return self._count

    def push(self, text: str) -> list[Event]:
        """What ``text`` adds. Text that may be part of a call that has no name yet is held back."""
        self._text += text
        next(self._machine)
        return self._take()

    def flush(self, was_cut: bool = False) -> list[Event]:
        """The rest, after the last text. The parser takes no more. ``was_cut``: the model would have written more."""
        self._ended = True
        begin = self._form.begin
        is_mark = begin.startswith(self._text) and (self._is_after_call or 2 * len(self._text) >= len(begin))
        if was_cut and (self._is_in_call or is_mark):
            self._text = ""
        for _ in self._machine:
            pass
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # The rest is one sequential program. It yields where it needs more text, and decides by characters alone.

    def _run(self) -> Generator[None, None, None]:
        form = self._form
        if form.has_bare_calls:
            start = yield from self._skip(_SPACE, 0)
            first = yield from self._at(start)
            if form.syntax == "python" and first == "[":
                yield from self._python_calls(start, only=self._names)
            elif form.syntax == "json" and first == "{":
                yield from self._calls(start, only=self._names)
        while (yield from self._content_until(form.begin)):
            self._is_in_call = True
            start = yield from self._skip(_SPACE, len(form.begin))
            if form.syntax == "xml":
                is_call = yield from self._xml_calls(start)
            elif form.syntax == "braces":
                is_call = yield from self._braces_call(start)
            elif form.syntax == "python":
                is_call = yield from self._python_calls(start)
            elif form.syntax == "marked":
                is_call = yield from self._marked_calls(start)
            elif form.syntax == "named" and (yield from self._at(start)) not in ("[", "{"):
                is_call = yield from self._named_call(start)
            else:
                is_call = yield from self._calls(start)
            if is_call and form.end:
                yield from self._skip_end()
        if not self._is_after_call and self._space:
            self._events.append(Content(self._space))

    def _calls(self, at: int, only: frozenset[str] | None = None) -> Generator[None, None, bool]:
        """Take JSON objects from ``at`` on, in a list or beside each other. False, and content, if none is a call."""
        is_list = (yield from self._at(at)) == "["
        if is_list:
            at = yield from self._skip(_SPACE, at + 1)
        if (yield from self._at(at)) != "{":
            self._content(at)
            return False
        found = False
        while (yield from self._at(at)) == "{":
            if not (yield from self._object(at, only)):
                return found
            found = True
            at = yield from self._skip(_SPACE + ",;", 0)
        if is_list and (yield from self._at(at)) == "]":
            self._consume(at + 1)
        return True

    def _object(self, at: int, only: frozenset[str] | None) -> Generator[None, None, bool]:
        """Take a call written as a JSON object that begins at ``at``. If it is none, what was read is content."""
        name: str | None = None
        arguments: str | None = None
        call: int | None = None
        mark, is_call = "{", True
        while mark in ("{", ",") and is_call:
            at = yield from self._skip(_SPACE, at + 1)
            end = yield from self._value(at)
            key, at = _text_of(self._text[at:end]), end
            at = yield from self._skip(_SPACE, at)
            is_call = key is not None and (yield from self._at(at)) == ":"
            if not is_call:
                break
            at = yield from self._skip(_SPACE, at + 1)
            is_arguments = key in _ARGUMENTS and arguments is None and call is None
            if is_arguments and name is not None and (yield from self._at(at)) == "{":
                call = self._begin(name, at)
                if not (yield from self._arguments(call)):
                    return True
                at = 0
            else:
                end = yield from self._value(at)
                value, at = self._text[at:end], end
                is_call = bool(value)
                if key == "name" and name is None:
                    name = _text_of(value)
                    is_call = bool(name) and (only is None or name in only)
                elif is_arguments:
                    arguments = _arguments_of(value)
                    is_call = arguments is not None
            at = yield from self._skip(_SPACE, at)
            mark = yield from self._at(at)
        closed = is_call and mark == "}"
        if call is not None:
            self._consume(at + closed)
            self._events.append(CallEnd(call))
            return True
        if name is None or not closed:
            self._content(at)
            return False
        call = self._begin(name, at + 1)
        self._events += [ArgumentsDelta(call, arguments or "{}"), CallEnd(call)]
        return True

    def _named_call(self, at: int) -> Generator[None, None, bool]:
        """Take a name, the mark and arguments. If they are not there, what was read is content."""
        mark = self._form.arguments_mark
        end = yield from self._skip(_NAME, at)
        name, call_id = self._text[at:end], ""
        if self._form.id_prefix:
            name = name.removeprefix(self._form.id_prefix)
            if (yield from self._at(end)) == ":":
                end = yield from self._skip(string.digits, end + 1)
                call_id = self._text[at:end]
            end = yield from self._skip(_SPACE, end)
        if name and (yield from self._is(CALL_ID, end)):
            end = yield from self._skip(_NAME, end + len(CALL_ID))
        if name and (yield from self._is(mark, end)):
            end += len(mark)
            if self._form.is_fenced:  # the word was the kind of the call
                start, end = end, (yield from self._skip(_NAME, end))
                name = self._text[start:end]
        end = yield from self._skip(_SPACE, end)
        if self._form.is_fenced and (yield from self._is(_FENCE, end)):
            end = yield from self._skip(_SPACE, end + len(_FENCE))
        if not name or (yield from self._at(end)) != "{":
            self._content(end)
            return False
        call = self._begin(name, end, call_id)
        if (yield from self._arguments(call)):
            self._events.append(CallEnd(call))
        return True

    def _marked_calls(self, at: int) -> Generator[None, None, bool]:
        """Take named calls, each between two marks. False, and content, if there is none."""
        first, last = self._form.call_marks
        is_call = False
        while (yield from self._is(first, at)):
            if not (yield from self._named_call(at + len(first))):
                return is_call
            is_call = True
            at = yield from self._skip(_SPACE + "`", 0)
            if (yield from self._is(last, at)):
                self._consume(at + len(last))
                at = 0
            at = yield from self._skip(_SPACE, at)
        if not is_call:
            self._content(at)
        return is_call

    def _xml_calls(self, at: int) -> Generator[None, None, bool]:
        """Take a call as XML, or several where the form allows that. False, and content, if there is none."""
        is_call = yield from self._xml_call(at)
        while is_call and self._form.is_list:
            at = yield from self._skip(_SPACE, 0)
            if not (yield from self._is(self._form.tags.function[0], at)) or not (yield from self._xml_call(at)):
                break
        return is_call

    def _xml_call(self, at: int) -> Generator[None, None, bool]:
        """Take a call as XML. If its first tag is not there, what was read is content."""
        tags = self._form.tags
        (before_name, behind_name), before_key = tags.function, tags.key[0]
        is_call = yield from self._is(before_name, at)
        start = at + len(before_name) if is_call else at
        end = yield from self._skip(_NAME, start)
        name, stop = self._text[start:end], end + len(behind_name)
        if is_call and name and not behind_name:  # what follows tells whether that was a name
            stop = yield from self._skip(_SPACE, end)
            is_call = (yield from self._is(before_key, stop)) or (yield from self._is(self._form.end, stop))
        elif is_call and name:
            is_call = yield from self._is(behind_name, end)
        if not is_call or not name:
            self._content(end)
            return False
        properties = self._schemas.get(name, {}).get("properties") or {}
        call, before = self._begin(name, stop), "{"
        at = yield from self._skip(_SPACE, 0)
        while (yield from self._is(before_key, at)):
            argument = yield from self._xml_argument(at + len(before_key))
            if argument is None:
                end = yield from self._find(self._form.end, at)
                self._consume(len(self._text) if end < 0 else end)
                self._events.append(CallEnd(call))
                return True
            key, value, end = argument
            self._consume(end)
            schema = properties.get(key)
            text = json_of_parameter(
                value.removeprefix(tags.padding).removesuffix(tags.padding),
                schema if isinstance(schema, Mapping) else {},
            )
            self._events.append(ArgumentsDelta(call, f"{before}{json.dumps(key)}: {text}"))
            before = ", "
            at = yield from self._skip(_SPACE, 0)
        if (yield from self._is(tags.end or self._form.end, at)):
            if tags.end:
                self._consume(at + len(tags.end))
            self._events.append(ArgumentsDelta(call, "{}" if before == "{" else "}"))
        self._events.append(CallEnd(call))
        return True

    def _xml_argument(self, at: int) -> Generator[None, None, tuple[str, str, int] | None]:
        """The key that begins at ``at``, its value, and the end of both; None if one of the tags is not there."""
        behind_key, (before_value, behind_value) = self._form.tags.key[1], self._form.tags.value
        key_end = yield from self._find(behind_key, at)
        if key_end < 0 or self._form.end in self._text[at:key_end]:
            return None
        begin = key_end + len(behind_key)
        if before_value:
            begin = yield from self._skip(_SPACE, begin)
            if not (yield from self._is(before_value, begin)):
                return None
            begin += len(before_value)
        value_end = yield from self._find(behind_value, begin)
        if value_end < 0:
            return None
        return self._text[at:key_end], self._text[begin:value_end], value_end + len(behind_value)

    def _braces_call(self, at: int) -> Generator[None, None, bool]:
        """Take a name and arguments in braces, each when it is complete. If they are not there, it is content."""
        is_call = yield from self._is(_CALL, at)
        start = at + len(_CALL) if is_call else at
        end = yield from self._skip(_NAME, start)
        name = self._text[start:end]
        if not is_call or not name or (yield from self._at(end)) != "{":
            self._content(end)
            return False
        call, before = self._begin(name, end + 1), "{"
        while True:
            start = yield from self._skip(_SPACE, 0)
            if (yield from self._at(start)) == "}":
                self._consume(start + 1)
                self._events.append(ArgumentsDelta(call, "{}" if before == "{" else "}"))
                break
            stop = yield from self._braces_value(start)
            mark = yield from self._at(stop)
            member = member_of_braces(self._text[start:stop], self._form.string_mark)
            if not mark or member is None:
                self._consume(stop)
                break
            key, value = member
            text = json_of_braces(value, self._form.string_mark)
            self._events.append(ArgumentsDelta(call, f"{before}{json.dumps(key)}: {text}"))
            self._consume(stop + (mark == ","))
            before = ", "
        self._events.append(CallEnd(call))
        return True

    def _braces_value(self, at: int) -> Generator[None, None, int]:
        """The end of a member that begins at ``at``: the comma or the bracket behind it."""
        mark, depth = self._form.string_mark, 0
        while character := (yield from self._at(at)):
            if character == mark[0] and (yield from self._is(mark, at)):
                at = yield from self._find(mark, at + len(mark))
                if at < 0:
                    return len(self._text)
                at += len(mark)
                continue
            if depth == 0 and character in ",}]":
                break
            depth += (character in "{[") - (character in "}]")
            at += 1
        return min(at, len(self._text))

    def _python_calls(self, at: int, only: frozenset[str] | None = None) -> Generator[None, None, bool]:
        """Take a list of calls as Python writes them. False, and content, if it does not begin with a call."""
        is_call = False
        if (yield from self._at(at)) == "[":
            at += 1
        while True:
            start = yield from self._skip(_SPACE, at)
            end = yield from self._skip(_NAME, start)
            name = self._text[start:end]
            if not name or (yield from self._at(end)) != "(" or not (only is None or name in only):
                if not is_call:
                    self._content(end)
                return is_call
            is_call = True
            call = self._begin(name, end + 1)
            is_whole = yield from self._python_arguments(call)
            self._events.append(CallEnd(call))
            if not is_whole:
                return True
            at = yield from self._skip(_SPACE, 0)
            mark = yield from self._at(at)
            if mark == "]":
                self._consume(at + 1)
            if mark != ",":
                return True
            at += 1

    def _python_arguments(self, call: int) -> Generator[None, None, bool]:
        """Take named arguments and the bracket behind them, each when it is complete. False if they are none."""
        before = "{"
        while True:
            start = yield from self._skip(_SPACE, 0)
            if (yield from self._at(start)) == ")":
                self._consume(start + 1)
                self._events.append(ArgumentsDelta(call, "{}" if before == "{" else "}"))
                return True
            end = yield from self._skip(_NAME, start)
            equals = yield from self._skip(_SPACE, end)
            if end == start or (yield from self._at(equals)) != "=":
                return False
            stop = yield from self._python_value(equals + 1)
            mark = yield from self._at(stop)
            if not mark:
                self._consume(len(self._text))
                return False
            text = json_of_literal(self._text[equals + 1 : stop])
            self._events.append(ArgumentsDelta(call, f"{before}{json.dumps(self._text[start:end])}: {text}"))
            self._consume(stop + (mark == ","))
            before = ", "

    def _python_value(self, at: int) -> Generator[None, None, int]:
        """The end of an expression that begins at ``at``: the comma or the bracket behind it."""
        depth, quote = 0, ""
        while character := (yield from self._at(at)):
            if quote:
                at += character == "\\"
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif depth == 0 and character in ",)]}":
                break
            else:
                depth += (character in "([{") - (character in ")]}")
            at += 1
        return min(at, len(self._text))

    def _begin(self, name: str, consumed: int, call_id: str = "") -> int:
        """A call is certain: white space before it, and its text up to ``consumed``, are no content."""
        self._consume(consumed)
        self._space, self._is_after_call, self._is_in_call = "", True, True
        self._events.append(CallBegin(self._count, name, call_id))
        self._count += 1
        return self._count - 1

    def _arguments(self, call: int) -> Generator[None, None, bool]:
        """Pass an object through as it arrives, up to its end.

        If it is no JSON, all text up to the next mark passes through, and the call ends: then the result is false.
        """
        nesting = _Nesting()
        while (end := nesting.scan(self._text)) is None and not self._ended:
            self._pass(call, len(self._text))
            yield
        self._pass(call, len(self._text) if end is None else end)
        if end is not None and nesting.is_json:
            return True
        mark = self._form.end or self._form.begin
        while mark not in self._text and not self._ended:
            self._pass(call, len(self._text) - overlap(self._text, mark))
            yield
        at = self._text.find(mark)
        self._pass(call, len(self._text) if at < 0 else at)
        self._events.append(CallEnd(call))
        return False

    def _pass(self, call: int, length: int) -> None:
        if length:
            self._events.append(ArgumentsDelta(call, self._text[:length]))
            self._consume(length)

    def _skip_end(self) -> Generator[None, None, None]:
        """Drop the end mark after a call, with brackets too many before it."""
        at = yield from self._skip(_SPACE + "]}", 0)
        if (yield from self._is(self._form.end, at)):
            self._consume(at + len(self._form.end))

    # -- reading text that may not be there yet --

    def _at(self, at: int) -> Generator[None, None, str]:
        """The character at ``at`` of what is not consumed; empty after the end."""
        while at >= len(self._text) and not self._ended:
            yield
        return self._text[at : at + 1]

    def _is(self, mark: str, at: int) -> Generator[None, None, bool]:
        for i, character in enumerate(mark):
            if (yield from self._at(at + i)) != character:
                return False
        return True

    def _find(self, mark: str, at: int) -> Generator[None, None, int]:
        """Where ``mark`` is, from ``at`` on; -1 if the text ends without it."""
        while (found := self._text.find(mark, at)) < 0 and not self._ended:
            at = max(at, len(self._text) - len(mark) + 1)
            yield
        return found

    def _skip(self, characters: str, at: int) -> Generator[None, None, int]:
        while (character := (yield from self._at(at))) and character in characters:
            at += 1
        return at

    def _value(self, at: int) -> Generator[None, None, int]:
        """The end of a JSON value that begins at ``at``; ``at`` itself if there is none."""
        first = yield from self._at(at)
        if first and first in '"{[':
            nesting, read = _Nesting(), at
            while (end := nesting.scan(self._text, read)) is None and not self._ended:
                read = len(self._text)
                yield
            return end if end is not None and nesting.is_json else at
        return (yield from self._skip(_LITERAL, at))

    # -- content --

    def _content_until(self, mark: str) -> Generator[None, None, bool]:
        """Pass text through; true if ``mark`` is next, false at the end. Behind a call, other marks are dropped."""
        others = [other for other in self._form.visible_tokens if other != mark and self._count]
        self._is_in_call = False
        while True:
            found = [(at, other) for other in (mark, *others) if (at := self._text.find(other)) >= 0]
            at, other = min(found, default=(-1, ""), key=lambda place: (place[0], -len(place[1])))
            if other == mark:
                self._content(at)
                return True
            if other:
                self._content(at)
                self._consume(len(other))
            elif self._ended:
                self._content(len(self._text) - max((overlap(self._text, o) for o in others), default=0))
                self._consume(len(self._text))
                return False
            else:
                held = max(overlap(self._text, o) for o in (mark, *others))
                self._content(len(self._text) - held)
                yield

    def _content(self, length: int) -> None:
        """The next ``length`` characters are content; white space at its end waits for what follows."""
        if not length:
            return
        text = self._space + self._text[:length]
        self._consume(length)
        if self._is_after_call:
            text = text.lstrip(_SPACE)
        body = text.rstrip(_SPACE)
        self._space = text[len(body) :]
        if body:
            self._is_after_call = False
            self._events.append(Content(body))

    def _consume(self, length: int) -> None:
        self._text = self._text[length:]


class _Nesting:
    """Finds the end of a JSON string, object or list in text that comes in pieces, by its quotes and brackets."""

    _OUTSIDE = re.compile(r"[^A-Za-z0-9 \t\r\n:,.+\-]")
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self.is_json = True
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int = 0) -> int | None:
        """Read on from ``start``: where the value ends; ``None`` if it goes on.

        At a character that cannot be there, ``is_json`` is false and the result is where it is.
        """
        at = start + (self._escaped and start < len(text))
        self._escaped = self._escaped and start >= len(text)
        while found := (self._INSIDE if self._in_string else self._OUTSIDE).search(text, at):
            character, at = found[0], found.end()
            if character == "\\" and self._in_string:
                self._escaped = at >= len(text)
                at += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._open.append("}" if character == "{" else "]")
            elif not self._open or self._open.pop() != character:
                self.is_json = False
                return found.start()
            if not self._open and not self._in_string:
                return at
        return None


def _text_of(value: str) -> str | None:
    """The text of a JSON string; ``None`` if it is none."""
    try:
        text = json.loads(value, strict=False) if value.startswith('"') else None
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _arguments_of(value: str) -> str | None:
    """Arguments as they stand in a call, as the text of an object; ``None`` for another value."""
    if value == "null":
        return "{}"
    text = _text_of(value) if value.startswith('"') else value
    return text if text is not None and text.lstrip(_SPACE).startswith("{") else None
