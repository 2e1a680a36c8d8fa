"""Backends: where a model computes. One is created per model; nothing is ambient."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from ..errors import DeviceError, UsageError
from ..memory.sizes import parse_size

if TYPE_CHECKING:
    from .base import Backend


def create(device: str = "auto", memory_limit: int | str | None = None) -> Backend:
    """The backend for ``device``: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``.

    ``auto`` takes the first GPU if one is usable, else the CPU, and says so in one line on stderr. Raises
    ``UsageError`` for another name or a limit that is no size, also where no GPU is used; ``DeviceError`` if a GPU is
    asked for and none can be used.
    """
    check_device(device)
    if memory_limit is not None:
        parse_size(memory_limit)
    if device == "cpu":
        return _cpu()
    try:
        return _cuda(int(device.partition(":")[2] or 0), memory_limit)
    except DeviceError as error:
        if device != "auto" or isinstance(error, MemoryError):
            raise
        print(f"bminf-lite: no usable GPU ({error}); using the CPU", file=sys.stderr)
        return _cpu()


def check_device(device: str) -> None:
    """Raise ``UsageError`` for what is no name of a device."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N")


def _cpu() -> Backend:
    from .cpu import CpuBackend

    return CpuBackend()


def _cuda(index: int, memory_limit: int | str | None) -> Backend:
    from ..cuda.doctor import require_usable

    require_usable(index)
    from .cuda.backend import CudaBackend

    return CudaBackend(index, memory_limit)
