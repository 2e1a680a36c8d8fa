"""``batch``: answer the rows of a file, on this machine or by the replicas of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._options import (
    UserPath,
    adapters_option,
    context_option,
    given_options,
    model_options,
    sampling_options,
    stop_option,
)

if TYPE_CHECKING:
    from ..batch.runner import Counts


def _parse_replicas(context: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor auto", context, param) from None


@click.command()
@model_options
@click.argument("input", metavar="IN", type=UserPath())
@click.argument("output", metavar="OUT", type=UserPath())
@sampling_options
@stop_option
@adapters_option
@click.option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    help="The model's name in rows, or several; by default that of its folder.",
)
@context_option
@click.option("--max-batch", type=int, metavar="N", help="The most sequences to decode together.")
@click.option(
    "--block-rows",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Rows of a block, which is written when it is complete.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Use the replicas of this Ray cluster: auto, HOST:PORT or ray://HOST:PORT; local starts one on this machine.",
)
@click.option(
    "--replicas",
    metavar="N|auto",
    callback=_parse_replicas,
    help="With --ray: how often the model is loaded; by default as often as the cluster has room for.",
)
@click.option(
    "--gpus-per-replica",
    type=float,
    metavar="N",
    help="With --ray: 1, a part of 1 to share a GPU, or 0 for CPUs; by default 1 where there are GPUs.",
)
def batch(
    model: Path,
    input: str,
    output: str,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    stop: tuple[str, ...],
    adapter: dict[str, str],
    served_model_name: tuple[str, ...],
    context: int | None,
    max_batch: int | None,
    block_rows: int,
    ray: str | None,
    replicas: int | str | None,
    gpus_per_replica: float | None,
    seed: int | None,
    **sampling: float | None,
) -> None:
    """Answer each row of IN, and write the rows with their answers to OUT.

    IN is a file of JSON lines or a folder of such files. A row has "prompt" or "messages", and the fields of requests
    to the server, such as "max_tokens" or "response_format"; other fields come out as they are. Or the rows are those
    of OpenAI's batch files. OUT is a file, if it ends with .jsonl, or a folder with a file for each block of rows. The
    same command goes on with a batch that was ended. Sampling options are for rows that give none.

    With --ray the replicas of a cluster answer the rows. MODEL, IN and OUT are then on storage that all its machines
    share; IN and OUT may be on an object store (s3://...), and IN may be Parquet files.

    \b
    Example:
      bminf-lite batch MODEL questions.jsonl answers.jsonl --max-new-tokens 256
      bminf-lite batch MODEL questions.jsonl answers.jsonl --adapter french=adapters/french
      bminf-lite batch MODEL s3://bucket/questions s3://bucket/answers --ray auto
    """
    from ..server import require_extra

    require_extra("batch")
    from ..batch.job import BatchJob, LoadOptions
    from ..batch.local import plan_input, run_local
    from ..batch.storage import LocalStorage
    from ..errors import UsageError

    job = BatchJob(
        str(model),
        LoadOptions(device, memory_limit, max_batch, kv_cache, context, adapter or None),
        sampling=given_options(sampling, stop),
        seed=seed,
        served_model_names=served_model_name,
    )
    started = time.perf_counter()
    if ray is not None:
        from ..ray import require_extra as require_ray

        require_ray("batch --ray")
        from ..ray.batch import Cluster, run_ray

        cluster = Cluster(ray, replicas if isinstance(replicas, int) else None, gpus_per_replica)
        with progress_bar() as (began, told):
            counts = run_ray(job, input, output, cluster, block_rows, lambda new: told(new.rows, new.new_tokens), began)
    elif replicas is not None or gpus_per_replica is not None:
        raise UsageError("--replicas and --gpus-per-replica are for clusters: give --ray ADDRESS too")
    else:
        plan, job = plan_input(LocalStorage(), input, job, block_rows)
        try:
            with progress_bar() as (began, told):
                counts = run_local(
                    job,
                    plan,
                    Path(output),
                    lambda new: told(new.rows, new.new_tokens),
                    lambda done: began(plan.num_rows, done),
                )
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt("what is finished is kept: the same command goes on") from error
    click.echo(summary(counts, time.perf_counter() - started), err=True)


@contextmanager
def progress_bar() -> Iterator[tuple[Callable[[int, int], None], Callable[[int, int], None]]]:
    """A bar of rows with the speed in tokens/s, and what tells it: all rows and those done before; rows and tokens."""
    from tqdm import tqdm

    tokens, started = 0, time.perf_counter()
    with tqdm(unit="row", disable=None) as bar:

        def began(rows: int, done: int) -> None:
            bar.total, bar.initial = rows, done
            bar.update(done)

        def told(rows: int, new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
            bar.update(rows)

        yield began, told


def summary(counts: Counts, seconds: float) -> str:
    """What was done, in a line."""
    parts = [f"{counts.rows:,} row{'s' * (counts.rows != 1)} in {seconds:.1f} s"]
    if counts.kept:
        parts.append(f"{counts.kept:,} more that a run or a replica had answered before it ended")
    parts.append(f"{counts.prompt_tokens:,} prompt tokens, {counts.new_tokens:,} new tokens")
    parts.append(f"{counts.new_tokens / seconds:.1f} tokens/s")
    if counts.errors:
        parts.append(f"{counts.errors:,} rows have errors: their field error says why")
    return "; ".join(parts)
