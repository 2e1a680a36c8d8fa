"""The process that reads a batch's rows, asks for their answers and writes them, beside the process of the model.

What a row costs beside the model is Python: JSON, checks, tokens, text, files. In the model's process it would share an
interpreter with the engine, whose steps would wait for it. So that process only gets token ids and gives token ids,
over the socket that a server's HTTP processes have too (:mod:`bminf_lite.server.engine_connection`).
:mod:`.row_worker` is what runs there.
"""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from multiprocessing.connection import Pipe

from ..api import Model
from ..server.client import EngineFailure
from ..server.direct import SECONDS_BETWEEN
from ..server.engine_server import EngineServer
from ..server.launcher import python_command
from ..server.model_info import model_info, pooling_service
from .plan import BatchBlock
from .row_worker import Answered, Failed, Progress, Work

END_SECONDS = 30.0
"""How long the process may finish what it writes when it is to end."""


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
                [*python_command("bminf_lite.batch.row_worker"), *map(str, fds)], stdin=subprocess.DEVNULL, pass_fds=fds
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
            if self._server is not None:  # otherwise it has nothing to write
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
