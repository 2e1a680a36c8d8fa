"""Where a batch is read from and written to: the files of this machine, or what :mod:`bminf_lite.ray` adds."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol, cast

from ..errors import UsageError
from ..files import write_file


class Storage(Protocol):
    """Files of one kind of storage. Paths are texts."""

    can_append: bool
    """Whether a file can grow, as a journal does."""

    def inputs(self, path: str) -> list[str]:
        """The file ``path``, or the files of the folder, without hidden ones, by name. ``UsageError`` if none."""
        ...

    def open(self, path: str) -> BinaryIO:
        """A file to read, in which one can seek."""
        ...

    def names(self, folder: str) -> set[str]:
        """The files of a folder that are complete. Makes the folder if it is missing."""
        ...

    def commit(self, folder: str, name: str, content: bytes) -> None:
        """Write a file that is among :meth:`names` when it is complete, and not before. Raises ``OSError``."""
        ...


class LocalStorage:
    """The files of this machine, shared file systems included: a file is committed by a rename."""

    can_append = True

    def inputs(self, path: str) -> list[str]:
        """See :meth:`Storage.inputs`."""
        place = Path(path)
        if not place.is_dir():
            if not place.is_file():
                raise UsageError(f"{path}: there is no such file or folder")
            return [path]
        return visible(path, [str(p) for p in place.iterdir() if p.is_file()])

    def open(self, path: str) -> BinaryIO:
        """See :meth:`Storage.open`."""
        return cast(BinaryIO, open(path, "rb"))

    def names(self, folder: str) -> set[str]:
        """See :meth:`Storage.names`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        return {p.name for p in Path(folder).iterdir()}

    def commit(self, folder: str, name: str, content: bytes) -> None:
        """See :meth:`Storage.commit`."""
        write_file(Path(folder) / name, content)


def visible(folder: str, paths: list[str]) -> list[str]:
    """The files of a folder that are no hidden ones, by name; ``UsageError`` if there is none."""
    found = sorted(path for path in paths if not path.rsplit("/", 1)[-1].startswith((".", "_")))
    if not found:
        raise UsageError(f"{folder}: the folder has no files")
    return found
