"""``convert``: the published files of CPM-1, CPM-2 and EVA to int8."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError
from ._options import PATH


@click.command()
@click.argument("model", type=click.Choice(["cpm-1", "cpm-2", "eva"]))
@click.argument("source", metavar="SOURCE", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option(
    "--vocabulary",
    type=PATH,
    required=True,
    metavar="FILE",
    help="The published vocabulary: chinese_vocab.model of CPM-1, vocab.txt of CPM-2 and EVA.",
)
@click.option(
    "--recipe",
    default="w8a8",
    show_default=True,
    metavar="w8a8|w8a16|merge|FILE",
    help="How to quantize, as in migrate; merge keeps the tensors float.",
)
@click.option("--heads", type=click.IntRange(min=1), metavar="N", help="Attention heads of a CPM-1 of another size.")
@click.option("--attn-scale", is_flag=True, help="The checkpoint is EVA 2, which scales attention scores.")
@click.option("--force", is_flag=True, help="Replace OUT if it is an earlier result.")
def convert(
    model: str, source: Path, out: Path, vocabulary: Path, recipe: str, heads: int | None, attn_scale: bool, force: bool
) -> None:
    """Convert the published files of CPM-1, CPM-2 or EVA.

    SOURCE is the folder with latest_checkpointed_iteration.txt, the folder with the shards
    mp_rank_XX_model_states.pt, or a single file. Their tensors are merged, quantized and written into the folder OUT,
    which appears complete or not at all.

    \b
    Example:
      bminf-lite convert cpm-1 CPM-large CPM-1-int8 --vocabulary bpe_3w_new/chinese_vocab.model
      bminf-lite convert cpm-2 CPM-2 CPM-2-int8 --vocabulary bpe_cn_en/vocab.txt
      bminf-lite convert eva eva2.0 EVA-2-int8 --vocabulary bpe_dialog_new/vocab.txt --attn-scale
    """
    from ..converters import cpm1, cpm2, eva

    if heads is not None and model != "cpm-1":
        raise UsageError(f"--heads is an option of cpm-1; the tensors of {model} show their heads")
    if attn_scale and model != "eva":
        raise UsageError(f"--attn-scale is an option of eva, not of {model}")
    if model == "cpm-1":
        cpm1.convert(source, out, vocabulary=vocabulary, recipe=recipe, heads=heads, force=force)
    elif model == "cpm-2":
        cpm2.convert(source, out, vocabulary=vocabulary, recipe=recipe, force=force)
    else:
        eva.convert(source, out, vocabulary=vocabulary, recipe=recipe, attn_scale=attn_scale, force=force)
    click.echo(f"wrote {out}")
