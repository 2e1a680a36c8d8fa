"""Matches names with regular expressions of a file: the program of the process that ``name_patterns.py`` starts.

The setup holds the ``patterns``. A request holds a ``name`` and the ``numbers`` of patterns; the reply is
``{"matching": ...}``, the numbers of those that the beginning of the name matches, or ``{"failed": ...}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def start(setup: dict[str, Any]) -> Callable[[Any], dict[str, str]]:
    patterns = [re.compile(pattern) for pattern in setup["patterns"]]

    def reply(request: Any) -> dict[str, str]:
        try:
            matching = [i for i in request["numbers"] if patterns[i].match(request["name"])]
        except (MemoryError, RecursionError):
            return {"failed": "needs too much memory"}
        return {"matching": " ".join(map(str, matching))}

    return reply
