"""Tokenizing long texts in bounded memory: about 115 bytes for each character are needed at a time.

A prompt that cannot fit its model is refused before all of it is tokenized. A document is tokenized in pieces, cut
where the tokens before and after the cut are those of the whole.
"""

from __future__ import annotations

import numpy as np

from ..errors import UsageError
from .tokenizer import Tokenizer

QUICK = 1 << 18
"""Characters that are tokenized in 0.2 s and 30 MB."""
USUAL_CHARACTERS = 4
"""Per token, in a text of a natural language."""
PIECE = 1 << 16
DOCUMENT_PIECE = 1 << 20
CUT_CONTEXT = 1_000
"""Characters on either side of a cut whose tokens are compared."""
MAX_TRIES = 16
"""Places for a cut that are tried."""
MAX_PIECE = 1 << 26
"""The longest text that is tokenized at once because it could not be cut: 8 GB of memory."""


def check_length(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Raise ``UsageError`` for a prompt that has far more than ``most`` tokens, or is no text.

    A text with few characters for ``most`` tokens is not tokenized here. A longer one is tokenized in pieces, until it
    has more tokens than can fit. Where pieces meet, some tokens may be counted twice, so what is close to the limit
    passes.
    """
    if not isinstance(text, str) or len(text) <= max(QUICK, USUAL_CHARACTERS * most):
        return
    count, allowed = 0, most + most // 4 + 1_000
    for end in range(PIECE, len(text) + PIECE, PIECE):
        count += len(tokenizer.encode(text[end - PIECE : end], add_special_tokens=False))
        if count > allowed:
            read = min(end, len(text))
            problem = f"the first {read:,} of its {len(text):,} characters have more than {allowed:,} tokens"
            raise UsageError(f"the prompt is too long: {problem}, and {most:,} are the most; shorten it")


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The tokens of a text of any length, int32, framed by the tokenizer's special tokens as a prompt is.

    Raises ``UsageError`` for a text of more than :data:`MAX_PIECE` characters that cannot be cut.
    """
    if len(text) <= 2 * DOCUMENT_PIECE:
        return np.array(tokenizer.encode(text), np.int32)
    frame = special_frame(tokenizer, text[:CUT_CONTEXT])
    parts, start = [], 0
    while frame is not None and len(text) - start > 2 * DOCUMENT_PIECE:
        cut = _cut(tokenizer, text, start + DOCUMENT_PIECE)
        if cut is None:
            break
        parts.append(np.array(tokenizer.encode(text[start:cut], add_special_tokens=False), np.int32))
        start = cut
    if len(text) - start > MAX_PIECE:
        problem = (
            f"a text of {len(text) - start:,} characters that cannot be cut at a line, and {MAX_PIECE:,} can be read"
        )
        raise UsageError(f"this tokenizer needs too much memory for {problem}; give a shorter text")
    if not parts or frame is None:
        return np.array(tokenizer.encode(text), np.int32)
    rest = np.array(tokenizer.encode(text[start:], add_special_tokens=False), np.int32)
    return np.concatenate([frame[0], *parts, rest, frame[1]])


def special_frame(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The special tokens that a tokenizer puts before and after ``text``, int32.

    None if they are not all that framing changes.
    """
    plain, framed = (tokenizer.encode(text, add_special_tokens=special) for special in (False, True))
    for first in range(len(framed) - len(plain) + 1):
        end = first + len(plain)
        if framed[first:end] == plain:
            return np.array(framed[:first], np.int32), np.array(framed[end:], np.int32)
    return None


def _cut(tokenizer: Tokenizer, text: str, near: int) -> int | None:
    """A place at or behind ``near`` where the text can be cut: at the start of a line, or of the break before it."""

    def tokens(start: int, end: int) -> list[int]:
        return tokenizer.encode(text[start:end], add_special_tokens=False)

    place = near
    for _ in range(MAX_TRIES):
        newline = text.find("\n", place, near + DOCUMENT_PIECE)
        if newline < 0:
            return None
        for cut in (newline, newline + 1):
            first, last = cut - CUT_CONTEXT, cut + CUT_CONTEXT
            if tokens(first, cut) + tokens(cut, last) == tokens(first, last):
                return cut
        place = newline + 1
    return None
