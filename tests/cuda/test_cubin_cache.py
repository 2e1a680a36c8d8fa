import os
import sys
import warnings
from pathlib import Path

import pytest

from bminf_lite.cuda.runtime import cubin_cache


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    assert cubin_cache.read(folder, "key") is None
    cubin_cache.write(folder, "key", b"contents\n\0 of any kind")
    cubin_cache.write(folder, "other", b"")
    assert cubin_cache.read(folder, "key") == b"contents\n\0 of any kind"
    assert cubin_cache.read(folder, "other") == b""
    assert sorted(path.name for path in folder.iterdir()) == ["key", "other"], "nothing temporary is left"


@pytest.mark.parametrize(
    "damage", [lambda stored: stored[:-1], lambda stored: stored[:70] + b"?" + stored[71:], lambda _: b""]
)
def test_a_damaged_entry_is_absent(tmp_path: Path, damage) -> None:
    cubin_cache.write(tmp_path, "key", b"some contents")
    stored = (tmp_path / "key").read_bytes()
    (tmp_path / "key").write_bytes(damage(stored))
    assert cubin_cache.read(tmp_path, "key") is None
    cubin_cache.write(tmp_path, "key", b"some contents")
    assert (tmp_path / "key").read_bytes() == stored


def test_a_folder_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "cache"
    with pytest.warns(RuntimeWarning, match="BMINF_LITE_CACHE") as caught:
        cubin_cache.write(folder, "key", b"contents")
    assert str(folder) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubin_cache.write(folder, "key", b"contents")
    assert cubin_cache.read(folder, "key") is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cubin_cache.write(tmp_path, "key", b"contents")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("platform", "environment", "folder"),
    [
        ("linux", {"BMINF_LITE_CACHE": "/data/kernels", "XDG_CACHE_HOME": "/x"}, "/data/kernels"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/bminf_lite"),
        ("linux", {"XDG_CACHE_HOME": "not/absolute"}, "/home/me/.cache/bminf_lite"),
        ("linux", {}, "/home/me/.cache/bminf_lite"),
        ("darwin", {}, "/home/me/Library/Caches/bminf_lite"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/bminf_lite/Cache"),
    ],
)
def test_the_platforms_folder(platform: str, environment: dict, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BMINF_LITE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert cubin_cache.default_folder() == Path(folder)
