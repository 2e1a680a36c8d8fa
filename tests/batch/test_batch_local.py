"""Batches on this machine: every row is answered once, as the server would answer it, through ends of all kinds."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from adapter_files import random_adapter
from batch_kit import CPU, journal_rows, prompts, read_rows, run, write_rows
from cli_kit import run as command
from cli_kit import start
from embedding_kit import write_encoder

import bminf_lite
from bminf_lite.batch import job as jobs
from bminf_lite.batch.runner import Counts
from bminf_lite.engine.model_runner import LaunchedStep, ModelRunner
from bminf_lite.engine.step import Step
from bminf_lite.errors import BminfError, UsageError
from bminf_lite.server.client import EngineFailure

PROGRAM = "import sys; from bminf_lite.cli import main; main(sys.argv[1:])"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", prompts(50))


@pytest.fixture(scope="module")
def expected(int8: Path) -> list[str]:
    """The answers of :func:`rows`."""
    with bminf_lite.load(int8, device="cpu") as model:
        return [model.generate(row["prompt"], max_new_tokens=row["max_tokens"]).text for row in prompts(50)]


def test_rows_come_out_in_order_with_what_they_had(int8, rows, tmp_path, expected):
    counts = run(int8, rows, tmp_path / "out")
    found = read_rows(tmp_path / "out")
    assert [row["generated_text"] for row in found] == expected
    assert [{name: row[name] for name in ("id", "prompt", "max_tokens")} for row in found] == prompts(50)
    assert (counts.rows, counts.errors, counts.kept) == (50, 0, 0)
    assert counts.new_tokens == sum(row["usage"]["completion_tokens"] for row in found) > 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names[:2] == ["batch.json", "rows-000000000000-000000000007.jsonl"] and len(names) == 8


def test_an_interrupted_batch_goes_on_and_repeats_no_finished_row(int8, tmp_path):
    rows, out = write_rows(tmp_path / "in.jsonl", prompts(400, tokens=20)), tmp_path / "out"
    told = Counts()

    def interrupt(counts: Counts) -> None:
        told.add_all(counts)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(int8, rows, out, block_rows=400, told=interrupt)
    kept = journal_rows(out)
    assert 0 < told.rows <= len(kept) < 400  # rows that ended while the run ended count too
    assert run(int8, rows, out, block_rows=400).rows == 400 - len(kept)
    found = read_rows(out)
    assert [row["id"] for row in found] == list(range(400))
    assert all(found[index]["generated_text"] == result["generated_text"] for index, result in kept.items())
    assert not list(out.glob(".*"))


def test_the_end_of_the_process_of_the_rows_is_an_error_and_loses_nothing(int8, tmp_path):
    rows, out = write_rows(tmp_path / "in.jsonl", prompts(400, tokens=20)), tmp_path / "out"

    def kill(counts: Counts) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it was killed by an earlier report
                if any("row_worker" in word for word in child.cmdline()):
                    child.kill()

    with pytest.raises(BminfError, match="has ended with -9; what is finished is kept"):
        run(int8, rows, out, block_rows=400, told=kill)
    kept = journal_rows(out)
    assert run(int8, rows, out, block_rows=400).rows == 400 - len(kept) < 400
    assert [row["id"] for row in read_rows(out)] == list(range(400))


def test_an_engine_that_fails_ends_the_batch_and_loses_nothing(int8, tmp_path, monkeypatch):
    rows, out = write_rows(tmp_path / "in.jsonl", prompts(60, tokens=20)), tmp_path / "out"
    launch, launches = ModelRunner.launch, count()

    def lost(runner: ModelRunner, step: Step) -> LaunchedStep:
        if next(launches) == 100:
            raise RuntimeError("the device is lost")
        return launch(runner, step)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", lost)
        with pytest.raises(EngineFailure, match="the device is lost"):
            run(int8, rows, out, block_rows=60)
    kept = journal_rows(out)
    assert run(int8, rows, out, block_rows=60).rows == 60 - len(kept) < 60
    assert all(row["error"] is None for row in read_rows(out))


def test_a_kill_while_a_complete_batch_is_tidied_up_costs_no_answer(int8, rows, tmp_path, expected, monkeypatch):
    """The blocks are removed when the file is there. What a kill leaves of them is taken for no batch."""
    rmtree, out = shutil.rmtree, tmp_path / "out.jsonl"

    def killed(folder: Path, **options: Any) -> None:
        if folder.exists():
            for path in sorted(folder.iterdir())[:3]:
                path.unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr("bminf_lite.batch.local.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run(int8, rows, out)
    monkeypatch.setattr("bminf_lite.batch.local.shutil.rmtree", rmtree)
    with pytest.raises(UsageError, match="the file exists"):
        run(int8, rows, out)
    assert [row["generated_text"] for row in read_rows(out)] == expected
    run(int8, rows, tmp_path / "again.jsonl")
    out.unlink()
    run(int8, rows, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.jsonl", "in.jsonl", "out.jsonl"]


def test_a_poison_row_fails_alone(int8, tmp_path):
    bad = [
        b"\xff",
        b"{",
        b"[]",
        {"prompt": "x" * 500, "id": 1},
        {"prompt": "a", "temperature": "hot"},
        {"prompt": "a", "response_format": {"type": "json_schema"}},
        {"prompt": "a", "model": "another"},
        {"prompt": "a", "logit_bias": {"999999": 1}},
        {"prompt": [10**9]},
        {"prompt": "\ud800"},
        {"prompt": "a", "regex": "("},
        {"messages": [{"role": "nobody", "content": "a"}]},
    ]
    good = prompts(len(bad))
    mixed = [row for pair in zip(good, bad, strict=True) for row in pair]
    counts = run(int8, write_rows(tmp_path / "in.jsonl", mixed), tmp_path / "out.jsonl")
    found = read_rows(tmp_path / "out.jsonl")
    assert (counts.rows, counts.errors) == (len(mixed), len(bad))
    assert all(row["error"] is None and row["generated_text"] for row in found[::2])
    assert all(row["error"]["message"] and row["generated_text"] is None for row in found[1::2])
    alone = read_rows_of(int8, good, tmp_path)
    assert [row["generated_text"] for row in found[::2]] == [row["generated_text"] for row in alone]


def read_rows_of(model: Path, rows: list, folder: Path) -> list:
    run(model, write_rows(folder / "alone.jsonl", rows), folder / "alone-out.jsonl")
    return read_rows(folder / "alone-out.jsonl")


def test_a_row_names_an_adapter(source, tmp_path):
    adapter = random_adapter(tmp_path / "adapter", source)
    options = replace(CPU, adapters={"french": str(adapter)})
    rows = write_rows(
        tmp_path / "in.jsonl", [{"prompt": "a", "model": name, "max_tokens": 8} for name in ("french", "source", "sql")]
    )
    run(source, rows, tmp_path / "out.jsonl", load=options, served_model_names=("source",))
    french, plain, unknown = read_rows(tmp_path / "out.jsonl")
    with bminf_lite.load(source, device="cpu", adapters={"french": adapter}) as model:
        texts = [model.generate("a", max_new_tokens=8, adapter=name).text for name in ("french", None)]
    assert [row["generated_text"] for row in (french, plain)] == texts and texts[0] != texts[1]
    assert "sql" in unknown["error"]["message"]


def test_openai_s_batch_files(int8, tmp_path):
    chat = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 3, "model": "gpt"}
    text = {"prompt": "a", "max_tokens": 4, "logprobs": 1, "n": 2, "temperature": 1.0, "seed": 1, "model": "gpt"}
    wanted = [
        {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "two", "method": "POST", "url": "/v1/completions", "body": text},
        {"custom_id": "three", "method": "POST", "url": "/v1/images", "body": {}},
        {"custom_id": "four", "method": "GET", "url": "/v1/completions", "body": {}},
        {"custom_id": "five", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "model": "other"}},
    ]
    rows = write_rows(tmp_path / "in.jsonl", wanted)
    counts = run(int8, rows, tmp_path / "out.jsonl", served_model_names=("gpt",))
    found = read_rows(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in found] == ["one", "two", "three", "four", "five"]
    statuses = [row["response"] and row["response"]["status_code"] for row in found]
    assert (counts.errors, statuses) == (3, [200, 200, 404, None, 404])
    assert found[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert [len(c["logprobs"]["tokens"]) for c in found[1]["response"]["body"]["choices"]] == [4, 4]
    assert found[3]["error"]["code"] == "invalid_row"
    with pytest.raises(UsageError, match="temperature: the rows of OpenAI's batch files"):
        run(int8, rows, tmp_path / "out2.jsonl", sampling={"temperature": 1.0})


def test_seeds_depend_on_the_row_alone(int8, tmp_path):
    same = [{"prompt": "a", "temperature": 1.0, "max_tokens": 6}] * 12
    rows = write_rows(tmp_path / "in.jsonl", same)
    texts = []
    for block_rows in (3, 12):
        run(int8, rows, tmp_path / f"out-{block_rows}", block_rows, seed=5)
        texts.append([row["generated_text"] for row in read_rows(tmp_path / f"out-{block_rows}")])
    assert texts[0] == texts[1] and len(set(texts[0])) > 6


def test_a_row_with_more_completions_than_the_queue_takes_waits_for_others(int8, tmp_path, monkeypatch):
    """A row that never fits gets the server's error, and the others are answered."""
    monkeypatch.setattr(jobs, "load", lambda path, **options: bminf_lite.load(path, max_queue=6, **options))
    wide = [{"prompt": str(i), "n": 6, "temperature": 1.0, "max_tokens": 4} for i in range(6)]
    rows = write_rows(tmp_path / "in.jsonl", [*wide, {"prompt": "a", "n": 64, "temperature": 1.0}])
    counts = run(int8, rows, tmp_path / "out")
    found = read_rows(tmp_path / "out")
    assert counts.errors == 1 and [len(row["choices"] or ()) for row in found] == [6] * 6 + [0]
    assert found[-1]["error"]["code"] == "queue_full"


