"""Calls of functions in a model's text: how a model writes them, and their parts while the text arrives.

Models are trained to write calls in one of a few forms, each around a JSON object with the function's name and its
arguments. :func:`find_tool_format` finds the form from the chat template and the vocabulary, :class:`ToolCallParser`
separates the calls from the text around them, and :func:`tool_grammar` describes them for constrained decoding.
For a model whose form is unknown, :func:`generic_messages` describes the generic form in the prompt.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UsageError
from .chat_template import Message
from .lark import TokenId, after_reasoning, mark_rule, no_token, rule_until
from .reasoning import Content, ReasoningFormat
from .text_stream import overlap

Tool = Mapping[str, Any]
"""OpenAI's form: ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}``."""


class CallBegin(NamedTuple):
    """A call of the function ``name`` begins; ``call`` counts the calls of an answer from 0."""

    call: int
    name: str


class ArgumentsDelta(NamedTuple):
    """More text of a call's arguments: those of a call joined are a JSON object, if the model wrote one."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """The call is complete, or the text ends."""

    call: int


Event = Content | CallBegin | ArgumentsDelta | CallEnd


# -- forms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolFormat:
    """A form in which models write calls. ``begin`` and ``end`` enclose a call; they may be special tokens.

    - ``arguments_key``: the key of the arguments, beside ``name``, in a call's JSON object.
    - ``has_bare_calls``: an answer that begins with a call may leave out ``begin``.
    - ``is_list``: ``begin`` is followed by a list of such objects.
    - ``arguments_mark``: the calls are no JSON objects, but a name, this mark and the arguments.
    - ``is_generic``: the chat template gets a description of the functions in a message, by :func:`generic_messages`.
    """

    name: str
    begin: str
    end: str = ""
    arguments_key: str = "arguments"
    has_bare_calls: bool = False
    is_list: bool = False
    arguments_mark: str = ""
    is_generic: bool = False

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """The texts that a detokenizer must not drop if they are special tokens."""
        marks = (self.begin, self.end, *((self.arguments_mark, _CALL_ID) if self.arguments_mark else ()))
        return tuple(mark for mark in marks if mark)

    def new_call_id(self) -> str:
        """A random id. Mistral's templates refuse others than nine letters and digits."""
        if self.begin == _MISTRAL:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_MISTRAL, _CALL_ID = "[TOOL_CALLS]", "[CALL_ID]"
HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", arguments_key="parameters", has_bare_calls=True)
MISTRAL = ToolFormat("mistral", _MISTRAL, is_list=True)
MISTRAL_ARGS = ToolFormat("mistral_args", _MISTRAL, arguments_mark="[ARGS]")
GENERIC = ToolFormat("generic", "<tool_call>", "</tool_call>", is_generic=True)

TOOL_FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, GENERIC)}
"""By name: what an option may choose instead of what :func:`find_tool_format` finds."""


def find_tool_format(template: str | None, has_token: Callable[[str], bool]) -> ToolFormat:
    """The form of a checkpoint, from its chat template for conversations with tools and its vocabulary.

    - ``hermes`` (Hermes, Qwen 2.5 and 3): the template reads ``tools`` and mentions ``<tool_call>`` around JSON.
    - ``mistral_args``, ``mistral``: it mentions ``[TOOL_CALLS]`` with or without ``[ARGS]``.
    - ``llama3_json`` (Llama 3.1 to 3.3): it reads ``tools``, and the vocabulary has ``<|python_tag|>``.
    - ``generic``: all others.
    """
    source = template or ""
    if re.search(r"\btools\b", source) is None:
        return GENERIC
    if _MISTRAL in source:
        return MISTRAL_ARGS if MISTRAL_ARGS.arguments_mark in source else MISTRAL
    if HERMES.begin in source:
        return GENERIC if "<function=" in source else HERMES  # Qwen3-Coder's form has XML instead of JSON
    return LLAMA3_JSON if has_token(LLAMA3_JSON.begin) else GENERIC


