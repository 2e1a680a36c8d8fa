"""Backends: where a model computes. Each model has its own; there is no global one."""

from __future__ import annotations

import functools
import logging
import re

from ..errors import DeviceError, NoDriverError, UsageError
from ..memory.sizes import parse_size
from .base import Backend
from .cpu import CpuBackend


def create(device: str = "auto", memory_limit: int | str | None = None) -> Backend:
    """The backend for ``device``: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``.

    ``auto`` is the first GPU if it is usable, else the CPU; a machine that has an NVIDIA driver then gets one warning
    in the log ``bminf_lite``. ``memory_limit`` bounds the GPU's memory, in bytes or as a text such as ``"6GiB"``.
    Raises ``UsageError`` for another name and for a limit that is not a size, ``DeviceError`` if ``device`` names a GPU
    that is not usable.
    """
    check_device(device, memory_limit)
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
        if not isinstance(error, NoDriverError):
            _warn_once(f"the GPU is not used: {error}; computing on the CPU")
        return CpuBackend()


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("bminf_lite").warning(message)


def check_device(device: str, memory_limit: int | str | None = None) -> None:
    """Raise ``UsageError`` unless ``device`` names a device and ``memory_limit``, if given, is a size."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N")
    if memory_limit is not None:
        parse_size(memory_limit)
