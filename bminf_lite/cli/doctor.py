"""``doctor``: whether this machine can run models on a GPU, and which components are missing."""

from __future__ import annotations

import click

from ._options import json_option


@click.command()
@json_option
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda"]),
    default="auto",
    show_default=True,
    help="With cuda, fail (exit code 1) if no GPU can be used.",
)
def doctor(as_json: bool, device: str) -> None:
    """Report the driver, the GPUs, the CUDA libraries and the speed of int8 products.

    For each missing component, the report gives the command that installs it. Running on the CPU needs none of them, so
    the exit code is 0 unless --device is cuda.

    \b
    Example:
      bminf-lite doctor
      bminf-lite doctor --json --device cuda
    """
    import json

    from ..cuda.doctor import diagnose

    report = diagnose()
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.text())
    if device == "cuda" and not report.usable:
        raise click.exceptions.Exit(1)
