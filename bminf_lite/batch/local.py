"""A batch on this machine: JSON lines and OpenAI's batch files, without Ray."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from ..api import Model
from ..errors import BminfError, UsageError
from .job import BatchJob, is_openai
from .line_blocks import LineBlocks
from .output import BatchOutput
from .plan import BLOCK_ROWS, JSONL, BatchBlock, Plan, plan_lines, read_lines
from .row_process import RowProcess
from .row_worker import Progress, Work
from .runner import ROWS_PER_SEQUENCE, BlockFormat, Counts
from .storage import LocalStorage, Storage

BLOCKS = ".blocks"
"""What is added to the name of an output file for the folder of its blocks."""


def plan_input(storage: Storage, path: str, job: BatchJob, block_rows: int = BLOCK_ROWS) -> tuple[Plan, BatchJob]:
    """The plan of a file, or of a folder of files, of JSON lines; and the job for its kind of rows.

    Raises ``UsageError`` for files of other kinds, and ``BminfError`` for a file that cannot be read.
    """
    paths = storage.inputs(path)
    if others := [p for p in paths if not p.endswith(JSONL)]:
        raise UsageError(f"{others[0]}: is no file of JSON lines, whose names end with {', '.join(JSONL)}")
    try:
        plan = plan_lines(storage, paths, block_rows)
        first = read_lines(storage, plan.blocks[0])
    except OSError as error:
        raise BminfError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    return plan, replace(job, is_openai=is_openai(first))


def run_local(
    job: BatchJob,
    plan: Plan,
    out: Path,
    told: Callable[[Counts], None] = lambda counts: None,
    began: Callable[[int], None] = lambda rows: None,
) -> Counts:
    """Answer the rows of ``plan`` by a model in this process; see :func:`run_blocks`.

    ``told`` is called with what was answered since the last call.
    """
    storage = LocalStorage()

    def answer(output: BatchOutput, blocks: Sequence[BatchBlock]) -> Counts:
        process = RowProcess()
        with closing(process), job.open_model() as model, closing(process):  # which ends before the model does
            process.serve(model, make_work(job, model, output, LineBlocks(storage, job.rows(model))))
            job.warm_up(model)
            process.answer(*blocks)
            return _received(process, len(blocks), told)

    return run_blocks(job, plan, storage, str(out), answer, began)


def run_blocks(
    job: BatchJob,
    plan: Plan,
    storage: Storage,
    out: str,
    answer: Callable[[BatchOutput, Sequence[BatchBlock]], Counts],
    began: Callable[[int], None] = lambda rows: None,
    suffix: str = ".jsonl",
) -> Counts:
    """Answer the rows of ``plan`` into the folder ``out``, or into a file if the name ends as those of JSON lines do.

    A run that was ended goes on where it was: rows that are finished are not answered again. ``began`` is called with
    the number of rows in blocks that were complete before, then ``answer`` with the others, whose files end with
    ``suffix``. Raises ``BminfError`` if the output cannot be written or the engine fails; what is finished is kept.
    """
    is_file = out.endswith(JSONL)
    if is_file and not (isinstance(storage, LocalStorage) and suffix == ".jsonl"):
        raise UsageError(f"{out}: must be a folder: blocks of Parquet or of an object store are not joined to a file")
    folder = out + BLOCKS if is_file else out
    output = BatchOutput(storage, folder, suffix)
    if is_file and Path(out).exists() and not (Path(folder).is_dir() and output.has_rows()):
        raise UsageError(f"{out}: the file exists; name a new one")
    with _alone_in(Path(folder)) if isinstance(storage, LocalStorage) else nullcontext():
        done = output.begin(job.describe(plan))
        blocks = [block for block in plan.blocks if block.name not in done]
        began(plan.num_rows - sum(block.num_rows for block in blocks))
        try:
            counts = answer(output, blocks) if blocks else Counts()
            if is_file:
                join(output, plan.blocks, Path(out))
        except OSError as error:
            problem = f"{error.strerror or error}; what is finished is kept: the same command goes on"
            raise BminfError(f"{error.filename or folder}: cannot be written: {problem}") from error
        if is_file:
            remove(Path(folder))
    return counts


def _received(process: RowProcess, num_blocks: int, told: Callable[[Counts], None]) -> Counts:
    """Wait until all blocks are committed; returns the counts of all."""
    total = Counts()
    while num_blocks:
        report = process.receive()
        if isinstance(report, Progress):
            told(report.counts)
        else:
            total.add_all(report.counts)
            num_blocks -= 1
    return total


def make_work(job: BatchJob, model: Model, output: BatchOutput, blocks: BlockFormat) -> Work:
    """What the process of the rows has to know of a batch that a model answers."""
    limit = ROWS_PER_SEQUENCE * model.engine_config.max_num_seqs
    return Work(job.settings(model), job.rows(model), blocks, output, limit)


def join(output: BatchOutput, blocks: Sequence[BatchBlock], out: Path) -> None:
    """Write the blocks' files behind each other into a file, which appears when it is complete. Raises ``OSError``."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        with open(partial, "wb") as file:
            for block in blocks:
                with open(output.file(block), "rb") as part:
                    shutil.copyfileobj(part, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, out)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def remove(folder: Path) -> None:
    """Remove the folder of a batch that is complete. A kill leaves at most a hidden folder, and no half of a batch."""
    hidden = folder.with_name(f".{folder.name}.complete")
    shutil.rmtree(hidden, ignore_errors=True)  # of a kill before
    with suppress(OSError):
        os.rename(folder, hidden)
        folder = hidden
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is missing.

    Raises ``UsageError`` if another process of this machine holds it, and ``BminfError`` if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BminfError(f"{folder}: cannot be used: {error.strerror or error}; name another output") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"{folder}: another process writes there; wait for it, or name another output") from None
    except OSError:
        pass  # a network file system without locks
    try:
        yield
    finally:
        os.close(descriptor)
