"""Norm and rotation of heads before attention over many tokens: the launcher of ``prepare_heads.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.cache_values import LayerCache
from ....backend.values import AttentionSpec
from ..arrays import address, ceil_div, pitch_of, round_up
from ..constants import PREPARE_BLOCKS, PREPARE_ELEMENTS, PREPARE_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext
from ..rowwise.rows import FROM_INT32, ROW, RowSource, orders_for
from .heads import ELEMENTS, ROPE_FIRST, defines_of, element_of, head_arguments, head_pitch_of

if TYPE_CHECKING:
    import cupy as cp

ROUND_LANES = 8
"""Lanes of the heads, of 128 elements, for which there are kernels whose blocks take tokens in rounds.

With heads of 64 elements it has taken 2 % longer.
"""


class PrepareHeads:
    """The kernel of ``prepare_heads.cu``."""

    source = "attention/prepare_heads.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        plain, in_rounds = (
            (BOOLEANS, orders_for(capability), ELEMENTS, (0,)),
            (BOOLEANS[:1], (ROW,), ELEMENTS, (ROUND_LANES,)),
        )
        for defines in ((), ROPE_FIRST):
            for values in (plain, in_rounds):
                yield KernelFamily(cls.source, "prepare_heads", values, defines=defines)

    def launch(
        self,
        step: StepContext,
        qkv: RowSource,
        spec: AttentionSpec,
        cache: LayerCache,
        cu_seqlens: cp.ndarray,
        context_lens: cp.ndarray,
        block_table: cp.ndarray | None,
        q: cp.ndarray | None,
        tokens: int,
        bytes_moved: int = 0,
        rotated_pairs: int = 0,
    ) -> None:
        """Norm and rotation of the heads of ``tokens`` tokens; keys and values go to the cache.

        Sequence ``b`` has the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1`` of ``qkv`` and of ``q``, fp16
        ``[T, heads, head_pitch]``; ``cu_seqlens`` is int32 ``[B + 1]`` and need not begin with 0. ``tokens`` is at
        least ``cu_seqlens[B] - cu_seqlens[0]``. ``context_lens`` is int32 ``[B]``, the tokens in the cache before the
        step, ``block_table`` int32 ``[B, W]`` with rows that are contiguous. Without one, keys and values of the cache
        are ``[T, kv_heads, head_dim]``. Without ``q``, queries are left out.
        For an int8 cache queries and keys may be transformed in blocks of ``rotated_pairs`` (``backend/rotation.py``).
        """
        read, kind, order = qkv
        step.is_unwritten(cache.keys.data.ptr, writes=True)
        first_head = spec.heads if q is None else 0
        lanes = threads_of_head(spec.head_dim)
        threads = (spec.heads + 2 * spec.kv_heads - first_head) * lanes
        blocks = ceil_div(threads, PREPARE_THREADS)
        block_threads = round_up(ceil_div(threads, blocks), 32)
        at_once = max(1, self._launcher.num_sms * (PREPARE_BLOCKS * PREPARE_THREADS // block_threads) // blocks)
        in_rounds = kind != FROM_INT32 and order == ROW and lanes == ROUND_LANES and tokens > at_once
        in_rounds = in_rounds and spec.head_dim == head_pitch_of(cache) == 2 * PREPARE_ELEMENTS * ROUND_LANES
        of_int32, own_lanes = BOOLEANS[kind == FROM_INT32], lanes if in_rounds else 0
        self._launcher.launch(
            step,
            self.source,
            f"prepare_heads<{of_int32}, {order}, {element_of(cache)}, {own_lanes}>",
            (at_once if in_rounds else tokens, blocks),
            block_threads,
            (
                *read,
                *head_arguments(spec),
                address(cu_seqlens),
                address(context_lens),
                address(block_table),
                0 if block_table is None else pitch_of(block_table),
                len(context_lens),
                address(q),
                cache.keys.data.ptr,
                cache.values.data.ptr,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                head_pitch_of(cache),
                address(cache.key_scales),
                address(cache.value_scales),
                first_head,
                lanes,
                rotated_pairs,
            ),
            bytes_moved=bytes_moved,
            defines=defines_of(spec),
        )


def threads_of_head(head_dim: int) -> int:
    """The threads that have a head's elements, a power of two."""
    return 1 << (ceil_div(head_dim // 2, PREPARE_ELEMENTS) - 1).bit_length()
