"""``migrate``: a float checkpoint to int8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._options import size_text

if TYPE_CHECKING:
    from ..checkpoint.manifest import MigrationReport, TensorReport


@click.command()
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--recipe", default="w8a8", show_default=True, metavar="w8a8|w8a16|FILE",
              help="int8 weights with int8 or float activations, or a TOML file that says it per tensor.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check the source and list what would become of each tensor.")
@click.option("--force", is_flag=True, help="Replace OUT if it is a migrated checkpoint.")
def migrate(source: Path, out: Path, recipe: str, dry_run: bool, force: bool) -> None:
    """Migrate a checkpoint to int8.

    Reads the Hugging Face folder SOURCE (safetensors in fp32, fp16 or bf16) and writes the folder OUT, which appears
    complete or not at all.

    \b
    Example:
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8
      bminf-lite migrate Llama-3.2-1B Llama-3.2-1B-int8 --recipe w8a16 --dry-run
    """
    from tqdm import tqdm

    from ..checkpoint.migrate import migrate as run

    with tqdm(unit="B", unit_scale=True, desc="migrating", disable=None, leave=False) as bar:

        def progress(done: int, total: int, tensor: str) -> None:
            bar.total = total
            bar.set_postfix_str(tensor, refresh=False)
            bar.update(done - bar.n)

        report = run(source, out, recipe, force=force, dry_run=dry_run, progress=progress)
    if dry_run:
        click.echo("\n".join(tensor_lines(report.tensors)))
    click.echo(summary(report, out, dry_run))


def tensor_lines(tensors: Sequence[TensorReport]) -> list[str]:
    """What becomes of each tensor, in columns."""
    names = [f"{t.name} {list(t.shape)}" for t in tensors]
    width = max(map(len, names), default=0)
    return [
        f"{name:{width}}  {t.source_dtype:4} {size_text(t.bytes_before):>9}  ->  "
        f"{t.scheme.value:5} {size_text(t.bytes_after):>9}"
        for name, t in zip(names, tensors, strict=True)
    ]


def summary(report: MigrationReport, out: Path, dry_run: bool) -> str:
    """Sizes, and where quantization lost most."""
    before, after = report.bytes_before, report.bytes_after
    lines = [
        f"{'would write' if dry_run else 'wrote'} {out}, recipe {report.recipe.name}: {len(report.tensors)} tensors, "
        f"{size_text(before)} -> {size_text(after)} ({before / after:.2f} times smaller)"
    ]
    measured = [t for t in report.tensors if t.snr_db is not None]
    if measured:
        worst = min(measured, key=lambda t: t.snr_db or 0.0)
        lines.append(
            f"signal to noise of int8 weights: {worst.snr_db:.1f} dB or better; worst is {worst.name}, "
            f"its row {worst.worst_row} has {worst.worst_row_snr_db:.1f} dB"
        )
    if report.tied_head is not None:
        lines.append(f"the output head shares the embedding's float tensor and runs as {report.tied_head.value}")
    return "\n".join(lines)