def test_a_full_disk_ends_the_batch_and_loses_nothing(int8, rows, tmp_path, expected):
    """A bound on the size of files, as a quota would be."""
    bound = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, bound[1]))
        with pytest.raises(BminfError, match="File too large; what is finished is kept"):
            run(int8, rows, tmp_path / "out", block_rows=50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bound)
    counts = run(int8, rows, tmp_path / "out", block_rows=50)
    assert 0 < counts.rows < 50
    assert [row["generated_text"] for row in read_rows(tmp_path / "out")] == expected


def test_the_command(int8, rows, tmp_path, expected):
    out = tmp_path / "out.jsonl"
    arguments = ("batch", int8, rows, out, "--device", "cpu", "--max-batch", "8")
    result = command(*arguments, "--temperature", "0")
    assert result.exit_code == 0, result.stderr
    assert [row["generated_text"] for row in read_rows(out)] == expected
    assert "50 rows in" in result.stderr and "tokens/s" in result.stderr and not result.stdout
    for others, words in (
        ((), "the file exists"),
        (("--seed", "-1"), "seed"),
        (("--stop", ""), "stop"),
    ):
        result = command(*arguments, *others)
        assert result.exit_code == 2 and words in result.stderr
    result = command("batch", int8, tmp_path, tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 0, result.stderr  # a folder: in.jsonl, and out.jsonl as an input


def test_a_model_of_vectors_answers_no_rows(rows, tmp_path):
    with pytest.raises(UsageError, match="bminf-lite embed reads files of texts"):
        run(write_encoder(tmp_path / "model"), rows, tmp_path / "out")


def test_another_input_or_other_options_do_not_go_on_with_a_batch(int8, rows, tmp_path):
    run(int8, rows, tmp_path / "out")
    assert run(int8, rows, tmp_path / "out").rows == 0
    with pytest.raises(UsageError, match=r"sampling was \{\}, and is \{\"temperature\": 1.0\}"):
        run(int8, rows, tmp_path / "out", sampling={"temperature": 1.0})
    write_rows(rows, prompts(49))
    with pytest.raises(UsageError, match="files was"):
        run(int8, rows, tmp_path / "out")


def test_a_batch_that_failed_before_its_first_row_gives_way_to_another(int8, rows, tmp_path):
    out = tmp_path / "out.jsonl"
    for wrong in (tmp_path / "no-model", write_encoder(tmp_path / "encoder")):
        with pytest.raises(BminfError):
            run(wrong, rows, out)
    (tmp_path / "out.jsonl.blocks" / ".0123456789abcdef.partial").write_bytes(b"{")  # of a kill
    out.write_text("another's")
    with pytest.raises(UsageError, match="the file exists"):
        run(int8, rows, out)
    assert out.read_text() == "another's"
    out.unlink()
    assert run(int8, rows, out, sampling={"temperature": 1.0}).rows == 50
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".0123456789abcdef.partial").write_bytes(b"{")
    assert run(int8, rows, tmp_path / "new").rows == 50


