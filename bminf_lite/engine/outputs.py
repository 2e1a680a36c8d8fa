"""The outputs of generation: whole results, and pieces of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from .request import Request


@dataclass(frozen=True)
class Timings:
    """The tokens of one request and its wall-clock times, in seconds.

    ``queue_seconds`` is the time before the request started, ``prompt_seconds`` that from its start to its first token,
    and ``decode_seconds`` that from the first token to the last.
    """

    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    decode_seconds: float
    queue_seconds: float = 0.0

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

    ``finish_reason`` is ``"stop"`` (an end-of-sequence token or a stop string), ``"length"`` (it has ``max_new_tokens``
    tokens), ``"context"`` (the model's context is full before that), or ``"deadline"``. ``token_ids`` holds every
    generated token, including the end-of-sequence token; ``text`` ends before a stop string.

    ``logprobs`` has the log-probability of each token if the parameters say so, and ``top_logprobs`` for each token the
    most likely tokens at its place, as pairs of a token id and its log-probability, if the parameters ask for any.
    ``prompt_logprobs`` has None for the first token of the prompt and then each token's log-probability, if the call
    asks for them. ``cached_tokens`` of the prompt came from the cache of earlier requests. In ``drafts`` checks
    ``accepted_tokens`` of ``draft_tokens`` were accepted; a check also brings the token behind them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    timings: Timings
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[float | None] | None = None
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-serialisable values."""
        result: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "timings": {
                "queue_seconds": self.timings.queue_seconds,
                "prompt_seconds": self.timings.prompt_seconds,
                "decode_seconds": self.timings.decode_seconds,
                "prompt_tokens_per_second": self.timings.prompt_tokens_per_second,
                "decode_tokens_per_second": self.timings.decode_tokens_per_second,
            },
        }
        if self.drafts:
            names = ("drafts", "draft_tokens", "accepted_tokens")
            result["speculative"] = {name: getattr(self, name) for name in names}
        if self.logprobs is not None:
            result["logprobs"] = self.logprobs
        if self.top_logprobs is not None:
            result["top_logprobs"] = [[list(pair) for pair in pairs] for pairs in self.top_logprobs]
        if self.prompt_logprobs is not None:
            result["prompt_logprobs"] = self.prompt_logprobs
        return result


@dataclass(frozen=True)
class Piece:
    """A part of a stream: a new token of prompt ``index``, and the text that it completes.

    Text is held back while it may be part of a character or of a stop string, so a piece may have no text. The last
    piece of each prompt has a ``finish_reason`` and the whole ``result``; at a deadline it has no token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    result: Result | None = None


class Update(NamedTuple):
    """A request at one moment: its generated tokens, whether it has ended, and when its newest token came."""

    request: Request
    num_tokens: int
    finish_reason: str | None
    time: float

    @classmethod
    def of(cls, request: Request) -> Update:
        """The state now."""
        return cls(request, len(request.output_tokens), request.finish_reason, request.last_token_time)


def make_result(update: Update, text: str) -> Result:
    """The result of a request that ends with ``update``, with its whole ``text``."""
    request, count = update.request, update.num_tokens
    assert update.finish_reason is not None
    prompt_tokens = len(request.source_token_ids or request.prompt_token_ids)
    started = request.start_time or time.perf_counter()
    first_token, last_token = request.first_token_time or started, update.time or started
    timings = Timings(
        prompt_tokens, count, first_token - started, last_token - first_token, started - request.arrival_time
    )
    return Result(
        text,
        request.output_tokens[:count].tolist(),
        update.finish_reason,
        prompt_tokens,
        timings,
        request.logprobs[:count].tolist() if request.params.logprobs is not None else None,
        request.top_logprobs[:count] if request.params.logprobs else None,
        request.num_cached_tokens,
        list(request.prompt_token_logprobs) if request.prompt_logprobs else None,
        request.num_drafts,
        request.num_draft_tokens,
        request.num_accepted_tokens,
    )
