"""What a client may ask of the server, and how long it may take: bounds, with their defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import UsageError

LARGEST = 1 << 40
"""A terabyte, or 35,000 years."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one server. Times are in seconds, sizes in bytes.

    - ``body``: the body of a request. ``headers``: its request line and headers.
    - ``n``: completions of one prompt; ``prompts``: prompts of one request. The larger of both bounds the completions
      of all its prompts.
    - ``max_tokens``: tokens of one completion; None leaves the model's context as the bound.
    - ``connections``: open connections of one HTTP process. ``requests``: POST requests it works on at a time.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value <= LARGEST:
                raise UsageError(
                    f"the limit {field.name} is {value!r}, but must be more than 0 and at most {LARGEST:,}"
                )

    def changed(self, settings: Iterable[str]) -> Limits:
        """These limits with some of them set as texts such as ``body=1000000``; ``UsageError`` for others."""
        given: dict[str, Any] = dict(map(_parsed, settings))
        return replace(self, **given)


def _parsed(setting: str) -> tuple[str, float]:
    name, _, text = setting.partition("=")
    kinds = {field.name: float if "seconds" in field.name else int for field in fields(Limits)}
    if name not in kinds:
        raise UsageError(f"there is no limit {name!r}; there are {', '.join(kinds)}")
    try:
        return name, kinds[name](text)
    except ValueError:
        wanted = "a number of seconds" if kinds[name] is float else "a whole number"
        raise UsageError(f"the limit {name} is {text!r}, but must be {wanted}") from None


DEFAULT_LIMITS = Limits()
