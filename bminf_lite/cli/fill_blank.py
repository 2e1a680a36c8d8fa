"""``fill-blank``: what belongs in the blanks of a text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ._options import device_option, kv_cache_option, memory_limit_option, model_argument
from ._prompts import read_stdin
from ._sampling import sampling_options, sampling_overrides


@click.command("fill-blank")
@model_argument
@click.argument("text", metavar="TEXT | -")
@device_option
@memory_limit_option
@kv_cache_option
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object that has the fillings by themselves.")
def fill_blank(
    model: Path,
    text: str,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    as_json: bool,
    **sampling: float | None,
) -> None:
    """Fill the blanks of a text.

    Prints TEXT with each <span> in it replaced by what the model in the folder MODEL finds to belong there: CPM-2, T5
    or their kin. With - the text is read from stdin. Options of sampling that are not given come from
    the model's generation_config.json, and else are as in brackets.

    \b
    Example:
      bminf-lite fill-blank CPM-2-int8 "今天天气<span>，我们去<span>吧。"
      bminf-lite fill-blank CPM-2-int8 - --json < text.txt
    """
    from ..api import load
    from ..text.infilling import fill_spans

    given = sampling_overrides(sampling)
    if text == "-":
        text = str(read_stdin().content)
    with load(model, device=device, memory_limit=memory_limit, kv_cache=kv_cache) as loaded:
        fillings = loaded.fill_blank(text, **given)
    whole = fill_spans(text, fillings)
    if as_json:
        value = {"text": whole, "fillings": [asdict(filling) for filling in fillings]}
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(whole)
