"""One prompt on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """A prompt, its sampling parameters, and the tokens generated so far.

    ``params`` must have a seed; ``index`` makes requests with equal seeds draw differently. For an encoder-decoder,
    the encoder reads ``source_token_ids`` and the decoder starts with ``prompt_token_ids``. A caller
    ends a request early by setting ``finish_reason``. Times are those of ``time.perf_counter``.
    """

    index: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    source_token_ids: Sequence[int] = ()
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    slot: int = -1
    num_prefilled_tokens: int = 0
    start_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.num_prefilled_tokens == len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache: all but the newest generated token."""
        return self.num_prefilled_tokens + max(len(self.output_token_ids) - 1, 0)

    @property
    def ended_by_eos(self) -> bool:
        """Whether the last token is an end-of-sequence token that ends the completion."""
        return bool(self.output_token_ids) and self.output_token_ids[-1] in self.eos_ids and not self.params.ignore_eos

    def remaining_tokens(self, context_length: int) -> int:
        """The most tokens that can still be generated."""
        limit = min(self.params.max_new_tokens, context_length - len(self.prompt_token_ids))
        return limit - len(self.output_token_ids)

    def append_token(
        self, token: int, logprob: float, context_length: int, top_logprobs: Sequence[tuple[int, float]] = ()
    ) -> None:
        """Record a generated token; sets ``finish_reason`` if it is the last."""
        self.last_token_time = time.perf_counter()
        self.first_token_time = self.first_token_time or self.last_token_time
        self.output_token_ids.append(token)
        self.logprobs.append(logprob)
        if self.params.logprobs:
            self.top_logprobs.append(list(top_logprobs))
        if self.ended_by_eos:
            self.finish_reason = "stop"
        elif self.remaining_tokens(context_length) <= 0:
            self.finish_reason = "length"
