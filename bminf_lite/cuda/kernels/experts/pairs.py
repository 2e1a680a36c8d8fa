"""Pairs of a token and an expert: sorted by expert, and their results added: the launchers of ``pairs.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import SORT_COPY_PAIRS, SORT_THREADS, SUM_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext
from .router import EACH, experts_of_a_lane
from .weights import RouterWeights

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
        yield KernelFamily(cls.source, "sort_by_expert", ((0, *EACH), BOOLEANS), _possible_sort)
        yield KernelFamily(cls.source, "gather_pairs")
        yield KernelFamily(cls.source, "weighted_sum", (BOOLEANS,))

    def choose_and_sort(
        self, step: StepContext | None, logits: cp.ndarray, router: RouterWeights, topk_ids: cp.ndarray,
        topk_weights: cp.ndarray, codes: cp.ndarray, scales: cp.ndarray, out: SortedPairs,
    ) -> None:  # fmt: skip
        """:meth:`RouterKernels.choose` and :meth:`sort`, of up to ``SORT_CHOICE_PAIRS`` pairs."""
        self._sort(
            step, experts_of_a_lane(router.spec.num_experts), logits, router, topk_ids, topk_weights, codes, scales, out
        )

    def sort(
        self, step: StepContext | None, router: RouterWeights, topk_ids: cp.ndarray, topk_weights: cp.ndarray,
        codes: cp.ndarray, scales: cp.ndarray, out: SortedPairs,
    ) -> None:  # fmt: skip
        """Sort ``topk_ids`` int32 ``[T, top_k]``, and copy the tokens' ``codes`` and ``scales`` to their pairs.

        Rows of ``codes`` lie one after another without gaps, and are padded to a multiple of 16 bytes. ``topk_weights``
        fp32 ``[T, top_k]`` multiply the scales if the router scales inputs.
        """
        self._sort(step, 0, None, router, topk_ids, topk_weights, codes, scales, out)
        if (pairs := topk_ids.size) <= SORT_COPY_PAIRS:
            return
        factors = address(topk_weights) if router.spec.scales_input else 0
        self._launcher.launch(
            step, self.source, "gather_pairs", ceil_div(pairs, SORT_THREADS // 32), SORT_THREADS,
            (out.pairs.data.ptr, pairs, router.spec.top_k, codes.data.ptr, scales.data.ptr, factors,
             pitch_of(codes) // 16, out.codes.data.ptr, out.scales.data.ptr),
            bytes_moved=nbytes_of(codes, out.codes), cache=True,
        )  # fmt: skip

    def _sort(
        self, step: StepContext | None, each: int, logits: cp.ndarray | None, router: RouterWeights,
        topk_ids: cp.ndarray, topk_weights: cp.ndarray, codes: cp.ndarray, scales: cp.ndarray, out: SortedPairs,
    ) -> None:  # fmt: skip
        pairs, experts, spec = topk_ids.size, router.spec.num_experts, router.spec
        copies = pairs <= SORT_COPY_PAIRS
        assert pitch_of(codes) == pitch_of(out.codes)
        parts = parts_of(pairs, experts, self._launcher.num_sms) if copies else 1
        self._launcher.launch(
            step, self.source, f"sort_by_expert<{each}, {BOOLEANS[copies]}>", (experts, parts), SORT_THREADS,
            (*router.arguments, address(logits), topk_ids.data.ptr, topk_weights.data.ptr, len(topk_ids),
             spec.scales_input, out.offsets.data.ptr, out.pairs.data.ptr, out.places.data.ptr, codes.data.ptr,
             scales.data.ptr, pitch_of(codes) // 16, out.codes.data.ptr, out.scales.data.ptr),
            bytes_moved=nbytes_of(topk_ids, *((codes, out.codes) if copies else ())),
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


def _possible_sort(each: int, copies: str) -> bool:
    return each == 0 or copies == BOOLEANS[1]
