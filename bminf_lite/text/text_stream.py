"""The one path from tokens to text: a completion's text up to a stop string, with the log-probabilities of its tokens.

What a completion gives depends on its tokens alone, not on how many of them are pushed at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .detokenizer import Detokenizer
from .stop_strings import StopMatcher
from .token_bytes import TokenTexts, shared_bytes
from .tokenizer import Tokenizer

TokenScores = tuple[float, list[tuple[int, float]]]
"""A token's log-probability, and the most likely tokens at its place with theirs."""


class LikelyToken(NamedTuple):
    """One of the most likely tokens at a place. Its text tells it from the others (:meth:`.TokenTexts.label`)."""

    text: str
    logprob: float
    bytes: bytes


class ScoredToken(NamedTuple):
    """A token's text and log-probability, and the most likely tokens at its place, the likeliest first.

    The texts of all tokens of a completion, joined, are its text. A token that completes no character has no text, and
    the one that completes the character has all of it. The ``bytes`` are the token's own, so those of all tokens,
    joined, are the text too. If the token is one of the most likely, it has the same text there. ``is_end``: it is the
    end-of-sequence token that ended the completion, which has no text.
    """

    text: str
    logprob: float | None
    top: list[LikelyToken]
    bytes: bytes
    is_end: bool = False


class NewText(NamedTuple):
    """What tokens add to a completion: text, and the tokens whose text is decided.

    With a ``finish_reason`` the completion has ended: ``stop`` at a stop string, even if more tokens would follow.
    """

    text: str
    tokens: list[ScoredToken]
    finish_reason: str | None


class _Waiting:
    """A token whose text is not given out yet, because later ones may change it or complete a stop string."""

    __slots__ = ("id", "is_end", "logprob", "text", "top")

    def __init__(
        self, id: int, text: str, logprob: float | None, top: Sequence[tuple[int, float]], is_end: bool = False
    ):
        self.id = id
        self.text = text
        self.logprob = logprob
        self.top = top
        self.is_end = is_end

    def scored(self, texts: TokenTexts, text: str, data: bytes) -> ScoredToken:
        """The token as it is given out, with a text and bytes."""
        likely = [
            LikelyToken(text, value, data) if i == self.id else LikelyToken(texts.label(i), value, texts.label_bytes(i))
            for i, value in self.top
        ]
        return ScoredToken(text, self.logprob, likely, data, self.is_end and not text)


def _scored(texts: TokenTexts, tokens: Sequence[_Waiting], given: str) -> list[ScoredToken]:
    """Tokens of which the last one has the text of all, as they are given out with the beginning ``given`` of it."""
    parts = shared_bytes([texts.bytes(token.id) for token in tokens], tokens[-1].text, given)
    visible = [""] * (len(tokens) - 1) + [given]
    return [token.scored(texts, text, part) for token, text, part in zip(tokens, visible, parts, strict=True)]


