"""Amounts of memory as text."""

from __future__ import annotations

import re
from decimal import Decimal

from ..errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """Bytes from a number of bytes or a text: ``"6GiB"``, ``"500 MB"``, ``"1.5g"``; k, M, G, T are powers of 1000.

    Raises ``UsageError`` for anything else, and for amounts that are not positive.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise UsageError(f"a size is a number of bytes or a text such as '6GiB', not {size!r}")
    if isinstance(size, int):
        nbytes = size
    elif match := _SIZE.fullmatch(size):
        nbytes = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    else:
        raise UsageError(f"{size!r} is not a size: write a number and a unit, such as '6GiB' or '500MB'")
    if nbytes <= 0:
        raise UsageError(f"a size must be positive, and {size!r} is not")
    return nbytes


def format_size(nbytes: int) -> str:
    """Bytes as text: ``"512 bytes"``, ``"2.0 MiB"``, ``"139.8 GiB"``."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << exponent:
            return f"{nbytes / (1 << exponent):.1f} {unit}"
    return f"{nbytes} bytes"
