"""The zip archive around a PyTorch file: where each record lies, and that it lies there alone.

Records of PyTorch are stored, not compressed, so that they can be mapped. Anything else is refused: compressed or
encrypted records (a small file could claim any size), records that overlap or reach past the file's end, and two of one
name. The standard library reads the archive's directory; the bytes of records are never read through it.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

MAX_DIRECTORY_BYTES = 1 << 26
"""Room for half a million records."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")

ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)``: bytes of the file, fewer at its end."""


class UnsupportedZipError(ValueError):
    """The archive is damaged, or not one that PyTorch would write. Says what."""


@dataclass(frozen=True)
class Record:
    """Where a record's bytes are in the file."""

    offset: int
    size: int


def zip_records(read: ReadAt, file_size: int) -> dict[str, Record]:
    """The records of the archive that the file is, by name. Raises :class:`UnsupportedZipError`."""
    try:
        with zipfile.ZipFile(_Window(read, file_size)) as archive:
            entries = archive.infolist()
    except UnsupportedZipError:
        raise
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, OSError, struct.error) as error:
        raise UnsupportedZipError(f"its zip directory cannot be read ({error}); it is damaged or truncated") from error
    records: dict[str, Record] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        record = _locate(entry, read)
        name = entry.orig_filename
        if name in records:
            raise UnsupportedZipError(f"its record {name!r} is there twice")
        if entry.header_offset < end:
            raise UnsupportedZipError(f"its record {name!r} overlaps the one before it")
        end = record.offset + record.size
        if end > file_size:
            raise UnsupportedZipError(f"its record {name!r} ends after the file's {file_size:,} bytes; it is truncated")
        records[name] = record
    return records


def _locate(entry: zipfile.ZipInfo, read: ReadAt) -> Record:
    """A record's place, by the directory and by the header in front of the record, which must agree."""
    name = entry.orig_filename
    header = read(entry.header_offset, _LOCAL_HEADER.size) if entry.header_offset >= 0 else b""
    if len(header) < _LOCAL_HEADER.size:
        raise UnsupportedZipError(f"its record {name!r} lies outside of the file")
    magic, _, flags, method, _, _, _, _, _, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    local_name = read(entry.header_offset + _LOCAL_HEADER.size, name_size)
    if magic != b"PK\3\4" or local_name != name.encode("utf-8" if entry.flag_bits & 0x800 else "cp437"):
        raise UnsupportedZipError(f"its record {name!r} is not where the directory says")
    if (flags | entry.flag_bits) & 0x1:
        raise UnsupportedZipError(f"its record {name!r} is encrypted")
    if method != zipfile.ZIP_STORED or entry.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedZipError(
            f"its record {name!r} is compressed, which torch.save never does; save the checkpoint with it"
        )
    if entry.file_size != entry.compress_size:
        raise UnsupportedZipError(
            f"its record {name!r} has {entry.compress_size:,} bytes and claims {entry.file_size:,}"
        )
    return Record(entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size, entry.file_size)


class _Window(io.RawIOBase):
    """The file as ``zipfile`` wants it. What it reads at once is bounded, since the file says how much that is."""

    def __init__(self, read: ReadAt, size: int):
        self._read_at = read
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError("a place before the start of the file")
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        rest = max(self._size - self._position, 0)
        size = rest if size < 0 else min(size, rest)
        if size > MAX_DIRECTORY_BYTES:
            raise UnsupportedZipError(f"its zip directory has {size:,} bytes, and {MAX_DIRECTORY_BYTES:,} are allowed")
        content = self._read_at(self._position, size)
        self._position += len(content)
        return content
