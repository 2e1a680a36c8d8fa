from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.memory.intervals import SizedIntervals

ranges = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(st.tuples(st.booleans(), ranges), max_size=20), ranges)
def test_is_a_set_of_integers(changes: list[tuple[bool, tuple[int, int]]], query: tuple[int, int]) -> None:
    intervals = SizedIntervals()
    integers: set[int] = set()
    for add, (start, end) in changes:
        if add:
            intervals.add(start, end)
            integers |= set(range(start, end))
        else:
            intervals.remove(start, end)
            integers -= set(range(start, end))
    pairs = list(intervals)
    assert {i for start, end in pairs for i in range(start, end)} == integers
    assert intervals.total == len(integers)
    assert all(start < end for start, end in pairs)
    assert all(end < following for (_, end), (following, _) in pairwise(pairs)), "coalesced"
    asked = set(range(*query))
    assert {i for start, end in intervals.within(*query) for i in range(start, end)} == integers & asked
    assert {i for start, end in intervals.missing(*query) for i in range(start, end)} == asked - integers
    for size in range(1, 42):
        fitting = [(end - start, start) for start, end in pairs if end - start >= size]
        start = intervals.take(size)
        assert start == (min(fitting)[1] if fitting else None)
        if start is not None:
            taken = set(range(start, start + size))
            assert {i for low, high in intervals for i in range(low, high)} == integers - taken
            assert intervals.total == len(integers) - size
            intervals.add(start, start + size)
        assert list(intervals) == pairs


@given(st.lists(ranges, max_size=20), st.lists(ranges, max_size=20))
def test_adding_at_once_and_one_by_one(there: list[tuple[int, int]], pieces: list[tuple[int, int]]) -> None:
    at_once, one_by_one = SizedIntervals(*there), SizedIntervals(*there)
    pieces = sorted((start, end) for start, end in pieces if start < end)
    at_once.add_all(pieces)
    for piece in pieces:
        one_by_one.add(*piece)
    assert list(at_once) == list(one_by_one) and at_once.total == one_by_one.total
