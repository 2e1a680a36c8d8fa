"""Filling blanks: a text with parts missing in, what belongs there out.

T5, CPM-2 and their kin were trained on it. Each missing part is a sentinel token in the source, and the decoder writes
``sentinel 0, what belongs there, sentinel 1, ...``. It is started with the first sentinel, and ends at the one that
would begin a part more than there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .prompts import EncodedPrompt

if TYPE_CHECKING:
    from .model import Model

SPAN = "<span>"
"""What stands for a missing part in a text."""


@dataclass(frozen=True)
class Filling:
    """What belongs in a blank. ``position`` is that of its ``<span>``, in characters from the start of the text."""

    position: int
    text: str


def fill_blanks(model: Model, text: str, **options: Any) -> list[Filling]:
    """See :meth:`.Model.fill_blank`."""
    if not isinstance(text, str):
        raise UsageError(f"a text with blanks must be text, but is {type(text).__name__}")
    if options.get("stop"):
        raise UsageError("stop texts do not apply to blanks, which end where the next one begins")
    tokenizer = model.tokenizer
    sentinels = tokenizer.sentinels
    if not model.limits.source_length or len(sentinels) < 2:
        raise UsageError("this model fills no blanks: that takes an encoder-decoder whose vocabulary has sentinels")
    parts = text.split(SPAN)
    count = len(parts) - 1
    if not 0 < count < len(sentinels):
        raise UsageError(f"the text has {count} {SPAN}; give 1 to {len(sentinels) - 1} of them")
    stop = frozenset([sentinels[count]])
    prompt = EncodedPrompt(tuple(tokenizer.encode_spans(parts)), False, (sentinels[0],), stop)
    tokens = model.generate(prompt, **options).token_ids
    pieces = _split(tokens, sentinels[1:count], model.eos_ids | stop)
    positions = _positions(parts)
    return [Filling(position, tokenizer.decode(piece)) for position, piece in zip(positions, pieces, strict=True)]


def filled(text: str, fillings: Sequence[Filling]) -> str:
    """``text`` with its blanks filled."""
    parts = text.split(SPAN)
    return parts[0] + "".join(f.text + part for f, part in zip(fillings, parts[1:], strict=True))


def _split(tokens: Iterable[int], sentinels: Sequence[int], ends: frozenset[int]) -> list[list[int]]:
    """The tokens of each part; empty for parts that were not reached. Sentinels out of their turn are passed over."""
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


def _positions(parts: Sequence[str]) -> list[int]:
    positions = [len(parts[0])]
    for part in parts[1:-1]:
        positions.append(positions[-1] + len(SPAN) + len(part))
    return positions
