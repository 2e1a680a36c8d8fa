"""Drafts from the longest suffix that occurred before: in the request, or in earlier completions of the same salt.

This is the speculation of a suffix tree of bounded depth (SuffixDecoding, Oliaro et al. 2024): the longest end of the
text that occurred before is continued as it was continued most often, as long as that is likely enough. Instead of a
tree, which takes a node for each token and depth, :class:`TokenIndex` chains the occurrences of runs of a few lengths,
as compressors of the LZ77 family do. It looks at the last :data:`OCCURRENCES` of them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .drafts import Drafter, ngram_keys
from .request import Request
from .speculative import SuffixOptions

SIZES = (8, 4, 2)
"""Lengths of the runs that are indexed, the longest first; a match has the last length at least."""
OCCURRENCES = 8
"""The occurrences that are counted, the last ones."""
SEPARATOR = -1
"""Stands between completions; no token equals it."""
MAX_INDEXED = 4096
"""Tokens of a prompt that are indexed in one step, at most."""
MAX_SHARED_TOKENS = 1 << 17
"""Tokens of earlier completions that are kept, of all salts together. A token takes about 400 bytes."""


class Occurrence(NamedTuple):
    """Where an end of a text occurred before: ``length`` tokens before the position ``end``."""

    length: int
    end: int


class TokenIndex:
    """A text that grows, and where each of its runs of :data:`SIZES` tokens occurred."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._last: dict[int, dict[int, int]] = {size: {} for size in SIZES}
        self._before: dict[int, dict[int, int]] = {size: {} for size in SIZES}
        self._num_indexed = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, and index the runs that have a token behind them."""
        self.tokens.extend(tokens)
        length, done = len(self.tokens), self._num_indexed
        for size in SIZES:
            first = max(done - size + 1, 0)
            if length - first <= size:
                continue
            keys = ngram_keys(np.asarray(self.tokens[first : length - 1], np.int64), size).tolist()
            last, before = self._last[size], self._before[size]
            for end, key in enumerate(keys, first + size):
                previous = last.get(key)
                if previous is not None:
                    before[end] = previous
                last[key] = end
        self._num_indexed = max(length - 1, 0)

    def occurrences(self, suffix: Sequence[int]) -> list[Occurrence]:
        """The last occurrences of the longest end of ``suffix`` that is found, the last one first.

        They may be of several lengths, up to that of ``suffix``.
        """
        for size in SIZES:
            if len(suffix) < size:
                continue
            key = int(ngram_keys(np.asarray(suffix[-size:], np.int64), size)[0])
            found: list[Occurrence] = []
            end = self._last[size].get(key)
            while end is not None and len(found) < OCCURRENCES:
                length = self._common(suffix, end)
                if length >= size:
                    found.append(Occurrence(length, end))
                end = self._before[size].get(end)
            if found:
                return found
        return []

    def _common(self, suffix: Sequence[int], end: int) -> int:
        """How many tokens before ``end`` equal the last ones of ``suffix``."""
        count = 0
        while count < len(suffix) and count < end and self.tokens[end - 1 - count] == suffix[-1 - count]:
            count += 1
        return count


class SuffixDrafter(Drafter):
    """Continues the longest suffix, of up to ``max_tree_depth`` tokens, that occurred before.

    There are at most ``max_spec_factor`` drafts for each token of it, and they end where their estimated probability,
    by the counts of what followed, is below ``min_token_prob``. The last ``max_cached_requests`` completions of each
    salt are kept, as far as :data:`MAX_SHARED_TOKENS` allows.
    """

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        self.earlier = EarlierCompletions(options.max_cached_requests)
        self._own: dict[Request, TokenIndex] = {}

    def propose(self, request: Request, count: int) -> Sequence[int]:
        own = self._own.setdefault(request, TokenIndex())
        known = request.num_known_tokens
        own.extend(request.token_ids(len(own.tokens), min(known, len(own.tokens) + MAX_INDEXED)))
        if len(own.tokens) < known:
            return ()  # the rest of a long prompt is indexed in the next steps
        suffix = request.token_ids(max(known - self.options.max_tree_depth, 0), known)
        texts = [own, *self.earlier.of(request.cache_salt)]
        found = [(text, match) for text in texts for match in text.occurrences(suffix)]
        longest = max((match.length for _, match in found), default=0)
        places = [(text.tokens, match.end) for text, match in found if match.length == longest]
        most = min(count, int(self.options.max_spec_factor * longest))
        return continuation_of(places, most, self.options.min_token_prob)

    def forget(self, request: Request) -> None:
        self._own.pop(request, None)
        if request.finish_reason in ("stop", "length", "context"):
            self.earlier.add(request.cache_salt, request.output_tokens)


def continuation_of(places: Sequence[tuple[Sequence[int], int]], count: int, min_probability: float) -> list[int]:
    """Up to ``count`` tokens that followed most often at some places: texts, with a position in each.

    Of several that are as frequent the first place's counts. A text that ends goes on with the continuation itself. The
    continuation ends before its probability is less than ``min_probability``.
    """
    drafts: list[int] = []
    total = len(places)

    def token_of(place: tuple[Sequence[int], int]) -> int:
        tokens, end = place
        position = end + len(drafts)
        if position < len(tokens):
            return tokens[position]
        return drafts[position - len(tokens)]

    while len(drafts) < count:
        counts: dict[int, int] = {}
        following = [token_of(place) for place in places]
        for token in following:
            if token != SEPARATOR:
                counts[token] = counts.get(token, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda token: counts[token])
        if counts[best] < min_probability * total:
            break
        places = [place for place, token in zip(places, following, strict=True) if token == best]
        drafts.append(best)
    return drafts


class EarlierCompletions:
    """The tokens of completions that have ended, by salt.

    A salt has two texts: a new one, and the one before it, which goes when the new one has half of the salt's requests
    or half of all tokens. The salts that were used longest ago go when all tokens together are too many.
    """

    def __init__(self, max_requests: int, max_tokens: int = MAX_SHARED_TOKENS) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._texts: OrderedDict[str, list[_Completions]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """All tokens that are kept."""
        return sum(text.num_tokens for texts in self._texts.values() for text in texts)

    def of(self, salt: str) -> list[TokenIndex]:
        """The texts of a salt, the newest first."""
        if salt in self._texts:
            self._texts.move_to_end(salt)
        return [text.index for text in self._texts.get(salt, ())]

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Keep a completion, or as much of it as there is room for."""
        if not self._max_requests:
            return
        half = self._max_tokens // 2
        texts = self._texts.setdefault(salt, [_Completions()])
        self._texts.move_to_end(salt)
        newest, tokens = texts[0], tokens[: half - 1]
        is_full = newest.num_requests >= -(-self._max_requests // 2) or newest.num_tokens + len(tokens) >= half
        if newest.num_requests and is_full:
            newest = _Completions()
            texts[:] = [newest, texts[0]]
        newest.index.extend([*tokens, SEPARATOR])
        newest.num_requests += 1
        while self.num_tokens > self._max_tokens:
            self._texts.popitem(last=False)


class _Completions:
    """A text of several completions."""

    def __init__(self) -> None:
        self.index = TokenIndex()
        self.num_requests = 0

    @property
    def num_tokens(self) -> int:
        return len(self.index.tokens)