class TextStream:
    """The text of one completion while its tokens arrive; it is empty without a tokenizer.

    - ``stop``: texts that end the completion and are not part of it. They may contain the spelling of special tokens.
    - ``before``: the tokens that the text continues (:meth:`.EncodedPrompt.before_text`); none before an answer.
    - ``texts``: given if log-probabilities are wanted.
    - ``keeps_stop``: the text includes what ended it, a stop string or the text of a token.
    - ``min_tokens``: a stop string that is complete with one of the first ``min_tokens`` tokens ends nothing.

    ``num_tokens`` have been pushed up to the end, the end-of-sequence token and those of a stop string included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
        texts: TokenTexts | None = None,
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ):
        self.num_tokens = 0
        self._min_tokens = min_tokens
        self._detokenizer = Detokenizer(tokenizer, before) if tokenizer else None
        self._matcher = StopMatcher(stop, keeps_stop)
        self._spellings = tokenizer.special_within(stop) if tokenizer and stop else {}
        self._keeps_stop = keeps_stop
        self._is_plain = not stop and texts is None
        self._texts = texts
        self._waiting: list[_Waiting] = []
        self._num_characters = 0  # given out, of the tokens that wait

    @property
    def found_stop(self) -> str | None:
        """The stop string that ended the completion."""
        return self._matcher.found

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None = None,
        logprobs: Sequence[float] | None = None,
        top_logprobs: Sequence[list[tuple[int, float]]] | None = None,
    ) -> NewText:
        """What the next tokens add. Tokens after a stop string are dropped.

        ``finish_reason`` is given with the last tokens, which may be none. ``stop`` says that the last one is an
        end-of-sequence token, which has no text, even if the vocabulary gives it one. Before the end, text is held back
        while it may be part of a character or of a stop string. ``logprobs`` and ``top_logprobs`` are as long as
        ``token_ids``.
        """
        if self._detokenizer is None:
            self.num_tokens += len(token_ids)
            return NewText("", [], finish_reason)
        if self._is_plain:
            return NewText(self._plain_text(self._detokenizer, token_ids, finish_reason), [], finish_reason)
        pieces: list[str] = []
        scored: list[ScoredToken] = []
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            is_last = position == last and finish_reason is not None
            is_end = is_last and finish_reason == "stop"
            text = "" if is_end and not self._keeps_stop else self._detokenizer.push(token_id)
            self.num_tokens += 1
            if self._texts is not None:
                logprob = logprobs[position] if logprobs else None
                top = top_logprobs[position] if top_logprobs else []
                self._waiting.append(_Waiting(token_id, text, logprob, top, is_end))
            pieces.append(self._decide(self._detokenizer, text, is_last, self._spellings.get(token_id, "")))
            self._give_tokens(self._detokenizer, is_last, scored)
            if self._matcher.stopped:
                return NewText("".join(pieces), scored, "stop")
        if finish_reason is not None and last < 0:
            pieces.append(self._decide(self._detokenizer, "", True))
            self._give_tokens(self._detokenizer, True, scored)
        return NewText("".join(pieces), scored, finish_reason)

    def _plain_text(self, detokenizer: Detokenizer, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """The text without stop strings: at the end that of all tokens that are left is decoded at once."""
        self.num_tokens += len(token_ids)
        if finish_reason is None:
            return "".join(map(detokenizer.push, token_ids))
        return detokenizer.flush(token_ids[:-1] if finish_reason == "stop" and not self._keeps_stop else token_ids)

    def _decide(self, detokenizer: Detokenizer, text: str, is_last: bool, spelling: str = "") -> str:
        """Take the text of the newest token, and return what can be given out now.

        ``spelling`` is that of a token without text if a stop string contains it.
        """
        if is_last and (rest := detokenizer.flush()):
            text += rest
            ended = [token for token in self._waiting if self._keeps_stop or not token.is_end]
            if ended:
                ended[-1].text += rest
        may_stop = self.num_tokens > self._min_tokens
        given, stopped = self._matcher.push(text, may_stop=may_stop)
        if spelling and not stopped:
            further, stopped = self._matcher.push(spelling, is_hidden=True, may_stop=may_stop)
            given += further
        if is_last and not stopped:
            given += self._matcher.flush()
        self._num_characters += len(given)
        return given

    def _give_tokens(self, detokenizer: Detokenizer, is_last: bool, scored: list[ScoredToken]) -> None:
        """Move the tokens whose text is given out to ``scored``. A stop string cuts or drops those that it is in.

        A token that completes no character goes with the one that does.
        """
        if self._texts is None:
            return
        waiting, stopped = self._waiting, self._matcher.stopped
        first = 0
        while first < len(waiting):
            last = next((i for i in range(first, len(waiting)) if waiting[i].text), len(waiting) - 1)
            given = waiting[last].text[: self._num_characters]
            if not given and (stopped or (detokenizer.is_undecided and not is_last)):
                break
            if len(given) < len(waiting[last].text) and not stopped:
                break
            scored += _scored(self._texts, waiting[first : last + 1], given)
            self._num_characters -= len(given)
            first = last + 1
        del waiting[: len(waiting) if stopped else first]


def score_prompt(
    tokenizer: Tokenizer, texts: TokenTexts, token_ids: Sequence[int], scores: Sequence[TokenScores | None]
) -> list[ScoredToken]:
    """The tokens of a prompt with their log-probabilities, and the most likely tokens at the place of each."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    pieces[-1] += detokenizer.flush()
    scored: list[ScoredToken] = []
    waiting: list[_Waiting] = []
    for token_id, text, score in zip(token_ids, pieces, scores, strict=True):
        waiting.append(_Waiting(token_id, text, *(score or (None, []))))
        if text:
            scored += _scored(texts, waiting, text)
            waiting = []
    return scored + (_scored(texts, waiting, "") if waiting else [])
