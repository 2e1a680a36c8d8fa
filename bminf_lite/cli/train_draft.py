"""``train-draft``: an EAGLE-3 head for a model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..errors import UsageError
from ._options import PATH, json_option, model_options


@click.command()
@model_options
@click.argument("output", metavar="OUTPUT", type=PATH)
@click.argument("files", metavar="FILE...", type=PATH, nargs=-1, required=True)
@click.option(
    "--pieces", type=click.IntRange(2, 1_000_000), default=400, show_default=True, help="Beginnings of a FILE."
)
@click.option("--prompt-tokens", type=click.IntRange(1, 100_000), default=32, show_default=True, help="Their tokens.")
@click.option(
    "--new-tokens", type=click.IntRange(1, 100_000), default=96, show_default=True, help="Tokens behind each."
)
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.7, show_default=True, help="That of the texts.")
@click.option(
    "--draft-vocab", type=click.IntRange(2, 2**24), default=32_000, show_default=True, help="Tokens of the head."
)
@click.option("--epochs", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Passes over the texts.")
@click.option(
    "--rate", type=click.FloatRange(0, 1, min_open=True), default=1e-3, show_default=True, help="Learning rate."
)
@click.option("--drafts", type=click.IntRange(1, 16), default=4, show_default=True, help="Guesses of a check.")
@click.option("--force", is_flag=True, help="Replace an earlier head.")
@json_option
def train_draft(
    model: Path, output: Path, files: tuple[Path, ...], pieces: int, prompt_tokens: int, new_tokens: int,
    temperature: float, draft_vocab: int, epochs: int, rate: float, drafts: int, force: bool, device: str,
    memory_limit: int | None, kv_cache: str, as_json: bool,
) -> None:  # fmt: skip
    """Train an EAGLE-3 head for the model in the folder MODEL, and write it to OUTPUT.

    Needs PyTorch (the extra torch). The model continues pieces of each FILE, UTF-8 text or JSONL with a "text" per
    line, and the head learns to guess what it writes. A tenth of the pieces is held out: the acceptance of the head's
    guesses behind them is printed for each FILE, greedy and at the temperature.

    \b
    Example:
      bminf-lite train-draft MODEL HEAD chat.jsonl code.txt
      bminf-lite serve MODEL --speculative '{"method": "eagle3", "model": "HEAD"}'
    """
    try:
        from ..torch.draft_head import TrainingOptions, torch_device
    except ImportError:
        raise UsageError("train-draft needs PyTorch: pip install 'bminf-lite[torch]'") from None

    from ..api import load
    from ..draft_training import head_config, measure_acceptance, pieces_of, train_head
    from ..evaluation.corpus import read_texts

    config = head_config(model, draft_vocab, None)
    options = TrainingOptions(epochs=epochs, rate=rate, steps=drafts)
    place = {"device": device, "memory_limit": memory_limit, "kv_cache": kv_cache}
    with load(model, speculative="none", **place) as loaded:  # type: ignore[arg-type]
        kinds = [pieces_of(path.name, read_texts(path), loaded, prompt_tokens, pieces) for path in files]
        train_head(
            model,
            output,
            kinds,
            loaded,
            config,
            options,
            new_tokens,
            temperature,
            torch_device(device),
            force,
            lambda line: click.echo(line, err=True),
        )
    found = []
    for heat in dict.fromkeys((0.0, temperature)):
        for own in measure_acceptance(model, output, kinds, new_tokens, heat, drafts, **place):
            found.append({"temperature": heat, **vars(own), "tokens_per_check": own.tokens_per_check})
            if not as_json:
                text = f"{own.kind}, temperature {heat:g}: {own.tokens_per_check:.2f} tokens a check"
                click.echo(f"{text}, {own.accepted:,} of {own.drafted:,} drafts accepted")
    if as_json:
        click.echo(json.dumps(found))
