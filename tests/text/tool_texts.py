"""Calls of functions as models of each form write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bminf_lite.text.tool_calls import ToolFormat


def written(
    form: ToolFormat,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    dump: Callable[[Any], str] = json.dumps,
    literal: Callable[[Any], str] = repr,
) -> str:
    """The calls, each a name and its arguments. ``dump`` writes JSON, and ``literal`` the values of Python."""
    if form.syntax == "named":
        return "".join(f"{form.begin}{name}{form.arguments_mark}{dump(arguments)}" for name, arguments in calls)
    if form.syntax == "marked":
        separator = "\n" * form.is_fenced
        return f"{form.begin}{separator.join(_marked(form, *call, dump) for call in calls)}{form.end}"
    if form.syntax == "xml":
        return "\n".join(f"{form.begin}\n{_xml(*call, dump)}\n{form.end}" for call in calls)
    if form.syntax == "python":
        texts = (f"{n}({', '.join(f'{key}={literal(v)}' for key, v in a.items())})" for n, a in calls)
        return f"[{', '.join(texts)}]"
    objects = [f'{{"name": {json.dumps(n)}, "{form.arguments_key}": {dump(arguments)}}}' for n, arguments in calls]
    if form.is_list:
        return f"{form.begin}[{', '.join(objects)}]"
    if form.end:
        return "\n".join(f"{form.begin}\n{text}\n{form.end}" for text in objects)
    return "; ".join(objects)


def _marked(form: ToolFormat, name: str, arguments: Mapping[str, Any], dump: Callable[[Any], str]) -> str:
    first, last = form.call_marks
    if form.is_fenced:
        return f"{first}function{form.arguments_mark}{name}\n```json\n{dump(arguments)}\n```{last}"
    return f"{first}{name}{form.arguments_mark}{dump(arguments)}{last}"


def _xml(name: str, arguments: Mapping[str, Any], dump: Callable[[Any], str]) -> str:
    texts = {key: value if isinstance(value, str) else dump(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<function={name}>\n{parameters}</function>"