def test_one_process_at_a_time_writes_to_a_folder(int8, rows, tmp_path):
    def second(counts: Counts) -> None:
        with pytest.raises(UsageError, match="another process"):
            run(int8, rows, tmp_path / "out")

    run(int8, write_rows(rows, prompts(3)), tmp_path / "out", told=second)


def test_ctrl_c_gives_one_message(int8, tmp_path):
    """A terminal sends the signal to the process of the rows too."""
    rows, out = write_rows(tmp_path / "in.jsonl", prompts(400, tokens=20)), tmp_path / "out"
    with start("batch", int8, rows, out, "--device", "cpu", start_new_session=True) as process:
        while process.poll() is None and not any(path.stat().st_size for path in out.glob(".*.journal")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.decode() == "\ninterrupted; what is finished is kept: the same command goes on\n"


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["kill", "file size"])
def test_a_process_that_is_killed_or_out_of_room(int8, tmp_path, limit):
    """SIGKILL in the middle, or a bound on the size of files, as a quota would be; then the same command goes on."""
    rows = write_rows(tmp_path / "in.jsonl", prompts(400, tokens=20))
    out = tmp_path / "out"
    code = PROGRAM
    if limit == "file size":
        bound = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        code = bound + "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); " + code
    arguments = ["batch", str(int8), str(rows), str(out), "--device", "cpu", "--block-rows", "64", "--max-batch", "16"]
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE) as process:
        if limit == "kill":
            while process.poll() is None and not list(out.glob("rows-*1.jsonl" if out.exists() else "x")):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        _, error = process.communicate()
    assert process.returncode == (-signal.SIGKILL if limit == "kill" else 1), error
    assert limit == "kill" or b"File too large; what is finished is kept" in error
    committed = read_rows(out)
    kept = {i: result for i, result in journal_rows(out).items() if i not in {row["id"] for row in committed}}
    counts = run(int8, rows, out, block_rows=64)
    assert counts.rows == 400 - len(kept) - len(committed)  # nothing that was finished is repeated
    assert not list(out.glob(".*.journal"))
    found = read_rows(out)
    assert Counter(row["id"] for row in found) == Counter(range(400))
    by_id = {row["id"]: row["generated_text"] for row in found}
    assert all(by_id[index] == result["generated_text"] for index, result in kept.items())


def test_the_output_of_a_batch_is_an_input(int8, tmp_path):
    """What failed is asked again: fields of an earlier answer are replaced."""
    first = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 2}, {"prompt": "a", "temperature": "x"}])
    run(int8, first, tmp_path / "out.jsonl")
    again = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    again[1]["temperature"] = 0
    run(int8, write_rows(tmp_path / "again.jsonl", again), tmp_path / "second.jsonl")
    found = read_rows(tmp_path / "second.jsonl")
    assert [row["error"] for row in found] == [None, None] and found[0]["generated_text"] == again[0]["generated_text"]
