"""Which of several kernels multiplies: measured at run time for exact products, by a table for those of floats.

The tiles of an int8 product change no result. The first product of a class of shapes runs each plausible tile
configuration on its own operands, timed by events of torch's current stream, and waits for them. The fastest is
remembered for the process.

Products of floats are sums in an order that depends on the kernel, so theirs is chosen by ``float_products.json``,
which ``benchmarks/measure_float_products.py`` writes. It holds what was measured and nothing else.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import torch

from ..cuda.kernels.arrays import ceil_div, round_up
from ..cuda.kernels.constants import GEMM_ROWS
from ..cuda.kernels.gemm.gemm_hopper import GemmTileConfig
from ..cuda.kernels.gemv.gemv import CODE_ROWS

FLOAT_PRODUCTS = resources.files(__package__) / "float_products.json"
UNMEASURED_GEMV_ROWS = CODE_ROWS[-1]
"""The most rows of :func:`most_gemv_rows` on a GPU that the table lacks."""
Key = tuple[int, int, int, torch.dtype]
"""A class of rows, the weight's rows and columns, and the type of the result."""
ROUNDS, RUNS = 3, 4
"""Each configuration is timed ``ROUNDS`` times, over ``RUNS`` launches each time."""
LEAST_GAIN = 1.02
"""Another configuration than the modelled one is chosen if it is at least ``LEAST_GAIN`` times as fast."""
MAX_MEASURED = 1024
"""Classes that a GPU's choices hold; products of further ones take the modelled configuration."""
HEAD_START_CYCLES = 200_000
"""The GPU waits about 0.1 ms, in which the host enqueues the launches that are timed."""


def row_class(rows: int) -> int:
    """The number of tiles of ``rows``, from nine on rounded up by less than a quarter."""
    tiles = ceil_div(rows, GEMM_ROWS)
    return round_up(tiles, 1 << max(0, (tiles - 1).bit_length() - 3))


class TileChoices:
    """The measured configurations of one GPU, for all threads."""

    def __init__(self) -> None:
        self._chosen: dict[Key, GemmTileConfig] = {}
        self._lock = threading.Lock()

    def known(self, key: Key) -> GemmTileConfig | None:
        """The configuration of ``key`` if it was measured."""
        return self._chosen.get(key)

    def measure(
        self, key: Key, candidates: Sequence[GemmTileConfig], milliseconds: Callable[[GemmTileConfig], float]
    ) -> GemmTileConfig | None:
        """The fastest of ``candidates``, measured unless it is known by now; None if the choices are full.

        ``candidates`` begin with the modelled configuration. ``milliseconds`` times one; its first call of each may
        take longer, because it compiles.
        """
        with self._lock:
            if key not in self._chosen and len(self._chosen) < MAX_MEASURED:
                self._chosen[key] = fastest(candidates, milliseconds)
            return self._chosen.get(key)


def fastest(candidates: Sequence[GemmTileConfig], milliseconds: Callable[[GemmTileConfig], float]) -> GemmTileConfig:
    """The candidate with the least of ``ROUNDS`` times, if the first one takes ``LEAST_GAIN`` times as long."""
    if len(candidates) == 1:
        return candidates[0]
    for candidate in candidates:
        milliseconds(candidate)
    rounds = [[milliseconds(candidate) for candidate in candidates] for _ in range(ROUNDS)]
    least = [min(times) for times in zip(*rounds, strict=True)]
    best = min(range(len(candidates)), key=least.__getitem__)
    return candidates[best if least[best] * LEAST_GAIN <= least[0] else 0]


def time_launches(launch: Callable[[], None]) -> float:
    """The time of ``RUNS`` launches on torch's current stream, in ms; waits for them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch._C._cuda_sleep(HEAD_START_CYCLES)
    start.record()
    for _ in range(RUNS):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@functools.cache
def most_gemv_rows(gpu: str, dtype: torch.dtype, elements: int) -> int:
    """The most rows of a w8a16 product that ``gemv_codes`` multiplies; for more the weight is dequantized.

    By the table's entry for the largest measured weight of at most ``elements`` elements.
    """
    entries: list[list[int]] = _float_products().get(gpu, {}).get(str(dtype), [])
    fitting = [rows for least, rows in entries if least <= elements]
    return fitting[-1] if fitting else UNMEASURED_GEMV_ROWS


@functools.cache
def _float_products() -> dict[str, dict[str, Any]]:
    """What was measured on each GPU: ``about``, and by dtype pairs of a weight's elements and rows, ascending."""
    table: dict[str, dict[str, Any]] = json.loads(FLOAT_PRODUCTS.read_text())
    return table
