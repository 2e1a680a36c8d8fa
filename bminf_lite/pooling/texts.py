"""Texts in tokens, for a model that reads whole texts: prompts before them, their length, and what is cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from ..engine.pooling import PoolingText
from ..errors import UsageError, is_whole, listed
from ..text.prompts import validate_lists, validate_token_ids
from ..text.tokenizer import Tokenizer, WholeText, require_text
from .settings import PoolingSettings

Text = str | Sequence[int] | np.ndarray
"""A text, or its tokens."""


QUERY_PROMPTS, TEXT_PROMPTS = ("query",), ("document", "passage", "corpus")
"""The names of the prompts of queries, and of the texts that are ranked for them."""


@dataclass(frozen=True)
class TextEncoder:
    """Makes tokens of texts. ``tokenizer`` is called for the first text, and may raise ``CheckpointError``.

    A model reads ``longest`` tokens of a text at most, with those of its frame.
    """

    tokenizer: Callable[[], Tokenizer]
    settings: PoolingSettings
    vocab_size: int
    longest: int

    @property
    def max_length(self) -> int:
        """Tokens of a text; what is more is cut off."""
        return min(self.longest, self.settings.max_length or self.longest)

    def prompt_text(self, prompt_name: str | None, prompt: str | None) -> str:
        """The text before each text: ``prompt``, else that of the settings named ``prompt_name``, or the default's."""
        settings = self.settings
        if prompt is not None:
            if prompt_name is not None:
                raise UsageError("give a prompt, or the name of one (prompt_name), not both")
            require_text(prompt)
            return prompt
        if prompt_name is not None:
            require_text(prompt_name, "prompt_name")
        name = prompt_name if prompt_name is not None else settings.default_prompt
        if name is None:
            return ""
        if prompt_name is not None and name not in settings.prompts:
            known = ", ".join(map(repr, settings.prompts)) or "none"
            raise UsageError(f"prompt_name is {prompt_name!r}, but the model's prompts are: {known}")
        return settings.prompts.get(name, "")

    def encode(self, texts: Sequence[Text], prompt: str = "", truncate: bool = True) -> list[PoolingText]:
        """The tokens of texts, each with ``prompt`` before it. Tokens are taken as they are.

        Raises ``UsageError`` that lists the texts that are none, and without ``truncate`` those that are too long.
        """
        if (lists := self._lists(texts, truncate)) is not None:
            return lists
        skipped = self._prompt_tokens(prompt) if prompt and not self.settings.include_prompt else 0
        lowered = {i: self._lowered(prompt + text) for i, text in enumerate(texts) if is_utf8(text)}
        whole = dict(zip(lowered, self._whole([(text,) for text in lowered.values()]), strict=True))

        def one(i: int) -> PoolingText:
            if i in whole:
                return self._checked(whole[i], truncate, skipped)
            if isinstance(texts[i], str):
                require_text(texts[i], "text")  # which raises
            return self._checked(self._of_tokens(texts[i]), truncate)

        return _of_each(len(texts), one)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], truncate: bool = True) -> list[PoolingText]:
        """The tokens of pairs of texts, which the model reads together. Raises ``UsageError`` as :meth:`encode`."""
        whole = self._whole([(self._lowered(first), self._lowered(second)) for first, second in pairs])
        return _of_each(len(pairs), lambda i: self._checked(whole[i], truncate))

    def encode_with_places(self, texts: Sequence[str], truncate: bool = True) -> list[tuple[PoolingText, WholeText]]:
        """The tokens of texts as :meth:`encode` gives them, and beside them their places in the texts."""
        whole = self._whole([(self._lowered(text),) for text in texts])
        return list(zip(_of_each(len(whole), lambda i: self._checked(whole[i], truncate)), whole, strict=True))

    def _lists(self, texts: Sequence[Text], truncate: bool) -> list[PoolingText] | None:
        """Texts that are all lists of token ids; None if they must be looked at one by one."""
        lists = validate_lists(texts, self.vocab_size)
        if lists is None:
            return None
        most, counts = self.max_length, [len(ids) for ids in lists]
        if min(counts) == 0 or (not truncate and max(counts) > most):
            return None
        return [PoolingText(ids[:most]) for ids in lists]

    def _whole(self, texts: Sequence[tuple[str, ...]]) -> list[WholeText]:
        return self.tokenizer().encode_whole(texts, self.max_length) if texts else []

    def _lowered(self, text: str) -> str:
        require_text(text, "text")
        return text.lower() if self.settings.lower_case else text

    def _prompt_tokens(self, prompt: str) -> int:
        """The tokens before those of a text: the prompt's, and the frame before it."""
        ids = self.tokenizer().encode_whole([(self._lowered(prompt),)], self.longest)[0].token_ids
        return len(ids) - (1 if ids and ids[-1] in self.tokenizer().special_ids else 0)

    def _of_tokens(self, text: Any) -> WholeText:
        ids = validate_token_ids(text, self.vocab_size)
        if not ids:
            raise UsageError("it has no token")
        return WholeText(ids[: self.max_length], num_cut=max(len(ids) - self.max_length, 0))

    def _checked(self, text: WholeText, truncate: bool, skipped: int = 0) -> PoolingText:
        if text.num_cut and not truncate:
            count = len(text.token_ids) + text.num_cut
            raise UsageError(
                f"it has {count:,} tokens, but the model reads {self.max_length:,} of a text: shorten it, or let it be "
                "cut off (truncate)"
            )
        ids = np.array(text.token_ids, np.int32)
        largest = int(ids.max(initial=-1))
        if largest < 0:
            raise UsageError("it has no token")
        if largest >= self.vocab_size:
            raise UsageError(f"it has the token {largest}, but the model's largest is {self.vocab_size - 1}")
        return PoolingText(ids, text.token_types, skipped)


def _of_each(count: int, work: Callable[[int], PoolingText]) -> list[PoolingText]:
    """What ``work`` gives for each of ``count`` texts. The ``UsageError`` lists the problems of all."""
    found, problems = [], []
    for i in range(count):
        try:
            found.append(work(i))
        except UsageError as error:  # noqa: PERF203, the other texts' problems are wanted too
            problems.append(f"text {i}: {error}")
    if problems:
        raise UsageError(problems[0] if len(problems) == 1 else listed(f"{count} texts", problems))
    return found


def first_prompt(prompts: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The first of ``names`` whose prompt has a text."""
    return next((name for name in names if prompts.get(name)), None)


def is_utf8(value: object) -> TypeGuard[str]:
    """Whether a value is a text that can be written as UTF-8."""
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def is_text(value: object) -> bool:
    """Whether a value is one text, or the tokens of one, and no list of texts."""
    if isinstance(value, str):
        return True
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, Sequence) and len(value) > 0 and is_whole(value[0])
