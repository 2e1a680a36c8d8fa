"""What runs in the process of a batch's rows, which :mod:`.row_process` starts with a socket to the engine and a pipe.

Both sides send Python's objects over the pipe: one way a :class:`Work` and then blocks; the other way a
:class:`Progress` now and then, an :class:`Answered` for each block, and a :class:`Failed` at an error, which ends the
process. It also ends when the pipe closes, so also when the model's process is killed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from ..errors import BminfError
from ..server.direct import DirectServer
from ..server.settings import ServerSettings
from .output import BatchOutput
from .plan import BatchBlock
from .rows import RowFormat
from .runner import BlockFormat, BlockRunner, Counts, run_all

PROGRESS_SECONDS = 0.1
"""Between two reports of progress."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """How rows are answered: as requests to a server with ``settings``, of the form ``rows``, ``limit`` at a time.

    ``blocks`` reads and encodes blocks, and ``output`` is where they are written.
    """

    settings: ServerSettings
    rows: RowFormat
    blocks: BlockFormat
    output: BatchOutput
    limit: int


@dataclass(frozen=True)
class Progress:
    """What was answered since the last report."""

    counts: Counts


@dataclass(frozen=True)
class Answered:
    """A block is committed; ``counts`` are those of its rows."""

    block: BatchBlock
    counts: Counts


@dataclass(frozen=True)
class Failed:
    """What ended the process."""

    error: Exception


class _Reporter:
    """Sends reports. Progress waits, so that a report holds what many rows have brought."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._counts = Counts()
        self._timer: asyncio.TimerHandle | None = None

    def told(self, result: Mapping[str, Any]) -> None:
        """A row is answered."""
        self._counts.add(result)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._report)

    def answered(self, block: BatchBlock, counts: Counts) -> None:
        """A block is committed."""
        if self._timer is not None:
            self._timer.cancel()
            self._report()
        self._pipe.send(Answered(block, counts))

    def _report(self) -> None:
        with suppress(OSError):  # the pipe has closed, which ends this process
            self._pipe.send(Progress(self._counts))
        self._counts, self._timer = Counts(), None


async def _answer_blocks(engine: socket.socket, pipe: Connection) -> None:
    """Answer blocks until the pipe closes, which cancels this task."""
    loop, this_task = asyncio.get_running_loop(), asyncio.current_task()
    assert this_task is not None
    work: asyncio.Future[Work] = loop.create_future()
    blocks: asyncio.Queue[BatchBlock] = asyncio.Queue()

    def receive() -> None:
        try:
            message: Work | Sequence[BatchBlock] = pipe.recv()
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            this_task.cancel()
            return
        if isinstance(message, Work):
            work.set_result(message)
            return
        for block in message:
            blocks.put_nowait(block)

    loop.add_reader(pipe.fileno(), receive)
    wanted = await work
    server = await DirectServer.connect(engine, wanted.settings)
    gc.collect()
    gc.freeze()  # what is there now stays, so the collector need not look at it again
    try:
        reporter = _Reporter(pipe)
        runner = BlockRunner(server.answer, wanted.rows, wanted.blocks, wanted.output, wanted.limit, reporter.told)
        await run_all(runner, blocks, reporter.answered)
    finally:
        server.close()


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same, if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BminfError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """``python -c ... ENGINE_FD PIPE_FD``. What a terminal sends to all processes is the business of the model's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    engine, pipe = socket.socket(fileno=int(sys.argv[1])), Connection(int(sys.argv[2]))
    try:
        uvloop.run(_answer_blocks(engine, pipe))
    except asyncio.CancelledError:
        return
    except Exception as error:
        if not isinstance(error, (BminfError, OSError)):
            _log.error("an error in the process of a batch's rows", exc_info=error)
        with suppress(OSError):
            pipe.send(Failed(_sendable(error)))
