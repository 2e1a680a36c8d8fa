"""Filling the blanks of a text, the task that T5, CPM-2 and similar models are pretrained on.

Each blank is a sentinel token in the source. The decoder starts with the first sentinel and writes ``filling 0,
sentinel 1, filling 1, sentinel 2, ...``; the sentinel after the last blank ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from .prompts import EncodedPrompt
from .tokenizer import Tokenizer

NO_BLANKS = "this model fills no blanks: that takes an encoder-decoder whose vocabulary has sentinels"
SPAN = "<span>"
"""A blank in a text."""


@dataclass(frozen=True)
class FilledSpan:
    """The ``text`` for a blank. ``position`` is that of its ``<span>``, in characters from the start of the text."""

    position: int
    text: str


@dataclass(frozen=True)
class BlankedText:
    """A text with blanks as a ``prompt``; the ``positions`` of its blanks, and the ``sentinels`` between fillings."""

    prompt: EncodedPrompt
    positions: tuple[int, ...]
    sentinels: tuple[int, ...]

    def fillings(self, tokenizer: Tokenizer, tokens: Iterable[int], eos_ids: frozenset[int]) -> list[FilledSpan]:
        """The fillings in the decoder's ``tokens``, one for each blank."""
        pieces = _split(tokens, self.sentinels, eos_ids | self.prompt.stop_ids)
        return [FilledSpan(at, tokenizer.decode(piece)) for at, piece in zip(self.positions, pieces, strict=True)]


def encode_blanks(tokenizer: Tokenizer, text: str) -> BlankedText:
    """A text with ``<span>`` for each blank, for an encoder-decoder.

    Raises ``UsageError`` for a value that is not text, for a vocabulary without sentinels, and for a text without
    blanks or with more blanks than sentinels.
    """
    if not isinstance(text, str):
        raise UsageError(f"a text with blanks must be text, but is {type(text).__name__}")
    sentinels = tokenizer.sentinels
    if len(sentinels) < 2:
        raise UsageError(NO_BLANKS)
    parts = text.split(SPAN)
    count = len(parts) - 1
    if not 0 < count < len(sentinels):
        raise UsageError(f"the text has {count} {SPAN}; give 1 to {len(sentinels) - 1} of them")
    stop = frozenset([sentinels[count]])
    prompt = EncodedPrompt(tuple(tokenizer.encode_spans(parts)), False, (sentinels[0],), stop)
    positions = tuple(match.start() for match in re.finditer(SPAN, text))
    return BlankedText(prompt, positions, tuple(sentinels[1:count]))


def fill_spans(text: str, fillings: Sequence[FilledSpan]) -> str:
    """``text`` with ``fillings`` in place of its blanks."""
    parts = text.split(SPAN)
    return parts[0] + "".join(f.text + part for f, part in zip(fillings, parts[1:], strict=True))


def _split(tokens: Iterable[int], sentinels: Sequence[int], ends: frozenset[int]) -> list[list[int]]:
    """The tokens of each filling; empty for blanks that were not reached. Sentinels out of order do not separate."""
    pieces: list[list[int]] = [[] for _ in range(len(sentinels) + 1)]
    reached = 0
    for token in tokens:
        if token in ends:
            break
        if reached < len(sentinels) and token == sentinels[reached]:
            reached += 1
        else:
            pieces[reached].append(token)
    return pieces
