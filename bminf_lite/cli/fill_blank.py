"""``fill-blank``: a text with its blanks filled."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ._options import (
    device_option,
    given_options,
    kv_cache_option,
    memory_limit_option,
    model_argument,
    sampling_options,
)
from ._prompts import read_stdin


@click.command("fill-blank")
@model_argument
@click.argument("text", metavar="TEXT | -")
@device_option
@memory_limit_option
@kv_cache_option
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object that also lists the fillings.")
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

    Prints TEXT with each <span> replaced by a filling of the model in the folder MODEL, for example CPM-2 or T5. With -
    the text is read from stdin. The defaults of sampling options are those of the model's generation_config.json, or
    else those in brackets.

    \b
    Example:
      bminf-lite fill-blank CPM-2-int8 "今天天气<span>，我们去<span>吧。"
      bminf-lite fill-blank CPM-2-int8 - --json < text.txt
    """
    from ..api import load
    from ..text.infilling import fill_spans

    given = given_options(sampling)
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
