"""Calls of functions as models of each form write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bminf_lite.text.tool_calls import ToolFormat
from bminf_lite.text.tool_calls.formats import XmlTags


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
        line = "\n" * form.tags.has_lines
        texts = [_xml(form.tags, *call, dump) for call in calls]
        if form.is_list:
            return f"{form.begin}{line}{line.join(texts)}{line}{form.end}"
        return line.join(f"{form.begin}{line}{text}{line}{form.end}" for text in texts)
    if form.syntax == "python":
        texts = [f"{n}({', '.join(f'{key}={literal(v)}' for key, v in a.items())})" for n, a in calls]
        marks = ("", "") if form.has_bare_calls else (form.begin, form.end)
        return f"{marks[0]}[{', '.join(texts)}]{marks[1]}"
    if form.syntax == "braces":
        texts = [f"call:{name}{braces(arguments, form.string_mark)}" for name, arguments in calls]
        return "".join(f"{form.begin}{text}{form.end}" for text in texts)
    objects = [f'{{"name": {json.dumps(n)}, "{form.arguments_key}": {dump(arguments)}}}' for n, arguments in calls]
    if form.is_list:
        return f"{form.begin}[{', '.join(objects)}]"
    if form.end:
        return "\n".join(f"{form.begin}\n{text}\n{form.end}" for text in objects)
    return "; ".join(objects)


def braces(value: Any, mark: str) -> str:
    """A value in braces, its strings within ``mark``."""
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{braces(value[key], mark)}' for key in sorted(value))}}}"
    return f"[{','.join(braces(item, mark) for item in value)}]" if isinstance(value, list) else json.dumps(value)


def _marked(form: ToolFormat, name: str, arguments: Mapping[str, Any], dump: Callable[[Any], str]) -> str:
    first, last = form.call_marks
    if form.is_fenced:
        return f"{first}function{form.arguments_mark}{name}\n```json\n{dump(arguments)}\n```{last}"
    name = f"{form.id_prefix}{name}:0" if form.id_prefix else name
    return f"{first}{name}{form.arguments_mark}{dump(arguments)}{last}"


def _xml(tags: XmlTags, name: str, arguments: Mapping[str, Any], dump: Callable[[Any], str]) -> str:
    texts = {key: value if isinstance(value, str) else dump(value) for key, value in arguments.items()}
    line, pad = "\n" * tags.has_lines, tags.padding
    parameters = "".join(
        f"{key.join(tags.key)}{tags.value[0]}{pad}{text}{pad}{tags.value[1]}{line}" for key, text in texts.items()
    )
    return f"{name.join(tags.function)}{line}{parameters}{tags.end}"
