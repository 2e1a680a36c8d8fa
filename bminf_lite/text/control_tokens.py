"""Text of others that must not become control tokens: ``split_special_tokens`` of transformers, for conversations too.

A tokenizer makes the token ``<|im_end|>`` of these characters wherever they stand, in a user's message too. Who writes
a message could so end it, and begin one of the system. Here such texts are broken up behind their first character by a
mark that nothing else has. The text is then tokenized in the parts between the marks, none of which has a control
token's text of its own. A chat template may be applied in between: what it writes itself keeps its control tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .chat_template import Message
from .tokenizer import Tokenizer

UNTRUSTED_ROLES = ("user", "tool")
"""The roles of messages whose texts come from others than the one who asks for an answer."""


class GuardedText(str):
    """A text in which control tokens' texts that are no control tokens are broken up by ``mark``."""

    __slots__ = ("mark",)

    mark: str

    @classmethod
    def of(cls, text: str, mark: str) -> GuardedText:
        """The text with its mark."""
        found = cls(text)
        found.mark = mark
        return found


class ControlTokens:
    """The control tokens of a vocabulary: all added tokens of two characters or more that are not white space.

    Special tokens are among them, and marks such as ``<tool_call>``, which some vocabularies do not call special.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._texts = frozenset(text for text in tokenizer.added_texts if len(text) > 1 and not text.isspace())
        self._lengths = sorted({len(text) for text in self._texts})
        self._beginnings = frozenset(text[:2] for text in self._texts)
        characters = "".join(map(re.escape, sorted({text[0] for text in self._texts})))
        self._first = re.compile(f"[{characters}]" if characters else "(?!)")

    def guard(self, text: str, mark: str | None = None) -> GuardedText:
        """A text without control tokens. ``mark`` is a new one by default."""
        mark = mark or new_mark()
        parts, start = [], 0
        for match in self._first.finditer(text):
            at = match.start()
            if text[at : at + 2] in self._beginnings and any(text[at : at + n] in self._texts for n in self._lengths):
                parts.append(text[start : at + 1])
                start = at + 1
        return GuardedText.of(mark.join([*parts, text[start:]]), mark)

    def guard_messages(self, messages: Sequence[Message], mark: str) -> list[Message]:
        """A conversation without control tokens in what users and tools say."""
        return [
            {**message, "content": self.guard_values(message.get("content"), mark)}
            if message["role"] in UNTRUSTED_ROLES
            else message
            for message in messages
        ]

    def guard_values(self, value: Any, mark: str) -> Any:
        """All texts in a JSON value without control tokens; the keys of objects stay as they are."""
        if isinstance(value, str):
            return str(self.guard(value, mark))
        if isinstance(value, Mapping):
            return {key: self.guard_values(item, mark) for key, item in value.items()}
        return [self.guard_values(item, mark) for item in value] if isinstance(value, (list, tuple)) else value

    def encode(self, text: GuardedText, add_special_tokens: bool) -> list[int]:
        """The tokens of a text. Raises as :meth:`.Tokenizer.encode` does."""
        first, *others = text.split(text.mark)
        if not others:
            return self._tokenizer.encode(str(text), add_special_tokens)
        known: dict[tuple[str, str], list[int]] = {}
        tokens, before = self._encode(first), first[-1]
        for part in others:
            if (before, part) not in known:
                known[before, part] = self._encode_behind(before, part)
            tokens += known[before, part]
            before = part[-1:] or before
        if not add_special_tokens:
            return tokens
        prefix, suffix = self._frame()
        return [*prefix, *tokens, *suffix]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_behind(self, before: str, text: str) -> list[int]:
        """The tokens of a text behind a character: some tokenizers begin each text with a space.

        If the character and the text share a token, the text is encoded behind a letter, or else alone.
        """
        for character in (before, "a"):
            alone, both = self._encode(character), self._encode(character + text)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self._encode(text)

    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before and behind a text."""
        alone, framed = self._encode("a"), self._tokenizer.encode("a", add_special_tokens=True)
        start = next(i for i in range(len(framed) - len(alone) + 1) if framed[i : i + len(alone)] == alone)
        return framed[:start], framed[start + len(alone) :]


def new_mark() -> str:
    """A text that nothing else has."""
    return f"cut{secrets.token_hex(16)}"
