"""Drafts: guesses of the next tokens of a request, which a step checks all at once.

A draft costs a row of a step and never changes what a request gets: the step samples behind each draft, and only drafts
that equal the choices are accepted (:mod:`bminf_lite.backend.sampling`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from .request import Request

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Drafter(ABC):
    """A source of drafts. It is called in the engine's thread, and must be quick.

    With ``needs_newest_token``, a request waits for its newest token before it gets drafts. To make a draft takes
    ``draft_cost`` of the time of a plain step; the drafts of all requests of a step are made at once. One that
    ``guesses_on_device`` lets a step make its drafts itself, unless the host has to know them: then it is not called.
    """

    needs_newest_token = False
    guesses_on_device = False
    draft_cost = 0.0

    def prepare(self, counts: Mapping[Request, int]) -> None:
        """Called before a step's drafts are proposed.

        ``counts`` has the requests, with the most drafts that each may have, if the drafter needs newest tokens; else
        it is empty.
        """
        return

    @abstractmethod
    def propose(self, request: Request, count: int) -> Sequence[int]:
        """Up to ``count`` tokens that are expected behind the known tokens of a request."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        return


class NgramDrafter(Drafter):
    """Proposes what followed the last tokens of a request where they occurred before, in its prompt or its completion.

    The last ``sizes[0]`` tokens are looked for first, then fewer. The last occurrence counts. It helps where a
    completion repeats its prompt: edits of a text, quotations, tables.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._indices: dict[Request, list[_NgramIndex]] = {}

    def propose(self, request: Request, count: int) -> Sequence[int]:
        indices = self._indices.setdefault(request, [_NgramIndex(size) for size in self.sizes])
        for index in indices:
            start = index.find(request)
            if start is not None:
                return continuation(request, start, count)
        return ()

    def forget(self, request: Request) -> None:
        self._indices.pop(request, None)


class _NgramIndex:
    """Where each run of ``size`` known tokens of one request occurred last, with at least one token behind it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._end_of: dict[int, int] = {}
        self._num_indexed = 0

    def find(self, request: Request) -> int | None:
        """The position behind the last earlier occurrence of the last ``size`` known tokens; None if there is none."""
        length, size = request.num_known_tokens, self.size
        if length <= size:
            return None
        first = max(self._num_indexed - size + 1, 0)
        keys = ngram_keys(np.asarray(request.token_ids(first, length), np.int64), size).tolist()
        self._end_of.update(zip(keys[:-1], range(first + size, length), strict=True))
        self._num_indexed = length - 1
        end = self._end_of.get(keys[-1])
        if end is None or list(request.token_ids(end - size, end)) != list(request.token_ids(length - size, length)):
            return None  # another run has the same key
        return end


def ngram_keys(tokens: np.ndarray, size: int) -> np.ndarray:
    """A key uint64 ``[n - size + 1]`` for each run of ``size`` tokens int64 ``[n]``; equal runs have equal keys."""
    keys = np.zeros(len(tokens) - size + 1, np.uint64)
    values = tokens.astype(np.uint64)
    for place in range(size):
        keys = keys * _FACTOR + values[place : place + len(keys)] + np.uint64(1)
    return keys


def continuation(request: Request, start: int, count: int) -> list[int]:
    """``count`` tokens from the position ``start`` on; those behind the known tokens repeat what is found before."""
    length = request.num_known_tokens
    tokens = list(request.token_ids(start, min(start + count, length)))
    while len(tokens) < count:
        tokens.append(tokens[len(tokens) - (length - start)])
    return tokens
