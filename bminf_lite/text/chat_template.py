"""Conversations to prompts by the chat template of a checkpoint, which is a Jinja program that is not trusted.

Templates render as in Hugging Face transformers, in jinja2's immutable sandbox. The sandbox denies access to the file
system and the interpreter, but not endless loops or gigabytes of memory: a single multiplication, filter or string
method can take either without returning to Python code that could check it. Therefore templates render in a separate
process (``chat_template_worker.py``). It is killed after a time limit, and on Linux the operating system limits its
memory. The process starts with the first conversation, in about a tenth of a second, and serves later ones.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """A checkpoint's chat template: its ``source``, and the special tokens that it may insert, as text.

    Raises ``CheckpointError`` if the source is too large; other faults are found when it renders. Thread-safe.
    """

    def __init__(
        self, source: str, bos_token: str | None = None, eos_token: str | None = None, limits: ChatLimits = ChatLimits()
    ):
        if len(source) > limits.source:
            raise CheckpointError(f"the chat template has {len(source):,} characters; {limits.source:,} are allowed")
        self._source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._limits = limits
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object) -> str:
        """The prompt for a conversation. ``variables`` are passed to the template: ``tools``, ``enable_thinking``, ...

        Raises ``UsageError`` for messages that are malformed or that the template refuses, ``CheckpointError`` for a
        template that fails or exceeds a limit.
        """
        check_messages(messages)
        variables = {"tools": None, "documents": None, **self._tokens, **variables}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            request = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as e:
            raise UsageError(f"messages and variables of a chat template must be JSON values: {e}") from None
        with self._lock:
            if self._worker is None or not self._worker.alive:
                self._worker = self._start()
            reply = self._worker.ask(request, self._limits.seconds)
        if "text" in reply:
            return reply["text"]
        if "refused" in reply:
            raise UsageError(f"the chat template refuses these messages: {reply['refused']}")
        raise CheckpointError(f"the chat template {reply['failed']}; give a plain prompt, or correct the template")

    def _start(self) -> WorkerProcess:
        limits = self._limits
        return WorkerProcess(WORKER, {"source": self._source, "output": limits.output, "memory": limits.memory})


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ``UsageError`` for a value that is not a conversation; it lists the invalid messages by number."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise UsageError('messages must be a list of {"role": ..., "content": ...} objects, one at least')
    wrong = [i for i, m in enumerate(messages) if not (isinstance(m, dict) and isinstance(m.get("role"), str))]
    if wrong:
        raise UsageError(f"each message must be an object whose role is text; not so: {', '.join(map(str, wrong))}")
