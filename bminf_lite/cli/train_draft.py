"""``train-draft``: an EAGLE-3 head for a model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from ..errors import UsageError
from ._options import PATH, json_option, model_options


@click.command()
@model_options
@click.argument("output", metavar="OUTPUT", type=PATH)
@click.argument("files", metavar="FILE...", type=PATH, nargs=-1, required=True)
@click.option(
    "--pieces", type=click.IntRange(2, 1_000_000), default=4000, show_default=True, help="Prompts of a FILE, at most."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1, 100_000), default=32, show_default=True, help="Those of a text's piece."
)
@click.option(
    "--new-tokens", type=click.IntRange(1, 100_000), default=192, show_default=True, help="Tokens behind each, at most."
)
@click.option(
    "--temperature", "temperatures", type=click.FloatRange(0, 100), default=(0.0, 0.7), show_default=True,
    multiple=True, help="That of the texts; several take turns.",
)  # fmt: skip
@click.option(
    "--draft-vocab", type=click.IntRange(2, 2**24), default=32_000, show_default=True, help="Tokens of the head."
)
@click.option("--epochs", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Passes over the texts.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="The most that the passes may take.")
@click.option("--batch", type=click.IntRange(1, 2**24), default=4096, show_default=True, help="Tokens of a step.")
@click.option(
    "--rate", type=click.FloatRange(0, 1, min_open=True), default=1e-3, show_default=True, help="Learning rate."
)
@click.option("--drafts", type=click.IntRange(1, 16), default=5, show_default=True, help="Guesses of a check.")
@click.option("--force", is_flag=True, help="Replace an earlier head.")
@json_option
def train_draft(
    model: Path, output: Path, files: tuple[Path, ...], pieces: int, prompt_tokens: int, new_tokens: int,
    temperatures: tuple[float, ...], draft_vocab: int, epochs: int, minutes: float | None, batch: int, rate: float,
    drafts: int, force: bool, device: str, memory_limit: int | None, kv_cache: str, as_json: bool,
) -> None:  # fmt: skip
    """Train an EAGLE-3 head for the model in the folder MODEL, and write it to OUTPUT.

    Needs PyTorch (the extra torch). The model answers prompts, and the head learns to guess what it writes. A FILE is
    JSONL with "messages" per line, each a prompt, or a text: UTF-8, or JSONL with a "text" per line, of which pieces
    are continued. A tenth of the prompts, at most about 50 of a FILE, is held out: the acceptance of the head's guesses
    behind them is printed for each FILE and temperature.

    \b
    Example:
      bminf-lite train-draft MODEL HEAD chat.jsonl code.txt
      bminf-lite serve MODEL --speculative '{"method": "eagle3", "model": "HEAD"}'
    """
    try:
        from ..torch.draft_training import TrainingOptions, torch_device
    except ImportError:
        raise UsageError("train-draft needs PyTorch: pip install 'bminf-lite[torch]'") from None

    from ..api import load
    from ..draft_training import WRITING_SEQUENCES, head_config, measure_acceptance, pieces_of, train_head
    from ..evaluation.corpus import read_prompts

    config = head_config(model, draft_vocab, None)
    seconds = math.inf if minutes is None else 60 * minutes
    options = TrainingOptions(epochs=epochs, batch=batch, rate=rate, steps=drafts, seconds=seconds)
    place = {"device": device, "memory_limit": memory_limit, "kv_cache": kv_cache}
    with load(model, speculative="none", max_batch=WRITING_SEQUENCES, **place) as loaded:  # type: ignore[arg-type]
        kinds = [pieces_of(path.name, read_prompts(path), loaded, prompt_tokens, pieces) for path in files]
        train_head(
            model,
            output,
            kinds,
            loaded,
            config,
            options,
            new_tokens,
            temperatures,
            torch_device(device),
            force,
            lambda line: click.echo(line, err=True),
        )
    heats = list(dict.fromkeys(temperatures))
    found = measure_acceptance(model, output, kinds, new_tokens, heats, drafts, **place)
    for own in found if not as_json else ():
        text = f"{own.kind}, temperature {own.temperature:g}: {own.tokens_per_check:.2f} tokens a check"
        click.echo(f"{text}, {own.accepted:,} of {own.drafted:,} drafts accepted")
    if as_json:
        click.echo(json.dumps([{**vars(own), "tokens_per_check": own.tokens_per_check} for own in found]))
