"""The actor of a batch: a model, and the blocks that it answers, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ..api import Model
from ..batch.job import BatchJob
from ..batch.local import make_runner
from ..batch.output import BatchOutput
from ..batch.plan import BatchBlock
from ..batch.rows import RowFormat
from ..batch.runner import BlockFormat, BlockRunner, Counts
from ..server.direct import DirectServer


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

    async def start(self) -> int:
        """Load the model. Returns the blocks that should be under way, so that the engine never waits for a row.

        Those are the blocks of the rows that are under way, and one that ends while the next one begins.
        """
        self._model: Model = await asyncio.to_thread(self.job.open_model)
        self._server = await DirectServer.start(self._model, self.job.settings(self._model))
        blocks = self.make_blocks(self.job.rows(self._model))
        self._runner: BlockRunner = make_runner(
            self.job, self._model, self._server, self.output, blocks, lambda result: self._counts.add(result)
        )
        return -(-self._runner.limit // self.block_rows) + 1

    async def answer(self, block: BatchBlock) -> Counts:
        """Answer the rows of a block that nothing has answered before, and commit the block."""
        return await self._runner.run(block)

    async def progress(self, seconds: float) -> Counts:
        """What was answered since the last call, after a pause."""
        await asyncio.sleep(seconds)
        counts, self._counts = self._counts, Counts()
        return counts
