"""The kernels' CUDA C++: package data, beside the headers that :mod:`.constants` renders."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from ..runtime.compiler import Sources
from ..runtime.driver import Device
from ..runtime.kernel import Kernel, Module
from .constants import HEADERS

SOURCES = Sources(resources.files("bminf_lite.cuda") / "kernels", HEADERS)


def load(device: Device, source: str, expression: str, defines: Sequence[str] = (), cache: bool = False) -> Kernel:
    """One instantiation of a kernel in ``source``, compiled and loaded; see :meth:`Module.kernel`."""
    return Module(device, SOURCES, source, [expression], defines).kernel(expression, cache)
