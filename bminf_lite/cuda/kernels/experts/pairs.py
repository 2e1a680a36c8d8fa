"""Pairs of a token and an expert: sorted by expert, and their results added: the launchers of ``pairs.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import SORT_COPY_PAIRS, SORT_THREADS, SUM_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp


@dataclass(frozen=True)
class SortedPairs:
    """The pairs of ``T`` tokens by expert, see :func:`backend.experts.sort_by_expert`; all are int32.

    ``places`` ``[T * top_k]`` says where among the sorted pairs each pair is. ``codes`` int8 ``[T * top_k, pitch]`` and
    ``scales`` fp32 ``[T * top_k]`` are the quantized tokens of the sorted pairs.
    """

    offsets: cp.ndarray
    pairs: cp.ndarray
    places: cp.ndarray
    codes: cp.ndarray
    scales: cp.ndarray


class PairKernels:
    """What stands around the products with sorted pairs."""

    source = "experts/pairs.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "sort_by_expert", (BOOLEANS,))
        yield KernelFamily(cls.source, "gather_pairs")
        yield KernelFamily(cls.source, "weighted_sum", (BOOLEANS,))

    def sort(
        self, step: StepContext | None, topk_ids: cp.ndarray, codes: cp.ndarray, scales: cp.ndarray,
        factors: cp.ndarray | None, out: SortedPairs,
    ) -> None:  # fmt: skip
        """Sort ``topk_ids`` int32 ``[T, top_k]``, and copy the tokens' ``codes`` and ``scales`` to their pairs.

        Rows of ``codes`` lie one after another without gaps, and are padded to a multiple of 16 bytes. ``factors`` fp32
        ``[T, top_k]`` multiply the scales. Rows of more than ``SORT_COPY_PAIRS`` pairs are copied by another kernel.
        """
        pairs, top_k, experts = topk_ids.size, topk_ids.shape[1], len(out.offsets) - 1
        copies, words = pairs <= SORT_COPY_PAIRS, pitch_of(codes) // 16
        assert pitch_of(codes) == pitch_of(out.codes)
        rows = codes.data.ptr, scales.data.ptr, address(factors), words, out.codes.data.ptr, out.scales.data.ptr
        parts = parts_of(pairs, experts, self._launcher.num_sms) if copies else 1
        self._launcher.launch(
            step, self.source, f"sort_by_expert<{BOOLEANS[copies]}>", (experts, parts), SORT_THREADS,
            (topk_ids.data.ptr, pairs, top_k, out.offsets.data.ptr, out.pairs.data.ptr, out.places.data.ptr, *rows),
            bytes_moved=nbytes_of(topk_ids, *((codes, out.codes) if copies else ())),
        )  # fmt: skip
        if not copies:
            self._launcher.launch(
                step, self.source, "gather_pairs", ceil_div(pairs, SORT_THREADS // 32), SORT_THREADS,
                (out.pairs.data.ptr, pairs, top_k, *rows), bytes_moved=nbytes_of(codes, out.codes), cache=True,
            )  # fmt: skip

    def weighted_sum(
        self, step: StepContext | None, results: cp.ndarray, places: cp.ndarray, weights: cp.ndarray | None,
        top_k: int, out: cp.ndarray, add: bool,
    ) -> None:  # fmt: skip
        """:func:`backend.experts.weighted_sum` of ``results`` fp16 of sorted pairs, fp32 ``[T, out]``, or added to it.

        ``weights`` fp32 ``[T, top_k]`` are ones if None.
        """
        rows, columns = out.shape
        self._launcher.launch(
            step, self.source, f"weighted_sum<{BOOLEANS[add]}>", (ceil_div(columns, 8 * SUM_THREADS), rows),
            SUM_THREADS,
            (results.data.ptr, pitch_of(results), places.data.ptr, address(weights), top_k, out.data.ptr, pitch_of(out),
             columns),
            bytes_moved=nbytes_of(results, out, out if add else None), cache=rows > self._launcher.num_sms,
        )  # fmt: skip


def parts_of(pairs: int, experts: int, num_sms: int) -> int:
    """Blocks for each expert: few experts leave most SMs without work, and few pairs need none of the others."""
    return max(1, min(2 * num_sms // experts, ceil_div(pairs, experts)))
