"""Files where Ray Data reads them too: object stores and other file systems, by pyarrow or fsspec."""

from __future__ import annotations

from typing import BinaryIO, cast

import pyarrow as pa
from pyarrow import fs

from ..batch.storage import LocalStorage, Storage, visible
from ..errors import BminfError, UsageError

MARKER = "_{}.done"
"""The name of an empty file that says that another one is complete. Readers of folders pass names with ``_`` by."""


class ArrowStorage:
    """The files of one file system that pyarrow or fsspec knows, such as ``s3://``.

    A file is complete when its marker is there, because not every file system shows a file only when it is whole.
    """

    can_append = False

    def __init__(self, filesystem: fs.FileSystem):
        self._filesystem = filesystem

    def inputs(self, path: str) -> list[str]:
        """See :meth:`.Storage.inputs`."""
        info = self._filesystem.get_file_info(path)
        if info.type == fs.FileType.File:
            return [path]
        if info.type == fs.FileType.NotFound:
            raise UsageError(f"{path}: there is no such file or folder")
        found = self._filesystem.get_file_info(fs.FileSelector(path))
        return visible(path, [entry.path for entry in found if entry.type == fs.FileType.File])

    def open(self, path: str) -> BinaryIO:
        """See :meth:`.Storage.open`."""
        return cast(BinaryIO, self._filesystem.open_input_file(path))

    def names(self, folder: str) -> set[str]:
        """See :meth:`.Storage.names`."""
        found = self._filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        if not found:
            self._filesystem.create_dir(folder)
        names = {entry.base_name for entry in found}
        return {name for name in names if MARKER.format(name) in names}

    def commit(self, folder: str, name: str, content: bytes) -> None:
        """See :meth:`.Storage.commit`."""
        for path, data in ((name, content), (MARKER.format(name), b"")):
            with self._filesystem.open_output_stream(f"{folder}/{path}") as file:
                file.write(data)


def storage_of(path: str) -> tuple[Storage, str]:
    """The storage of a path or an address such as ``s3://bucket/folder``, and what the path is called there.

    Raises ``UsageError`` for an address of no file system that is known, and ``BminfError`` where it is not reached.
    """
    scheme, separator, rest = path.partition("://")
    if not separator:
        return LocalStorage(), path
    try:
        filesystem, place = fs.FileSystem.from_uri(path)
    except pa.ArrowInvalid:
        try:
            import fsspec

            filesystem = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme)))
        except (ImportError, ValueError) as error:
            raise UsageError(f"{path}: no file system is known for {scheme}://: {error}") from None
        place = rest
    except OSError as error:
        raise BminfError(f"{path}: cannot be reached: {error}") from error
    return ArrowStorage(filesystem), place.rstrip("/")
