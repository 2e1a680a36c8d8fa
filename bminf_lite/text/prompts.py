"""Prompts as callers give them: text to continue, token ids, or a conversation to answer; one of them or a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError

Message = dict[str, Any]
"""A ``role``, as a rule a ``content``, and whatever else the chat template reads."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens, checked.

    ``continues`` says how the completion reads: as the continuation of the prompt's text, where a first word keeps the
    space before it, or, after a conversation and from an encoder-decoder, as a text of its own. ``target`` are tokens
    that the decoder of an encoder-decoder begins with, after those that it always begins with. ``stop_ids`` end the
    completion beside the end-of-text tokens.
    """

    token_ids: tuple[int, ...]
    continues: bool = True
    target: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()


Prompt = str | Sequence[int] | Sequence[Message] | EncodedPrompt


def is_batch(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of prompts and not one: a list of texts, of lists, of conversations, or empty."""
    if isinstance(prompt, str) or not _is_list(prompt):
        return False
    return len(prompt) == 0 or not isinstance(prompt[0], (int, np.integer, dict))


def is_conversation(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], dict)


def validate_token_ids(token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Token ids as Python integers; ``UsageError`` for what is no list of ids, or outside of the vocabulary."""
    if not _is_list(token_ids):
        raise UsageError(f"a prompt is text, token ids or messages, but this one is {type(token_ids).__name__}")
    for position, i in enumerate(token_ids):
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise UsageError(f"token {position} is {i!r}, but a token id is a whole number from 0 to {vocab_size - 1}")
    return tuple(map(int, token_ids))


def _is_list(value: Any) -> bool:
    """Whether ``value`` is a list of anything. Bytes are none: they are text that was not decoded, not token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))
