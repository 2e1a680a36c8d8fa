"""``doctor``: what this machine has for running on a GPU, and what is missing."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--device", type=click.Choice(["auto", "cuda"]), default="auto", show_default=True,
              help="With cuda, fail (exit code 1) where a GPU cannot be used.")  # fmt: skip
def doctor(as_json: bool, device: str) -> None:
    """Report the driver, the GPUs, the CUDA libraries and the speed of int8 products.

    For each thing that is missing, the report gives the command that installs it. Running on the CPU needs none of it,
    so the exit code is 0 unless a GPU is asked for.

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
