"""``perplexity``: how well a model predicts a text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from ._options import json_option, model_options, require_number, text_argument, tokens_option, window_options


@click.command()
@model_options
@text_argument
@window_options
@tokens_option
@json_option
def perplexity(
    model: Path,
    text: Path,
    window: int | None,
    stride: int | None,
    tokens: int | None,
    device: str,
    memory_limit: int | None,
    kv_cache: str,
    as_json: bool,
) -> None:
    """Measure how well a model predicts a text.

    Prints the perplexity of FILE, UTF-8 text or JSONL with a "text" per line, under the float or int8 model in the
    folder MODEL, with its standard error. Windows overlap, so that each token is predicted once, and after the first
    window from at least WINDOW - STRIDE tokens before it. A stride as long as the window makes separate windows, as
    many published figures are computed.

    \b
    Example:
      bminf-lite perplexity MODEL wiki.test.txt
      bminf-lite perplexity MODEL texts.jsonl --window 2048 --stride 2048 --json
    """
    import numpy as np
    from tqdm import tqdm

    from ..api import load
    from ..evaluation.compare import nan_to_none
    from ..evaluation.corpus import read_texts, truncate_windows, windows_for
    from ..evaluation.perplexity import Perplexity, window_losses

    windows = windows_for(model, read_texts(text), window, stride)
    if tokens is not None:
        windows = truncate_windows(windows, tokens)
    with load(model, device=device, memory_limit=memory_limit, kv_cache=kv_cache) as loaded:
        started = time.perf_counter()
        progress = tqdm(windows, unit="window", desc="perplexity", disable=None, leave=False)
        result = Perplexity.from_losses(np.concatenate(list(window_losses(loaded, progress))))
        seconds = time.perf_counter() - started
        device = loaded.device
    if as_json:
        found = {"perplexity": result.value, "standard_error": result.standard_error, "tokens": result.tokens}
        how = {"windows": len(windows), "device": device, "seconds": round(seconds, 3)}
        click.echo(json.dumps(nan_to_none(found | how)))
    else:
        click.echo(f"perplexity {result}")
        read = sum(len(w.tokens) for w in windows)
        plural = "s" * (len(windows) > 1)
        click.echo(f"{len(windows)} window{plural} on {device}, {read / seconds:,.0f} tokens per second", err=True)
    require_number(result.value)
