"""What generation returns: whole results, and pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request: until its first token, and from there to its last."""

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

    ``finish_reason`` is ``"stop"`` (an end-of-text token or a stop string) or ``"length"`` (``max_new_tokens`` or the
    model's context is used up). ``token_ids`` holds every generated token, the end-of-text token included; ``text``
    ends before a stop string. ``logprobs`` has the log-probability of each token, if asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    timings: Timings
    logprobs: list[float] | None = None

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
        return result


@dataclass(frozen=True)
class Piece:
    """A part of a stream: new text of prompt ``index``, and the tokens it came from.

    Text is held back while it may be half a character or the start of a stop string, so a piece may have tokens and
    no text. The last piece of each prompt has a ``finish_reason`` and the whole ``result``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    result: Result | None = None
