"""``verify``: whether the files of a migrated checkpoint are still what migration wrote."""

from __future__ import annotations

from pathlib import Path

import click

from ._options import model_argument, progress_callback, size_text


@click.command()
@model_argument
def verify(model: Path) -> None:
    """Look for damage in a migrated checkpoint.

    Reads every file of the folder MODEL, and compares its size and checksum with those that migration wrote into
    bminf_lite.json. Lists the files that are missing or have changed, with exit code 1. Loading a model checks only
    sizes, scales and small tensors, because it must be quick.

    \b
    Example:
      bminf-lite verify Llama-3.2-1B-int8
    """
    from tqdm import tqdm

    from ..checkpoint.verify import verify as run

    with tqdm(unit="B", unit_scale=True, desc="verifying", disable=None, leave=False, delay=0.1) as bar:
        found = run(model, progress_callback(bar))
    click.echo(f"{model}: {found.files} files, {size_text(found.bytes)}, all as migration wrote them")
