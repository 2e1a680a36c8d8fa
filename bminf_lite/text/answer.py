"""The parts of an answer while its text arrives: reasoning, content and calls."""

from __future__ import annotations

from .reasoning import Content, Reasoning, ReasoningParser
from .tool_calls import Event, ToolCallParser

AnswerEvent = Reasoning | Event


class AnswerParser:
    """Separates an answer into reasoning, content and calls, each where its parser is given.

    Calls within the reasoning are reasoning. The tokenizer that makes the text must show the marks
    (:meth:`.Tokenizer.showing` with ``visible_tokens`` of the formats).
    """

    def __init__(self, reasoning: ReasoningParser | None = None, calls: ToolCallParser | None = None):
        self._reasoning = reasoning
        self._calls = calls

    @property
    def call_count(self) -> int:
        """Calls so far, with one that is not complete."""
        return self._calls.call_count if self._calls else 0

    def push(self, text: str) -> list[AnswerEvent]:
        """What ``text`` adds. Text whose part is not certain yet is held back."""
        if self._reasoning is None:
            return [*self._calls_in(text)]
        return self._parted(self._reasoning.push(text))

    def flush(self) -> list[AnswerEvent]:
        """The rest, after the last text."""
        rest = self._parted(self._reasoning.flush()) if self._reasoning else []
        return [*rest, *(self._calls.flush() if self._calls else [])]

    def _parted(self, parts: list[Content | Reasoning]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for part in parts:
            events += [part] if isinstance(part, Reasoning) else self._calls_in(part.text)
        return events

    def _calls_in(self, text: str) -> list[Event]:
        if self._calls is not None:
            return self._calls.push(text)
        return [Content(text)] if text else []
