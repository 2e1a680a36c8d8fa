"""One completion while its tokens arrive: their text up to a stop string, and the log-probability of each.

What a completion gives depends on its tokens alone, not on how many of them an output joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from ..errors import BminfError, CheckpointError
from ..text.text_stream import Detokenizer, StopMatcher
from ..text.tokenizer import Tokenizer
from .client import Output
from .protocol import PromptScore

KNOWN_TEXTS = 65536


class CompletionFailed(BminfError):
    """The engine ended a completion with an error."""


class ScoredToken(NamedTuple):
    """A token's text and log-probability, and the most likely tokens at its place, the likeliest first.

    The texts of all tokens of a completion, joined, are its text. A token that completes no character has no text, and
    the one that completes the character has all of it. ``is_end``: it is the end-of-sequence token that ended the
    completion, which has no text.
    """

    text: str
    logprob: float | None
    top: list[tuple[str, float]]
    is_end: bool = False


class NewText(NamedTuple):
    """What an output adds to a completion. ``finish_reason`` is OpenAI's, ``stop`` or ``length``, at the end."""

    text: str
    tokens: list[ScoredToken]
    finish_reason: str | None


class TokenTexts:
    """The text of single tokens as they are within a text; for the tokens that were not chosen."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []
        with suppress(CheckpointError):  # a vocabulary without this letter
            self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._offset = len(tokenizer.decode(self._before))
        self.text = lru_cache(KNOWN_TEXTS)(self._text)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([*self._before, token_id])[self._offset :]


class _Waiting:
    """A token whose text is not given out yet, because later ones may change it or complete a stop string."""

    __slots__ = ("id", "is_end", "logprob", "text", "top")

    def __init__(self, id: int, text: str, logprob: float | None, top: list[tuple[int, float]], is_end: bool):
        self.id = id
        self.text = text
        self.logprob = logprob
        self.top = top
        self.is_end = is_end

    def scored(self, texts: TokenTexts) -> ScoredToken:
        """The token as it is given out."""
        top = [(self.text if token_id == self.id else texts.text(token_id), value) for token_id, value in self.top]
        return ScoredToken(self.text, self.logprob, top, self.is_end)


class CompletionText:
    """The text of one completion.

    ``stop`` are texts that end it. ``prompt`` holds the tokens that the text continues; it is empty for an answer.
    ``texts`` is given if log-probabilities are wanted. ``num_tokens`` were generated so far, the end-of-sequence token
    and those of a stop text included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        texts: TokenTexts | None = None,
    ):
        self.num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._matcher = StopMatcher(stop)
        self._texts = texts
        self._waiting: list[_Waiting] = []
        self._num_characters = 0  # given out, of the tokens that wait

    @property
    def found_stop(self) -> str | None:
        """The stop text that ended the completion."""
        return self._matcher.found

    def read(self, output: Output) -> NewText:
        """The text and the tokens that an output adds. Raises :class:`CompletionFailed` for an error of the engine.

        With a finish reason the completion has ended, even if the engine would continue it.
        """
        if output.finish_reason == "error":
            raise CompletionFailed(output.error or "the engine ended this completion with an error")
        pieces: list[str] = []
        scored: list[ScoredToken] = []
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            is_last = position == last and output.finish_reason is not None
            is_end = is_last and output.finish_reason == "stop"
            text = "" if is_end else self._detokenizer.push(token_id)
            self.num_tokens += 1
            if self._texts is not None:
                logprob = output.logprobs[position] if output.logprobs else None
                top = output.top_logprobs[position] if output.top_logprobs else []
                self._waiting.append(_Waiting(token_id, text, logprob, top, is_end))
            pieces.append(self._decide(text, is_last))
            self._give_tokens(is_last, scored)
            if self._matcher.stopped:
                return NewText("".join(pieces), scored, "stop")
        if output.finish_reason is not None and last < 0:
            pieces.append(self._decide("", True))
            self._give_tokens(True, scored)
        reason = output.finish_reason
        return NewText("".join(pieces), scored, reason if reason in (None, "stop") else "length")

    def _decide(self, text: str, is_last: bool) -> str:
        """Take the text of the newest token, and return what can be given out now."""
        if is_last and (rest := self._detokenizer.flush()):
            text += rest
            newest = next((token for token in reversed(self._waiting) if not token.is_end), None)
            if newest is not None:
                newest.text += rest
        given, stopped = self._matcher.push(text)
        if is_last and not stopped:
            given += self._matcher.flush()
        self._num_characters += len(given)
        return given

    def _give_tokens(self, is_last: bool, scored: list[ScoredToken]) -> None:
        """Move the tokens whose text is given out to ``scored``. A stop text cuts or drops those that it is in."""
        if self._texts is None:
            return
        waiting, ends = self._waiting, is_last or self._matcher.stopped
        decided = len(waiting)
        if self._detokenizer.is_undecided and not ends:
            while decided and not waiting[decided - 1].text:
                decided -= 1
        count = 0
        while count < decided and len(waiting[count].text) <= self._num_characters:
            self._num_characters -= len(waiting[count].text)
            scored.append(waiting[count].scored(self._texts))
            count += 1
        if ends and count < len(waiting) and self._num_characters:
            waiting[count].text = waiting[count].text[: self._num_characters]
            scored.append(waiting[count].scored(self._texts))
            count = len(waiting)
        del waiting[:count]


def score_prompt(
    tokenizer: Tokenizer, texts: TokenTexts, token_ids: Sequence[int], scores: Sequence[PromptScore | None]
) -> list[ScoredToken]:
    """The tokens of a prompt with their log-probabilities, and the most likely tokens at the place of each."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    pieces[-1] += detokenizer.flush()
    scored = []
    for token_id, text, score in zip(token_ids, pieces, scores, strict=True):
        logprob, likely = (None, []) if score is None else score
        top = [(text if likely_id == token_id else texts.text(likely_id), value) for likely_id, value in likely]
        scored.append(ScoredToken(text, logprob, top))
    return scored
