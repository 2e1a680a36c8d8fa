"""Files that are written appear complete or not at all."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bminf_lite import files
from bminf_lite.errors import BminfError, UsageError
from bminf_lite.files import check_writable, is_within, save_result, write_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", [b"", b"one\n", bytes(range(256)) * 1000])
@pytest.mark.parametrize("sync", [True, False])
def test_a_file_holds_what_was_written(tmp_path: Path, content: bytes, sync: bool) -> None:
    for earlier in (None, b"earlier"):
        path = tmp_path / f"{earlier!r}"
        if earlier is not None:
            path.write_bytes(earlier)
        write_file(path, content, sync=sync)
        assert path.read_bytes() == content
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("earlier", [None, b"earlier"])
def test_any_step_that_fails_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException, earlier: bytes | None
) -> None:
    path = tmp_path / "report.html"
    if earlier is not None:
        path.write_bytes(earlier)

    def fail(*_: object, **__: object) -> None:
        raise failure

    if step == "write":
        original = os.fdopen

        class FullDisk:
            def __init__(self, descriptor: int):
                self.file = original(descriptor, "wb")
                self.fileno, self.flush = self.file.fileno, self.file.flush

            def __enter__(self) -> FullDisk:
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def write(self, content: bytes) -> None:
                self.file.write(content[: len(content) // 2])
                fail()

        monkeypatch.setattr(files, "open", lambda target, mode: FullDisk(target), raising=False)
    else:
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(failure)):
        write_file(path, b"new" * 100)
    assert names(tmp_path) == ([] if earlier is None else ["report.html"])
    if earlier is not None:
        assert path.read_bytes() == earlier


def test_a_file_size_limit_of_the_system_leaves_the_earlier_file(tmp_path: Path) -> None:
    """A real failure in the middle of the write: RLIMIT_FSIZE, as a full disk or a quota would."""
    path = tmp_path / "report.html"
    path.write_bytes(b"earlier")
    code = (
        "import resource, signal, sys, pathlib; from bminf_lite.files import save_result\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "save_result(pathlib.Path(sys.argv[1]), bytes(100_000))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "cannot be written: File too large; the earlier file is unchanged" in found.stderr
    assert path.read_bytes() == b"earlier" and names(tmp_path) == ["report.html"]


def test_a_process_that_is_killed_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(b"earlier")
    code = (
        "import os, pathlib, signal, sys; from bminf_lite import files\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_file(pathlib.Path(sys.argv[1]), bytes(100_000))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert found.returncode == -signal.SIGKILL and path.read_bytes() == b"earlier"


def test_readers_see_the_earlier_or_the_new_file(tmp_path: Path) -> None:
    path, whole = tmp_path / "file", {bytes([i]) * 100_000 for i in range(4)}
    path.write_bytes(min(whole))
    done, seen = threading.Event(), set()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(25):
        for content in sorted(whole):
            write_file(path, content, sync=False)
    done.set()
    reader.join()
    assert seen <= whole


def test_a_link_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_bytes(b"earlier")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    new, umask = tmp_path / "new", os.umask(0o027)
    try:
        write_file(new, b"")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_pipe_and_a_device_are_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, b"through the pipe")
    assert os.read(reader, 100) == b"through the pipe" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    write_file(Path("/dev/null"), b"nothing")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(BminfError, match=r"^/dev/full: cannot be written: No space left on device$"):
        save_result(Path("/dev/full"), b"nothing")


def test_a_name_of_255_bytes_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("x" * 255), b"content")
    assert names(tmp_path) == ["x" * 255]


@pytest.mark.parametrize("write", [save_result, lambda path, _: check_writable(path, "--report")])
@pytest.mark.parametrize("name", ["", "x" * 256, "missing/file", "loop", "file/below"])
def test_a_path_that_cannot_be_written_is_our_error(tmp_path: Path, write, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    with pytest.raises(BminfError, match=r"cannot be written|does not exist; make it first"):
        write(tmp_path / name, b"content")
    assert names(tmp_path) == before


def test_a_folder_in_which_nothing_can_be_written_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError) as error:
        check_writable(tmp_path / "new", "OUT")
    told = f"OUT {tmp_path / 'new'}: nothing can be written in the folder {tmp_path}; name another one"
    assert str(error.value) == told


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_write_protected_files_and_folders_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"earlier")
    file.chmod(0o444)
    with pytest.raises(UsageError, match="Permission denied"):
        check_writable(file, "--plot")
    with pytest.raises(BminfError, match="Permission denied; the earlier file is unchanged"):
        save_result(file, b"new")
    tmp_path.chmod(0o555)
    with pytest.raises(UsageError, match="nothing can be written in the folder"):
        check_writable(tmp_path / "new", "--plot")
    tmp_path.chmod(0o755)


@pytest.mark.parametrize("name", ["a", "a/b", "..a", "a..", "a/...", "ü", ".hidden"])
def test_names_inside_of_a_folder(name: str) -> None:
    assert is_within(name)


@pytest.mark.parametrize("name", ["", "/", "/etc/passwd", "..", "../a", "a/../b", "a/..", "a//b", "a\\b", "a\0b"])
def test_names_that_lead_elsewhere(name: str) -> None:
    assert not is_within(name)
