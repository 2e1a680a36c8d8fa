"""Targets of a ``quantization_config``: names of layers, or regular expressions for them (``re:.*down_proj``).

A regular expression in a file can take longer than the age of the universe: Python's ``re`` goes back over every way in
which ``(a+)+`` matches. Therefore expressions are matched in a process of their own (``name_pattern_worker.py``), which
is killed when it takes too long. It starts when the first name is asked for, and only if there are expressions.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError
from ..worker_process import WorkerProcess

PREFIX = "re:"
WORKER = Path(__file__).with_name("name_pattern_worker.py")
MAX_PATTERNS = 1_000
MAX_PATTERN = 1_000
"""Characters of an expression."""
SECONDS = 2.0
"""For all expressions and one name; milliseconds are usual."""
TOTAL_SECONDS = 20.0
MEMORY = 1 << 28


class Targets:
    """Layers that a configuration names, as it lists them: ``names`` of layers or classes, and ``patterns``.

    ``patterns`` lack their prefix.
    """

    def __init__(self, listed: Iterable[str] = ()):
        self.listed = tuple(listed)
        self.names = frozenset(target for target in self.listed if not target.startswith(PREFIX))
        self.patterns = tuple(target[len(PREFIX) :] for target in self.listed if target.startswith(PREFIX))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Targets) and other.listed == self.listed

    def __hash__(self) -> int:
        return hash(self.listed)


NO_TARGETS = Targets()


class NameMatcher:
    """Tells which layers some targets name. ``patterns`` are those of all; ``source`` is the file that has them."""

    def __init__(self, patterns: Iterable[str] = (), source: object = ""):
        self._patterns = list(dict.fromkeys(patterns))
        self._source = source
        self._worker: WorkerProcess | None = None
        self._matching: dict[str, frozenset[str]] = {}
        self._seconds = TOTAL_SECONDS

    def matches(self, targets: Targets, name: str) -> bool:
        """Whether ``targets`` name the layer ``name``: as it is, or by a pattern that its beginning matches.

        The format's other readers do it so. Raises :class:`CheckpointError` for patterns that take too long.
        """
        if name in targets.names or not targets.patterns:
            return name in targets.names
        if name not in self._matching:
            self._matching[name] = self._ask(name)
        return not self._matching[name].isdisjoint(targets.patterns)

    def _ask(self, name: str) -> frozenset[str]:
        """The patterns that match a name."""
        reply = self._reply(name, range(len(self._patterns)))
        if "failed" in reply:
            wrong = next((i for i in range(len(self._patterns)) if "failed" in self._reply(name, [i])), 0)
            problem = f"the pattern {PREFIX + self._patterns[wrong]!r} {reply['failed']} to match with {name!r}"
            raise CheckpointError(f"{self._source}: quantization_config: {problem}; list the names of layers instead")
        return frozenset(self._patterns[int(number)] for number in reply["matching"].split())

    def _reply(self, name: str, numbers: Iterable[int]) -> dict[str, str]:
        if self._seconds <= 0:
            problem = f"its patterns take longer than {TOTAL_SECONDS:g} s to match with the names of layers"
            raise CheckpointError(f"{self._source}: quantization_config: {problem}; list the names instead")
        if self._worker is None or not self._worker.alive:
            self._worker = WorkerProcess(WORKER, {"memory": MEMORY, "patterns": self._patterns})
        start = time.perf_counter()
        reply = self._worker.ask(json.dumps({"name": name, "numbers": list(numbers)}), SECONDS)
        self._seconds -= time.perf_counter() - start
        return reply


def pattern_problems(targets: Iterable[str]) -> list[str]:
    """What is wrong with the regular expressions among ``targets``."""
    patterns = [target for target in targets if target.startswith(PREFIX)]
    if len(patterns) > MAX_PATTERNS:
        return [f"has {len(patterns):,} patterns, and {MAX_PATTERNS:,} are allowed"]
    problems = []
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN:
            problems.append(f"has a pattern of {len(pattern):,} characters, and {MAX_PATTERN:,} are allowed")
            continue
        try:
            re.compile(pattern[len(PREFIX) :])
        except (re.error, OverflowError, RecursionError) as error:
            problems.append(f"{pattern!r} is not a regular expression ({error})")
    return problems
