"""Reasoning in an answer: the text between ``<think>`` and ``</think>``, apart from the answer, while it arrives.

gpt-oss writes an answer as messages instead, which say where they belong: see :class:`HarmonyParser`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from .stop_strings import overlap


class Content(NamedTuple):
    """More text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """More text of the reasoning before the answer."""

    text: str


class AnswerParser(Protocol):
    """Separates reasoning and content while an answer arrives."""

    def push(self, text: str) -> list[Content | Reasoning]: ...

    def flush(self, was_cut: bool = False) -> list[Content | Reasoning]: ...


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning: the texts before and after it, which may be special tokens.

    ``next`` is what follows the reasoning, and ``answer`` what precedes the answer itself. ``token`` is the special
    token with which ``begin`` begins, if that is not a token itself.
    """

    name: str
    begin: str
    end: str
    next: str = ""
    answer: str = ""
    token: str = ""

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """The texts that a detokenizer must not drop if they are special tokens."""
        return (self.token or self.begin, self.end)

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt ends inside a block of reasoning: many templates open it for the model."""
        return prompt.rstrip().endswith(self.begin)

    def is_open_in(self, answer: str) -> bool:
        """Whether an answer so far ends inside its block of reasoning."""
        return answer.lstrip().startswith(self.begin) and self.end not in answer

    def parser(self, opened: bool = False) -> AnswerParser:
        """A parser of one answer, to which the prompt has ``opened`` the reasoning."""
        return ReasoningParser(self, opened)

    @property
    def unseparated(self) -> ReasoningFormat | None:
        """The format for answers in which reasoning is content: None, because the text is the content then."""
        return None


@dataclass(frozen=True)
class HarmonyFormat(ReasoningFormat):
    """The format of gpt-oss, in which an answer is several messages (https://github.com/openai/harmony).

    Unless it ``separates`` them, messages of reasoning are content.
    """

    separates: bool = True

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        return (*HARMONY_ENDS, "<|channel|>", MESSAGE, "<|constrain|>")

    def parser(self, opened: bool = False) -> AnswerParser:
        return HarmonyParser(opened, self.separates)

    @property
    def unseparated(self) -> ReasoningFormat:
        return replace(self, separates=False)


REASONING_FORMATS = {
    form.name: form
    for form in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", token="<|channel>"),
    )
}
"""The formats with one block of reasoning, by their names. That of Gemma 4 names a channel, of which there is one."""
HARMONY = HarmonyFormat(
    "harmony", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
"""What ends the text of a message; the last one begins the next message."""
MESSAGE = "<|message|>"
"""What stands between the header and the text of a message."""
HARMONY_CALL = "<|channel|>commentary to=functions."
"""What precedes the name of a function in the header of a message that calls it."""


def find_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The format whose end a chat template mentions; ``None`` if it mentions none, or there is no template.

    It is ``HARMONY`` for a template that mentions the channel of its reasoning.
    """
    source = template or ""
    if HARMONY.begin in source:
        return HARMONY
    return next((form for form in REASONING_FORMATS.values() if form.end in source), None)


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


class HarmonyParser:
    """Separates the messages of an answer in the format of gpt-oss by their channels, while they arrive.

    A message is a header, ``<|message|>`` and a text up to one of ``HARMONY_ENDS``. Messages in the channel
    ``analysis`` are reasoning, and others are content. One to a function, ``to=functions.NAME``, becomes content in one
    form, whatever else its header says: ``HARMONY_CALL``, the name, ``<|message|>``, the arguments, ``<|call|>``. A
    blank line separates messages of a kind, but for calls. The first header begins behind ``<|start|>assistant``, which
    ends the prompt; if the prompt ``opened`` a message of ``analysis``, the answer begins within it. Text where a
    header should be is content. All is content unless the parser ``separates``. The texts joined depend on the answer
    alone, not on how it is cut into pieces.
    """

    MAX_HEADER = 256
    """Characters of a header, at most: longer text is none."""

    def __init__(self, opened: bool = False, separates: bool = True):
        self._held = ""
        self._reasoning: type[Content] | type[Reasoning] = Reasoning if separates else Content
        self._kind: type[Content] | type[Reasoning] | None = self._reasoning if opened else None  # None: in a header
        self._is_call = False
        self._begun: set[type] = set()  # kinds that have text
        self._needs_line = False

    def push(self, text: str) -> list[Content | Reasoning]:
        """What ``text`` adds. Text that later text may still assign is held back."""
        self._held += text
        return self._advance(last=False)

    def flush(self, was_cut: bool = False) -> list[Content | Reasoning]:
        """The rest, after the last text. ``was_cut``: the model would have written more, so a half mark is no text."""
        if was_cut and self._kind is not None:
            cut, mark = max((overlap(self._held, mark), mark) for mark in HARMONY_ENDS)
            if 2 * cut >= len(mark):
                self._held = self._held[: len(self._held) - cut]
        return self._advance(last=True)

    def _advance(self, last: bool) -> list[Content | Reasoning]:
        found: list[Content | Reasoning] = []
        while self._header(found, last) if self._kind is None else self._body(found, last):
            pass
        return found

    def _header(self, found: list[Content | Reasoning], last: bool) -> bool:
        """Take a header. False if more text is needed."""
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            header = header[: len(header) - overlap(header, MESSAGE)]
        if mark and self._may_be_header(header):
            recipient = re.search(r"to=functions\.([^\s<]+)", header)
            is_analysis = re.search(r"<\|channel\|>\s*analysis", header) and not recipient
            self._kind, self._is_call, self._held = self._reasoning if is_analysis else Content, bool(recipient), rest
            self._needs_line = self._kind in self._begun and not recipient
            if recipient:
                found.append(Content(f"{HARMONY_CALL}{recipient[1]}{MESSAGE}"))
            return True
        if mark or not self._may_be_header(header):
            text = self._held.lstrip()
            self._held = text.removeprefix("<|start|>") if text.startswith("<|start|>") else self._held
            self._kind, self._is_call, self._needs_line = Content, False, Content in self._begun
            return True
        if last:  # half a header is no text
            self._held = ""
        return False

    def _may_be_header(self, text: str) -> bool:
        """Whether a header begins like this."""
        text = text.lstrip()
        if len(text) > self.MAX_HEADER or "\n" in text:
            return False
        begins = ("<|start|>", "<|channel|>", "<|constrain|>", "to=")
        return any(text.startswith(begin) or begin.startswith(text) for begin in begins)

    def _body(self, found: list[Content | Reasoning], last: bool) -> bool:
        """Take the text of a message as far as it is there. False if more text is needed."""
        places = [(at, mark) for mark in HARMONY_ENDS if (at := self._held.find(mark)) >= 0]
        if not places:
            held = 0 if last else max(overlap(self._held, mark) for mark in HARMONY_ENDS)
            self._emit(found, self._held[: len(self._held) - held])
            self._held = self._held[len(self._held) - held :]
            return False
        at, mark = min(places)
        self._emit(found, self._held[:at])
        self._held = self._held[at if mark == "<|start|>" else at + len(mark) :]
        if self._is_call:
            found.append(Content("<|call|>"))
        self._kind, self._is_call = None, False
        return True

    def _emit(self, found: list[Content | Reasoning], text: str) -> None:
        if not text:
            return
        kind = self._kind
        assert kind is not None
        if not self._is_call:
            self._begun.add(kind)
        found.append(kind("\n\n" * self._needs_line + text))
        self._needs_line = False
