"""Stop strings: text ends before the first of them, however it is cut into pieces.

The stop string that is complete first counts; of several that end at the same character, the longest. So the emitted
text depends on the text alone, and generation ends at the character that completes a stop string. Text that may be the
start of a stop string is held back until the next characters decide.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text before the first of ``stop_strings``. Each character costs amortised O(strings)."""

    def __init__(self, stop_strings: Sequence[str] = ()):
        self._stops = [(stop, _borders(stop)) for stop in stop_strings]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; returns the text to emit, and whether a stop string is complete. Drops text after that."""
        if self.stopped:
            return "", True
        start = len(self._held)
        self._held += text
        for i, char in enumerate(text, start + 1):
            for j, (stop, borders) in enumerate(self._stops):
                matched = self._matched[j]
                while matched and stop[matched] != char:
                    matched = borders[matched]
                self._matched[j] = matched + (stop[matched] == char)
            complete = [len(stop) for (stop, _), n in zip(self._stops, self._matched, strict=True) if n == len(stop)]
            if complete:
                self.stopped = True
                return self._take(i - max(complete)), True
        return self._take(len(self._held) - max(self._matched, default=0)), False

    def flush(self) -> str:
        """The text held back, after the last text; empty after a stop string."""
        return "" if self.stopped else self._take(len(self._held))

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def _borders(stop: str) -> list[int]:
    """For each length ``n`` the longest proper prefix of ``stop[:n]`` that is also its suffix (Knuth-Morris-Pratt)."""
    borders = [0, 0]
    for char in stop[1:]:
        n = borders[-1]
        while n and stop[n] != char:
            n = borders[n]
        borders.append(n + (stop[n] == char))
    return borders
