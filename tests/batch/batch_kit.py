"""Inputs of batches, and what comes out of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bminf_lite.batch.job import BatchJob, LoadOptions
from bminf_lite.batch.local import plan_input, run_local
from bminf_lite.batch.output import read_journal
from bminf_lite.batch.runner import Counts
from bminf_lite.batch.storage import LocalStorage

CPU = LoadOptions(device="cpu", max_batch=4)


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """A file with a line for each row; a row that is ``bytes`` is a line as it is."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(path: Path) -> list[Any]:
    """The rows of a file, or of the blocks of a folder."""
    files = sorted(path.glob("rows-*.jsonl")) if path.is_dir() else [path]
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def prompts(count: int, tokens: int = 4) -> list[dict[str, Any]]:
    """Rows whose answers have different lengths."""
    return [{"id": i, "prompt": f"prompt {i}", "max_tokens": tokens + i % 5} for i in range(count)]


def run(
    model: Path, rows: Path, out: Path, block_rows: int = 8, told: Any = None, load: LoadOptions = CPU, **job: Any
) -> Counts:
    """Run a batch on this machine."""
    plan, wanted = plan_input(LocalStorage(), str(rows), BatchJob(str(model), load, **job), block_rows)
    return run_local(wanted, plan, out, told or (lambda counts: None))


def journal_rows(out: Path) -> dict[int, Any]:
    """The rows in the journals of incomplete blocks, by number."""
    return {i: r for path in out.glob(".*.journal") for i, r in read_journal(path.read_bytes()).items()}
