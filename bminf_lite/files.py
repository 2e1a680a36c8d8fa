"""Files and paths that a user names.

``~`` is expanded, and only regular files of a sensible size are read. A file is written whole or not at all: its
content goes into a temporary file of the same folder, which takes its name when it is complete.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BminfError, UsageError

MAX_TEXT_BYTES = 1 << 28
"""The most bytes of a JSON or text file of a checkpoint; the largest vocabularies take a tenth of it."""
MAX_FILE_BYTES = 1 << 30
"""The most bytes of a file of texts or prompts, all of which is in memory."""
MAX_JSON_VALUES = 1 << 21
"""The most values in a JSON file that Python parses, which takes about a microsecond and 100 bytes for each."""
MAX_THREADS = 16
"""More threads would wait for the disk."""


def expand(path: str | Path, what: str = "path") -> Path:
    """``path`` with ``~`` expanded; ``UsageError`` for a value that is no path, or that the system cannot look up.

    A path that does not exist passes.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise UsageError(f"{what} is {path!r}, but must be the path of a folder, as text or a pathlib.Path")
    try:
        found = Path(path).expanduser()
        if not found.is_absolute():
            _require_working_folder(what, path)
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (RuntimeError, ValueError) as error:  # of an unknown user; of zero bytes and halves of surrogate pairs
        raise UsageError(f"{what} is {str(path)!r}, which is no path: {error}") from error
    except OSError as error:
        raise UsageError(f"{what} is {str(path)!r}, which cannot be reached: {error.strerror}") from error
    return found


def _require_working_folder(what: str, path: str | os.PathLike[str]) -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        problem = "is relative, but the working directory has been deleted: change to another one"
        raise UsageError(f"{what} {str(path)!r} {problem}, or give an absolute path") from None


def read_small_file(path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file of at most ``most`` bytes. Raises ``OSError``, also for a device or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file", str(path))
        if status.st_size > most:
            raise OSError(0, f"it has {status.st_size:,} bytes, and {most:,} are allowed", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


class TooManyValues(ValueError):
    """A JSON file has more values than may be."""


def parse_json(
    content: bytes,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    most: int = MAX_JSON_VALUES,
) -> Any:
    """The value in a JSON file; ``ValueError`` if it is none, nests too deeply, or has more than ``most`` values.

    Commas and brackets in texts count as values too.
    """
    count = sum(map(content.count, (b",", b"[", b"{")))
    if count > most:
        raise TooManyValues(f"it has up to {count:,} values, and {most:,} are allowed")
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def read_file_or_pipe(path: Path) -> bytes:
    """The content of a file or a pipe. Raises ``OSError``, also for a device, and for more than 1 GiB."""
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
            raise OSError(0, "it is a device", str(path))
        return read_at_most(file, MAX_FILE_BYTES, str(path))


def read_at_most(file: BinaryIO, most: int, name: str) -> bytes:
    """All that ``file``, called ``name``, holds; ``OSError`` for more than ``most`` bytes, of which no more is read."""
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(0, f"it has more than {most:,} bytes", name)
    return content


def write_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file that appears complete or not at all, and wait until it is on the disk, unless ``sync`` is False.

    An earlier file keeps its content until the new one is complete: a full disk, Ctrl-C or a crash leaves it as it
    was. Its permissions stay, and a link stays a link. What is no regular file, such as ``/dev/stdout`` or a pipe, is
    written directly. Raises ``OSError``, also for an earlier file that is write-protected.
    """
    target = Path(os.path.realpath(path))
    earlier = _earlier_file(target)
    if earlier is not None and not stat.S_ISREG(earlier.st_mode):
        with open(target, "wb") as special:
            special.write(content)
        return
    # The name is short and does not depend on the target's, which may have all of the 255 bytes that are allowed.
    partial = target.parent / f".{secrets.token_hex(8)}.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if earlier is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(earlier.st_mode))
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    if sync:
        with suppress(OSError):  # network file systems that cannot
            sync_folder(target.parent)


def save_result(path: Path, content: bytes) -> None:
    """:func:`write_file` for what a user asked for: raises ``BminfError``, which names the file and the reason."""
    try:
        write_file(path, content)
    except OSError as error:
        kept = "; the earlier file is unchanged" if os.path.isfile(path) else ""
        raise BminfError(f"{path}: cannot be written: {error.strerror or error}{kept}") from error


def check_writable(path: Path, what: str) -> None:
    """Raise ``UsageError`` if :func:`write_file` cannot write ``path``; to be called before work that takes long.

    ``what`` is what the user gave the path for, such as an option's name.
    """
    if not path.is_absolute():
        _require_working_folder(what, path)
    try:
        target = Path(os.path.realpath(path))
        earlier = _earlier_file(target)
        if not target.parent.is_dir():
            raise UsageError(f"{what} {path}: the folder {target.parent} does not exist; make it first")
        if (earlier is None or stat.S_ISREG(earlier.st_mode)) and not os.access(target.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{what} {path}: nothing can be written in the folder {target.parent}; name another one")
    except UsageError:  # which is a ValueError
        raise
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{what} {path}: cannot be written: {problem}; name another file") from None


def _earlier_file(target: Path) -> os.stat_result | None:
    """The status of an existing file. Raises ``OSError`` if it may not be written, or is a folder."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return status


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_within(name: str) -> bool:
    """Whether a file's name in a list, with ``/`` between its parts, is that of a file inside of the list's folder."""
    parts = name.split("/")
    return not {"", ".", ".."} & set(parts) and "\\" not in name and "\0" not in name


def linkable_root(folder: Path) -> Path:
    """The folder that links in ``folder`` may lead to: itself, or the model's folder in the cache of Hugging Face.

    There, ``snapshots/REVISION`` holds links into ``blobs``.
    """
    root = folder.resolve()
    is_cache = root.parent.name == "snapshots" and (root.parents[1] / "blobs").is_dir()
    return root.parents[1] if is_cache else root


def thread_count() -> int:
    """Threads for work that is spread over cores: reading, hashing and converting files, masks of grammars."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)
