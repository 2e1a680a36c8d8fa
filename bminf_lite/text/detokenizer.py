"""Tokens to text, one at a time: a piece of text never changes once it has been given out."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
