"""``migrate``: a float checkpoint to int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ._options import OUTPUT, PATH, completes, device_option, progress_callback, size_text
from ._progress import Stages, shown

if TYPE_CHECKING:
    from ..checkpoint.manifest import MigrationReport, TensorReport


@click.command()
@click.argument("source", metavar="SOURCE", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option(
    "--recipe",
    show_default="w8a8-rotate-all, or w8a8 with --portable",
    metavar="w8a8|w8a16|w8a8-rotate|w8a8-rotate-all|w8a8-smooth|auto|FILE",
    shell_complete=completes("w8a8", "w8a16", "w8a8-rotate", "w8a8-rotate-all", "w8a8-smooth", "auto", or_file=True),
    help="int8 weights with int8 (w8a8) or float (w8a16) activations; w8a8 after rotations that spread "
    "outliers, of which that of down projections' input must be supported by other readers "
    "(w8a8-rotate); w8a8 after rotations of every product's input (w8a8-rotate-all); w8a8 with outliers "
    "moved into the weights (w8a8-smooth); for each product what loses least in about "
    "the same time, by measured divergence (auto); or a TOML file.",
)
@click.option(
    "--calibrate",
    type=PATH,
    metavar="FILE",
    help='Text to calibrate on, or JSONL with a "text" per line; w8a8-smooth and auto need it.',
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="How many pieces of that text, of up to 512 tokens each.",
)
@click.option(
    "--max-divergence",
    type=float,
    metavar="NATS",
    help="Fail, and write nothing, if the mean divergence of predictions on a held-out part of that text is larger. "
    "Of a model that makes vectors it is the mean of 1 - cosine.",
)
@click.option(
    "--target-divergence",
    type=float,
    metavar="NATS",
    help="With --recipe auto: find the fastest assignment of quantizations to products whose mean divergence "
    "on a held-out part of that text is at most this.",
)
@click.option(
    "--plot",
    type=OUTPUT,
    metavar="FILE",
    help="With --target-divergence: draw divergence over time, as .png, .svg or .pdf.",
)
@click.option(
    "--offline-only",
    is_flag=True,
    help="Rotate in the weights alone, so that other readers open the result. With a recipe that rotates, "
    "such as auto, or with --target-divergence.",
)
@device_option
@click.option(
    "--gpus",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="With --calibrate: divide the products among N GPUs, from the one of --device on. The result is that of one.",
)
@click.option(
    "--merge", metavar="FOLDER", type=PATH, help="Merge the LoRA adapter that PEFT saved in FOLDER before quantizing."
)
@click.option("--dry-run", is_flag=True, help="Check the source, and list how each tensor would be stored.")
@click.option(
    "--portable",
    is_flag=True,
    help="Write what other readers open: without --recipe this is w8a8, and a recipe that rotates inputs needs "
    "--offline-only too. Matrices "
    "that they open only as float (GPT-2's) stay float in the file, about four times as large, and are "
    "quantized when they are loaded.",
)
@click.option(
    "--force", is_flag=True, help="Replace OUT if it is a migrated checkpoint in which no file was added or changed."
)
def migrate(
    source: Path,
    out: Path,
    recipe: str | None,
    calibrate: Path | None,
    samples: int,
    max_divergence: float | None,
    target_divergence: float | None,
    plot: Path | None,
    offline_only: bool,
    device: str,
    gpus: int,
    merge: Path | None,
    dry_run: bool,
    portable: bool,
    force: bool,
) -> None:
    """Migrate a checkpoint to int8.

    Reads the Hugging Face folder SOURCE (safetensors, or PyTorch's .bin files, in fp32, fp16 or bf16), or the .gguf
    file SOURCE, and writes the folder OUT, which appears complete or not at all. Calibration and the measure of its
    cost run on --device.

    \b
    Example:
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8 --recipe w8a16 --dry-run
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8 --recipe w8a8-rotate
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8 --recipe w8a8-rotate --offline-only
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8 --merge adapters/french
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8 --recipe auto --calibrate text.jsonl
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8 --recipe auto --calibrate text.jsonl --target-divergence 1e-3
    """
    from ..bench.plot import check_target, save_trade
    from ..checkpoint.recipe import load_recipe
    from ..migration.budget import searches
    from ..migration.migrate import migrate as run

    if plot is not None:
        if target_divergence is None:
            raise UsageError("--plot draws the trade of --target-divergence; give that too")
        check_target(plot)
    work = partial(
        run,
        source,
        out,
        recipe,
        calibrate=calibrate,
        samples=samples,
        max_divergence=max_divergence,
        target_divergence=target_divergence,
        offline_only=offline_only,
        device=device,
        gpus=gpus,
        merge=merge,
        force=force,
        dry_run=dry_run,
        portable=portable,
    )
    has_target = target_divergence is not None
    stages = Stages(has_target or (recipe is not None and searches(load_recipe(recipe))), has_target)
    report = _with_progress(work, None if calibrate is None else stages)
    if dry_run:
        click.echo("\n".join(tensor_lines(report.tensors)))
    if report.calibration:
        click.echo("\n".join(product_lines(report.calibration["products"])))
    click.echo(f"{'would write' if dry_run else 'wrote'} {out}, {report}")
    if not report.cost:
        click.echo("\n".join(next_steps(report, source, out)))
    else:
        trade = report.cost.get("trade")
        lines = [] if not trade else trade_lines(trade) if has_target else choice_lines(trade)
        click.echo("\n".join([*lines, cost_line(report.cost), *advice_lines(report)]))
        if plot and trade:
            save_trade(trade, plot)
            click.echo(f"wrote {plot}")


def next_steps(report: MigrationReport, source: Path, out: Path) -> list[str]:
    """What a result that was not measured is expected to cost, and how to measure it."""
    from ..evaluation.advice import expectation

    measuring = f"measure it on a text of yours: bminf-lite compare {out} {source} TEXT"
    expected = expectation(report.recipe.name) if report.generates else ""  # vectors have no divergence per token
    return [line for line in (expected, measuring) if line]


def advice_lines(report: MigrationReport) -> list[str]:
    """What to try next for a result that was measured."""
    from ..checkpoint.recipe import RotatedInputs
    from ..evaluation.advice import ProductCounts, advice

    cost, recipe = report.cost, report.recipe
    if cost is None or cost.get("kl") is None:
        return []
    if report.calibration:
        schemes = [
            p["scheme"] + (f" H{p['rotation']}" if p["rotation"] > 1 else "") for p in report.calibration["products"]
        ]
    else:
        rotation = " H" if recipe.rotated_inputs is RotatedInputs.ALL else ""
        schemes = [tensor.scheme.value + rotation for tensor in report.tensors]
    return advice(cost["kl"], ProductCounts.of(schemes), was_searched="trade" in cost)


def _with_progress(work: Callable[..., MigrationReport], stages: Stages | None) -> MigrationReport:
    """Migrate, and show how far it is; ``stages`` are those of a migration with a text."""
    from tqdm import tqdm

    if stages is not None:
        with shown(stages) as progress:
            return work(
                progress=progress.writing, calibration_progress=progress.calibration, cost_progress=progress.measuring
            )
    with tqdm(unit="B", unit_scale=True, desc="migrating", disable=None, leave=False, delay=0.1) as bar:
        return work(progress=progress_callback(bar))


def product_lines(products: Sequence[dict[str, Any]]) -> list[str]:
    """A calibration's decision for each product, in columns; errors of its output are signal-to-noise ratios."""
    names = [product["tensors"][0] + (", ..." if len(product["tensors"]) > 1 else "") for product in products]
    width = max(map(len, names), default=0)
    return [
        f"{name:{width}}  {p['scheme']:5}  smoothing {'none' if p['exponent'] is None else p['exponent']!s:4}  "
        f"{p['rounding']:7}  {decibel_text(p['error_before']):>8} -> {decibel_text(p['error']):>8}"
        + (f"  rotated by {p['rotation']}" if p["rotation"] > 1 else "")
        + (f"  inputs in fp16: {', '.join(map(str, p['outlier_columns']))}" if p["outlier_columns"] else "")
        for name, p in zip(names, products, strict=True)
    ]


def decibel_text(error: float) -> str:
    """A relative squared error as a signal-to-noise ratio."""
    return f"{-10 * math.log10(error):.1f} dB" if error > 0 else "exact"


def trade_lines(trade: Mapping[str, Any]) -> list[str]:
    """The trade of a migration with a target as a table, and what the next step in either direction costs."""
    points, chosen = trade["points"], trade["chosen"]
    fastest = points[0]["request_seconds"]
    around = {0, len(points) - 1, chosen - 1, chosen, chosen + 1} & set(range(len(points)))
    measured = {number for number, point in enumerate(points) if point["measured"] is not None}
    evenly = {round(i * (len(points) - 1) / 8) for i in range(9)}
    lines = [
        f"trade on {trade['times_of']}: the fastest assignments, each with its expected and its measured divergence,",
        "the time of all products for a request and for its prompt alone, and the product that it changes",
        f"  {'':4}{'expected':>9}  {'measured':>9}  {'request':>10}  {'prompt':>10}",
    ]
    for number in sorted(around | measured | evenly):
        point = points[number]
        mark = "->" if number == chosen else ""
        found = "" if point["measured"] is None else f"{point['measured']:.6f}"
        lines.append(
            f"  {mark:4}{point['expected']:9.6f}  {found:>9}  {1e3 * point['request_seconds']:7.3f} ms  "
            f"{1e3 * point['prompt_seconds']:7.3f} ms  {point['change']}"
        )
    time = points[chosen]["request_seconds"]
    correction = points[chosen]["measured"] / points[chosen]["expected"] if points[chosen]["expected"] else 1.0

    def divergence(point: Mapping[str, Any]) -> str:
        measured = point["measured"]
        return f"about {correction * point['expected']:.6f}" if measured is None else f"{measured:.6f}"

    kept = f"kept: {time / fastest - 1:+.1%} time of the fastest assignment"
    steps = [
        f"{name} takes {points[i]['request_seconds'] / time - 1:+.1%} time, divergence {divergence(points[i])}"
        for name, i in (("the next faster", chosen - 1), ("the next more exact", chosen + 1))
        if 0 <= i < len(points)
    ]
    return [*lines, "; ".join([kept, *steps])]


def choice_lines(trade: Mapping[str, Any]) -> list[str]:
    """The assignment that a search without a target chose, beside quantizations of all products alike."""
    rows = [*((f"all products in {how}", point) for how, point in trade["uniform"].items())]
    rows.append(("chosen for each product", trade["assignment"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"compared on held-out tokens; the time is that of all products for a request, on {trade['times_of']}"]
    for name, point in rows:
        found = "not finite" if point["measured"] is None else f"{point['measured']:.6f}"
        lines.append(f"  {name:{width}}  divergence {found:>10}  request {1e3 * point['request_seconds']:7.3f} ms")
    return lines


def cost_line(cost: Mapping[str, Any]) -> str:
    """The error on the held-out text, as one line."""
    if "vectors" in cost:
        if cost["divergence"] is None:
            return "cost: the int8 model's vectors hold a NaN or an infinity"
        of = f"cost: cosine of {cost['vectors']:,} held-out vectors"
        return f"{of} {cost['mean_cosine']:.6f} in the mean, {cost['least_cosine']:.6f} the least"
    if cost["kl"] is None:
        return "cost: the int8 model's logits hold a NaN or an infinity"
    return (
        f"cost on {cost['tokens']:,} held-out tokens: "
        f"perplexity ratio {cost['ratio']:.5f} ± {cost['ratio_error']:.5f}, "
        f"divergence {cost['kl']:.6f} (99.9th percentile {cost['kl_p999']:.4f}), same most likely token "
        f"{cost['agreement']:.2%}"
    )


def tensor_lines(tensors: Sequence[TensorReport]) -> list[str]:
    """Each tensor before and after, in columns."""
    names = [f"{t.name} {list(t.shape)}" for t in tensors]
    width = max(map(len, names), default=0)
    return [
        f"{name:{width}}  {t.source_dtype:4} {size_text(t.bytes_before):>9}  ->  "
        f"{t.scheme.value:5} {size_text(t.bytes_after):>9}"
        for name, t in zip(names, tensors, strict=True)
    ]
