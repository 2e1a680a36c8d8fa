"""The outputs of generation: whole results, and pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .request import Request


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request: from its start to its first token, and from there to its last."""

    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    decode_seconds: float

    @property
    def total_seconds(self) -> float:
        """From the start of the request to its last token."""
        return self.prompt_seconds + self.decode_seconds

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens over the time to the first new token."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens after the first, over the time that they took."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 and self.new_tokens > 1 else 0.0


@dataclass(frozen=True)
class Result:
    """A finished request. Prints as its text.

    ``finish_reason`` is ``"stop"`` (an end-of-sequence token or a stop string) or ``"length"`` (``max_new_tokens`` or
    the model's context is used up). ``token_ids`` holds every generated token, including the end-of-sequence token;
    ``text`` ends before a stop string. ``logprobs`` has the log-probability of each token if the parameters say so,
    and ``top_logprobs`` for each token the most likely tokens at its place, as pairs of a token id and its
    log-probability, if the parameters ask for any.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    timings: Timings
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-serialisable values."""
        result: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "timings": {
                "prompt_seconds": self.timings.prompt_seconds,
                "decode_seconds": self.timings.decode_seconds,
                "prompt_tokens_per_second": self.timings.prompt_tokens_per_second,
                "decode_tokens_per_second": self.timings.decode_tokens_per_second,
            },
        }
        if self.logprobs is not None:
            result["logprobs"] = self.logprobs
        if self.top_logprobs is not None:
            result["top_logprobs"] = [[list(pair) for pair in pairs] for pairs in self.top_logprobs]
        return result


@dataclass(frozen=True)
class Piece:
    """A part of a stream: a new token of prompt ``index``, and the text that it completes.

    Text is held back while it may be part of a character or of a stop string, so a piece may have no text.
    The last piece of each prompt has a ``finish_reason`` and the whole ``result``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    result: Result | None = None


def make_piece(request: Request, text: str, whole_text: str) -> Piece:
    """The piece for the newest token of ``request`` and its ``text``; ``whole_text`` is all text so far."""
    token_ids = request.output_token_ids[-1:]
    if request.finish_reason is None:
        return Piece(request.index, text, token_ids)
    prompt_tokens, output = len(request.source_token_ids or request.prompt_token_ids), list(request.output_token_ids)
    prompt_seconds = request.first_token_time - request.start_time
    decode_seconds = request.last_token_time - request.first_token_time
    timings = Timings(prompt_tokens, len(output), prompt_seconds, decode_seconds)
    logprobs = list(request.logprobs) if request.params.logprobs is not None else None
    top_logprobs = list(request.top_logprobs) if request.params.logprobs else None
    result = Result(whole_text, output, request.finish_reason, prompt_tokens, timings, logprobs, top_logprobs)
    return Piece(request.index, text, token_ids, request.finish_reason, result)
