"""The settings of a server: plain values that its processes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.sampling_params import SamplingParams
from ..errors import UsageError
from .limits import Limits
from .security import Security

MAX_NAME = 256
"""Characters of a model's name."""


@dataclass(frozen=True)
class ServerSettings:
    """How the server presents the model and whom it serves.

    ``served_model_names`` are the names under which requests may ask for the model; the first one is reported.
    ``request_log`` is the file to which a line of JSON is written for each request, ``-`` for stderr.
    ``tool_call_format`` is how the model writes calls of functions, if not as its chat template tells.
    ``seed`` is that of requests that give none; without one each of them draws its own.
    ``split_special_tokens`` is the default of requests: texts are text, also where they spell control tokens.

    Raises ``UsageError`` for a seed out of range, a name that is no text or not UTF-8, because messages are, and for
    a model's name that is empty, longer than :data:`MAX_NAME` or not printable.
    """

    served_model_names: tuple[str, ...]
    security: Security = field(default_factory=Security)
    limits: Limits = field(default_factory=Limits)
    request_log: str | None = None
    tool_call_format: str | None = None
    seed: int | None = None
    split_special_tokens: bool = False

    def __post_init__(self) -> None:
        SamplingParams(seed=self.seed)  # which checks it
        for name in (*self.served_model_names, self.request_log or ""):
            try:
                str.encode(name)
            except (TypeError, UnicodeEncodeError):  # noqa: PERF203, they are one or two
                raise UsageError(f"{name!r} is a name of a model or a log, but must be text in UTF-8") from None
        for name in self.served_model_names:
            if not 0 < len(name) <= MAX_NAME or not name.isprintable():
                wanted = f"must be a printable text of 1 to {MAX_NAME} characters"
                raise UsageError(f"the served model name is {repr(name)[:MAX_NAME]}, but {wanted}")
