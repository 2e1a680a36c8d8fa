"""Parts of grammars in Lark's notation, as llguidance reads it: marks, text up to a mark, an answer after reasoning.

A mark may be one token of the vocabulary. llguidance keeps such tokens, if they are special or look like ``<this>``,
apart from text: only a token id in the grammar stands for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .reasoning import ReasoningFormat

TokenId = Callable[[str], "int | None"]
"""The id of a text that is one token; ``None`` for others."""


def no_token(text: str) -> int | None:
    """None for every text: for a grammar without token ids."""
    return None


def mark_rule(mark: str, token_id: TokenId) -> str:
    """A mark as a part of a rule: its token id, or its text in quotes. Nothing for an empty mark.

    A mark may have several tokens of the form ``<|this|>``, and text between them.
    """
    found = token_id(mark) if mark else None
    if found is not None:
        return f"<[{found}]>"
    parts = [part for part in re.split(r"(<\|\w+\|>)", mark) if part]
    tokens = [token_id(part) if part.startswith("<|") and part != mark else None for part in parts]
    if not any(token is not None for token in tokens):
        return json.dumps(mark) if mark else ""
    return " ".join(
        json.dumps(part) if token is None else f"<[{token}]>" for part, token in zip(parts, tokens, strict=True)
    )


def rule_until(name: str, mark: str, token_id: TokenId) -> str:
    """A rule for any text up to the first ``mark``, which is part of it. Needs the terminal ``TEXT``."""
    pattern = re.escape(mark).replace("/", r"\/")
    rule = f"{name}: {name}_text\n{name}_text[lazy]: /(.|\\n)*{pattern}/"
    found = token_id(mark)
    return rule if found is None else f"{name}: {name}_text | TEXT <[{found}]>\n{rule.partition(chr(10))[2]}"


def after_reasoning(rules: str, form: ReasoningFormat | None, is_open: bool, token_id: TokenId) -> str:
    """A grammar of which the rule ``answer`` describes the answer, and ``form`` the reasoning that may precede it.

    If the prompt ends inside the reasoning (``is_open``), the rest of the reasoning must precede the answer. ``rules``
    define ``answer``, and may use ``TEXT``.
    """
    text = "TEXT: /(.|\\n)*/"
    if form is None:
        return f"start: answer\n{text}\n{rules}"
    begin = "" if is_open else mark_rule(form.begin, token_id)
    start = "start: reasoning answer" if is_open else "start: reasoning? answer"
    gap = mark_rule(form.next, token_id) or "/\\n{0,2}/"
    reasoning = f"reasoning: {begin} until_end {gap}\n{rule_until('until_end', form.end, token_id)}"
    return f"{start}\n{reasoning}\n{text}\n{rules}"
