"""What the scheduler plans, and what a step brings back: requests and positions, without arrays of a device.

A sequence brings new tokens to a step and samples some of them. Decoding brings one and samples it. A piece of a prompt
brings several, and samples the last if the prompt ends there. Checking drafts brings the newest token and the drafts
behind it, and samples all of them, so each is a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .request import Request

NO_TOKEN = -1
"""Stands for a token that the host does not know: the newest of its sequence, which the sampler holds, or a guess."""


class ScheduledTokens(NamedTuple):
    """Tokens ``start`` to ``start + num_tokens`` of a request. ``samples``: the step chooses the token that follows."""

    request: Request
    start: int
    num_tokens: int
    samples: bool

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.start + self.num_tokens

    @property
    def num_scored(self) -> int:
        """How many prompt tokens, from ``start + 1`` on, the step computes log-probabilities of."""
        if not self.request.prompt_logprobs:
            return 0
        return max(min(self.stop, len(self.request.prompt_token_ids) - 1) - self.start, 0)

    @property
    def needs_more_logits(self) -> bool:
        """Whether logits beside those to sample from are needed."""
        request = self.request
        return (request.prompt_logprobs or request.take_logits is not None) and self.num_scored + self.num_taken > 0

    @property
    def num_taken(self) -> int:
        """How many of the last tokens have logits that the request takes."""
        if self.request.take_logits is None:
            return 0
        return max(min(self.stop - self.request.logits_start, self.num_tokens), 0)


@dataclass(eq=False)
class Step:
    """The tokens of a step. Nothing changes it once it is made.

    Each row of ``decoding`` is a token that samples: the newest one of its request, at its one of ``positions``. If the
    step checks drafts, rows behind a request's newest token are its drafts: ``offsets`` counts them from 1, and is 0
    for newest tokens, and ``drafts`` are the draft tokens, 0 for newest tokens. Both are empty in a step without
    drafts.

    Drafts that are not known yet are :data:`NO_TOKEN`: before the step the draft model makes ``num_guesses`` guesses of
    each request that has any. Requests of which the host does not know how many drafts were accepted are ``ahead``:
    their ``positions`` are the lowest ones, and may be as much higher as stands there.

    Behind these rows are ``singles``, tokens that do not sample, and ``pieces`` of several tokens. The sources of the
    requests ``sources`` are encoded before the step, and the ``copies`` of :class:`.Admission` are made, in order.

    Most sequences of most steps decode. They have no object of their own for the garbage collector to visit.
    """

    decoding: Sequence[Request] = ()
    positions: Sequence[int] = ()
    offsets: Sequence[int] = ()
    drafts: Sequence[int] = ()
    num_guesses: int = 0
    ahead: Mapping[Request, int] = field(default_factory=dict)
    singles: Sequence[ScheduledTokens] = ()
    pieces: Sequence[ScheduledTokens] = ()
    sources: Sequence[Request] = ()
    copies: Sequence[tuple[Request, Sequence[tuple[int, int]]]] = ()

    @cached_property
    def others(self) -> Sequence[ScheduledTokens]:
        """The tokens behind those of the requests that decode."""
        return [*self.singles, *self.pieces]

    @cached_property
    def requests(self) -> Sequence[Request]:
        """The requests of all rows and pieces, in order."""
        return [*self.decoding, *(part.request for part in self.others)] if self.others else self.decoding

    @cached_property
    def sampled(self) -> Sequence[Request]:
        """The requests of all tokens that sample, in order; a request with drafts occurs once for each of its rows."""
        if not self.others:
            return self.decoding
        return [*self.decoding, *(part.request for part in self.others if part.samples)]

    @property
    def num_decodes(self) -> int:
        """Rows of one token, whose attention is that of decoding."""
        return len(self.decoding) + len(self.singles)

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all pieces."""
        return sum(part.num_tokens for part in self.pieces)


class StepResult(NamedTuple):
    """What a step chose and scored.

    ``chosen`` is int32 as ``Backend.sample`` returns it, for the tokens that sample. ``prompt_scores`` is int32 as
    ``Backend.token_logprobs`` returns it, for the prompt tokens that the parts score. If one of their requests wants
    more than the most likely token, ``prompt_top`` has what ``Backend.sample`` returns of their logits in the variant
    ``FULL``. ``drafts`` int32 are those of a step that makes its guesses itself, for the tokens that sample.
    """

    chosen: np.ndarray
    prompt_scores: np.ndarray
    prompt_top: np.ndarray | None = None
    drafts: np.ndarray | None = None
