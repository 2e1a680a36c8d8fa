"""Reasoning in an answer: the text between ``<think>`` and ``</think>``, apart from the answer, while it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .stop_strings import overlap


class Content(NamedTuple):
    """More text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """More text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning: the texts before and after it, which may be special tokens."""

    name: str
    begin: str
    end: str

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """The texts that a detokenizer must not drop if they are special tokens."""
        return (self.begin, self.end)

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt ends inside a block of reasoning: many templates open it for the model."""
        return prompt.rstrip().endswith(self.begin)

    def is_open_in(self, answer: str) -> bool:
        """Whether an answer so far ends inside its block of reasoning."""
        return answer.lstrip().startswith(self.begin) and self.end not in answer


REASONING_FORMATS = {
    form.name: form
    for form in (ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("mistral", "[THINK]", "[/THINK]"))
}
"""The formats, by their names."""


def find_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The format whose end a chat template mentions; ``None`` if it mentions none, or there is no template."""
    return next((form for form in REASONING_FORMATS.values() if form.end in (template or "")), None)


class ReasoningParser:
    """Separates the reasoning at the start of an answer from the rest of it.

    White space around the reasoning belongs to neither. A begin mark later in the answer is text; so is an end mark
    without a begin, unless the prompt ``opened`` the block. Reasoning that the answer does not close is reasoning. The
    texts joined depend on the answer alone, not on how it is cut into pieces.
    """

    def __init__(self, form: ReasoningFormat, opened: bool = False):
        self._form = form
        self._held = ""
        self._state = self._reasoning if opened else self._start
        self._began = False

    @property
    def is_in_content(self) -> bool:
        """Whether all further text is the answer's."""
        return self._state == self._content

    def push(self, text: str) -> list[Content | Reasoning]:
        """What ``text`` adds. Text that later text may still assign is held back."""
        self._held += text
        return self._state(last=False)

    def flush(self, was_cut: bool = False) -> list[Content | Reasoning]:
        """The rest, after the last text. ``was_cut``: the model would have written more, so a half mark is no text."""
        mark = self._form.begin if self._state == self._start else self._form.end
        cut = overlap(self._held, mark) if was_cut and self._state in (self._start, self._reasoning) else 0
        if 2 * cut >= len(mark):
            self._held = self._held[: len(self._held) - cut]
        return self._state(last=True)

    def _start(self, last: bool) -> list[Content | Reasoning]:
        text, begin = self._held.lstrip(), self._form.begin
        if text.startswith(begin):
            self._held, self._state = text[len(begin) :], self._reasoning
        elif begin.startswith(text) and not last:
            return []
        else:
            self._state = self._content
        return self._state(last)

    def _reasoning(self, last: bool) -> list[Content | Reasoning]:
        text, mark, rest = self._held.partition(self._form.end)
        if not self._began:
            text = text.lstrip()
        body = text.rstrip()
        if mark:
            self._held, self._state, self._began = rest, self._gap, self._began or bool(body)
            return [*([Reasoning(body)] if body else []), *self._gap(last)]
        if not last:  # white space may be the last of the reasoning, and the end mark may have begun
            body = body[: len(body) - overlap(body, self._form.end)].rstrip()
        self._held = text[len(body) :]
        self._began = self._began or bool(body)
        return [Reasoning(body)] if body else []

    def _gap(self, last: bool) -> list[Content | Reasoning]:
        self._held = self._held.lstrip()
        if not self._held:
            return []
        self._state = self._content
        return self._content(last)

    def _content(self, last: bool) -> list[Content | Reasoning]:
        text, self._held = self._held, ""
        return [Content(text)] if text else []
