"""``bench``: the speed of a model on this device, and the share of the hardware's limits that it reaches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._options import OUTPUT, PATH, Command, device_option, kv_cache_option, memory_limit_option

if TYPE_CHECKING:
    from ..bench.runner import Measurement


def numbers(value: str) -> tuple[int, ...]:
    """Whole numbers separated by commas, such as ``512,2048``."""
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 512,2048") from None


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
@click.option("--kernels", is_flag=True, help="Time single kernels over a sweep of sizes; needs no model.")
@device_option
@memory_limit_option
@kv_cache_option
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
    kernels: bool,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
) -> None:
    """Measure the speed of a model.

    Processes random prompts (pp), or encodes sources (enc), and decodes tokens (tg) with the model in the folder MODEL,
    or with random weights of a shape. Prints tokens per second (the median of the runs ± their standard deviation), the
    bytes that a token must move, and the share of this device's measured rates that is reached. If layers are streamed
    because they do not fit the memory limit, it also prints the bytes copied for a token, the share of the link's
    speed, and the speed that "plan" predicts.

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
      bminf-lite bench --kernels -o csv
    """
    from .. import backend
    from ..bench import plot as drawing
    from ..bench.model import checkpoint_model, random_model, read_shape, shape_names
    from ..bench.report import Report
    from ..bench.runner import make_profiler, run_tests, time_kernels, trace_step, workloads

    if (model is None) == (shape is None) and not (kernels and model is None):
        raise click.UsageError(f"Give either MODEL or --shape, which is one of: {', '.join(shape_names())}.")
    if trace and max(len(batches), len(depths)) > 1:
        raise click.UsageError("--trace shows one step: give one -b and one -d.")
    if plot is not None:
        drawing.check_target(plot)
    tests = workloads(prompts, generated, depths, batches)
    if not tests and not kernels:
        raise click.UsageError("There is nothing to run: -p and -n are both 0.")
    config = None if shape is None else read_shape(shape)
    with closing(backend.create(device, memory_limit)) as ops:
        profiler = make_profiler(ops)
        report = Report(ops.describe(), profiler.versions())
        if config is not None:
            name = Path(str(shape)).name.removesuffix(".json")
            report.bench_model = random_model(name, config, ops, kv_cache, recipe)
        elif model is not None:
            report.bench_model = checkpoint_model(model, ops, kv_cache)
        if report.bench_model is not None and trace:
            report.trace = trace_step(report.bench_model, profiler, batches[0], depths[0])
        if report.bench_model is not None and not trace and not kernels:
            report.measurements = run_tests(report.bench_model, profiler, tests, repetitions, _show_progress)
        if kernels:
            report.kernels = time_kernels(profiler)
    with closing(backend.create(device)) as ops:  # with all of the device's memory free
        report.ceilings = make_profiler(ops).ceilings()
    click.echo({"md": report.markdown, "json": report.json, "csv": report.csv}[output]())
    if plot is not None:
        drawing.save(report, plot)


def _show_progress(measurement: Measurement) -> None:
    click.echo(f"{measurement.test}: {measurement.speed:.2f} ± {measurement.deviation:.2f} tokens/s", err=True)
