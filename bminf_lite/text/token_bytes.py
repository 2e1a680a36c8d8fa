"""The bytes and texts of single tokens, for log-probabilities: tokens that end within a character are told apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from ..errors import CheckpointError
from .tokenizer import Tokenizer

KNOWN_TOKENS = 65536
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_bytes() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for 256 and on in order.

    See ``bytes_to_unicode`` in https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_bytes()


class TokenTexts:
    """What single tokens are within a text, as it is asked for again and again; for tokens that were not chosen too."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []
        with suppress(CheckpointError):  # a vocabulary without this letter
            self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._offset = len(tokenizer.decode(self._before))
        self.text = lru_cache(KNOWN_TOKENS)(self._text)
        self.bytes = lru_cache(KNOWN_TOKENS)(self._bytes)
        self.label = lru_cache(KNOWN_TOKENS)(self._label)

    def _text(self, token_id: int) -> str:
        """The text, with U+FFFD for bytes that are no character; empty for a special token."""
        return self._tokenizer.decode([*self._before, token_id])[self._offset :]

    def _bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, which may be a part of a character; none for a special token."""
        text, spelled = self._text(token_id), self._spelled_bytes(token_id)
        if spelled is not None and spelled.decode(errors="replace") == text:
            return spelled
        return text.encode(errors="replace")

    def _spelled_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the vocabulary's spelling stands for; None if it does not spell bytes."""
        piece = self._tokenizer.id_to_piece(token_id)
        if piece is None:
            return None
        if self._tokenizer.byte_level and all(character in _BYTE_LEVEL for character in piece):
            return bytes(_BYTE_LEVEL[character] for character in piece)
        match = _BYTE_PIECE.fullmatch(piece) if self._tokenizer.byte_fallback else None
        return None if match is None else bytes([int(match[1], 16)])

    def _label(self, token_id: int) -> str:
        """A text that tells the token from others: its own text where it has one.

        A token that begins or ends within a character is ``bytes:\\xe2\\x80``, as OpenAI wrote it. A special token is
        spelled as in the vocabulary, and an id outside of it is ``token_id:123``, as in vLLM.
        """
        text, data = self._text(token_id), self._bytes(token_id)
        if text.encode(errors="replace") != data:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text or self._tokenizer.id_to_piece(token_id) or f"token_id:{token_id}"

    def label_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that was not chosen: those of its label if it has no text."""
        return self.bytes(token_id) or self.label(token_id).encode()


def shared_bytes(tokens: Sequence[bytes], text: str, given: str) -> list[bytes]:
    """What each of some tokens adds to a text, of which they make ``text``, and its beginning ``given`` is given out.

    ``tokens`` are their bytes. A first space may not be in the text, and bytes that are no characters are U+FFFD there.
    """
    whole, encoded = b"".join(tokens), text.encode(errors="replace")
    if given == text and whole.decode(errors="replace") == text:
        return list(tokens)
    if not whole.endswith(encoded):  # the last token has the text, which is not made of the tokens' bytes
        return [b""] * (len(tokens) - 1) + [given.encode(errors="replace")]
    first = len(whole) - len(encoded)
    end, at = first + len(given.encode(errors="replace")), 0
    found = []
    for token in tokens:
        found.append(token[max(first - at, 0) : max(end - at, 0)])
        at += len(token)
    return found
