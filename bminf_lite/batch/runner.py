"""Answers the rows of blocks. Rows of several blocks are under way at a time, so that no block waits for its slowest.

A :class:`BlockRunner` feeds one server: the number of rows under way is bounded for all blocks together, and rows start
in the order in which their blocks were begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..server.direct import DirectAnswer
from .output import BatchOutput, Journal
from .plan import BatchBlock
from .rows import Row, RowError, RowFormat, failed, has_error, usage_of

QUEUE_FULL = 429
RETRY_SECONDS = 0.1
ROWS_PER_SEQUENCE = 2
"""Rows under way for each sequence of a step: one computes, the other's prompt is in tokens and waits."""


@dataclass
class Counts:
    """What was done: rows, those with errors, and tokens. ``kept`` rows are those of a run or a replica that ended."""

    rows: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    kept: int = 0

    def add(self, result: Mapping[str, Any]) -> None:
        """Count a row."""
        prompt, new = usage_of(result)
        self.rows += 1
        self.errors += has_error(result)
        self.prompt_tokens += prompt
        self.new_tokens += new

    def add_all(self, other: Counts) -> None:
        """Add the counts of other rows."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class BlockFormat(Protocol):
    """How a block is read and written."""

    def read(self, block: BatchBlock) -> list[Row]:
        """The rows of a block. Raises ``OSError``."""
        ...

    def encode(self, block: BatchBlock, rows: Sequence[tuple[Row, Mapping[str, Any]]]) -> bytes:
        """The content of a block's file: rows with what was answered."""
        ...


class BlockRunner:
    """Answers blocks of rows, at most ``limit`` rows at a time.

    - ``answer`` answers a request to an interface; what it raises ends the batch.
    - ``told`` is called with the result of each row that is answered.
    """

    def __init__(
        self,
        answer: Callable[[str, bytes], Awaitable[DirectAnswer]],
        rows: RowFormat,
        blocks: BlockFormat,
        output: BatchOutput,
        limit: int,
        told: Callable[[Mapping[str, Any]], None] = lambda result: None,
    ):
        self._answer = answer
        self._rows = rows
        self._blocks = blocks
        self._output = output
        self.limit = limit
        self._room = asyncio.Semaphore(limit)  # which is fair: rows start in order
        self._num_answering = 0
        self._told = told

    async def run(self, block: BatchBlock, has_started: asyncio.Event | None = None) -> Counts:
        """Answer the rows of a block that no earlier run has answered, and commit the block.

        ``has_started`` is set when all its rows are under way or done.
        """
        started = has_started or asyncio.Event()
        counts = Counts()
        rows = await asyncio.to_thread(self._blocks.read, block)
        results = await asyncio.to_thread(self._output.finished, block)
        counts.kept = len(results)
        journal = self._output.journal(block)
        tasks: list[asyncio.Task[None]] = []
        try:
            for row in rows:
                if row.index not in results:
                    await _unless_failed(self._room.acquire(), tasks)
                    tasks.append(asyncio.create_task(self._run_row(row, results, journal, counts)))
                    await asyncio.sleep(0)  # so that the engine begins with the first rows, not after a whole block
            started.set()
            await asyncio.gather(*tasks)
            content = self._blocks.encode(block, [(row, results[row.index]) for row in rows])
            await asyncio.to_thread(self._output.commit, block, content)
        finally:
            started.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if journal is not None:
                journal.close()
        return counts

    async def _run_row(self, row: Row, results: dict[int, Any], journal: Journal | None, counts: Counts) -> None:
        try:
            result = self._rows.result(await self._answered(row))
            if journal is not None:
                journal.append(row.index, result)
            results[row.index] = result
            counts.add(result)
            self._told(result)
        finally:
            self._room.release()

    async def _answered(self, row: Row) -> DirectAnswer:
        try:
            call = self._rows.call(row)
        except RowError as error:
            return failed(error)
        while True:
            is_alone = self._num_answering == 0
            self._num_answering += 1
            try:
                answer = await self._answer(*call)
            finally:
                self._num_answering -= 1
            if answer.status != QUEUE_FULL or is_alone:
                return answer
            await asyncio.sleep(RETRY_SECONDS)  # a row with many completions: it fits when others have ended


async def _unless_failed(waiting: Awaitable[Any], tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait, and raise what a task has raised meanwhile."""
    await waiting
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def run_all(
    runner: BlockRunner, blocks: asyncio.Queue[BatchBlock], ended: Callable[[BatchBlock, Counts], None]
) -> None:
    """Answer blocks in order until this task is cancelled. ``ended`` is called for each block that is committed.

    The next one begins when all rows of the one before are under way. Raises what ends a block.
    """
    tasks: dict[asyncio.Task[Counts], BatchBlock] = {}

    async def begin() -> None:
        block, started = await blocks.get(), asyncio.Event()
        tasks[asyncio.create_task(runner.run(block, started))] = block
        await started.wait()

    beginning = asyncio.create_task(begin())
    try:
        while True:
            await asyncio.wait({beginning, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in tasks if task.done()]:
                ended(tasks.pop(task), task.result())
            if beginning.done():
                beginning = asyncio.create_task(begin())
    finally:
        beginning.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(beginning, *tasks, return_exceptions=True)
