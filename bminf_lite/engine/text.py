"""From a request's tokens to the pieces that a caller sees, ending it where a stop string is complete."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import Detokenizer
from .generation import Request
from .result import Piece, Result, Timings
from .stop import StopMatcher
from .tokenizer import Tokenizer


class TextStream:
    """The text of one request as it grows; without a tokenizer it has none.

    ``context`` are the tokens that the text continues: the prompt's, or none for an answer.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request, context: Sequence[int] = ()):
        self.request = request
        self.detokenizer = Detokenizer(tokenizer, context) if tokenizer else None
        self.matcher = StopMatcher(request.params.stop)
        self.seen = 0
        self.text = ""

    def take(self) -> Piece:
        """The piece for the tokens that have come since the last call; may set the request's ``finish_reason``."""
        request = self.request
        new, self.seen = request.tokens[self.seen :], len(request.tokens)
        text = self._read(new)
        self.text += text
        return Piece(request.index, text, new, request.finish_reason, self._result(request.finish_reason))

    def _read(self, tokens: list[int]) -> str:
        """The text that ``tokens`` add, up to a stop string."""
        if self.detokenizer is None:
            return ""
        if self.request.ended_by_eos:
            tokens = tokens[:-1]  # the end-of-text token has no text, whatever the vocabulary says
        text = "".join(map(self.detokenizer.push, tokens))
        if self.request.finish_reason:
            text += self.detokenizer.flush()
        text, stopped = self.matcher.push(text)
        if stopped:
            self.request.finish_reason = "stop"
        elif self.request.finish_reason:
            text += self.matcher.flush()
        return text

    def _result(self, finish_reason: str | None) -> Result | None:
        if finish_reason is None:
            return None
        request = self.request
        timings = Timings(
            prompt_tokens=len(request.given),
            new_tokens=len(request.tokens),
            prompt_seconds=request.first_token - request.started,
            decode_seconds=request.last_token - request.first_token,
        )
        logprobs = list(request.logprobs) if request.params.logprobs else None
        return Result(self.text, list(request.tokens), finish_reason, len(request.given), timings, logprobs)
