"""What a step has room for, and what the requests that run will need to go on to their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .request import Request


@dataclass
class Budget:
    """What is left of a step: tokens, and prompt tokens whose log-probabilities are wanted."""

    tokens: int
    logit_rows: int

    def piece(self, request: Request) -> int:
        """The most tokens that a request may have in the step."""
        if request.whole_prompt:
            return request.num_uncomputed_tokens
        limit = min(self.tokens, self.logit_rows) if request.prompt_logprobs else self.tokens
        if request.blocks and request.num_computed_tokens < request.blocks.branch:
            limit = min(limit, request.blocks.branch - request.num_computed_tokens)
        return min(request.num_uncomputed_tokens, limit)

    def spend(self, request: Request, count: int) -> None:
        """Subtract the tokens that a request has."""
        self.tokens -= count
        if request.prompt_logprobs:
            self.logit_rows -= count


class Growth:
    """The most additional blocks that requests of known length will hold at once until the last of them has ended."""

    def __init__(self, block_size: int, requests: Sequence[Request]):
        self._block_size = block_size
        counted = [r for r in requests if not r.may_end_early]
        remaining = np.array([r.max_length - r.num_tokens for r in counted], np.int64)
        order = remaining.argsort()[::-1]
        self._remaining = remaining[order]  # tokens to come, the most first
        self._held = np.array([r.num_tokens for r in counted], np.int64)[order]  # tokens now; freed when a request ends

    def add(self, request: Request) -> None:
        """Count a request."""
        if not request.may_end_early:
            remaining = request.max_length - request.num_tokens
            place = len(self._remaining) - int(np.searchsorted(self._remaining[::-1], remaining))
            self._remaining = _inserted(self._remaining, place, remaining)
            self._held = _inserted(self._held, place, request.num_tokens)

    def blocks(self) -> int:
        """The number of blocks.

        It is largest just before some request ends: those with more tokens to come have grown by as many tokens as
        that one, and those with fewer have given their blocks back.
        """
        held = self._held
        if not len(held):
            return 0
        grown = self._remaining * np.arange(1, len(held) + 1)
        gone = held.sum() - held.cumsum()
        partly_filled = len(held) > 1
        return max(int((grown - gone).max()) // self._block_size + partly_filled, 0)


def _inserted(values: np.ndarray, place: int, value: int) -> np.ndarray:
    """``np.insert`` for one integer, in a quarter of its time."""
    return np.concatenate((values[:place], [value], values[place:]))
