"""Blocks of the input, and the files of the output."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.batch import plan as plans
from bminf_lite.batch.output import BatchOutput, read_journal
from bminf_lite.batch.plan import BatchBlock, plan_lines, read_lines
from bminf_lite.batch.storage import LocalStorage
from bminf_lite.errors import UsageError

STORAGE = LocalStorage()
BLOCK = BatchBlock("in", 0, 2, 0, 10)


@given(
    files=st.lists(st.lists(st.sampled_from(["", " ", "{}", '{"a": 1}', '"ü\r"']), min_size=1), min_size=1, max_size=3),
    ends=st.booleans(),
    block_rows=st.integers(1, 5),
    chunk=st.integers(1, 9),
)
def test_blocks_hold_every_row_once_and_in_order(tmp_path_factory, files, ends, block_rows, chunk):
    folder = tmp_path_factory.mktemp("rows")
    paths = []
    for i, lines in enumerate(files):
        paths.append(str(folder / f"{i}.jsonl"))
        Path(paths[-1]).write_text("\n".join(lines) + ("\n" if ends or not lines[-1] else ""), newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_CHUNK", chunk)
        plan = plan_lines(STORAGE, paths, block_rows)
    every = [line for lines in files for line in lines]
    assert plan.num_rows == len(every) == sum(block.num_rows for block in plan.blocks)
    assert all(block.num_rows <= block_rows for block in plan.blocks)
    rows = [row for block in plan.blocks for row in read_lines(STORAGE, block)]
    assert [row.index for row in rows] == [i for i, line in enumerate(every) if line.strip()]
    assert sorted(block.name for block in plan.blocks) == [block.name for block in plan.blocks]
    changed = Path(paths[0]).read_bytes()[:-1] + b"x"
    Path(paths[0]).write_bytes(changed)
    assert plan_lines(STORAGE, paths, block_rows).describe() != plan.describe()


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    plan = plan_lines(STORAGE, [str(tmp_path / "a.jsonl")])
    assert read_lines(STORAGE, plan.blocks[0])[0].fields == {"prompt": "a"}


def test_input_without_rows_is_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    for path, words in (("a.jsonl", "no rows"), ("b.jsonl", "no such file")):
        with pytest.raises(UsageError, match=words):
            plan_lines(STORAGE, STORAGE.inputs(str(tmp_path / path)))


def output(folder: Path) -> BatchOutput:
    made = BatchOutput(STORAGE, str(folder), ".jsonl")
    made.begin({"a": 1})
    return made


@pytest.mark.parametrize("cut", range(1, 12, 5))
def test_a_journal_keeps_what_was_written_whole(tmp_path, cut):
    out = output(tmp_path)
    for i in range(2):
        earlier = set(tmp_path.glob(".*.journal"))
        journal = out.journal(BLOCK)
        journal.append(i, {"text": "ü" * 10})
        journal.append(i + 10, {})
        journal.close()
        (path,) = set(tmp_path.glob(".*.journal")) - earlier
        path.write_bytes(path.read_bytes()[:-cut])
    assert out.finished(BLOCK).keys() == ({0, 10, 1, 11} if cut == 1 else {0, 1})
    out.commit(BLOCK, b"{}\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["batch.json", f"{BLOCK.name}.jsonl"]
    assert output(tmp_path).begin({"a": 1}) == {BLOCK.name}


@given(st.binary(max_size=60))
def test_a_journal_of_anything_is_read(content):
    assert read_journal(content) == {}


def test_a_full_disk_leaves_the_rows_before(tmp_path, monkeypatch):
    write, room = os.write, 100

    def full(descriptor: int, content: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, content[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", full)
    journal = output(tmp_path).journal(BLOCK)
    with pytest.raises(OSError, match="No space"):
        for i in range(100):
            journal.append(i, {"text": "abc"})
    found = output(tmp_path).finished(BLOCK)
    assert found == {i: {"text": "abc"} for i in range(2)}


def test_a_folder_of_something_else_is_not_used(tmp_path):
    other = BatchOutput(STORAGE, str(tmp_path / "batch"), ".jsonl")
    journal = output(tmp_path / "batch").journal(BLOCK)
    other.begin({"a": 2})  # nothing is finished yet
    out = output(tmp_path / "batch")
    journal.append(0, {})
    with pytest.raises(UsageError, match="that of another batch: a was 1, and is 2"):
        other.begin({"a": 2})
    journal.close()
    out.commit(BLOCK, b"{}\n")
    with pytest.raises(UsageError, match="that of another batch: a was 1, and is 2"):
        other.begin({"a": 2})
    with pytest.raises(UsageError, match="has other files"):
        output(tmp_path)
