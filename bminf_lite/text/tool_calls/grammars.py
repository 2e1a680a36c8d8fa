"""Calls of functions as grammars, for constrained decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UsageError
from ..json_schema import enforceable
from ..lark import TokenId, after_reasoning, mark_rule, no_token, rule_until
from ..reasoning import ReasoningFormat
from .formats import Tool, ToolFormat, function_names, parameters_of
from .values import types_of

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spacing of arguments: that of ``tojson``, by which templates write earlier calls into the prompt."""


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
    Whether the schemas are valid is found when the grammar is compiled. In XML, of the schema of a string only ``enum``
    is enforced.
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
    repeats = parallel and (
        form.syntax == "xml" or (form.syntax == "named" and not form.end) or (form.syntax == "json" and bool(form.end))
    )
    if required:
        optional, separator = "?" * form.has_bare_calls, r'"\n"? ' * bool(form.end)
        again = f" ({separator}{begin} rest)*" * repeats
        answer = f"answer: {begin}{optional} rest{again}"
    elif form.text_mark:
        answer = f"answer: {mark_rule(form.text_mark, token_id)} TEXT | {begin} rest"
    elif form.has_bare_calls:
        answer = f"answer: NO_CALL | {begin}? rest | NO_CALL {begin} rest\n"
        first = r"\[" if form.syntax == "python" else "{"
        answer += rf"NO_CALL: /[ \t\r\n]*([^{first} \t\r\n](.|\n)*)?/"
    else:
        answer = "answer: (until_call rest)* TEXT" if repeats else "answer: TEXT | until_call rest"
        answer += "\n" + rule_until("until_call", form.begin, token_id)
    rules = [answer, f"rest: {rest}", f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = _arguments_schema(function, any_object=not required and not function.get("strict"))
        rules += _CALL_RULES[form.syntax](form, function["name"], i, schema, token_id)
    rules += _SHARED_RULES.get(form.syntax, ())
    return after_reasoning("\n".join(rules), reasoning, reasoning_is_open, token_id)


def _after_begin(form: ToolFormat, parallel: bool, token_id: TokenId) -> str:
    """What follows the begin mark."""
    if form.syntax == "marked":
        first, last = (mark_rule(mark, token_id) for mark in form.call_marks)
        one = f"{first} call {last}"
        separator = r'"\n" ' * form.is_fenced
        return f"{one} {f'({separator}{one})* ' * parallel}{mark_rule(form.end, token_id)}"
    if form.syntax == "python":
        return f'"[" call {_MORE_CALLS * parallel}"]" {mark_rule(form.end, token_id)}?'
    if form.syntax == "named" and form.end:  # the end ends the answer
        return f"call {mark_rule(form.end, token_id)}?"
    if form.end:
        return rf'"\n" call "\n" {mark_rule(form.end, token_id)}'
    if form.is_list:
        return f'" "? "[" call {_MORE_CALLS * parallel}"]"'
    return 'call ("; " call)*' if form.has_bare_calls and parallel else "call"


_MORE_CALLS = '(", " call)* '


def _arguments_schema(function: Mapping[str, Any], any_object: bool) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    schema = {} if any_object else enforceable(parameters_of(function))
    return {"type": "object", **schema, "x-guidance": _SPACING}


# -- the rules of a call, by the syntax of a form ---------------------------------------------------------------------


def _json_call(form: ToolFormat, name: str, number: int, schema: dict[str, Any], token_id: TokenId) -> list[str]:
    begin = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments_key}": ')
    return [f'call_{number}: {begin} arguments_{number} "}}"', f"arguments_{number}: %json {json.dumps(schema)}"]


def _named_call(form: ToolFormat, name: str, number: int, schema: dict[str, Any], token_id: TokenId) -> list[str]:
    mark, arguments = mark_rule(form.arguments_mark, token_id), f"arguments_{number}"
    constraint = f"({mark_rule(form.constraint, token_id)})? " if form.constraint else ""
    begin, end = f"{json.dumps(name)} {constraint}{mark}", ""
    if form.is_fenced:
        begin, end = rf'"function" {mark} {json.dumps(name)} "\n```json\n"', r'"\n```"'
    return [f"call_{number}: {begin} {arguments} {end}", f"{arguments}: %json {json.dumps(schema)}"]


def _xml_call(form: ToolFormat, name: str, number: int, schema: dict[str, Any], token_id: TokenId) -> list[str]:
    """Parameters in the order of the schema. The text of a string ends where its tag is closed."""
    rules, parts = [], []
    for i, (key, value, is_required) in enumerate(_parameters(schema)):
        rule = f"parameter_{number}_{i}"
        types = types_of(value)
        choices = value.get("enum")
        begin = json.dumps(f"<parameter={key}>\n")
        if "string" not in types:
            rules += [rf'{rule}: {begin} {rule}_value "\n</parameter>\n"', f"{rule}_value: %json {json.dumps(value)}"]
        elif choices and types == {"string"}:
            texts = " | ".join(json.dumps(choice) for choice in choices)
            rules.append(rf'{rule}: {begin} ({texts}) "\n</parameter>\n"')
        else:
            rules.append(rf'{rule}: {begin} until_parameter "\n"')
        parts.append(rule + "?" * (not is_required))
    if "properties" not in schema:
        parts = ["any_parameter*"]
    return [f'call_{number}: {json.dumps(f"<function={name}>" + chr(10))} {" ".join(parts)} "</function>"', *rules]


def _python_call(form: ToolFormat, name: str, number: int, schema: dict[str, Any], token_id: TokenId) -> list[str]:
    """Arguments in the order of the schema, those that are required first."""
    rules: list[str] = []
    required: list[str] = []
    optional: list[str] = []
    for i, (key, value, is_required) in enumerate(_parameters(schema)):
        rule = f"argument_{number}_{i}"
        boolean = ' ("True" | "False")' if types_of(value) == {"boolean"} and "enum" not in value else ""
        rules.append(f"{rule}: {json.dumps(key + '=')}{boolean or f' {rule}_value'}")
        if not boolean:
            rules.append(f"{rule}_value: %json {json.dumps(value)}")
        (required if is_required else optional).append(rule)
    if "properties" not in schema:
        arguments = '(any_argument (", " any_argument)*)?'
    elif required:
        arguments = ' ", " '.join(required) + "".join(f' (", " {rule})?' for rule in optional)
    else:  # any of them may be the first
        begins = [
            " ".join([rule, *(f'(", " {other})?' for other in optional[i + 1 :])]) for i, rule in enumerate(optional)
        ]
        arguments = f"({' | '.join(begins)})?" if begins else ""
    return [f'call_{number}: {json.dumps(name + "(")} {arguments} ")"', *rules]


def _parameters(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """The name and the schema of each parameter, and whether it is required. What they refer to goes with them."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    found = []
    for key, value in (schema.get("properties") or {}).items():
        whole = {**value, **shared} if isinstance(value, Mapping) else {"not": {}} if value is False else dict(shared)
        found.append((key, {**whole, "x-guidance": _SPACING}, key in required))
    return found


_CALL_RULES = {
    "json": _json_call,
    "named": _named_call,
    "marked": _named_call,
    "xml": _xml_call,
    "python": _python_call,
}
_SHARED_RULES = {
    "xml": (
        r'any_parameter: "<parameter=" /[^<>\n]+/ ">\n" until_parameter "\n"',
        r"until_parameter[lazy]: /(.|\n)*<\/parameter>/",
    ),
    "python": (
        'any_argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" any_value',
        'any_value: "True" | "False" | "None" | any_json',
        f"any_json: %json {json.dumps({'x-guidance': _SPACING})}",
    ),
}
