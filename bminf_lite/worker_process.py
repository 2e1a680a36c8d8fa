"""A process for work that cannot be trusted to end: it is killed when a reply takes too long.

Requests and replies are JSON, a line each, in ASCII. The process runs ``worker_loop.py``, which says what a program is.
The first request is the setup, whose ``path`` is this process's ``sys.path``.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BminfError

LOOP = Path(__file__).with_name("worker_loop.py")
START_SECONDS = 60.0


class WorkerProcess:
    """A running ``program``. Not thread-safe. Raises ``BminfError`` if it does not start.

    ``setup`` has a bound on its ``memory`` in bytes, and what the program needs.
    """

    def __init__(self, program: Path, setup: Mapping[str, Any]):
        # -I and -S: the program imports from this process's sys.path, whatever the environment says.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LOOP), str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
        )
        self._end = weakref.finalize(self, _end, self._process)
        if self.ask(json.dumps({"path": [str(p) for p in sys.path], **setup}), START_SECONDS) != {}:
            raise BminfError(f"a process for work that is not trusted does not start: {sys.executable} {program}")

    @property
    def alive(self) -> bool:
        """Whether it can take requests."""
        return self._end.alive and self._process.poll() is None

    def kill(self) -> None:
        """End the process, from any thread; a request that it works on fails."""
        self._process.kill()

    def ask(self, request: str, seconds: float) -> dict[str, str]:
        """The reply to one request, or ``{"failed": ...}``.

        The process ends if it does not reply in time, or the wait is interrupted.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def expire() -> None:  # does not use self, because the timer's thread would keep it alive
            late.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.start()
        reply = ""
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            pass  # the process has ended: the reply is empty
        finally:
            timer.cancel()
            if late.is_set() or not reply.endswith("\n"):
                self._end()
        if late.is_set():
            return {"failed": f"takes longer than {seconds:g} s"}
        if not reply.endswith("\n"):
            return {"failed": "ends the process that works on it"}
        answer: dict[str, str] = json.loads(reply)
        return answer


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(OSError):  # closing flushes into a pipe that has no reader
        process.stdin.close()
