"""What OpenAI's interfaces have in common: usage, events of a stream, and log-probabilities as JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ...text.text_stream import ScoredToken
from ..client import Generation, Output
from ..errors import ApiError
from ..event_stream import EventStream
from ..generating import told
from ..schemas.sampling import StreamOptions

_DONE = b"data: [DONE]\n\n"

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have, as in vLLM."""


@dataclass(frozen=True)
class TokenUsage:
    """Counts of tokens: ``cached`` of the prompt's came from the cache, ``reasoning`` of the generated are thoughts."""

    prompt: int
    generated: int
    cached: int = 0
    reasoning: int = 0

    def openai(self) -> dict[str, Any]:
        """As completions report them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def responses(self) -> dict[str, Any]:
        """As ``/v1/responses`` reports them."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.generated,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.generated,
        }


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What all chunks of a response begin with; ``kind`` is the type of its object."""
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "object": kind, "created": int(time.time()), "model": model}


def reports_usage(options: StreamOptions | None) -> bool:
    """Whether a stream ends with a chunk that has the usage."""
    return options is not None and bool(options.include_usage)


def chunk_end(options: StreamOptions | None, usage: Callable[[], dict[str, Any]]) -> Callable[[], bytes]:
    """What follows the choices of a chunk: its usage, if the request asks for that, and the end of the event.

    ``usage`` returns the tokens so far.
    """
    if not reports_usage(options):
        return lambda: b"}\n\n"
    if options is None or not options.continuous_usage_stats:
        return lambda: b',"usage":null}\n\n'
    return lambda: b',"usage":' + msgspec.json.encode(usage()) + b"}\n\n"


async def write_chunks(
    stream: EventStream, generation: Generation, chunk: Callable[[Output], bytes], last: Callable[[], dict[str, Any]]
) -> bytes:
    """Write a stream: ``chunk`` of each output. What has arrived meanwhile is written at once.

    Returns the end of the stream: the chunks of the last outputs, the chunk ``last``, if it is not empty, and
    ``[DONE]``; or the chunks that were made before an error, and the error as an event.
    """
    chunks = b""
    try:
        async for output in generation:
            chunks += chunk(output)
            while (more := generation.take()) is not None:
                chunks += chunk(more)
            if chunks and not generation.has_ended:
                ready, chunks = chunks, b""
                await stream.write(ready)
        end = last()
        return chunks + (b"data: " + msgspec.json.encode(end) + b"\n\n" if end else b"") + _DONE
    except Exception as error:
        return chunks + _error_event(told(error))


def sse(name: str, value: Any) -> bytes:
    """A named event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    """An error in a stream that has begun; the stream ends after it."""
    return b"data: " + error.body() + b"\n\n"


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)


def scored_token(token: ScoredToken) -> dict[str, Any]:
    """A token of a chat's ``logprobs``."""
    item = _item(token.text, 0.0 if token.logprob is None else token.logprob, token.bytes)
    item["top_logprobs"] = [_item(*likely) for likely in token.top]
    return item


def _item(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}
