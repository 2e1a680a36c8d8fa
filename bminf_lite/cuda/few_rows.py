"""Exact int8 products of 2 to 32 rows on the tensor cores, bound by reading the weight: decoding of small batches."""

from __future__ import annotations

import functools

from .driver import Device, DeviceAttribute
from .kernels import Kernel, Module

MAX_ROWS = 32
GROUP = 16
"""Rows of the weight in one product of the tensor cores."""
MAX_GROUPS = 16
"""Groups per block, so that their sums fit into shared memory beside the weights under way."""
THREADS = 256
RING_BYTES = THREADS // 32 * 2 * GROUP * (512 + 64)


class FewRows:
    """The kernel of ``src/few_rows.cu`` on one GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernel = functools.cache(self._load)

    @functools.cached_property
    def supported(self) -> bool:
        """Whether the GPU has bulk copies, and the shared memory for the weights under way."""
        shared = self._device.attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        return self._device.compute_capability >= (9, 0) and shared >= RING_BYTES + sums_bytes(MAX_ROWS // 8) + 1024

    def launch(self, acc: int, w: int, x: int, rows: int, out_features: int, pitch: int, stream: int) -> None:
        """``acc = x @ w.T`` on ``stream``, from addresses divisible by 16.

        ``x`` is int8 ``[rows, pitch]``, rows up to ``MAX_ROWS``, ``w`` int8 ``[out_features, pitch]`` and ``acc`` int32
        ``[rows, out_features]``; ``out_features`` and ``pitch`` are multiples of 16.
        """
        assert 0 < rows <= MAX_ROWS and out_features % GROUP == 0 and pitch % 16 == 0, (rows, out_features, pitch)
        groups, tiles = out_features // GROUP, tiles_for(rows)
        waves = -(-groups // (self._multiprocessors * MAX_GROUPS))
        grid = min(groups, self._multiprocessors * waves)
        arguments = (acc, w, x, rows, out_features, pitch)
        self._kernel(tiles)(grid, THREADS, arguments, shared=RING_BYTES + sums_bytes(tiles), stream=stream)

    @functools.cached_property
    def _multiprocessors(self) -> int:
        return self._device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)

    def _load(self, tiles: int) -> Kernel:
        expression = f"few_rows<{tiles}>"
        return Module(self._device, "few_rows.cu", [expression]).kernel(expression, "pppiii")


def tiles_for(rows: int) -> int:
    """Tiles of 8 rows, of which the kernel is compiled for 1, 2 and 4."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def sums_bytes(tiles: int) -> int:
    """Shared memory for a block's sums."""
    return MAX_GROUPS * GROUP * tiles * 8 * 4
