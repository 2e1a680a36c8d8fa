"""Short convolutions over the last tokens of each sequence: the launcher of ``short_convolution.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ....backend.values import ForwardBatch, ShortConvolution
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import SHORT_CONVOLUTION_THREADS as THREADS
from ..constants import SHORT_CONVOLUTION_TOKENS as TOKENS_AT_ONCE
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

EACH = (1, 4, 8)
"""Channels of a thread: one, or where rows are whole vectors of eight, four for fp32 results and eight for fp16."""


class ShortConvolutionKernels:
    """:meth:`.Backend.short_convolution` of fp16 activations."""

    source = "rowwise/short_convolution.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "short_convolution", (EACH, BOOLEANS, BOOLEANS), _is_launched)
        yield KernelFamily(cls.source, "store_inputs", (EACH, BOOLEANS), _is_launched)

    def launch(
        self,
        step: StepContext,
        rows: cp.ndarray,
        convolution: ShortConvolution,
        ring: cp.ndarray,
        slots: cp.ndarray,
        batch: ForwardBatch,
        out: cp.ndarray,
    ) -> None:
        """``rows`` fp16 ``[T, 3 * channels]`` -> ``out`` fp16 ``[T, channels]``, both with padded rows.

        Into an fp32 ``out`` goes the convolution of the first columns of ``rows``, without gates, activated by SiLU.

        ``ring`` fp16 ``[slots, n, channels]`` takes the inputs, dense within a slot; ``slots`` int32 ``[B, W]`` has the
        sequences' slots in its first column. One launch, or a second one that writes the ring if a sequence may have
        more new tokens than the ring has rows beside those that the first one reads.
        """
        taps, (tokens, channels), ring_rows = convolution.taps, out.shape, ring.shape[1]
        is_gated = out.dtype == np.float16
        is_aligned = channels % EACH[-1] == 0 and rows.data.ptr % (2 * EACH[-1]) == 0
        each, gated = EACH[1 + is_gated] if is_aligned else 1, BOOLEANS[is_gated]
        stores = batch.max_query_len <= ring_rows - len(taps) + 1
        blocks = ceil_div(channels, THREADS * each)
        inputs = rows.data.ptr, pitch_of(rows)
        slot = ring.data.ptr, pitch_of(ring), ring_rows
        sequences = (
            address(batch.cu_seqlens),
            address(batch.context_lens),
            slots.data.ptr,
            pitch_of(slots),
            batch.batch_size,
        )
        self._launcher.launch(
            step,
            self.source,
            f"short_convolution<{each}, {BOOLEANS[stores]}, {gated}>",
            (tokens if stores else ceil_div(tokens, TOKENS_AT_ONCE), blocks),
            THREADS,
            (
                *inputs,
                taps.data.ptr,
                len(taps),
                address(convolution.bias),
                *slot,
                *sequences,
                batch.has_drafts,
                out.data.ptr,
                pitch_of(out),
                channels,
                tokens,
            ),
            bytes_moved=nbytes_of(rows, out),
        )
        if not stores:
            self._launcher.launch(
                step,
                self.source,
                f"store_inputs<{each}, {gated}>",
                (batch.batch_size * ring_rows, blocks),
                THREADS,
                (*inputs, *slot, *sequences, channels),
            )


def _is_launched(each: int, *booleans: str) -> bool:
    """Whether a thread computes ``each`` channels of such results; the last argument says whether they are gated."""
    return each == 1 or (each == EACH[-1]) == (booleans[-1] == BOOLEANS[True])
