"""What a client may ask of the server, and how long it may take: bounds, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one server. Times are in seconds, sizes in bytes.

    - ``body``: the body of a request. ``headers``: its request line and headers.
    - ``n``: completions of one prompt; ``prompts``: prompts of one request.
    - ``max_tokens``: tokens of one completion; None leaves the model's context as the bound.
    - ``connections``: open connections of one HTTP process. ``requests``: requests that it works on at a time.
    - ``header_seconds``: from the first byte of a request, or the opening of a connection, to the end of its headers.
      ``body_seconds``: from there to the end of its body. ``idle_seconds``: a connection without a request.
      ``stalled_seconds``: how long a client may read nothing of what waits for it.
    """

    body: int = 16 << 20
    headers: int = 32 << 10
    n: int = 128
    prompts: int = 1024
    max_tokens: int | None = None
    connections: int = 4096
    requests: int = 2048
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: float = 75.0
    stalled_seconds: float = 60.0


DEFAULT_LIMITS = Limits()
