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
    is enforced. In braces, of the schema of a string, a list or an object only the type, ``enum``, ``const``, members
    and items are.
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
        (form.syntax == "xml" and not form.is_list)
        or form.syntax == "braces"
        or (form.syntax == "named" and not form.end)
        or (form.syntax == "json" and bool(form.end))
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
    if form.syntax in _SHARED_RULES:
        rules += _SHARED_RULES[form.syntax](form, token_id)
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
    if form.syntax == "braces":
        return f"call {mark_rule(form.end, token_id)}"
    if form.end:
        line, more = _line(form), r'("\n" call)* ' * (form.is_list and parallel)
        return f"{line} call {more}{line} {mark_rule(form.end, token_id)}"
    if form.is_list:
        return f'" "? "[" call {_MORE_CALLS * parallel}"]"'
    return 'call ("; " call)*' if form.has_bare_calls and parallel else "call"


def _line(form: ToolFormat) -> str:
    """The end of a line behind a tag, as a part of a rule."""
    return r'"\n"' if form.syntax != "xml" or form.tags.has_lines else r'"\n"?'


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
    if form.id_prefix:
        begin = f"{json.dumps(f'{form.id_prefix}{name}:')} /[0-9]+/ {mark}"
    if form.is_fenced:
        begin, end = rf'"function" {mark} {json.dumps(name)} "\n```json\n"', r'"\n```"'
    return [f"call_{number}: {begin} {arguments} {end}", f"{arguments}: %json {json.dumps(schema)}"]


def _xml_call(form: ToolFormat, name: str, number: int, schema: dict[str, Any], token_id: TokenId) -> list[str]:
    """Parameters in the order of the schema. The text of a string ends where its tag is closed."""
    tags, line, rules, parts = form.tags, _line(form), list[str](), list[str]()
    padding = json.dumps(tags.padding) if tags.padding else ""
    end = f"{padding} {mark_rule(tags.value[1], token_id)} {line}"
    for i, (key, value, is_required) in enumerate(_parameters(schema)):
        rule = f"parameter_{number}_{i}"
        types = types_of(value)
        choices = value.get("enum")
        begin = _xml_begin(form, json.dumps(key), token_id)
        if "string" not in types:
            rules += [f"{rule}: {begin} {rule}_value {end}", f"{rule}_value: %json {json.dumps(value)}"]
        elif choices and types == {"string"}:
            texts = " | ".join(json.dumps(choice) for choice in choices)
            rules.append(f"{rule}: {begin} ({texts}) {end}")
        else:
            rules.append(f"{rule}: {begin} until_value {line}")
        parts.append(rule + "?" * (not is_required))
    if "properties" not in schema:
        parts = ["any_parameter*"]
    before, behind = tags.function
    head = f"{json.dumps(before + name + behind)} {line}"
    return [f"call_{number}: {head} {' '.join(parts)} {json.dumps(tags.end) if tags.end else ''}", *rules]


def _xml_begin(form: ToolFormat, key: str, token_id: TokenId) -> str:
    """What precedes a parameter's value; ``key`` is its name as a part of a rule."""
    tags = form.tags
    parts = [mark_rule(tags.key[0], token_id), key, mark_rule(tags.key[1], token_id)]
    if tags.value[0]:
        parts += [_line(form), mark_rule(tags.value[0], token_id)]
    return " ".join(parts + [json.dumps(tags.padding)] * bool(tags.padding))


def _braces_call(form: ToolFormat, name: str, number: int, schema: dict[str, Any], token_id: TokenId) -> list[str]:
    """Members in the order of their names, in which chat templates write them."""
    values = _BracesValues(f"value_{number}", schema, mark_rule(form.string_mark, token_id))
    arguments = values.members(schema)
    return [f'call_{number}: {json.dumps(f"call:{name}{{")} {arguments} "}}"', *values.rules]


