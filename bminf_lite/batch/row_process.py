"""The process that reads a batch's rows, asks for their answers and writes them, beside the process of the model.

What a row costs beside the model is Python: JSON, checks, tokens, text, files. In the model's process it would share an
interpreter with the engine, whose steps would wait for it. So that process only gets token ids and gives token ids,
over the socket that a server's HTTP processes have too (:mod:`bminf_lite.server.engine_connection`).

:class:`RowProcess` is the model's side, and :func:`main` the other. They send each other Python's objects over a pipe:
one way a :class:`Work` and then blocks; the other way a :class:`Progress` now and then, an :class:`Answered` for each
block, and a :class:`Failed` at an error, which ends the process. It also ends when the pipe closes, so also when the
model's process is killed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import uvloop

from ..api import Model
from ..errors import BminfError
from ..server.client import EngineFailure
from ..server.direct import SECONDS_BETWEEN, DirectServer
from ..server.engine_server import EngineServer
from ..server.launcher import python_command
from ..server.model_info import model_info, pooling_service
from ..server.settings import ServerSettings
from .output import BatchOutput
from .plan import BatchBlock
from .rows import RowFormat
from .runner import BlockFormat, BlockRunner, Counts, run_all

PROGRESS_SECONDS = 0.1
"""Between two reports of progress."""
END_SECONDS = 30.0
"""How long the process may finish what it writes when it is to end."""

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


class RowProcess:
    """The process, for the model's side. Start it before the model is loaded, which takes longer; :meth:`close` it.

    :meth:`serve` gives it a model, then :meth:`answer` blocks; :meth:`receive` waits for what it reports. ``fileno`` is
    readable when there is a report.
    """

    def __init__(self) -> None:
        self._server: EngineServer | None = None
        self._engine, engine = socket.socketpair()
        self._pipe, pipe = Pipe()
        fds = engine.fileno(), pipe.fileno()
        with engine, pipe:
            self._process = subprocess.Popen(
                [*python_command(__name__), *map(str, fds)], stdin=subprocess.DEVNULL, pass_fds=fds
            )

    def serve(self, model: Model, work: Work) -> None:
        """Let the process prepare itself for a model that is loaded, and need not be warm yet."""
        adapters, pooling = model.adapter_store, pooling_service(model)
        self._server = EngineServer(model.engine, model_info(model), adapters=adapters, pooling=pooling)
        self._server.serve(self._engine, SECONDS_BETWEEN)
        self._send(work)

    def answer(self, *blocks: BatchBlock) -> None:
        """Let blocks follow those that are to be answered. They begin in order."""
        self._send(blocks)

    def fileno(self) -> int:
        """The file descriptor of the reports."""
        return self._pipe.fileno()

    def receive(self) -> Progress | Answered:
        """The next report. Raises what ended the process: ``OSError``, ``EngineFailure`` or another error."""
        try:
            report: Progress | Answered | Failed = self._pipe.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise EngineFailure(
                f"the process of the batch's rows has ended with {code}; what is finished is kept: the same command "
                "goes on"
            ) from None
        if isinstance(report, Failed):
            raise report.error
        return report

    def close(self) -> None:
        """End the process. It finishes what it is writing. May be called again."""
        self._pipe.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            if self._server is not None:
                self._server.close()
            self._engine.close()

    def _send(self, message: object) -> None:
        with suppress(BrokenPipeError):  # receive says why it has ended
            self._pipe.send(message)


# -- in the process ----------------------------------------------------------------------------------------------------


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
