"""Backends: where a model computes. Each model has its own; there is no global one."""

from __future__ import annotations

import re
import sys

from ..errors import DeviceError, UsageError
from ..memory.sizes import parse_size
from .base import Backend
from .cpu import CpuBackend


def create(device: str = "auto", memory_limit: int | str | None = None) -> Backend:
    """The backend for ``device``: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``.

    ``auto`` is the first GPU if it is usable, else the CPU with a line on stderr. ``memory_limit`` bounds the GPU's
    memory, in bytes or as a text such as ``"6GiB"``. Raises ``UsageError`` for another name and for a limit that is not
    a size, ``DeviceError`` if ``device`` names a GPU that is not usable.
    """
    check_device(device)
    if memory_limit is not None:
        parse_size(memory_limit)
    if device == "cpu":
        return CpuBackend()
    try:
        from ..cuda.doctor import require_usable

        index = int(device.partition(":")[2] or 0)
        require_usable(index)
        from .cuda.backend import CudaBackend

        return CudaBackend(index, memory_limit)
    except DeviceError as error:
        if device != "auto" or isinstance(error, MemoryError):
            raise
        print(f"bminf-lite: no usable GPU ({error}); using the CPU", file=sys.stderr)
        return CpuBackend()


def check_device(device: str) -> None:
    """Raise ``UsageError`` unless ``device`` names a device."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N")