class _BracesValues:
    """The rules of values in braces, whose schemas lie in ``root``. A rule's name begins with ``name``.

    ``quote`` is the mark around strings, as a part of a rule.
    """

    def __init__(self, name: str, root: Mapping[str, Any], quote: str):
        self.rules: list[str] = []
        self._name, self._root, self._quote = name, root, quote
        self._count = 0
        self._references: dict[str, str] = {}

    def members(self, schema: Mapping[str, Any]) -> str:
        """The members of an object, without its braces."""
        properties = schema.get("properties")
        if properties is None:
            return "any_members"
        required, first = schema.get("required") or (), self._new_name()
        names = sorted(properties)
        for i, key in enumerate(names):
            member = f"{json.dumps(f'{key}:')} {self.value(properties[key])}"
            others = "" if key in required else f" | {first}_{i + 1}"
            self.rules.append(f"{first}_{i}: {member} {first}_more_{i + 1}{others}")
            others = "" if key in required else f" | {first}_more_{i + 1}"
            self.rules.append(f'{first}_more_{i}: "," {member} {first}_more_{i + 1}{others}')
        self.rules += [f'{first}_{len(names)}: ""', f'{first}_more_{len(names)}: ""']
        return f"{first}_0"

    def value(self, schema: Any) -> str:
        """The name of the rule of a value: one of its own, or ``any_value``."""
        if not isinstance(schema, Mapping):
            return "any_value" if schema is not False else self._json({"not": {}})
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._references:
                self._references[reference] = name = self._new_name()
                self.rules.append(f"{name}: {self.value(self._resolved(reference))}")
            return self._references[reference]
        if "const" in schema or "enum" in schema:
            choices = schema["enum"] if "enum" in schema else [schema["const"]]
            return self._rule(" | ".join(map(self._literal, choices)))
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self._rule(" | ".join(map(self.value, schema[key])))
        types = sorted(types_of(schema)) or ["object"] * ("properties" in schema) or ["array"] * ("items" in schema)
        return self._rule(" | ".join(self._typed(kind, schema) for kind in types)) if types else "any_value"

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return f"{self._quote} until_quote"
        if kind == "array":
            item = self.value(schema.get("items", True))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return f'"{{" {self.members(schema)} "}}"'
        return self._json({**schema, "type": kind})

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._literal, value))} "]"'
        if isinstance(value, dict):
            members = (f"{json.dumps(f'{key}:')} {self._literal(value[key])}" for key in sorted(value))
            return f'"{{" {_COMMA.join(members)} "}}"'
        return json.dumps(json.dumps(value))

    def _resolved(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        # a reference to nothing fails where the grammar is compiled
        return {"type": f"unknown reference {reference}"} if found is None else found

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps(schema)}")

    def _rule(self, body: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"


_COMMA = ' "," '


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


def _shared_xml(form: ToolFormat, token_id: TokenId) -> list[str]:
    begin = _xml_begin(form, r'/[^<>"\n]+/', token_id)
    return [
        f"any_parameter: {begin} until_value {_line(form)}",
        rule_until("until_value", form.tags.value[1], token_id),
    ]


def _shared_python(form: ToolFormat, token_id: TokenId) -> list[str]:
    return [
        'any_argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" any_value',
        'any_value: "True" | "False" | "None" | any_json',
        f"any_json: %json {json.dumps({'x-guidance': _SPACING})}",
    ]


def _shared_braces(form: ToolFormat, token_id: TokenId) -> list[str]:
    return [
        rule_until("until_quote", form.string_mark, token_id),
        'any_members: (any_member ("," any_member)*)?',
        r'any_member: /[^\s:{}\[\],<>"]+/ ":" any_value',
        f'any_value: {mark_rule(form.string_mark, token_id)} until_quote | any_literal | "{{" any_members "}}" '
        '| "[" (any_value ("," any_value)*)? "]"',
        'any_literal: %json {"type": ["boolean", "null", "number"]}',
    ]


_CALL_RULES = {
    "json": _json_call,
    "named": _named_call,
    "marked": _named_call,
    "xml": _xml_call,
    "python": _python_call,
    "braces": _braces_call,
}
_SHARED_RULES = {"xml": _shared_xml, "python": _shared_python, "braces": _shared_braces}
