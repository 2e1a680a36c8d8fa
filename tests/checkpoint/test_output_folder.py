"""The output appears complete or not at all, whatever happens."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import tiny_checkpoint
import xxhash

from bminf_lite.checkpoint import output_folder as module
from bminf_lite.checkpoint.manifest import MANIFEST_FILE
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.output_folder import output_folder
from bminf_lite.errors import CheckpointError


def fill(folder: Path, content: str) -> None:
    (folder / MANIFEST_FILE).write_text(content)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def make(target: Path, content: str, force: bool = False) -> None:
    with output_folder(target, force, 0) as folder:
        assert folder.parent == target.parent and not any(folder.iterdir())
        fill(folder, content)


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the system call that exchanges names."""
    if not request.param:
        monkeypatch.setattr(module, "_exchange", lambda a, b: False)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), output_folder(tmp_path / "out", False, 0) as folder:
        fill(folder, "new")
        raise error
    assert names(tmp_path) == set()


def test_ctrl_c_while_the_old_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", "old")
    remove, calls = shutil.rmtree, []

    def interrupted_once(folder: Path, ignore_errors: bool) -> None:
        calls.append(folder)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / MANIFEST_FILE).read_text() == "new" and names(tmp_path) == {"out"}


@pytest.mark.usefixtures("exchange")
def test_replacing_keeps_the_old_one_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    make(target, "old")
    with pytest.raises(ValueError), output_folder(target, True, 0) as folder:
        fill(folder, "new")
        assert (target / MANIFEST_FILE).read_text() == "old"
        raise ValueError
    assert (target / MANIFEST_FILE).read_text() == "old" and names(target.parent) == {"out"}
    make(target, "new", force=True)
    assert (target / MANIFEST_FILE).read_text() == "new" and names(target.parent) == {"out"}


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(CheckpointError, match=r"already exists.*--force"):
        make(target, "x")
    make(target, "an empty folder may be replaced", force=True)
    (target / MANIFEST_FILE).unlink()
    (target / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not the result of a migration"):
        make(target, "x", force=True)
    assert names(target) == {"precious"} and names(tmp_path) == {"out"}
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        make(target / "precious", "x", force=True)


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(CheckpointError, match="another process made it"), output_folder(target, False, 0):
        target.mkdir()
        (target / "theirs").write_text("x")
    assert names(target) == {"theirs"} and names(tmp_path) == {"out"}


def test_leftovers_of_killed_runs_are_removed_and_running_ones_stay(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with output_folder(target, False, 0) as running:
        killed = [tmp_path / ".out.0123abcd.partial", tmp_path / ".out.0123abce.old"]
        others = [tmp_path / ".out2.0123abcd.partial", tmp_path / ".out.0123abcd.partial.x", tmp_path / "out.partial"]
        for folder in killed + others:
            folder.mkdir()
            (folder / "x").write_text("x")
        killed[1].rename(tmp_path / "aside")
        make(tmp_path / "out3", "x")
        assert killed[0].exists(), "another target's leftovers are not ours"
        (tmp_path / "aside").rename(killed[1])
        target.mkdir()
        with pytest.raises(CheckpointError, match="already exists"):
            make(target, "second")
        assert running.exists() and all(folder.exists() for folder in others)
        assert not any(folder.exists() for folder in killed)
        shutil.rmtree(target)
    assert target.exists()


def test_a_run_killed_between_two_renames_is_repaired(tmp_path: Path) -> None:
    target, old = tmp_path / "out", tmp_path / ".out.0123abcd.old"
    old.mkdir()
    fill(old, "old")
    with pytest.raises(CheckpointError, match="already exists"):
        make(target, "new")
    assert (target / MANIFEST_FILE).read_text() == "old" and names(tmp_path) == {"out"}


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    told = r"the disk is full: 1,000,000,000,000,000,000 bytes are needed and [\d,]+ are free"
    with pytest.raises(CheckpointError, match=told), output_folder(tmp_path / "out", False, 10**18):
        raise AssertionError("must not start")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_becomes_full(tmp_path: Path, code: int) -> None:
    told = "the disk is full: 7 bytes are needed"
    with pytest.raises(CheckpointError, match=told), output_folder(tmp_path / "out", False, 7) as folder:
        fill(folder, "x")
        raise OSError(code, os.strerror(code))
    assert names(tmp_path) == set()


def test_a_source_that_cannot_be_read_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    target, source = tmp_path / "out", tmp_path / "source" / "tokenizer.json"
    problem = PermissionError(errno.EACCES, "Permission denied", str(source))
    with (
        pytest.raises(CheckpointError, match=rf"^{source}: cannot be read: Permission denied$"),
        output_folder(target, False, 0),
    ):
        raise problem
    with (
        pytest.raises(CheckpointError, match=rf"^{target}: cannot be written: "),
        output_folder(target, False, 0) as folder,
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "config.json"))
    with pytest.raises(CheckpointError, match=rf"^{target}: cannot be written: "), output_folder(target, False, 0):
        raise OSError(errno.EIO, "Input/output error")
    assert names(tmp_path) == set()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_migration_names_the_file_that_it_cannot_read(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "source")
    (source / "tokenizer.json").chmod(0)
    with pytest.raises(CheckpointError, match=rf"{source}/tokenizer\.json:? cannot be read"):
        migrate(source, tmp_path / "out")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        make(tmp_path / "file" / "out", "x")


def test_a_link_to_the_target_is_followed(tmp_path: Path) -> None:
    make(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    with output_folder(tmp_path / "link", True, 0) as folder:
        fill(folder, "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / MANIFEST_FILE).read_text() == "new"


def test_a_target_below_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
        with pytest.raises(CheckpointError, match=r"/file:? is a file, not a folder; name another folder"):
            make(target, "x", force=True)


def record(name: str, content: str = "x") -> dict[str, object]:
    """What a manifest says of a file."""
    checksum = xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(content.encode()))
    return {"name": name, "bytes": len(content), "xxh3": checksum}


@pytest.mark.parametrize("added", ["notes.txt", "more/model.safetensors", "link"])
def test_files_that_the_user_added_are_not_deleted(tmp_path: Path, added: str) -> None:
    target = tmp_path / "out"
    make(target, json.dumps({"files": [record("model.safetensors"), record("a/b.jinja")]}))
    for name in ("model.safetensors", "a/b.jinja"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("x")
    if added == "link":
        (target / added).symlink_to("nowhere")
    else:
        (target / added).parent.mkdir(exist_ok=True)
        (target / added).write_text("mine")
    with pytest.raises(CheckpointError, match=rf"would delete them: {added}; move"):
        make(target, "new", force=True)
    (target / added).unlink()
    make(target, "new", force=True)
    assert (target / MANIFEST_FILE).read_text() == "new" and names(tmp_path) == {"out"}


@pytest.mark.parametrize(
    "name, content", [("config.json", "y"), ("config.json", "longer"), ("model.safetensors", "trained")]
)
def test_files_that_the_user_changed_are_not_deleted(tmp_path: Path, name: str, content: str) -> None:
    target = tmp_path / "out"
    make(target, json.dumps({"files": [record("model.safetensors"), record("config.json")]}))
    for own in ("model.safetensors", "config.json"):
        (target / own).write_text("x")
    (target / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"or changed.*would delete them: {name}; move"):
        make(target, "new", force=True)
    assert (target / name).read_text() == content
    (target / name).write_text("x")
    make(target, "new", force=True)


@pytest.mark.parametrize("manifest", ["", "{}", "[]", '{"files": [{"name": "notes.txt"}]}'])
def test_beside_a_manifest_that_cannot_be_read_nothing_is_deleted(tmp_path: Path, manifest: str) -> None:
    make(tmp_path / "out", manifest)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"would delete them: notes\.txt; move"):
        make(tmp_path / "out", "new", force=True)
    assert names(tmp_path / "out") == {MANIFEST_FILE, "notes.txt"}


@pytest.mark.usefixtures("exchange")
def test_a_read_only_result_is_replaced_and_its_copy_removed() -> None:
    """As another user than root, for whom permissions do not count."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            make(folder / "out", json.dumps({"files": [record("deep/file")]}))
            (folder / "out" / "deep").mkdir()
            (folder / "out" / "deep" / "file").write_text("x")
            for path in (folder / "out" / "deep" / "file", folder / "out" / "deep", folder / "out"):
                path.chmod(0o555)
            make(folder / "out", "new", force=True)
            assert (folder / "out" / MANIFEST_FILE).read_text() == "new" and names(folder) == {"out"}
        finally:
            if is_root:
                os.seteuid(0)
