"""Functions and calls in words, for a chat template that knows none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..chat_template import Message, content_text
from .formats import GENERIC, Tool

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

    :func:`generic_instructions` follow the system message, or are one; without ``has_system`` the template takes no
    system message, and they precede the first message. Calls become part of the assistant's content. Results become
    messages of the user, successive ones a single message. ``messages`` are in the form of :func:`.template_messages`.
    """
    result: list[Message] = []
    if tools:
        text = generic_instructions(tools)
        first, rest = messages[0], messages[1:]
        if first["role"] == "system":
            text = f"{content_text(first)}\n\n{text}".lstrip()
            messages = rest
        if has_system or not messages:
            result.append({"role": "system", "content": text})
        else:
            first, rest = messages[0], messages[1:]
            messages = [{**first, "content": f"{text}\n\n{content_text(first)}"}, *rest]
    for i, message in enumerate(messages):
        content = content_text(message)
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
