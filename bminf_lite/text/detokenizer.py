"""Token ids to text, one at a time. The pieces joined are the text of all ids decoded at once.

Text is emitted when no later token can change it. Two things delay it: an unfinished UTF-8 character, and a run of byte
tokens (``<0xE2>``), which a decoder turns into text or into U+FFFD as a whole. The text of a token also depends on the
tokens before it: a SentencePiece decoder drops the space before the first word. Therefore a new token is decoded
together with the tokens of the last piece, and what it adds to their text is new.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from .tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PROMPT_TOKENS = 16
_UNFINISHED_TOKENS = 8


class Detokenizer:
    """The text of a sequence of tokens as it grows; special tokens have none.

    ``prompt`` holds the ids that the sequence continues: with them the first word keeps the space before it. Each token
    costs the decoding of a bounded window.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # A decoder looks back a few tokens at most, and a character has four bytes at most.
        self._emitted = list(islice(filter(self._has_text, reversed(prompt)), _PROMPT_TOKENS))[::-1]
        self._emitted_text = tokenizer.decode(self._emitted)
        self._pending: list[int] = []
        self._try_at = 0

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes certain; often empty, never part of a character."""
        if not self._has_text(token_id):
            return ""
        self._pending.append(token_id)
        if len(self._pending) < self._try_at or self._is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._emitted + self._pending)
        if text.endswith("\ufffd") or len(text) <= len(self._emitted_text):
            # A longer run than a character's four bytes is not text: decode it again only now and then.
            n = len(self._pending)
            self._try_at = n + 1 + (n // 8 if n >= _UNFINISHED_TOKENS else 0)
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The rest of the text after the last token. Unfinished characters are U+FFFD."""
        return self._emit(self._tokenizer.decode(self._emitted + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._emitted, self._pending, self._try_at = self._pending, [], 0
        self._emitted_text = self._tokenizer.decode(self._emitted)
        return new

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._tokenizer.special_ids and self._tokenizer.id_to_piece(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        piece = self._tokenizer.id_to_piece(token_id)
        return self._tokenizer.byte_fallback and piece is not None and _BYTE_PIECE.fullmatch(piece) is not None
