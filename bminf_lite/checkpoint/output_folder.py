"""A folder that appears complete or not at all.

The files are written into a hidden folder beside the target, on the same file system. When they are on the disk, the
folder is renamed to the target in one step. A run that is killed leaves the target as it was; the next run for the same
target removes the hidden folder. An earlier result is replaced only if it holds nothing but what a migration wrote, as
it wrote it.
With ``force`` the new folder and an existing target exchange names in one step (``renameat2`` of Linux), so a complete
folder has that name at every moment. Where the system cannot exchange names, the old folder is renamed first, and
renamed back if the second step fails; the next run repairs what a run that was killed between the two steps left.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError
from ..files import read_small_file, sync_folder
from .checksum import file_checksum
from .manifest import MANIFEST_FILE, file_records

_PARTIAL = ".partial"
_OLD = ".old"


@contextmanager
def output_folder(target: Path, force: bool, needed: int) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends without an exception it becomes ``target``.

    ``needed`` is the size of the result in bytes. Raises :class:`CheckpointError` if the target exists without
    ``force``, if it exists and is no migrated checkpoint, or if the disk is, or becomes, full.
    """
    target = target.resolve()
    partial, lock = target.parent / f".{target.name}.{secrets.token_hex(4)}{_PARTIAL}", -1
    try:
        _check_is_folder(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(target)
        check_target(target, force)
        check_space(target, needed)
        partial.mkdir()
        lock = _lock(partial)
        yield partial
        sync_folder(partial)
        _publish(partial, target, force)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(target, needed) from error
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.exists():
            remedy = "name another folder, or replace it with --force"
            raise CheckpointError(f"{target}: another process made it meanwhile; {remedy}") from error
        if (other := _other_file(error, partial, target)) is not None:
            raise CheckpointError(f"{other}: cannot be read: {error.strerror}") from error
        raise CheckpointError(f"{target}: cannot be written: {error}") from error
    finally:
        _remove(partial)
        if lock >= 0:
            os.close(lock)


def _other_file(error: OSError, *folders: Path) -> Path | None:
    """The file of an error, if it is in none of ``folders`` and is none that they are in: one of the source."""
    if not isinstance(error.filename, (str, os.PathLike)) or error.filename2 is not None:
        return None
    path = Path(error.filename).absolute()
    related = any(path.is_relative_to(folder) or folder.is_relative_to(path) for folder in folders)
    return None if related else path


def check_target(target: Path, force: bool) -> None:
    """Raise :class:`CheckpointError` if ``target`` exists and may not be replaced, or cannot be made."""
    _check_is_folder(target)
    parent = _existing_parent(target)
    if not os.access(parent, os.W_OK):
        raise CheckpointError(f"{target}: nothing can be written in {parent}; name a folder elsewhere")
    if not target.exists():
        return
    if not force:
        raise CheckpointError(f"{target}: already exists; name another folder, or replace it with --force (force=True)")
    if any(target.iterdir()) and not (target / MANIFEST_FILE).is_file():
        problem = f"holds no {MANIFEST_FILE}, so it is not the result of a migration and is not replaced"
        raise CheckpointError(f"{target}: {problem}; delete it, or name another folder")
    if own := _own_files(target):
        names = ", ".join(own[:4]) + (", ..." if len(own) > 4 else "")
        problem = f"holds files that were added or changed, and replacing it would delete them: {names}"
        raise CheckpointError(f"{target}: {problem}; move or delete them, or name another folder")


def _check_is_folder(target: Path) -> None:
    """Raise :class:`CheckpointError` if ``target``, or a folder that it would be in, is a file."""
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not existing.is_dir():
        where = "" if existing == target else f"{existing} "
        raise CheckpointError(f"{target}: {where}is a file, not a folder; name another folder")


def _own_files(target: Path) -> list[str]:
    """The user's files in a result: those that its manifest does not list, and those that have changed since.

    All files, if the manifest cannot be read. Of weights the size is compared, because reading them takes long.
    """
    try:
        manifest = json.loads(read_small_file(target / MANIFEST_FILE))
        known = {record.name: record for record in file_records(manifest, target)}
    except (OSError, ValueError, AttributeError, CheckpointError):
        known = {}

    def is_result(path: Path, name: str) -> bool:
        record = known.get(name)
        if record is None or path.is_symlink() or not path.is_file() or path.stat().st_size != record.bytes:
            return False
        return path.suffix == ".safetensors" or file_checksum(path) == record.xxh3

    files = (path for path in target.rglob("*") if path.is_symlink() or not path.is_dir())
    names = {path.relative_to(target).as_posix(): path for path in files if path != target / MANIFEST_FILE}
    return sorted(name for name, path in names.items() if not is_result(path, name))


def check_space(target: Path, needed: int) -> None:
    """Raise :class:`CheckpointError` if fewer than ``needed`` bytes are free on the disk of ``target``."""
    if _free(target) < needed:
        raise _disk_full(target, needed)


def _free(target: Path) -> int:
    """The free bytes on the disk of ``target``."""
    return shutil.disk_usage(_existing_parent(target)).free


def _existing_parent(target: Path) -> Path:
    """The folder that ``target`` will be in, or the one in which that will be made."""
    return next(folder for folder in (*target.parents, target) if folder.exists())


def _disk_full(target: Path, needed: int) -> CheckpointError:
    room = f"{needed:,} bytes are needed and {_free(target):,} are free"
    return CheckpointError(f"{target}: the disk is full: {room}; make room, or name a folder on another disk")


def _clear_leftovers(target: Path) -> None:
    """Remove the folders of killed runs for the same target. The folder of a running one is locked, and stays."""
    for leftover in _siblings(target, _OLD):
        if target.exists():
            _delete(leftover)
        else:
            os.rename(leftover, target)
    for leftover in _siblings(target, _PARTIAL):
        try:
            lock = _lock(leftover)
        except OSError:
            continue
        _delete(leftover)
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder completely, also if Ctrl-C or a signal interrupts it."""
    try:
        _delete(folder)
    except (KeyboardInterrupt, SystemExit):
        _delete(folder)
        raise


def _delete(folder: Path) -> None:
    """Remove a folder, also where it or a folder in it is read-only, as an earlier result may be."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _siblings(target: Path, suffix: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{re.escape(suffix)}")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]


def _lock(folder: Path) -> int:
    """Lock a folder while the descriptor is open, or raise ``OSError``. The system unlocks it if the process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _publish(partial: Path, target: Path, force: bool) -> None:
    """Rename ``partial`` to ``target``, and an earlier ``target`` to ``partial``."""
    if not force or not target.exists():
        os.rename(partial, target)
    elif not _exchange(partial, target):
        old = partial.with_suffix(_OLD)
        os.rename(target, old)
        try:
            os.rename(partial, target)
        except OSError:
            os.rename(old, target)
            raise
        os.rename(old, partial)
    sync_folder(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = ctypes.c_int(-100), ctypes.c_uint(2)  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, ctypes.c_char_p(os.fsencode(a)), here, ctypes.c_char_p(os.fsencode(b)), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))