def tool_format(name: str) -> ToolFormat:
    """The form of that name. Raises ``UsageError`` if there is none."""
    if name not in TOOL_FORMATS:
        raise UsageError(f"the form of tool calls is {name!r}, but must be one of {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def function_names(tools: Sequence[Tool]) -> list[str]:
    """The names of the functions, in order."""
    return [tool["function"]["name"] for tool in tools]


# -- from text to calls -----------------------------------------------------------------------------------------------

_SPACE = " \t\r\n"
_NAME = string.ascii_letters + string.digits + "_.-"
_LITERAL = string.ascii_letters + string.digits + "+-."
_ARGUMENTS = ("arguments", "parameters")


class ToolCallParser:
    """Separates the calls in an answer from the text around them, while it arrives.

    What the events say joined depends on the text alone, not on how it is cut into pieces. White space beside a call
    belongs to nothing. A call's arguments pass through as they are written, from when the function's name is known;
    from there on the call is one, even if the text ends or is no JSON: then its arguments are none either. Arguments
    that are a string hold JSON, and absent ones are ``{}``. Text that begins as a call and is none is content.

    After ``form.begin``, a call of any name is one; without it, where the form allows that, it must be one of
    ``names``.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]):
        self._form = form
        self._names = frozenset(names)
        self._text = ""  # what is not consumed
        self._ended = False
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

    def flush(self) -> list[Event]:
        """The rest, after the last text. The parser takes no more."""
        self._ended = True
        for _ in self._machine:
            pass
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # The rest is one sequential program. It yields where it needs more text, and decides by characters alone.

    def _run(self) -> Generator[None, None, None]:
        if self._form.has_bare_calls:
            start = yield from self._skip(_SPACE, 0)
            if (yield from self._at(start)) == "{":
                yield from self._calls(start, only=self._names)
        while (yield from self._content_until(self._form.begin)):
            mark = self._form.arguments_mark
            is_call = False
            start = yield from self._skip(_SPACE, len(self._form.begin))
            if mark and (yield from self._at(start)) not in ("[", "{"):
                is_call = yield from self._named_call(start, mark)
            else:
                is_call = yield from self._calls(start)
            if is_call and self._form.end:
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

    def _named_call(self, at: int, mark: str) -> Generator[None, None, bool]:
        """Take a name, ``mark`` and arguments. If they are not there, what was read is content."""
        end = yield from self._skip(_NAME, at)
        name = self._text[at:end]
        if name and (yield from self._is(_CALL_ID, end)):
            end = yield from self._skip(_NAME, end + len(_CALL_ID))
        if name and (yield from self._is(mark, end)):
            end += len(mark)
        end = yield from self._skip(_SPACE, end)
        if not name or (yield from self._at(end)) != "{":
            self._content(end)
            return False
        call = self._begin(name, end)
        if (yield from self._arguments(call)):
            self._events.append(CallEnd(call))
        return True

    def _begin(self, name: str, consumed: int) -> int:
        """A call is certain: white space before it, and its text up to ``consumed``, are no content."""
        self._consume(consumed)
        self._space, self._is_after_call = "", True
        self._events.append(CallBegin(self._count, name))
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
        """Pass text through; true if ``mark`` is next, false at the end."""
        while (at := self._text.find(mark)) < 0 and not self._ended:
            self._content(len(self._text) - overlap(self._text, mark))
            yield
        self._content(len(self._text) if at < 0 else at)
        return at >= 0

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


# -- calls as grammars ------------------------------------------------------------------------------------------------

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of arguments: as ``tojson`` writes them, which is how the model has read earlier calls."""


def tool_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    required: bool = False,
    name: str | None = None,
    parallel: bool = True,
    token_id: TokenId = no_token,
    reasoning: ReasoningFormat | None = None,
    reasoning_is_open: bool = False,
) -> str | None:
    """A grammar (Lark, as llguidance reads it) of the answers that may call ``tools``; ``None`` if none is needed.

    - ``required``: the answer is one call or several. Otherwise it may be any text, but the arguments in its calls are
      constrained, if at least one tool is ``strict``.
    - ``name``: the answer is one call of this function. ``parallel``: in other cases there may be several calls.
    - ``token_id``: the id of a mark that is one token. Without it the grammar has no ids of tokens, so that it can be
      validated without the vocabulary; it then fits models whose marks are ordinary text.
    - ``reasoning``: the answer may begin with reasoning, and does if that ``reasoning_is_open``.

    Arguments follow the function's schema ``parameters``; without one they are ``{}``. If no call is required, those of
    a function that is not strict are any object. Raises ``UsageError`` for a name that no function has.
    Whether the schemas are valid is found when the grammar is compiled.
    """
    if name is not None:
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            known = ", ".join(function_names(tools)) or "none"
            raise UsageError(f"the function to call is {name!r}, but the functions in tools are: {known}")
        tools, required, parallel = named, True, False
    if not required and not any(tool["function"].get("strict") for tool in tools):
        return None
    begin, rest = mark_rule(form.begin, token_id), _after_begin(form, parallel, token_id)
    repeats = parallel and bool(form.end or form.arguments_mark)
    if required:
        optional, separator = "?" * form.has_bare_calls, r'"\n"? ' * bool(form.end)
        again = f" ({separator}{begin} rest)*" * repeats
        answer = f"answer: {begin}{optional} rest{again}"
    elif form.has_bare_calls:
        answer = f"answer: NO_CALL | {begin}? rest | NO_CALL {begin} rest\n"
        answer += r"NO_CALL: /[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"
    else:
        answer = "answer: (until_call rest)* TEXT" if repeats else "answer: TEXT | until_call rest"
        answer += "\n" + rule_until("until_call", form.begin, token_id)
    rules = [answer, f"rest: {rest}", f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = _arguments_schema(function, any_object=not required and not function.get("strict"))
        rules += [_call_rule(form, function["name"], i, token_id), f"arguments_{i}: %json {json.dumps(schema)}"]
    return after_reasoning("\n".join(rules), reasoning, reasoning_is_open, token_id)


def _after_begin(form: ToolFormat, parallel: bool, token_id: TokenId) -> str:
    """What follows the begin mark."""
    if form.end:
        return rf'"\n" call "\n" {mark_rule(form.end, token_id)}'
    if form.is_list:
        return '" "? "[" call (", " call)* "]"' if parallel else '" "? "[" call "]"'
    return 'call ("; " call)*' if form.has_bare_calls and parallel else "call"


def _call_rule(form: ToolFormat, name: str, number: int, token_id: TokenId) -> str:
    if form.arguments_mark:
        return f"call_{number}: {json.dumps(name)} {mark_rule(form.arguments_mark, token_id)} arguments_{number}"
    begin = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments_key}": ')
    return f'call_{number}: {begin} arguments_{number} "}}"'


