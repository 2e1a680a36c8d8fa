"""Sets of integers as sorted, disjoint half-open intervals that never touch each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import TypeVar

Set = TypeVar("Set", bound="Intervals")


class Intervals:
    """A set of integers; adding and removing coalesce and split its intervals."""

    def __init__(self, *intervals: tuple[int, int]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        for start, end in intervals:
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def copy(self) -> Intervals:
        """The same set, which changes on its own."""
        return self._copied_to(Intervals.__new__(Intervals))

    def _copied_to(self, other: Set) -> Set:
        other._starts, other._ends, other.total = self._starts.copy(), self._ends.copy(), self.total
        return other

    def add(self, start: int, end: int) -> None:
        """Add ``[start, end)``, of which nothing need be absent."""
        if start >= end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._replace(first, last, [(start, end)])

    def add_all(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Add several ``[start, end)``, none of them empty, in order of their starts."""
        runs: list[tuple[int, int]] = []
        for start, end in pieces:
            if runs and start <= runs[-1][1]:
                runs[-1] = runs[-1][0], max(end, runs[-1][1])
            else:
                runs.append((start, end))
        for start, end in runs:
            self.add(start, end)

    def remove(self, start: int, end: int) -> None:
        """Remove ``[start, end)``, of which nothing need be present."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if start >= end or first >= last:
            return
        edges = (self._starts[first], start), (end, self._ends[last - 1])
        self._replace(first, last, [(low, high) for low, high in edges if low < high])

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of the set that lie in ``[start, end)``."""
        if start >= end:
            return
        for i in range(bisect_right(self._ends, start), bisect_left(self._starts, end)):
            yield max(start, self._starts[i]), min(end, self._ends[i])

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``[start, end)`` that are not in the set."""
        gaps = []
        for low, high in self.within(start, end):
            if start < low:
                gaps.append((start, low))
            start = high
        if start < end:
            gaps.append((start, end))
        return gaps

    def _replace(self, first: int, last: int, intervals: list[tuple[int, int]]) -> None:
        if last - first == len(intervals) == 1:  # one that grows or shrinks, which is most of what an arena does
            ((start, end),) = intervals
            self.total += end - start - (self._ends[first] - self._starts[first])
            self._starts[first], self._ends[first] = start, end
            return
        self.total -= sum(self._ends[first:last]) - sum(self._starts[first:last])
        self.total += sum(end - start for start, end in intervals)
        self._starts[first:last] = [start for start, _ in intervals]
        self._ends[first:last] = [end for _, end in intervals]


class SizedIntervals(Intervals):
    """A set of integers that also finds an interval by its size."""

    def __init__(self, *intervals: tuple[int, int]) -> None:
        self._sizes: list[tuple[int, int]] = []  # (size, start), in order
        super().__init__(*intervals)

    def copy(self) -> SizedIntervals:
        other = self._copied_to(SizedIntervals.__new__(SizedIntervals))
        other._sizes = self._sizes.copy()
        return other

    def take(self, size: int) -> int | None:
        """Remove the first ``size`` integers of the smallest interval that has so many, of several the first.

        Returns its start; None, with nothing removed, where no interval is large enough.
        """
        fit = bisect_left(self._sizes, (size, 0))
        if fit == len(self._sizes):
            return None
        found, start = self._sizes.pop(fit)
        i = bisect_left(self._starts, start)
        if found == size:
            del self._starts[i], self._ends[i]
        else:
            self._starts[i] = start + size
            insort(self._sizes, (found - size, start + size))
        self.total -= size
        return start

    def _replace(self, first: int, last: int, intervals: list[tuple[int, int]]) -> None:
        for i in range(first, last):
            del self._sizes[bisect_left(self._sizes, (self._ends[i] - self._starts[i], self._starts[i]))]
        for start, end in intervals:
            insort(self._sizes, (end - start, start))
        super()._replace(first, last, intervals)
