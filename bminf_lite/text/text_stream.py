"""The text of a completion while its tokens arrive: tokens to text, up to a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from .tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PROMPT_TOKENS = 16
_UNFINISHED_TOKENS = 8


class Detokenizer:
    """Turns tokens into text, one at a time; the pieces joined are the text of all tokens decoded at once.

    Text is emitted when no later token can change it. Two things delay it: an unfinished UTF-8 character, and a run of
    byte tokens (``<0xE2>``), which a decoder turns into text or into U+FFFD as a whole. A token's text also depends
    on the tokens before it: a SentencePiece decoder drops the space before the first word. Therefore a new token is
    decoded together with the tokens of the last piece, and the text that it adds is new. Special tokens have no text.

    ``prompt`` holds the ids that the sequence continues: with them the first word keeps the space before it. Each token
    costs the decoding of a bounded window.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # A decoder looks back a few tokens at most, and a character has four bytes at most.
        self._emitted = list(islice(filter(self._has_text, reversed(prompt)), _PROMPT_TOKENS))[::-1]
        self._emitted_text = self._window_text(self._emitted)
        self._pending: list[int] = []
        self._try_at = 0

    def push(self, token_id: int) -> str:
        """The text that later tokens cannot change; often empty, never part of a character."""
        if not self._has_text(token_id):
            return ""
        self._pending.append(token_id)
        if len(self._pending) < self._try_at or self._is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._emitted + self._pending)
        if text.endswith("\ufffd") or len(text) <= len(self._emitted_text):
            # A run longer than a character's four bytes is rarely text, so it is decoded less and less often.
            n = len(self._pending)
            self._try_at = n + 1 + (n // 8 if n >= _UNFINISHED_TOKENS else 0)
            return ""
        return self._emit(text)

    @property
    def is_undecided(self) -> bool:
        """Whether text of tokens so far is held back."""
        return bool(self._pending)

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The rest of the text, with that of the last tokens, decoded at once. Unfinished characters are U+FFFD."""
        rest, self._pending = [*self._pending, *token_ids], []
        return self._tokenizer.decode(self._emitted + rest)[len(self._emitted_text) :] if rest else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._emitted, self._pending, self._try_at = self._pending, [], 0
        self._emitted_text = self._window_text(self._emitted)
        return new

    def _window_text(self, window: list[int]) -> str:
        """The text of a window alone; usually it is one token, whose text the tokenizer remembers."""
        return self._tokenizer.token_text(window[0]) if len(window) == 1 else self._tokenizer.decode(window)

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._tokenizer.special_ids and self._tokenizer.id_to_piece(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        if not self._tokenizer.byte_fallback:
            return False
        piece = self._tokenizer.id_to_piece(token_id)
        return piece is not None and _BYTE_PIECE.fullmatch(piece) is not None


class StopMatcher:
    """Cuts a stream of text before the first of ``stop_strings``.

    The first stop string to be complete counts, and of several that end at the same character the longest. The emitted
    text therefore depends on the text alone, however it is cut into pieces. Text that may be the start of a stop string
    is held back until the next characters decide.
    """

    def __init__(self, stop_strings: Sequence[str] = ()):
        self._stops = [(stop, _borders(stop)) for stop in stop_strings]
        self._matched = [0] * len(self._stops)  # of each stop string, how many characters the text ends with
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; ``found`` is that string."""
        return self.found is not None

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; returns the text to emit, and whether a stop string is complete. Drops text after that."""
        if not self._stops:
            return text, False
        if self.stopped:
            return "", True
        ends = []
        for i, (stop, borders) in enumerate(self._stops):
            self._matched[i], end = _advance(stop, borders, self._matched[i], text)
            if end:
                ends.append((end, -len(stop), stop))
        held = self._held + text
        if ends:
            end, _, self.found = min(ends)
            start, self._held = len(self._held) + end - len(self.found), ""
            return held[:start], True
        undecided = max(self._matched)
        self._held = held[len(held) - undecided :]
        return held[: len(held) - undecided], False

    def flush(self) -> str:
        """The text held back, after the last text; empty after a stop string."""
        text, self._held = self._held, ""
        return text


def _advance(stop: str, borders: Sequence[int], matched: int, text: str) -> tuple[int, int]:
    """How many characters of ``stop`` a text ends with if it ended with ``matched`` of them before ``text``.

    The second number is where in ``text`` the stop string is complete, 0 if it is not. This is the algorithm of Knuth,
    Morris and Pratt: each character is looked at about once, also if text and stop strings repeat themselves.
    """
    at = 0
    while at < len(text):
        if not matched:
            at = text.find(stop[0], at)
            if at < 0:
                return 0, 0
        while matched and stop[matched] != text[at]:
            matched = borders[matched - 1]
        matched += stop[matched] == text[at]
        at += 1
        if matched == len(stop):
            return matched, at
    return matched, 0


@lru_cache(1024)
def _borders(stop: str) -> list[int]:
    """Of each prefix of a text, the length of the longest shorter prefix that it ends with."""
    borders, border = [0], 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border - 1]
        border += stop[border] == character
        borders.append(border)
    return borders


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of ``text`` that is a prefix of ``stop``, but not all of it."""
    if stop[:1] not in text:
        return 0
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """Turns the tokens of one completion into text; the text is empty without a tokenizer.

    ``prompt`` holds the tokens that the text continues; it is empty for an answer. ``text`` is all text that
    :meth:`push` has returned.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self._matcher = StopMatcher(stop)

    def push(self, tokens: Sequence[int], last: bool) -> tuple[str, bool]:
        """The text that ``tokens`` add, and whether a stop string ends it.

        Text is held back while it may be part of a character or of a stop string, unless the tokens are the ``last``.
        """
        if self._detokenizer is None:
            return "", False
        text = self._detokenizer.flush(tokens) if last else "".join(map(self._detokenizer.push, tokens))
        text, stopped = self._matcher.push(text)
        if last and not stopped:
            text += self._matcher.flush()
        self.text += text
        return text, stopped
