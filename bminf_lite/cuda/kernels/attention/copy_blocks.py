"""Copies of blocks of key-value caches: the launcher of ``copy_blocks.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher

if TYPE_CHECKING:
    import cupy as cp

THREADS = 256
SHARES = 4
"""Thread blocks that share a copy."""


class CopyBlocks:
    """The kernel of ``copy_blocks.cu``."""

    source = "attention/copy_blocks.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "copy_blocks")

    def launch(self, copies: cp.ndarray) -> None:
        """Make each of ``copies``, int64 ``[n, 3]``: a target's address, a source's, and how many bytes to copy.

        They are multiples of 16. No target is the source of another copy, or its target.
        """
        self._launcher.launch(None, self.source, "copy_blocks", (len(copies), SHARES), THREADS, (copies.data.ptr,))
