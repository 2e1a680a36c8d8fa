"""Compiled kernels kept on disk, so that a second start compiles nothing.

An entry is a file named by the hash of everything that its contents depend on, so an entry is never stale, only unused.
It is written under a temporary name and then renamed, so several processes may compile the same kernel at once. It
begins with a checksum of its contents, so a damaged entry counts as absent. If the folder cannot be written, there is a
warning and each start compiles again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import warnings
from pathlib import Path

from ...files import write_file

ENVIRONMENT_VARIABLE = "BMINF_LITE_CACHE"


def default_folder() -> Path:
    """The folder for compiled kernels: ``$BMINF_LITE_CACHE``, or ``bminf_lite`` in the platform's folder for caches."""
    if override := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(override)
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "bminf_lite" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bminf_lite"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "bminf_lite"


def read(folder: Path, key: str) -> bytes | None:
    """The contents of the entry ``key``; None if it is absent or damaged."""
    try:
        stored = (folder / key).read_bytes()
    except OSError:
        return None
    checksum, _, contents = stored.partition(b"\n")
    return contents if checksum == _checksum(contents) else None


def write(folder: Path, key: str, contents: bytes) -> None:
    """Keep ``contents`` under ``key``; warns once for each folder that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / key, _checksum(contents) + b"\n" + contents, sync=False)
    except OSError as error:
        _warn_unwritable(folder, f"{error.strerror or error}")


def _checksum(contents: bytes) -> bytes:
    return hashlib.sha256(contents).hexdigest().encode()


@functools.cache
def _warn_unwritable(folder: Path, reason: str) -> None:
    warnings.warn(
        f"{folder}: compiled kernels cannot be kept there ({reason}), so every start compiles them again; "
        f"set {ENVIRONMENT_VARIABLE} to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
