"""The actor of a batch: a model, the process of its rows, and the blocks that they answer, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ..api import Model
from ..batch.job import BatchJob
from ..batch.local import make_work
from ..batch.output import BatchOutput
from ..batch.plan import BatchBlock
from ..batch.row_process import RowProcess
from ..batch.row_worker import Progress
from ..batch.rows import RowFormat
from ..batch.runner import BlockFormat, Counts


@dataclass
class Replica:
    """An asyncio actor of Ray. The driver calls :meth:`start`, then :meth:`answer` for several blocks at a time.

    - ``block_rows``: rows of a block. ``make_blocks`` makes what reads and writes blocks.
    """

    job: BatchJob
    output: BatchOutput
    block_rows: int
    make_blocks: Callable[[RowFormat], BlockFormat]
    _counts: Counts = field(default_factory=Counts, init=False)
    _answering: dict[BatchBlock, asyncio.Future[Counts]] = field(default_factory=dict, init=False)
    _error: Exception | None = field(default=None, init=False)

    async def start(self) -> int:
        """Load the model. Returns the blocks that should be under way, so that the engine never waits for a row.

        Those are the blocks of the rows that are under way, and one that ends while the next one begins.
        """
        self._process = RowProcess()
        self._model: Model = await asyncio.to_thread(self.job.open_model)
        blocks = self.make_blocks(self.job.rows(self._model))
        work = make_work(self.job, self._model, self.output, blocks)
        self._process.serve(self._model, work)
        await asyncio.to_thread(self.job.warm_up, self._model)
        asyncio.get_running_loop().add_reader(self._process.fileno(), self._receive)
        return -(-work.limit // self.block_rows) + 1

    async def answer(self, block: BatchBlock) -> Counts:
        """Answer the rows of a block that nothing has answered before, and commit the block."""
        if self._error is not None:
            raise self._error
        answered = self._answering[block] = asyncio.get_running_loop().create_future()
        self._process.answer(block)
        return await answered

    async def progress(self, seconds: float) -> Counts:
        """What was answered since the last call, after a pause."""
        await asyncio.sleep(seconds)
        counts, self._counts = self._counts, Counts()
        return counts

    def _receive(self) -> None:
        """Take a report of the rows' process."""
        try:
            report = self._process.receive()
        except Exception as error:
            self._error = error
            asyncio.get_running_loop().remove_reader(self._process.fileno())
            for answered in self._answering.values():
                if not answered.done():
                    answered.set_exception(error)
            self._answering.clear()
            return
        if isinstance(report, Progress):
            self._counts.add_all(report.counts)
        elif not (answered := self._answering.pop(report.block)).done():  # it may have been cancelled
            answered.set_result(report.counts)
