"""``demo``: migrate, generate and compare, on the small model that comes with the package."""

from __future__ import annotations

import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._options import size_text

if TYPE_CHECKING:
    import numpy as np

    from ..api import Model

PROMPT = "If the file"
NEW_TOKENS = 96
SEED = 5
WINDOW = 1024
SCORED_TOKENS = 12 * WINDOW


@click.command()
def demo() -> None:
    """Migrate the bundled model, and generate with it.

    Migrates the small fp32 checkpoint that comes with the package into a temporary folder, streams a completion, and
    compares int8 with float on a text that is not in the training data. Speeds are measured after a first run of the
    same, which on a GPU compiles kernels.

    \b
    Example:
      bminf-lite demo
    """
    from ..api import load

    with (
        resources.as_file(resources.files("bminf_lite").joinpath("demo_model")) as source,
        tempfile.TemporaryDirectory(prefix="bminf-lite-demo-") as folder,
    ):
        target = Path(folder) / "demo-int8"
        show_migration(source, target)
        with load(target) as int8:
            text = (source / "heldout.txt").read_text(encoding="utf-8")
            ids = int8.tokenizer.encode(text)
            if compiling := warm_up(int8, ids):
                click.echo(f"\nKernels were compiled and chosen in {compiling:.1f} s, and are kept for the next run")
            show_completion(int8)
            click.echo(f"\nPerplexity on unseen text, the first {SCORED_TOKENS:,} of {len(ids):,} tokens")
            quantized = show_perplexity("int8", int8, ids[:SCORED_TOKENS])
            device = int8.device
        with load(source, device=device) as original:
            compiling = warm_up(original, ids)
            plain = show_perplexity("float", original, ids[:SCORED_TOKENS], compiling)
        click.echo(f"  ratio {ratio_text(quantized, plain)} on these tokens; bminf-lite compare measures all of a text")


def show_migration(source: Path, target: Path) -> None:
    """Migrate, and print the size before and after."""
    from ..migration.migrate import migrate

    started = time.perf_counter()
    report = migrate(source, target)
    seconds = time.perf_counter() - started
    ratio = report.bytes_before / report.bytes_after
    click.echo(f"Migration of the bundled model, {seconds:.2f} s")
    click.echo(f"  before {size_text(report.bytes_before):>9}  fp32")
    click.echo(f"  after  {size_text(report.bytes_after):>9}  int8 linear layers, {ratio:.1f} times smaller")


def warm_up(model: Model, ids: list[int]) -> float:
    """Run everything that is measured once, and return the seconds that compiling kernels took; 0 if next to none."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        model.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.7, top_p=0.9, seed=SEED, ignore_eos=True)
        model.logits(ids[:WINDOW])
        seconds.append(time.perf_counter() - started)
    compiling = seconds[0] - seconds[1]
    return compiling if model.device != "cpu" and compiling > 0.1 else 0.0


def show_completion(model: Model) -> None:
    """Stream a completion, and print its speed."""
    click.echo(f"\nCompletion on {model.describe()}, temperature 0.7, seed {SEED}\n\n  {PROMPT}", nl=False)
    for piece in model.stream(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.7, top_p=0.9, seed=SEED):
        click.echo(piece.text.replace("\n", "\n  "), nl=False)
        if piece.result is not None:
            times = piece.result.timings
            click.echo(f"\n\n  {times.new_tokens} tokens, {times.decode_tokens_per_second:.0f} tokens per second")


def show_perplexity(name: str, model: Model, ids: list[int], compiling: float = 0.0) -> np.ndarray:
    """Print the perplexity of ``ids``, and return the loss of each token. ``compiling`` seconds went before."""
    import numpy as np
    from tqdm import tqdm

    from ..evaluation.corpus import sliding_windows
    from ..evaluation.perplexity import Perplexity, window_losses

    started = time.perf_counter()
    windows = tqdm(sliding_windows([ids], WINDOW, WINDOW), unit="window", desc=f"  {name}", disable=None, leave=False)
    losses = np.concatenate(list(window_losses(model, windows)))
    speed = len(ids) / (time.perf_counter() - started)
    before = f"; kernels were compiled in {compiling:.1f} s before" if compiling else ""
    click.echo(f"  {name:5}  {Perplexity.from_losses(losses).value:8.3f}  ({speed:,.0f} tokens per second{before})")
    return losses


def ratio_text(losses: np.ndarray, reference: np.ndarray) -> str:
    """The ratio of two perplexities with its standard error, that of the paired losses."""
    import math

    from ..evaluation.perplexity import mean_and_error

    mean, error = mean_and_error(losses - reference)
    return f"{math.exp(mean):.4f} ± {math.exp(mean) * error:.4f}"
