"""Attention over the key-value cache for steps with several new tokens per sequence.

The kernel multiplies on the tensor cores, tile by tile, and keeps no scores in memory; ``src/attention_prefill.cu``
says how. It is a template over the size of a head and of its tiles, compiled when a model first needs it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from .driver import Device
from .kernels import Kernel, Module

WARP = 32
MAX_HEAD_DIM = 256
_SIGNATURE = "pqpppqpppfiiiii"


@dataclass(frozen=True)
class Tiling:
    """How the kernel cuts its work: ``rows`` of queries a block, ``keys`` a tile, ``warps`` a block.

    ``blocks`` is how many blocks a multiprocessor must have registers for.
    """

    rows: int
    keys: int
    warps: int
    blocks: int

    def expression(self, depth: int) -> str:
        """The instantiation for heads padded to ``depth``."""
        return f"bminf::attend_prefill<{depth}, {self.rows}, {self.keys}, {self.warps}, {self.blocks}>"

    def shared(self, depth: int) -> int:
        """Bytes of shared memory a block."""
        return (self.rows + 2 * self.keys) * (depth + 8) * 2


def tiling_for(compute_capability: tuple[int, int], depth: int) -> Tiling:
    """The tiling for heads padded to ``depth`` columns."""
    if depth > 128:  # the output alone takes half of a thread's registers
        return Tiling(rows=64, keys=32 if compute_capability >= (8, 0) else 16, warps=4, blocks=1)
    return Tiling(rows=64, keys=64, warps=4, blocks=2)


class PrefillAttention:
    """Causal attention of new tokens over a cache that already holds their keys and values, on one GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernel = functools.cache(self._load)

    def launch(
        self,
        q: int, q_pitch: int, keys: int, values: int, out: int, out_pitch: int, starts: int, past: int, slots: int,
        *,
        heads: int, kv_heads: int, head_dim: int, capacity: int, scale: float, window: int | None,
        count: int, longest: int, stream: int = 0, dependent: bool = False,
    ) -> None:  # fmt: skip
        """Launch on ``stream``. Addresses are of the GPU; with ``D = head_dim`` padded to a multiple of 16:

        - ``q`` fp16 ``[T, heads, D]`` with ``q_pitch`` elements from token to token, normalised and rotated already;
        - ``keys``, ``values`` fp16 ``[slots, kv_heads, capacity, D]``, with the new tokens' in place, zero in padding;
        - ``out`` fp16 ``[T, heads * head_dim]`` with ``out_pitch`` elements from token to token;
        - ``starts`` int32 ``[count + 1]``, ``past`` and ``slots`` int32 ``[count]``: see ``backend.values.Step``.

        Addresses are multiples of 16 bytes, pitches of 8 elements. ``longest`` is an upper bound of the new tokens of
        any sequence. ``scale`` is positive, ``heads`` a multiple of ``kv_heads``, ``window`` at least 1 or None, and
        ``head_dim`` at most ``MAX_HEAD_DIM``. ``dependent`` as in :class:`Kernel`.
        """
        depth = -(-head_dim // 16) * 16
        tiling = tiling_for(self._device.compute_capability, depth)
        tiles = -(-longest * (heads // kv_heads) // tiling.rows)
        self._kernel(tiling, depth)(
            (tiles * kv_heads, count), tiling.warps * WARP,
            (
                q, q_pitch, keys, values, out, out_pitch, starts, past, slots,
                scale * math.log2(math.e), window or 0, heads, kv_heads, head_dim, capacity,
            ),
            shared=tiling.shared(depth), stream=stream, dependent=dependent,
        )  # fmt: skip

    def _load(self, tiling: Tiling, depth: int) -> Kernel:
        expression = tiling.expression(depth)
        return Module(self._device, "attention_prefill.cu", [expression]).kernel(expression, _SIGNATURE)
