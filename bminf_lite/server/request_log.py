"""The request log: a line of JSON for each request, written beside the event loop.

A line has times, counts and the reason of an end. It never has a prompt, a completion, a key or an address.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
from typing import Any

import msgspec

from ..errors import UsageError
from ..files import expand

MAX_PENDING_LINES = 10_000
"""Lines that may wait for a slow disk or terminal. More are dropped and counted."""


def checked_path(path: str | None) -> str | None:
    """The path of a log. Raises ``UsageError`` for a file that cannot be written."""
    if path is None or path == "-":
        return path
    file = expand(path, "the request log")
    try:
        file.open("a").close()
    except OSError as error:
        raise UsageError(f"the request log {path} cannot be written: {error.strerror or error}") from None
    return str(file.absolute())


class RequestLog:
    """Appends lines to a file, or to standard error if ``path`` is ``-``.

    Several processes may append to one file: a line is one write. A file that was moved away is made anew, so the
    ordinary ``logrotate`` works. Raises ``OSError`` if the file cannot be opened.
    """

    def __init__(self, path: str):
        self._sink: logging.Handler
        if path == "-":
            self._sink = logging.StreamHandler(sys.stderr)
        else:
            self._sink = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(MAX_PENDING_LINES)
        self._listener = logging.handlers.QueueListener(self._lines, self._sink)
        self._listener.start()
        self.num_dropped = 0

    def write(self, fields: dict[str, Any]) -> None:
        """Write a line soon. Returns at once."""
        line = msgspec.json.encode(fields).decode()
        record = logging.LogRecord("bminf_lite.requests", logging.INFO, "", 0, line, None, None)
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits."""
        self._listener.stop()
        self._sink.close()
