"""The machine to plan for: this one, as far as it can be measured, or one that somebody describes."""

from __future__ import annotations

import re
from pathlib import Path

from ..cuda.doctor import require_usable
from ..cuda.runtime.driver import Device
from ..errors import DeviceError, UsageError
from .device import device_limit, measure_speeds
from .planner import Machine
from .sizes import format_size

MEMINFO = Path("/proc/meminfo")
CONTEXT_BYTES = 544 << 20
"""What a CUDA context, the libraries and the kernels' code took of an H200; smaller GPUs take less."""


def machine_of(
    memory_limit: int | str | None = None,
    gpu_memory: int | None = None,
    link: float | None = None,
    bandwidth: float | None = None,
) -> Machine:
    """A GPU with ``gpu_memory`` bytes, ``link`` and ``bandwidth`` (bytes per second); what is not given is that of this
    machine's first GPU, measured unless both memory and link are given.

    Raises ``UsageError`` for a limit larger than the GPU, and ``DeviceError`` where there is no usable GPU to measure.
    """
    if gpu_memory is None or link is None:
        gpu = first_gpu()
        free, total = gpu.memory() if gpu_memory is None else (_free_of(gpu_memory), gpu_memory)
        speeds = measure_speeds(gpu)
        link, bandwidth = link or speeds.link, bandwidth or speeds.bandwidth
    else:
        free, total = _free_of(gpu_memory), gpu_memory
    return Machine(usable_memory(memory_limit, free, total), link, bandwidth, available_memory())


def _free_of(gpu_memory: int) -> int:
    return max(0, gpu_memory - CONTEXT_BYTES)


def first_gpu() -> Device:
    """This machine's first GPU, or a ``DeviceError`` that says what can be given instead."""
    try:
        require_usable(0)
    except DeviceError as error:
        raise DeviceError(f"{error}; give --gpu-memory and --link to plan for another machine") from error
    return Device(0)


def usable_memory(memory_limit: int | str | None, free_bytes: int, total_bytes: int) -> int:
    """Bytes to plan with on a GPU of which ``free_bytes`` of ``total_bytes`` are free now: no more than the limit, and
    no more than is free less a margin. Raises ``UsageError`` for a limit larger than the GPU, or one that is no size.
    """
    limit = device_limit(memory_limit, free_bytes)
    if limit > total_bytes:
        raise UsageError(f"the memory limit is {format_size(limit)}, but the GPU has {format_size(total_bytes)}")
    return min(limit, device_limit(None, free_bytes))


def available_memory(meminfo: Path = MEMINFO) -> int | None:
    """Bytes that this host can give without swapping, its page cache included; None where that is not known."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None
