"""What a cubin says of its kernels: where their parameters lie and how many threads a block may have.

The driver reads this from the section ``.nv.info.<kernel>`` of the ELF file: a sequence of entries of a format, an
attribute, and a value of two bytes, or, with format 4, of as many bytes as these two say.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from bminf_lite.cuda.runtime.declarations import struct_format

PARAMETER_INFO, MAX_THREADS = 0x17, 0x05


@dataclass(frozen=True)
class KernelInfo:
    """``parameters`` are pairs of offset and size in bytes; ``max_threads`` is 0 where the kernel names no bound."""

    parameters: tuple[tuple[int, int], ...]
    max_threads: int


def sections(image: bytes) -> dict[str, bytes]:
    """An ELF file's sections by name."""
    (table,), (entry, count, names) = struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry) for i in range(count)]
    start = headers[names][4]
    found = {}
    for name, _, _, _, offset, size in headers:
        end = image.index(b"\0", start + name)
        found[image[start + name : end].decode()] = image[offset : offset + size]
    return found


def kernel_info(image: bytes, symbol: str) -> KernelInfo:
    """The facts of one kernel, by its symbol."""
    content, at = sections(image)[f".nv.info.{symbol}"], 0
    parameters, threads = {}, 0
    while at < len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form != 4:
            continue
        if attribute == PARAMETER_INFO:
            _, ordinal, offset, bits = struct.unpack_from("<IHHI", content, at)
            parameters[ordinal] = offset, bits >> 18
        elif attribute == MAX_THREADS:
            x, y, z = struct.unpack_from("<III", content, at)
            threads = x * y * z
        at += size
    return KernelInfo(tuple(parameters[i] for i in range(len(parameters))), threads)


def offsets_and_sizes(signature: str) -> tuple[tuple[int, int], ...]:
    """The same of a signature, as a launch packs it."""
    sizes = [struct.calcsize({"p": "P", "T": "128s"}.get(letter, letter)) for letter in signature]
    ends = [struct.calcsize(struct_format(signature[: i + 1])) for i in range(len(signature))]
    return tuple((end - size, size) for end, size in zip(ends, sizes, strict=True))
