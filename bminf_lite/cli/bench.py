"""``bench``: the speed of a model on this device, and the share of the hardware's limits that it reaches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._options import (
    OUTPUT,
    PATH,
    Command,
    batched_tokens_option,
    device_option,
    gpus_option,
    kv_cache_option,
    memory_limit_option,
    parse_speculative,
)

if TYPE_CHECKING:
    from ..api import Model
    from ..backend.base import Backend
    from ..bench.model import BenchModel
    from ..bench.runner import Measurement
    from ..bench.serving import Load
    from ..engine.speculative import SpeculativeConfig
    from ..models._config import ModelConfig


def numbers(value: str) -> tuple[int, ...]:
    """Whole numbers separated by commas, such as ``512,2048``."""
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 512,2048") from None


def shape_name(shape: str) -> str:
    """The name of a packaged shape, or of a file ``NAME.json``."""
    return Path(shape).name.removesuffix(".json")


def numbers_option(flag: str, name: str, default: str, text: str) -> Callable[[Command], Command]:
    """An option that is a list of :func:`numbers`."""
    return click.option(flag, name, type=numbers, default=default, metavar="N,...", help=f"{text} [{default}]")


@click.command()
@click.argument("model", metavar="[MODEL]", required=False, type=PATH)
@click.option(
    "--shape", metavar="NAME", help='Random int8 weights of a packaged shape (listed by "bench") or a config.json.'
)
@click.option(
    "--recipe", default="w8a8", show_default=True, metavar="NAME", help="How the matrices of a --shape are quantized."
)
@numbers_option("-p", "prompts", "512", "Lengths of prompts, or of an encoder's sources; 0 for none.")
@numbers_option("-n", "generated", "128", "Numbers of tokens to decode; 0 for none.")
@numbers_option("-b", "batches", "1", "Sequences at once.")
@numbers_option("-d", "depths", "0", "Tokens in the cache before a test begins, or in the source that it decodes.")
@click.option("-r", "repetitions", type=click.IntRange(1), default=5, show_default=True, help="Runs of each test.")
@click.option(
    "-o", "output", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True, help="Output format."
)
@click.option(
    "--plot", metavar="FILE.png", type=OUTPUT, help="Draw the results, as curves where -p, -d or -b has several values."
)
@click.option("--trace", is_flag=True, help="Show the parts of one decode step in order, instead of running tests.")
@click.option("--offline", metavar="N", type=click.IntRange(1), help="Time N requests that are there at once.")
@click.option("--online", metavar="RATE", type=float, help="Time requests that arrive at random, RATE per second.")
@click.option("--requests", type=click.IntRange(1), help="Number of requests for --online. [20 times RATE]")
@click.option(
    "--input", "input_tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt."
)
@click.option(
    "--output",
    "output_tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="New tokens of each request.",
)
@click.option("--max-batch", type=click.IntRange(1), help="The most sequences in one step of --offline and --online.")
@batched_tokens_option
@click.option("--kernels", is_flag=True, help="Time single kernels over a sweep of sizes; needs no model.")
@device_option
@gpus_option
@memory_limit_option
@kv_cache_option
@click.option(
    "--speculative",
    metavar="METHOD|JSON",
    callback=parse_speculative,
    help="With --offline or --online: check guesses of the next tokens. [none]",
)
def bench(
    model: Path | None,
    shape: str | None,
    recipe: str,
    prompts: tuple[int, ...],
    generated: tuple[int, ...],
    batches: tuple[int, ...],
    depths: tuple[int, ...],
    repetitions: int,
    output: str,
    plot: Path | None,
    trace: bool,
    offline: int | None,
    online: float | None,
    requests: int | None,
    input_tokens: int,
    output_tokens: int,
    max_batch: int | None,
    max_num_batched_tokens: int,
    kernels: bool,
    device: str,
    gpus: int,
    memory_limit: int | None,
    kv_cache: str,
    speculative: SpeculativeConfig | None,
) -> None:
    """Measure the speed of a model.

    Processes random prompts (pp), or encodes sources (enc), and decodes tokens (tg) with the model in the folder MODEL,
    or with random weights of a shape. Prints tokens per second (the median of the runs ± their standard deviation), the
    bytes that a token must move, and the share of this device's measured rates that is reached. If layers are streamed
    because they do not fit the memory limit, or experts are copied, it also prints the bytes copied for a token, the
    share of the link's speed, and the speed that "plan" predicts. Random weights choose all experts alike.

    With --gpus the bytes, the shares and the memory are those of the first GPU, which waits for the others' sums. The
    trace of a step shows that wait.

    With --offline or --online, requests of exactly --input and --output tokens go through the engine as a caller's do.
    Prints tokens per second, and the median and 99th percentile of the time to the first token and between tokens.

    \b
    Example:
      bminf-lite bench MODEL
      bminf-lite bench --shape llama-3-8b -p 512,2048 -d 0,512
      bminf-lite bench --shape llama-3-8b --recipe w8a8-rotate
      bminf-lite bench --shape cpm-2 -p 256 -n 255 -d 256
      bminf-lite bench --shape llama-3-70b -p 0 -n 16 -r 3 --memory-limit 24GiB
      bminf-lite bench --shape llama-3-8b -p 0 -d 128,1024,8192,32768 --plot context.png
      bminf-lite bench --shape llama-3-8b -p 0 -d 32768 --kv-cache int8
      bminf-lite bench --shape llama-3.2-1b -d 512 --trace
      bminf-lite bench --shape llama-3-8b --kv-cache int8 --offline 4096 --input 128 --output 128
      bminf-lite bench --shape llama-3-8b --online 20 --input 1000 --output 200 --plot times.png
      bminf-lite bench --kernels -o csv
    """
    from .. import backend
    from ..api import load as load_model
    from ..bench import plot as drawing
    from ..bench.model import checkpoint_model, random_model, read_shape, shape_names
    from ..bench.report import Report
    from ..bench.runner import make_profiler, run_tests, time_kernels, trace_step, workloads
    from ..bench.serving import Load
    from ..checkpoint.opened_model import describe_model, open_model

    if (model is None) == (shape is None) and not (kernels and model is None):
        raise click.UsageError(f"Give either MODEL or --shape, which is one of: {', '.join(shape_names())}.")
    if trace and max(len(batches), len(depths)) > 1:
        raise click.UsageError("--trace shows one step: give one -b and one -d.")
    if plot is not None:
        drawing.check_target(plot)
    tests = workloads(prompts, generated, depths, batches)
    if not tests and not kernels:
        raise click.UsageError("There is nothing to run: -p and -n are both 0.")
    _check_load(offline, online, requests, max_batch, trace, kernels, speculative)
    if gpus > 1 and kernels:
        raise click.UsageError("--kernels measures one GPU: leave out --gpus.")
    if shape is not None and speculative is not None and speculative.model is not None:
        raise click.UsageError("--speculative with a model needs MODEL: a shape has no tokens for it to guess.")
    config = None if shape is None else read_shape(shape)

    def make_model(ops: Backend | Sequence[Backend]) -> BenchModel:
        if config is not None:
            name = shape_name(str(shape))
            return random_model(name, config, ops, kv_cache, max_batch, recipe, max_num_batched_tokens, speculative)
        assert model is not None
        return checkpoint_model(model, ops, kv_cache, max_batch, max_num_batched_tokens)

    if offline is not None or online is not None:
        count = offline or requests or max(1, round(20 * (online or 0)))
        load = Load(count, input_tokens, output_tokens, online)
        if model is not None:
            loaded = load_model(
                model,
                device=device,
                memory_limit=memory_limit,
                max_batch=max_batch,
                kv_cache=kv_cache,
                max_num_batched_tokens=max_num_batched_tokens,
                max_queue=_queue(load),
                speculative=speculative,
                gpus=gpus,
            )
            name = model.resolve().name
            _run_load(load, loaded, f"{name}, int8 cache" if kv_cache == "int8" else name, output, plot)
        else:
            assert config is not None
            most = _largest_sum(describe_model(config).config, max_num_batched_tokens)
            ranks = backend.create_ranks(gpus, device, memory_limit, most)
            _run_load(load, *_random_model(load, ranks, make_model), output, plot)
        return
    with closing(backend.create(device)) as ops:  # first: after a large model, reads were measured up to 13 % slower
        ceilings = make_profiler(ops).ceilings()
    most = 1
    if gpus > 1 and config is not None:
        most = _largest_sum(describe_model(config).config, max_num_batched_tokens)
    elif gpus > 1 and model is not None:
        with open_model(model) as opened:
            most = _largest_sum(opened.config, max_num_batched_tokens)
    ranks = backend.create_ranks(gpus, device, memory_limit, most)
    with ExitStack() as stack:
        stack.callback(backend.close_ranks, ranks)
        profiler = make_profiler(ranks[0])
        name = ranks[0].describe()
        report = Report(name if gpus == 1 else f"{gpus} x {name}", profiler.versions(), ceilings)
        if model is not None or shape is not None:
            bench_model = report.bench_model = make_model(ranks)
            if trace:
                report.trace = trace_step(bench_model, profiler, batches[0], depths[0])
            elif not kernels:
                report.measurements = run_tests(bench_model, profiler, tests, repetitions, _show_progress)
        if kernels:
            report.kernels = time_kernels(profiler)
    click.echo({"md": report.markdown, "json": report.json, "csv": report.csv}[output]())
    if plot is not None:
        drawing.save(report, plot)


def _largest_sum(config: ModelConfig, tokens: int) -> int:
    """The most values that ranks add or gather at once in steps of ``tokens`` tokens."""
    return max(config.hidden_size * tokens, config.vocab_size)


def _check_load(
    offline: int | None,
    online: float | None,
    requests: int | None,
    max_batch: int | None,
    trace: bool,
    kernels: bool,
    speculative: SpeculativeConfig | None,
) -> None:
    """Raise ``UsageError`` for options of a load that contradict each other, or have no effect."""
    if offline is not None and online is not None:
        raise click.UsageError("Give either --offline or --online.")
    if online is not None and not 0 < online < math.inf:
        raise click.UsageError(f"--online {online:g}: the rate must be more than 0 requests per second, and finite.")
    if requests is not None and online is None:
        raise click.UsageError("--requests is for --online; --offline N says itself how many there are.")
    is_load = offline is not None or online is not None
    if max_batch is not None and not is_load:
        raise click.UsageError("--max-batch is for --offline and --online; -b gives the sequences of other tests.")
    if speculative is not None and not is_load:
        raise click.UsageError("--speculative is for --offline and --online: the other tests have no text to guess.")
    for name, is_given in (("--trace", trace), ("--kernels", kernels)):
        if is_load and is_given:
            raise click.UsageError(f"{name} is not for --offline and --online: leave one of them out.")


def _queue(load: Load) -> int:
    """The queue that a load needs."""
    from ..engine.config import EngineConfig

    return max(EngineConfig.max_queue, load.requests)


def _random_model(
    load: Load, ranks: Sequence[Backend], make_model: Callable[[Sequence[Backend]], BenchModel]
) -> tuple[Model, str]:
    """A model with random weights for a load, which owns the backends ``ranks``, and its name."""
    from ..api import Model
    from ..backend import close_ranks

    try:
        bench_model = make_model(ranks)
    except BaseException:
        close_ranks(ranks)
        raise
    return Model(bench_model.networks, replace(bench_model.engine_config, max_queue=_queue(load))), bench_model.name


def _run_load(load: Load, model: Model, name: str, output: str, plot: Path | None) -> None:
    """Time a load on a model, and print the result; closes the model."""
    from ..bench import plot as drawing
    from ..bench.serving import run_load, warm_up

    with model:
        warm_up(model, load)
        result = run_load(model, load)
    rows = {"model": name, **result.to_dict()}
    if output == "md":
        click.echo(result.markdown())
    elif output == "json":
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(f"{','.join(rows)}\n{','.join('' if v is None else str(v) for v in rows.values())}")
    if plot is not None:
        drawing.save_serving(result, plot)


def _show_progress(measurement: Measurement) -> None:
    click.echo(f"{measurement.test}: {measurement.speed:.2f} ± {measurement.deviation:.2f} tokens/s", err=True)
