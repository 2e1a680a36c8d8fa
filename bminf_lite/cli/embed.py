"""``embed``: vectors of the texts in a file."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..files import check_writable, save_result
from ..text.text_lines import TextLine, read_text_lines
from ._options import OUTPUT, PATH, device_option, memory_limit_option, model_argument

if TYPE_CHECKING:
    import numpy as np

POOLINGS = ("cls", "lasttoken", "mean", "max", "weightedmean", "mean_sqrt_len_tokens")
"""The values of :class:`..backend.values.Pooling`, which is not imported before a command runs."""


@click.command()
@model_argument
@click.argument("texts", metavar="FILE", type=PATH)
@click.argument("out", metavar="OUT", type=OUTPUT)
@click.option("--prompt-name", metavar="NAME", help="Put the model's prompt of this name before each text.")
@click.option("--prompt", metavar="TEXT", help="Put this text before each text.")
@click.option("--dimensions", type=click.IntRange(min=1), metavar="N", help="Keep the first N elements of each vector.")
@click.option(
    "--normalize/--no-normalize", default=None, help="Give vectors length 1, or not; by default what the model says."
)
@click.option(
    "--pooling",
    type=click.Choice(POOLINGS),
    help="What a text's vector is made of those of its tokens; by default what the model's folder says.",
)
@click.option("--no-truncate", is_flag=True, help="Fail for a text that the model does not read to its end.")
@device_option
@memory_limit_option
def embed(
    model: Path,
    texts: Path,
    out: Path,
    prompt_name: str | None,
    prompt: str | None,
    dimensions: int | None,
    normalize: bool | None,
    pooling: str | None,
    no_truncate: bool,
    device: str,
    memory_limit: int | None,
) -> None:
    """Make vectors of texts.

    Reads FILE, a text per line, or JSONL with a "text" and perhaps an "id" per line, and writes the vectors of the
    model in the folder MODEL to OUT: a matrix for NumPy (.npy), a line of JSON for each text (.jsonl), or a table
    (.parquet, which needs the package pyarrow). Of a model that generates text, a vector is that of the text's last
    token, or what --pooling says.

    \b
    Example:
      bminf-lite embed all-MiniLM-L6-v2-int8 texts.txt vectors.npy
      bminf-lite embed Qwen3-Embedding-0.6B-int8 queries.jsonl vectors.parquet --prompt-name query
    """
    write = writer_for(out)
    check_writable(out, "OUT")
    lines = read_text_lines(texts)
    import numpy as np
    from tqdm import tqdm

    from ..api import load

    with load(model, device=device, memory_limit=memory_limit, embeddings=True) as loaded:
        if loaded.engine_config.generates:
            click.echo(f"{model} generates text; for a search, take a model that was trained to embed", err=True)
        options: dict[str, Any] = {"prompt_name": prompt_name, "prompt": prompt, "normalize": normalize}
        options |= {"dimensions": dimensions, "pooling": pooling, "truncate": not no_truncate}
        started, parts = time.perf_counter(), []
        with tqdm(total=len(lines), unit="text", desc="embed", disable=None, leave=False) as bar:
            for part in loaded.embed_slices([line.text for line in lines], **options):
                parts.append(part)
                bar.update(len(part))
        seconds, tokens = time.perf_counter() - started, loaded.stats().text_tokens
        name = loaded.device
    vectors = np.concatenate(parts)
    save_result(out, write(lines, vectors))
    click.echo(f"wrote {out}: {len(vectors):,} vector{'s' * (len(vectors) != 1)} of {vectors.shape[1]:,} elements")
    click.echo(f"{tokens:,} tokens on {name}, {tokens / seconds:,.0f} per second", err=True)


def writer_for(out: Path) -> Callable[[Sequence[TextLine], np.ndarray], bytes]:
    """What makes the content of a file of this suffix; ``UsageError`` for another suffix or without pyarrow."""
    writers = {".npy": npy_bytes, ".jsonl": jsonl_bytes, ".parquet": parquet_bytes}
    writer = writers.get(out.suffix.lower())
    if writer is None:
        raise UsageError(f"OUT {out}: its suffix must be one of {', '.join(writers)}")
    if writer is parquet_bytes:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise UsageError("a .parquet file needs the package pyarrow: pip install pyarrow") from None
    return writer


def npy_bytes(lines: Sequence[TextLine], vectors: np.ndarray) -> bytes:
    """The matrix fp32 ``[texts, elements]`` as a file of NumPy."""
    import numpy as np

    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, vectors)
    return buffer.getvalue()


def jsonl_bytes(lines: Sequence[TextLine], vectors: np.ndarray) -> bytes:
    """An object with ``id`` and ``embedding`` per line."""
    rows = (
        {"id": line.id, "embedding": [float(str(x)) for x in row]} for line, row in zip(lines, vectors, strict=True)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet_bytes(lines: Sequence[TextLine], vectors: np.ndarray) -> bytes:
    """A table with the columns ``id``, ``text`` and ``embedding``."""
    import pyarrow
    import pyarrow.parquet

    ids: list[Any] = [line.id for line in lines]
    if any(isinstance(name, str) for name in ids):
        ids = list(map(str, ids))
    flat = pyarrow.array(vectors.reshape(-1))
    columns = {
        "id": pyarrow.array(ids),
        "text": pyarrow.array([line.text for line in lines]),
        "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
    }
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()
