"""``batch``: answer the rows of a file, on this machine or by the replicas of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import UserPath, context_option, given_options, model_options, sampling_options, stop_option

if TYPE_CHECKING:
    from ..batch.runner import Counts


@click.command()
@model_options
@click.argument("input", metavar="IN", type=UserPath())
@click.argument("output", metavar="OUT", type=UserPath())
@sampling_options
@stop_option
@click.option("--served-model-name", multiple=True, metavar="NAME",
              help="The model's name in rows, or several; by default that of its folder.")  # fmt: skip
@context_option
@click.option("--max-batch", type=int, metavar="N", help="The most sequences to decode together.")
@click.option("--block-rows", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
              help="Rows of a block, which is written when it is complete.")  # fmt: skip
def batch(
    model: Path,
    input: str,
    output: str,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    stop: tuple[str, ...],
    served_model_name: tuple[str, ...],
    context: int | None,
    max_batch: int | None,
    block_rows: int,
    seed: int | None,
    **sampling: float | None,
) -> None:
    """Answer each row of IN, and write the rows with their answers to OUT.

    IN is a file of JSON lines or a folder of such files. A row has "prompt" or "messages", and the fields of requests
    to the server, such as "max_tokens" or "response_format"; other fields come out as they are. Or the rows are those
    of OpenAI's batch files. OUT is a file, if it ends with .jsonl, or a folder with a file for each block of rows. The
    same command goes on with a batch that was ended. Sampling options are for rows that give none.

    \b
    Example:
      bminf-lite batch MODEL questions.jsonl answers.jsonl --max-new-tokens 256
    """
    from ..server import require_extra

    require_extra("batch")
    from ..batch.job import BatchJob, LoadOptions
    from ..batch.local import plan_input, run_local
    from ..batch.storage import LocalStorage

    job = BatchJob(
        str(model),
        LoadOptions(device, memory_limit, max_batch, kv_cache, context),
        sampling=given_options(sampling, stop),
        seed=seed,
        served_model_names=served_model_name,
    )
    plan, job = plan_input(LocalStorage(), input, job, block_rows)
    started = time.perf_counter()
    with progress_bar(plan.num_rows) as (began, told):
        counts = run_local(job, plan, Path(output), told, began)
    click.echo(summary(counts, time.perf_counter() - started), err=True)


@contextmanager
def progress_bar(num_rows: int) -> Iterator[tuple[Callable[[int], None], Callable[[Mapping[str, Any]], None]]]:
    """A bar of rows with the speed in tokens/s, and what tells it of rows: done before, and one that is answered."""
    from tqdm import tqdm

    from ..batch.rows import usage_of

    tokens, started = 0, time.perf_counter()
    with tqdm(total=num_rows, unit="row", disable=None) as bar:

        def began(rows: int) -> None:
            bar.initial = rows
            bar.update(rows)

        def told(result: Mapping[str, Any]) -> None:
            nonlocal tokens
            tokens += usage_of(result)[1]
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
            bar.update()

        yield began, told


def summary(counts: Counts, seconds: float) -> str:
    """What was done, in a line."""
    parts = [f"{counts.rows:,} rows in {seconds:.1f} s"]
    if counts.kept:
        parts.append(f"{counts.kept:,} more of blocks that an earlier run had begun")
    parts.append(f"{counts.prompt_tokens:,} prompt tokens, {counts.new_tokens:,} new tokens")
    parts.append(f"{counts.new_tokens / seconds:.1f} tokens/s")
    if counts.errors:
        parts.append(f"{counts.errors:,} rows have errors: their field error says why")
    return "; ".join(parts)
