"""Backends: where a model computes. Each model has its own; there is no global one."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

from ..errors import DeviceError, NoDriverError, UsageError, require_whole
from ..memory.sizes import parse_size
from .base import Backend
from .communicator import simulated_ranks
from .cpu import CpuBackend

if TYPE_CHECKING:
    from .cuda.backend import CudaBackend

MAX_GPUS = 64
"""The bound of ``gpus``."""


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


def create_apart(gpus: int, device: str = "auto", memory_limit: int | str | None = None) -> list[Backend]:
    """The backends of ``gpus`` GPUs that compute apart, from the one that ``device`` names on; see :func:`create`.

    ``memory_limit`` bounds each GPU's memory. On a CPU all of them compute there; ``auto`` does not take it for
    several. The first one's device is the calling thread's afterwards. Raises ``UsageError`` and ``DeviceError``, also
    for more GPUs than there are.
    """
    require_whole("gpus", gpus, MAX_GPUS)
    backends = [create(device, memory_limit)]
    if gpus == 1:
        return backends
    if device == "auto" and backends[0].name == "cpu":
        raise DeviceError(
            f"{gpus} GPUs were asked for (gpus={gpus}), but this machine has none that can be used (bminf-lite doctor "
            "says why): give one GPU, or the device cpu, on which threads compute the parts, which helps to test"
        )
    try:
        kind, _, number = backends[0].name.partition(":")
        if kind == "cpu":
            return backends + [CpuBackend() for _ in range(1, gpus)]
        from ..cuda.runtime.driver import device_count

        first, count = int(number), device_count()
        if first + gpus > count:
            raise UsageError(
                f"{gpus} GPUs from number {first} on were asked for (gpus={gpus}), but this machine has {count}, "
                f"numbered from 0: give at most {count - first}"
            )
        for rank in range(1, gpus):
            backends.append(create(f"cuda:{first + rank}", memory_limit))  # noqa: PERF401, an error closes them
    except BaseException:
        close_ranks(backends)
        raise
    backends[0].make_current()
    return backends


def create_ranks(
    gpus: int, device: str = "auto", memory_limit: int | str | None = None, most: int = 1
) -> Sequence[Backend]:
    """The backends of a model's ranks: those of :func:`create_apart`, connected to each other.

    ``most`` is the largest number of values that the ranks add at once. On a CPU, the ranks are threads. Raises
    ``UsageError`` and ``DeviceError``, also for more GPUs than there are.
    """
    backends = create_apart(gpus, device, memory_limit)
    if gpus == 1:
        return backends
    try:
        if backends[0].name == "cpu":
            for ops, rank in zip(backends, simulated_ranks(gpus), strict=True):
                ops.communicator = rank
        else:
            from .cuda.peers import connect

            connect(cast("Sequence[CudaBackend]", backends), most)
    except BaseException:
        close_ranks(backends)
        raise
    backends[0].make_current()
    return backends


def replica_devices(device: str, replicas: int, gpus: int = 1) -> list[str]:
    """The device of each of several copies of a model, of ``gpus`` GPUs each, from the one that ``device`` names on.

    ``auto`` is the CPU on a machine without GPUs. Raises ``UsageError`` and ``DeviceError``, also for more GPUs than
    there are.
    """
    check_device(device)
    require_whole("gpus", gpus, MAX_GPUS)
    if device == "cpu":
        return ["cpu"] * replicas
    from ..cuda.runtime.driver import device_count

    try:
        count = device_count()
    except NoDriverError:
        if device != "auto":
            raise
        return ["cpu"] * replicas
    first = int(device.partition(":")[2] or 0)
    if first + replicas * gpus > count:
        raise UsageError(
            f"{replicas} replicas of {gpus} GPUs each from number {first} on need {replicas * gpus}, but this machine "
            f"has {count}, numbered from 0: give at most {max(count - first, 0) // gpus} replicas"
        )
    return [f"cuda:{first + number * gpus}" for number in range(replicas)]


def close_ranks(backends: Sequence[Backend]) -> None:
    """Free the memory of all ranks' devices."""
    with ExitStack() as stack:  # all are closed, in their order, also if one fails
        if len(backends) > 1:
            stack.callback(backends[0].make_current)
        for ops in reversed(backends):
            stack.callback(ops.close)
            stack.callback(ops.make_current)


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("bminf_lite").warning(message)


def check_device(device: str, memory_limit: int | str | None = None) -> None:
    """Raise ``UsageError`` unless ``device`` names a device and ``memory_limit``, if given, is a size."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N")
    if memory_limit is not None:
        parse_size(memory_limit)