def _arguments_schema(function: Mapping[str, Any], any_object: bool) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    none: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
    schema = {} if any_object else function.get("parameters") or none
    return {"type": "object", **schema, "x-guidance": _SPACING}


# -- a form for any model ---------------------------------------------------------------------------------------------

_INSTRUCTIONS = """\
You can call functions to help with the request. These are the functions, each as JSON with the schema of its arguments:
{functions}

To call a function, write its name and its arguments as JSON in this form, for each call anew:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
The next message has the results between <tool_response> and </tool_response>."""


def generic_instructions(tools: Sequence[Tool]) -> str:
    """A text that tells a model which functions it may call, and how."""
    return _INSTRUCTIONS.format(functions="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def generic_messages(messages: Sequence[Message], tools: Sequence[Tool], has_system: bool = True) -> list[Message]:
    """A conversation with tools for a chat template that knows none: only contents, of the roles that it knows.

    :func:`generic_instructions` follow the system message, or are one; if the template ``has_system`` messages not,
    they precede the first message. Calls become part of the assistant's content, and results become messages of the
    user, those beside each other one. ``messages`` are in the form of :func:`.template_messages`.
    """
    result: list[Message] = []
    if tools:
        text = generic_instructions(tools)
        first, rest = messages[0], messages[1:]
        if first["role"] == "system":
            text = f"{first.get('content') or ''}\n\n{text}".lstrip()
            messages = rest
        if has_system or not messages:
            result.append({"role": "system", "content": text})
        else:
            first, rest = messages[0], messages[1:]
            messages = [{**first, "content": f"{text}\n\n{first.get('content') or ''}"}, *rest]
    for i, message in enumerate(messages):
        content = message.get("content") or ""
        if message["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if i and messages[i - 1]["role"] == "tool":
                result[-1]["content"] += f"\n{text}"
            else:
                result.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            texts = [content] * bool(content) + [_written(call["function"]) for call in calls]
            result.append({**kept, "content": "\n".join(texts)})
        else:
            result.append(dict(message))
    return result


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"{GENERIC.begin}\n{json.dumps(call, ensure_ascii=False)}\n{GENERIC.end}"
