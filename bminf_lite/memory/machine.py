"""The machine to plan for: this one, as measured, or one that the user describes."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

from ..cuda.doctor import require_usable
from ..cuda.runtime.driver import Device
from ..errors import DeviceError, UsageError
from .device import MARGIN, device_limit, measure_speeds
from .planner import Machine

MEMINFO = Path("/proc/meminfo")
HOST_RESERVE = 1 << 30
"""Bytes of host memory that are left to other programs."""
CONTEXT_BYTES = 544 << 20
"""Bytes of a CUDA context, the libraries and the kernels' code on an H200; fewer on smaller GPUs."""


def machine_of(
    memory_limit: int | str | None = None,
    gpu_memory: int | None = None,
    link: float | None = None,
    bandwidth: float | None = None,
) -> Machine:
    """A GPU with ``gpu_memory`` bytes, ``link`` and ``bandwidth`` in bytes per second, and its host's memory.

    If ``gpu_memory`` or ``link`` is missing, this machine's first GPU is measured instead. If both are given, the
    machine may be another one, and the memory of its host is not known. Raises ``UsageError`` for a limit larger than
    the GPU and for speeds that are none, and ``DeviceError`` without a usable GPU to measure.
    """
    for name, speed in (("link", link), ("bandwidth", bandwidth)):
        is_number = isinstance(speed, int | float) and not isinstance(speed, bool)
        if speed is not None and not (is_number and 0 < speed < inf):
            raise UsageError(f"{name} is {speed!r}, but must be bytes per second, more than 0")
    is_described = gpu_memory is not None and link is not None
    if gpu_memory is None or link is None:
        gpu = first_gpu()
        free, total = gpu.memory()
        speeds = measure_speeds(gpu)
        link, bandwidth = link or speeds.link, bandwidth or speeds.bandwidth
    if gpu_memory is not None:
        free, total = gpu_memory - CONTEXT_BYTES, gpu_memory
    memory = usable_memory(memory_limit, free, total)
    is_limited = memory_limit is not None and memory < usable_memory(None, free, total)
    host = None if is_described else available_memory()
    return Machine(memory, link, bandwidth, host, 0 if is_limited else total - free + MARGIN)


def first_gpu() -> Device:
    """This machine's first GPU. Raises ``DeviceError``, with the options to give instead, if it is not usable."""
    try:
        require_usable(0)
    except DeviceError as error:
        remedy = "To plan for another machine, give gpu_memory and link (--gpu-memory, --link)"
        raise DeviceError(f"{error}. {remedy}") from error
    return Device(0)


def usable_memory(memory_limit: int | str | None, free_bytes: int, total_bytes: int) -> int:
    """Bytes to plan with: at most the limit, and at most the free memory less a margin; raises as ``device_limit``."""
    limit, free = (device_limit(given, free_bytes, total_bytes) for given in (memory_limit, None))
    return min(limit, free)


def available_memory(meminfo: Path = MEMINFO) -> int | None:
    """Bytes that this host can allocate without swapping, its page cache included; None if that is not known."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None
