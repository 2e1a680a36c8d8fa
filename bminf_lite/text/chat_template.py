"""Conversations to prompts by the chat template of a checkpoint, which is a Jinja program that is not trusted.

Templates render as in Hugging Face transformers, in jinja2's immutable sandbox. The sandbox denies access to the file
system and the interpreter, but not endless loops or gigabytes of memory: a single multiplication, filter or string
method can take either without returning to Python code that could check it. Therefore templates render in a separate
process (``chat_template_worker.py``). It is killed after a time limit, and on Linux the operating system limits its
memory. The process starts with the first conversation, in about a tenth of a second, and serves later ones; several
processes render several conversations at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError, UsageError
from ..worker_process import WorkerProcess

Message = dict[str, Any]
"""A ``role``, usually a ``content``, and any other keys that the chat template reads."""

WORKER = Path(__file__).with_name("chat_template_worker.py")


@dataclass(frozen=True)
class ChatLimits:
    """Limits for a template: characters of source and of output, seconds per conversation, bytes of memory."""

    source: int = 1 << 20
    output: int = 1 << 24
    seconds: float = 2.0
    memory: int = 1 << 29


class ChatTemplate:
    """A checkpoint's chat template: its ``source``, and the ``special_tokens`` that it may insert, as texts by name.

    Renders as many conversations at a time as it may have ``processes``; more wait. Thread-safe. Raises
    ``CheckpointError`` if the source is too large; other faults are found when it renders.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        limits: ChatLimits = ChatLimits(),
        processes: int = 1,
    ):
        if len(source) > limits.source:
            raise CheckpointError(f"the chat template has {len(source):,} characters; {limits.source:,} are allowed")
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._limits = limits
        self._free: LifoQueue[WorkerProcess | None] = LifoQueue()
        for _ in range(processes):
            self._free.put(None)  # a process that has not started

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, as ``apply_chat_template`` of transformers gives it.

        ``tools`` are in OpenAI's form, and templates expect the arguments of earlier calls as objects
        (:func:`template_messages`). ``variables`` are passed to the template: ``enable_thinking``, ...

        A content may be a list of parts of text. A template that loops over parts gets the list, and another a text; a
        template that knows nothing but lists gets one for a text too.

        Raises ``UsageError`` for messages that are malformed or that the template refuses, ``CheckpointError`` for a
        template that fails or exceeds a limit.
        """
        check_messages(messages)
        variables = {"documents": None, **self._special_tokens, **variables, "tools": tools or None}
        variables |= {"messages": _as_in_transformers(messages), "add_generation_prompt": add_generation_prompt}
        try:
            request = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as e:
            raise UsageError(f"messages and variables of a chat template must be JSON values: {e}") from None
        worker = self._free.get()
        try:
            if worker is None or not worker.alive:
                worker = self._start()
            reply = worker.ask(request, self._limits.seconds)
        finally:
            self._free.put(worker)
        if "text" in reply:
            return reply["text"]
        if "refused" in reply:
            raise UsageError(f"the chat template refuses these messages: {reply['refused']}")
        raise CheckpointError(f"the chat template {reply['failed']}; give a plain prompt, or correct the template")

    def _start(self) -> WorkerProcess:
        limits = self._limits
        return WorkerProcess(WORKER, {"source": self._source, "output": limits.output, "memory": limits.memory})


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ``UsageError`` for a value that is not a conversation; it lists the invalid messages by number.

    A content may have parts, but only of text: no model here reads others.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise UsageError('messages must be a list of {"role": ..., "content": ...} objects, one at least')
    wrong = [i for i, m in enumerate(messages) if not (isinstance(m, dict) and isinstance(m.get("role"), str))]
    if wrong:
        raise UsageError(f"each message must be an object whose role is text; not so: {', '.join(map(str, wrong))}")
    for number, message in enumerate(messages):
        for part in _parts(message):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UsageError(f"messages[{number}].content has a part of type {kind!r}: only text is supported")


def content_text(message: Message) -> str:
    """The text of a message's content, whose parts are lines if it is a list."""
    parts = _parts(message)
    return "\n".join(part["text"] for part in parts) if parts else message.get("content") or ""


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def template_messages(messages: Sequence[Message]) -> list[Message]:
    """OpenAI's messages in the form that chat templates read.

    The arguments of calls, which are JSON text, become objects; arguments that are no JSON object remain text. Raises
    ``UsageError`` for a part of a content that is no text.
    """
    check_messages(messages)
    return [
        {**message, "tool_calls": [_template_call(call) for call in calls]}
        if (calls := message.get("tool_calls"))
        else dict(message)
        for message in messages
    ]


def _template_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def _as_in_transformers(messages: Sequence[Message]) -> list[Message]:
    """What ``apply_chat_template`` does first: no keys without a value, and reasoning under all of its names."""
    prepared = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        prepared.append(kept)
    return prepared
