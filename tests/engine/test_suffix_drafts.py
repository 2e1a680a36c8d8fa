"""Drafts of suffixes: the longest end that occurred before, continued as most often, within bounds of memory."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.engine import suffix_drafts
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.engine.speculative import SuffixOptions
from bminf_lite.engine.suffix_drafts import (
    OCCURRENCES,
    SEPARATOR,
    SIZES,
    EarlierCompletions,
    SuffixDrafter,
    TokenIndex,
)

MANY_TOKENS = st.lists(st.integers(0, 1), max_size=60)
"""Of two kinds, so that much repeats."""


def expected_occurrences(tokens: list[int], suffix: list[int]) -> list[tuple[int, int]]:
    """By searching the text: for the longest of the indexed lengths that occurs, its last places."""

    def common(end: int) -> int:
        pairs = zip(reversed(tokens[:end]), reversed(suffix), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(end, len(suffix)))

    for size in SIZES:
        found = [(common(end), end) for end in range(len(tokens) - 1, size - 1, -1) if common(end) >= size]
        if found and len(suffix) >= size:
            return found[:OCCURRENCES]
    return []


@given(st.lists(MANY_TOKENS, max_size=4), st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_occurrences_are_those_that_a_search_finds(parts: list[list[int]], suffix: list[int]) -> None:
    """However the text came."""
    index = TokenIndex()
    for part in parts:
        index.extend(part)
    assert index.occurrences(suffix) == expected_occurrences([token for part in parts for token in part], suffix)


def request(prompt: list[int], output: list[int] = [], **fields: Any) -> Request:  # noqa: B006
    made = Request(0, prompt, SamplingParams(seed=1), **fields)
    made.output_tokens = array("i", output)
    made.num_known_tokens += len(output)
    return made


def expected_drafts(texts: list[list[int]], own: list[int], count: int, options: SuffixOptions) -> list[int]:
    """By the counts of what followed, in the text itself and in others."""
    suffix = own[-options.max_tree_depth :]
    places = [(text, *found) for text in [own, *texts] for found in expected_occurrences(text, suffix)]
    longest = max((length for _, length, _ in places), default=0)
    places = [place for place in places if place[1] == longest]
    drafts: list[int] = []
    total = len(places)
    while len(drafts) < min(count, int(options.max_spec_factor * longest)) and places:
        following = [(text + drafts if text is own else text)[end + len(drafts)] for text, _, end in places]
        counts = Counter(token for token in following if token != SEPARATOR)
        if not counts or counts.most_common(1)[0][1] < options.min_token_prob * total:
            break
        best = counts.most_common(1)[0][0]
        places = [place for place, token in zip(places, following, strict=True) if token == best]
        drafts.append(best)
    return drafts


@given(MANY_TOKENS.filter(bool), st.lists(MANY_TOKENS, max_size=3), st.integers(1, 8), st.floats(0.01, 1.0))
def test_the_longest_end_goes_on_as_most_often(
    prompt: list[int], earlier: list[list[int]], count: int, probability: float
) -> None:
    options = SuffixOptions(min_token_prob=probability)
    drafter, text = SuffixDrafter(options), []
    for answer in earlier:
        drafter.forget(request([0], answer, finish_reason="stop"))
        text += [*answer, SEPARATOR]
    found = drafter.propose(request(prompt), count)
    assert found == expected_drafts([text], prompt, count, options)


def test_a_text_that_grows_is_indexed_once() -> None:
    drafter, growing = SuffixDrafter(SuffixOptions()), request([1, 2, 3, 4], [1, 2])
    assert drafter.propose(growing, 8) == [3, 4]  # as many as tokens were found
    growing.output_tokens.extend([3])
    growing.num_known_tokens += 1
    assert drafter.propose(growing, 8) == [4, 1, 2]
    assert len(drafter._own[growing].tokens) == 7
    drafter.forget(growing)
    assert not drafter._own


def test_a_salt_sees_its_own_answers_alone() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    drafter.forget(request([0], [5, 6, 7, 8], finish_reason="stop", cache_salt="a"))
    drafter.forget(request([0], [5, 6, 9, 9], finish_reason="cancelled", cache_salt="b"))
    assert drafter.propose(request([5, 6], cache_salt="a"), 4) == [7, 8]
    assert drafter.propose(request([5, 6], cache_salt="b"), 4) == []
    assert SuffixDrafter(SuffixOptions(max_cached_requests=0)).earlier.of("a") == []


def test_a_long_prompt_is_indexed_in_pieces(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(suffix_drafts, "MAX_INDEXED", 4)
    drafter, long = SuffixDrafter(SuffixOptions()), request([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    assert [drafter.propose(long, 2) for _ in range(3)] == [(), (), [3, 4]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=40), st.integers(1, 6))
def test_earlier_completions_are_bounded(answers: list[tuple[str, int]], max_requests: int) -> None:
    """The newest one of a salt that was used last is always there, as far as there is room for it."""
    earlier = EarlierCompletions(max_requests, max_tokens=60)
    for i, (salt, count) in enumerate(answers):
        earlier.add(salt, [i] * count)
        assert earlier.num_tokens <= 60
        newest = earlier.of(salt)[0].tokens
        assert newest[-1] == SEPARATOR and newest[-2] == i
        kept = {token for index in earlier.of(salt) for token in index.tokens}
        assert len(kept - {SEPARATOR}) <= max_requests + 1
