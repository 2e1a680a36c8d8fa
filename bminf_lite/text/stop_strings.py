"""Texts that end a completion, found in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Cuts a stream of text before the first of ``stop_strings``.

    The first stop string to be complete counts, and of several that end at the same character the longest. The emitted
    text therefore depends on the text alone, however it is cut into pieces. Text that may be the start of a stop string
    is held back until the next characters decide. With ``keeps_stop`` the stream is cut behind the stop string.

    A stop string may contain the spelling of tokens without text. What is hidden is looked at and never emitted, but as
    a part of a stop string that is kept.
    """

    def __init__(self, stop_strings: Sequence[str] = (), keeps_stop: bool = False):
        self._keeps_stop = keeps_stop
        self._stops = [(stop, _borders(stop)) for stop in stop_strings]
        self._matched = [0] * len(self._stops)  # of each stop string, how many characters the text ends with
        self._held = ""
        self._hidden: list[tuple[int, int]] = []  # ranges of ``_held``, in order
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; ``found`` is that string."""
        return self.found is not None

    def push(self, text: str, is_hidden: bool = False, may_stop: bool = True) -> tuple[str, bool]:
        """Take more text; returns the text to emit, and whether a stop string is complete. Drops text after that.

        Without ``may_stop`` a stop string that ends within this text does not count; one may begin there.
        """
        if not self._stops:
            return "" if is_hidden else text, False
        if self.stopped:
            return "", True
        if is_hidden:
            self._hidden.append((len(self._held), len(self._held) + len(text)))
        ends = []
        for i, (stop, borders) in enumerate(self._stops):
            self._matched[i], end = _advance(stop, borders, self._matched[i], text)
            while end and not may_stop:
                self._matched[i], further = _advance(stop, borders, borders[-1], text[end:])
                end = further and end + further
            if end:
                ends.append((end, -len(stop), stop))
        held = self._held + text
        if ends:
            end, _, self.found = min(ends)
            end += len(self._held)
            start, self._held = end - len(self.found), held
            return self._take(start) + (self.found if self._keeps_stop else ""), True
        self._held = held
        return self._take(len(held) - max(self._matched)), False

    def flush(self) -> str:
        """The text held back, after the last text; empty after a stop string."""
        return "" if self.stopped else self._take(len(self._held))

    def _take(self, length: int) -> str:
        """The next ``length`` held characters, without those that are hidden."""
        taken, self._held = self._held[:length], self._held[length:]
        if not self._hidden:
            return taken
        visible, at = [], 0
        for start, end in self._hidden:
            visible.append(taken[at:start])
            at = max(at, end)
        visible.append(taken[at:])
        later = [(start - length, end - length) for start, end in self._hidden if end > length]
        self._hidden = [(max(start, 0), end) for start, end in later]
        return "".join(visible)


def _advance(stop: str, borders: Sequence[int], matched: int, text: str) -> tuple[int, int]:
    """How many characters of ``stop`` a text ends with if it ended with ``matched`` of them before ``text``.

    The second number is where in ``text`` the stop string is complete, 0 if it is not. This is the algorithm of Knuth,
    Morris and Pratt: each character is looked at about once, also if text and stop strings repeat themselves.
    """
    at = 0
    while at < len(text):
        if not matched:
            at = text.find(stop[0], at)
            if at < 0:
                return 0, 0
        while matched and stop[matched] != text[at]:
            matched = borders[matched - 1]
        matched += stop[matched] == text[at]
        at += 1
        if matched == len(stop):
            return matched, at
    return matched, 0


@lru_cache(1024)
def _borders(stop: str) -> list[int]:
    """For each prefix of a text, the length of the longest shorter prefix that it ends with."""
    borders, border = [0], 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border - 1]
        border += stop[border] == character
        borders.append(border)
    return borders


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of ``text`` that is a prefix of ``stop``, but not all of it."""
    if stop[:1] not in text:
        return 0
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
