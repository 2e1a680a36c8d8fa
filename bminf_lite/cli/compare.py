"""``compare``: the error of quantization, in predictions and layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import UsageError
from ._options import (
    OUTPUT,
    PATH,
    device_option,
    json_option,
    kv_cache_option,
    memory_limit_option,
    model_argument,
    progress_callback,
    require_number,
    text_argument,
    tokens_option,
    window_options,
)

if TYPE_CHECKING:
    from ..evaluation.compare import Comparison, LinearReport

MAX_SHOWN = 5


@click.command()
@model_argument
@click.argument("reference", metavar="REFERENCE", type=PATH)
@text_argument
@click.option(
    "--report", metavar="OUT.html", type=OUTPUT, help="Write plots and a table of all layers, as one HTML file."
)
@window_options
@tokens_option
@device_option
@memory_limit_option
@kv_cache_option
@json_option
def compare(
    model: Path,
    reference: Path,
    text: Path,
    report: Path | None,
    window: int | None,
    stride: int | None,
    tokens: int | None,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    as_json: bool,
) -> None:
    """Compare a model with its original on a text.

    Reads FILE (UTF-8 text, or JSONL with a "text" per line) with the int8 model in the folder MODEL and the float model
    in REFERENCE, a layer of each at a time, so that neither has to fit in memory. Prints the ratio of their
    perplexities, the Kullback-Leibler divergence of their predictions, and the layers that lose most; --report and
    --json have every layer. --kv-cache is that of the int8 model.

    Of models that make vectors of texts, FILE has a text per line (or JSONL): prints the cosine of each text's two
    vectors, and how pairs of texts rank.

    \b
    Example:
      bminf-lite compare Llama-3.2-1B-int8 Llama-3.2-1B wiki.test.txt --tokens 16384
      bminf-lite compare MODEL REFERENCE texts.jsonl --report report.html
      bminf-lite compare all-MiniLM-L6-v2-int8 all-MiniLM-L6-v2 texts.txt
    """
    from tqdm import tqdm

    from ..evaluation import measure
    from ..evaluation.corpus import parse_config
    from ..evaluation.report import check_report_path, write_report

    if not parse_config(model).generates:
        given = {"--report": report, "--window": window, "--stride": stride, "--tokens": tokens}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(wrong)}: for models that generate text; this one makes vectors")
        _compare_vectors(model, reference, text, device, memory_limit, as_json)
        return
    if report is not None:
        check_report_path(report)
    with tqdm(unit="part", desc="comparing", disable=None, leave=False) as bar:
        result = measure.compare(
            model,
            reference,
            text,
            window=window,
            stride=stride,
            tokens=tokens,
            device=device,
            memory_limit=memory_limit,
            kv_cache=kv_cache,
            progress=progress_callback(bar),
        )
    click.echo(json.dumps(result.to_dict()) if as_json else lines(result, was_searched(model)))
    if report is not None:  # last, so that a full disk does not lose the results above
        write_report(report, result, model, reference, text)
        click.echo(f"wrote {report}", err=True)
    for side in (result.divergence.reference, result.divergence.perplexity):
        require_number(side.value)


def _compare_vectors(
    model: Path, reference: Path, text: Path, device: str, memory_limit: int | None, as_json: bool
) -> None:
    """Compare models that make vectors of texts."""
    from ..evaluation.vectors import compare_vectors
    from ..text.text_lines import read_text_lines

    texts = [line.text for line in read_text_lines(text)]
    result = compare_vectors(model, reference, texts, device, memory_limit)
    click.echo(json.dumps(result.to_dict()) if as_json else result.summary())


def was_searched(model: Path) -> bool:
    """Whether a search chose how the products of the checkpoint in the folder ``model`` are quantized."""
    from ..checkpoint.manifest import MANIFEST_FILE
    from ..checkpoint.reader import MAX_LIST_BYTES, read_json

    manifest = model / MANIFEST_FILE
    return manifest.is_file() and "trade" in (read_json(manifest, MAX_LIST_BYTES).get("cost") or {})


def lines(result: Comparison, was_searched: bool = False) -> str:
    """The comparison as text: predictions, the products with the least signal to noise, and what to try next.

    ``was_searched`` is that of :func:`.advice.advice`.
    """
    from ..evaluation.advice import ProductCounts, advice

    found = sorted(result.linears, key=lambda linear: linear.own.snr_db)[:MAX_SHOWN]
    width = max(len(linear.name) for linear in found)
    title = f"least signal to noise of its own, of {len(result.linears)} products:"
    worst = [linear.tensors[0] for linear in found if "w8a8" in linear.scheme]
    tips = advice(
        result.divergence.kl, ProductCounts.of(linear.scheme for linear in result.linears), worst, was_searched
    )
    return "\n".join(
        [result.divergence.summary(), "", title, *(linear_line(linear, width) for linear in found)]
        + ["", *tips] * bool(tips)
    )


def linear_line(linear: LinearReport, width: int) -> str:
    """One product; ``width`` is that of the longest name."""
    channel, largest = linear.input.channels[0]
    return (
        f"  {linear.name:{width}}  {linear.scheme:5}  {linear.own.snr_db:5.1f} dB, accumulated "
        f"{linear.accumulated.snr_db:5.1f} dB; input up to {largest:.0f} times its rms (channel {channel})"
    )
