"""The request log: what a line holds, and what happens to lines that the disk cannot take."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from bminf_lite.errors import UsageError
from bminf_lite.server.request_log import MAX_PENDING_LINES, RequestLog, checked_path
from bminf_lite.server.request_record import Observer


def test_a_line_has_counts_and_times_and_no_text(tmp_path: Path) -> None:
    async def serve() -> None:
        observer = Observer(128, lambda values: None, RequestLog(str(tmp_path / "log")))
        record = observer.begin("/v1/chat/completions", "chatcmpl-7", "a model")
        record.add_prompt(12, n=2)
        record.tokens(0, 1, cached_tokens=8)
        record.finished(0, "stop")
        record.tokens(1, 5)
        record.end(200)
        observer.begin("/v1/completions", "cmpl-8", "a model").end(400)
        observer.close()

    asyncio.run(serve())
    served, refused = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert served.pop("time").endswith("+00:00")
    assert 0 <= served.pop("first_token_seconds") <= served.pop("seconds")
    assert served == {
        "id": "chatcmpl-7",
        "route": "/v1/chat/completions",
        "model": "a model",
        "status": 200,
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 6,
        "finish_reasons": {"stop": 1, "cancelled": 1},
    }
    assert (refused["status"], refused["output_tokens"], refused["first_token_seconds"]) == (400, 0, None)


def test_a_moved_file_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path))
    log.write({"n": 1})
    log._lines.join()
    path.rename(tmp_path / "log.1")
    log.write({"n": 2})
    log.close()
    assert (tmp_path / "log.1").read_text() == '{"n":1}\n' and path.read_text() == '{"n":2}\n'


def test_a_stuck_sink_costs_lines_and_bounded_memory(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"))
    log._listener.stop()
    for _ in range(MAX_PENDING_LINES + 5):
        log.write({})
    assert log.num_dropped == 5
    log._listener.start()
    log.close()


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    assert checked_path(None) is None and checked_path("-") == "-"
    assert checked_path(str(tmp_path / "log")) == str(tmp_path / "log")
    for path in (tmp_path, tmp_path / "none" / "log"):
        with pytest.raises(UsageError, match=f"the request log {path} cannot be written: "):
            checked_path(str(path))


def append(path: str, name: int) -> None:
    log = RequestLog(path)
    for _ in range(500):
        log.write({"name": name, "filling": "x" * 200})
    log.close()


@pytest.mark.slow
def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=append, args=(str(tmp_path / "log"), i)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(line["name"] for line in lines) == sorted([0, 1, 2] * 500)
