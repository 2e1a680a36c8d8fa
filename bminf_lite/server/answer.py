"""An answer in a conversation while its tokens arrive: text, reasoning, and calls of functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..text.reasoning import AnswerParser, Content, Reasoning
from ..text.text_stream import ScoredToken, TextStream
from ..text.tool_calls import ArgumentsDelta, CallBegin, CallEnd, ToolCallParser
from .client import Generation, Output
from .generating import Ending, read

Event = Content | Reasoning | CallBegin | ArgumentsDelta | CallEnd


def call_number(event: CallBegin | ArgumentsDelta | CallEnd) -> int:
    """Which of an answer's calls an event is about, from 0; the name ``index`` is also that of a tuple's method."""
    return event[0]


class NewEvents(NamedTuple):
    """What an output adds to an answer. At the end, the finish reason is ``stop``, ``length`` or ``tool_calls``."""

    events: Sequence[Event]
    tokens: list[ScoredToken]
    finish_reason: str | None


class Answer:
    """One answer. Its joined events do not depend on how its tokens were grouped into outputs.

    ``ending`` says what ends it, and ``stop_reason`` is vLLM's. ``reasoning`` and ``tools`` separate these parts from
    the text; without them all text is content. Without ``parallel_calls`` the answer ends after its first call.
    """

    def __init__(
        self,
        completion: TextStream,
        ending: Ending,
        reasoning: AnswerParser | None = None,
        tools: ToolCallParser | None = None,
        parallel_calls: bool = True,
    ):
        self.completion = completion
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._ending = ending
        self.num_cached = 0
        self._reasoning = reasoning
        self._tools = tools
        self._parallel_calls = parallel_calls

    def read(self, generation: Generation, output: Output) -> NewEvents:
        """What an output adds. Raises :class:`.CompletionFailed` for an error of the engine."""
        self.num_cached = output.cached_tokens
        if self._tools is None or self._parallel_calls:
            return self._read(generation, output)
        events: list[Event] = []
        tokens: list[ScoredToken] = []
        for one in _single_tokens(output):  # so that nothing depends on the tokens after the first call
            new = self._read(generation, one)
            events += new.events
            tokens += new.tokens
            end = next((i for i, event in enumerate(events) if isinstance(event, CallEnd)), None)
            if end is not None:
                generation.stop(output.index)
                self.finish_reason = "tool_calls"
                return NewEvents(events[: end + 1], tokens, self.finish_reason)
            if new.finish_reason is not None:
                break
        return NewEvents(events, tokens, self.finish_reason)

    def _read(self, generation: Generation, output: Output) -> NewEvents:
        new = read(generation, self.completion, output)
        self.finish_reason = new.finish_reason
        if new.finish_reason is not None:
            self.stop_reason = self._ending.reason(self.completion, output)
        if self._reasoning is None and self._tools is None:
            return NewEvents((Content(new.text),) if new.text else (), new.tokens, new.finish_reason)
        ends, was_cut = new.finish_reason is not None, new.finish_reason != "stop"
        parts: list[Content | Reasoning] = [Content(new.text)] if new.text else []
        if self._reasoning is not None:
            parts = [*self._reasoning.push(new.text), *(self._reasoning.flush(was_cut) if ends else ())]
        events: list[Event] = [*parts]
        if self._tools is not None:
            events = [*self._with_calls(self._tools, parts), *(self._tools.flush(was_cut) if ends else ())]
            if self._tools.call_count and new.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return NewEvents(events, new.tokens, self.finish_reason)

    def _with_calls(self, tools: ToolCallParser, parts: Sequence[Content | Reasoning]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                events += tools.push(part.text)
            else:
                events.append(part)
        return events


def _single_tokens(output: Output) -> Iterator[Output]:
    """The outputs of one token each that an output joins."""
    last = len(output.token_ids) - 1
    if last < 1:
        yield output
        return
    for i, token_id in enumerate(output.token_ids):
        yield Output(
            output.index,
            [token_id],
            None if output.logprobs is None else [output.logprobs[i]],
            None if output.top_logprobs is None else [output.top_logprobs[i]],
            output.finish_reason if i == last else None,
            error=output.error,
        )
