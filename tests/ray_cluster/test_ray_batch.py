"""Batches on a cluster of two nodes: every row is answered once, whatever ends meanwhile."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from batch_kit import journal_rows, read_rows, write_rows
from ray_kit import DEMO, finish, kill, kill_node, ray_cluster, replicas_of, rows_process_of, start_batch, wait_for

from bminf_lite.batch.job import BatchJob, LoadOptions
from bminf_lite.batch.local import plan_input, run_local
from bminf_lite.batch.storage import LocalStorage

pytestmark = [pytest.mark.ray_cluster, pytest.mark.timeout(150)]


def prompts(count: int, tokens: int = 2) -> list[dict[str, Any]]:
    """Rows whose answers have different lengths."""
    return [{"id": i, "prompt": f"prompt {i}", "max_tokens": tokens + i % 3, "temperature": 0} for i in range(count)]


def num_committed(out: Path) -> int:
    return len(list(out.glob("rows-*.jsonl"))) if out.exists() else 0


@pytest.fixture
def cluster():
    with ray_cluster(1, 1) as found:
        yield found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of ``prompts(2000)`` in one process without Ray."""
    folder = tmp_path_factory.mktemp("local")
    rows = write_rows(folder / "in.jsonl", prompts(2000))
    plan, job = plan_input(LocalStorage(), str(rows), BatchJob(str(DEMO), LoadOptions("cpu", max_batch=64)))
    run_local(job, plan, folder / "out")
    return [row["generated_text"] for row in read_rows(folder / "out")]


def test_a_node_is_killed_in_the_middle_of_2000_prompts(cluster, tmp_path, expected):
    rows, out = write_rows(tmp_path / "in.jsonl", prompts(2000)), tmp_path / "out"
    process = start_batch(cluster, rows, out)
    wait_for(lambda: num_committed(out) >= 8)
    [node] = cluster.worker_nodes
    assert len(replicas_of(node)) == len(replicas_of(cluster.head_node)) == 1
    kill_node(cluster, node)
    assert num_committed(out) < 24
    told = finish(process)
    found = read_rows(out)
    assert [row["id"] for row in found] == list(range(2000)), told
    assert [row["generated_text"] for row in found] == expected
    assert not list(out.glob(".*.journal"))


def test_a_driver_that_is_killed_and_started_again_repeats_nothing(cluster, tmp_path, expected):
    rows, out = write_rows(tmp_path / "in.jsonl", prompts(2000)), tmp_path / "out"
    process = start_batch(cluster, rows, out)
    wait_for(lambda: num_committed(out) >= 10)
    kill(process)
    nodes = [cluster.head_node, *cluster.worker_nodes]
    wait_for(lambda: not any(map(replicas_of, nodes)))  # Ray ends the actors of a driver that has ended
    committed = {row["id"] for row in read_rows(out)}
    kept = journal_rows(out).keys() - committed
    told = finish(start_batch(cluster, rows, out))
    assert told.startswith(f"{2000 - len(committed) - len(kept):,} rows in"), told
    found = read_rows(out)
    assert Counter(row["id"] for row in found) == Counter(range(2000))
    assert [row["generated_text"] for row in found] == expected


def test_a_full_disk_loses_nothing_and_a_poison_row_fails_alone(tmp_path, expected):
    """A bound on the size of the replicas' files, as a quota would be; then without."""
    wanted = [*prompts(300), {"id": 300, "prompt": "x" * 50_000}, {"id": 301, "prompt": "a", "regex": "("}]
    wanted[100:100] = [b"{"]
    rows, out = write_rows(tmp_path / "in.jsonl", wanted), tmp_path / "out"
    with ray_cluster(1, 1) as cluster:
        process = start_batch(cluster, rows, out)
        limit_files((cluster.head_node, *cluster.worker_nodes), 12_000)
        _, error = process.communicate(timeout=100)
        assert process.returncode == 1 and b"File too large; what is finished is kept" in error, error.decode()
    committed = read_rows(out)
    kept = journal_rows(out).keys()
    with ray_cluster(2) as cluster:
        told = finish(start_batch(cluster, rows, out))
    assert "3 rows have errors" in told or kept, told
    found = read_rows(out)
    assert len(found) == 303 and len(kept) + len(committed) > 0
    assert [row.get("id") for row in found] == [*range(100), None, *range(100, 302)]
    assert [row["error"] is None for row in found] == [i not in (100, 301, 302) for i in range(303)]
    assert all(row["error"]["message"] for row in (found[100], *found[301:]))
    good = [row["generated_text"] for row in found if row["error"] is None]
    assert good == expected[:300]


def limit_files(nodes: Sequence[Any], size: int) -> None:
    """Bound the files of the replicas' rows, while the models are loaded: a write beyond the bound fails.

    The first that fails ends the others, so all are there before any has a bound.
    """
    wait_for(lambda: all(replicas_of(node) and rows_process_of(replicas_of(node)[0]) for node in nodes))
    for node in nodes:
        process = rows_process_of(replicas_of(node)[0])
        assert process is not None
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))


def test_parquet_and_a_store_without_appending(cluster, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    first, second = prompts(150), [{**row, "id": row["id"] + 150, "note": "n"} for row in prompts(40)]
    for name, part in (("a", first), ("b", second)):
        parquet.write_table(pa.Table.from_pylist(part), tmp_path / "in" / f"{name}.parquet", row_group_size=50)
    out = tmp_path / "out"
    told = finish(start_batch(cluster, f"file://{tmp_path}/in", f"file://{out}", "--replicas", 1))
    assert told.startswith("190 rows in"), told
    tables = [parquet.read_table(path) for path in sorted(out.glob("rows-*.parquet"))]
    assert [table.num_rows for table in tables] == [64, 64, 22, 40]
    found = [row for table in tables for row in table.to_pylist()]
    assert [row["id"] for row in found] == list(range(190))
    assert all(row["usage"]["completion_tokens"] == row["max_tokens"] and row["error"] is None for row in found)
    assert found[-1]["note"] == "n" and found[0]["generated_text"] == found[150]["generated_text"]
    for path in (out / "_rows-000000000064-000000000127.parquet.done", out / "_batch.json.done"):
        assert path.exists()
    (out / "_rows-000000000064-000000000127.parquet.done").unlink()  # it was killed before the block was complete
    again = finish(start_batch(cluster, f"file://{tmp_path}/in", f"file://{out}", "--replicas", 1))
    assert again.startswith("64 rows in"), again


def test_what_cannot_be_done_is_said(cluster, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", prompts(3))
    for options, words, code in (
        (("--replicas", 0), "replicas is 0", 2),
        (("--gpus-per-replica", 2), "gpus_per_replica is 2.0, but must be 0 to 1", 2),
        (("--ray", "127.0.0.1:1"), "cannot be reached", 1),
        (("--device", "cuda:7"), "3 replicas in a row could not be started", 1),
        (("--context", 0), "context is 0", 2),
    ):
        process = start_batch(cluster, rows, tmp_path / "out", *options)
        _, error = process.communicate(timeout=100)
        assert process.returncode == code and words in error.decode(), error.decode()
    assert json.loads((tmp_path / "out" / "batch.json").read_text())["model"] == "demo_model"
