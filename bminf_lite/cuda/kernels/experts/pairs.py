"""Pairs of a token and an expert: sorted by expert, and their results added: the launchers of ``pairs.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import address, ceil_div, nbytes_of, pitch_of, pointer_and_pitch
from ..constants import SORT_LIST, SORT_THREADS, SUM_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp


@dataclass(frozen=True)
class SortedPairs:
    """The pairs of ``T`` tokens by expert, see :func:`backend.experts.sort_by_expert`; all are int32.

    ``places`` ``[T * top_k]`` says where among the sorted pairs each pair is. ``codes`` int8 ``[T * top_k, pitch]`` and
    ``scales`` fp32 ``[T * top_k]`` are the quantized tokens of the sorted pairs, None where these stay float. ``slots``
    ``[T * top_k]`` are those of the tokens' adapters, None if no token has one. ``claimed`` ``[GROUPED_PRODUCTS]`` are
    the counters of the grouped products, which become zeros, None where there are none.
    """

    offsets: cp.ndarray
    pairs: cp.ndarray
    places: cp.ndarray
    codes: cp.ndarray | None = None
    scales: cp.ndarray | None = None
    slots: cp.ndarray | None = None
    claimed: cp.ndarray | None = None


@dataclass(frozen=True)
class Addend:
    """What is added to the sum of the experts: ``values`` fp32 ``[T, out]``, padded, times ``gate`` fp32 ``[T]``."""

    values: cp.ndarray
    gate: cp.ndarray | None = None


def addend_arguments(addend: Addend | None) -> tuple[int, int, int]:
    """The values, their pitch, and the gate; zeros for None."""
    return (0, 0, 0) if addend is None else (*pointer_and_pitch(addend.values), address(addend.gate))


class PairKernels:
    """What stands around the products with sorted pairs."""

    source = "experts/pairs.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "sort_by_expert")
        yield KernelFamily(cls.source, "weighted_sum", (BOOLEANS,))

    def sort(
        self,
        step: StepContext | None,
        topk_ids: cp.ndarray,
        codes: cp.ndarray | None,
        scales: cp.ndarray | None,
        factors: cp.ndarray | None,
        out: SortedPairs,
        slots: cp.ndarray | None = None,
    ) -> None:
        """Sort ``topk_ids`` int32 ``[T, top_k]``, and copy the tokens' ``codes`` and ``scales`` to their pairs, if any.

        Rows of ``codes`` lie one after another without gaps, and are padded to a multiple of 16 bytes. ``factors`` fp32
        ``[T, top_k]`` multiply the scales. ``slots`` int32 ``[T]`` are those of the tokens' adapters.
        """
        (tokens, top_k), pairs = topk_ids.shape, topk_ids.size
        each = tokens_of_a_block(tokens, top_k, self._launcher.num_sms)
        words = 0 if codes is None else pitch_of(codes) // 16
        assert (slots is None) == (out.slots is None)
        assert (codes is None) == (out.codes is None) and pointer_and_pitch(codes)[1] == pointer_and_pitch(out.codes)[1]
        self._launcher.launch(
            step,
            self.source,
            "sort_by_expert",
            ceil_div(tokens, each),
            SORT_THREADS,
            (
                topk_ids.data.ptr,
                pairs,
                top_k,
                len(out.offsets) - 1,
                each,
                out.offsets.data.ptr,
                out.pairs.data.ptr,
                out.places.data.ptr,
                address(codes),
                address(scales),
                address(factors),
                words,
                address(out.codes),
                address(out.scales),
                address(slots),
                address(out.slots),
                address(out.claimed),
            ),
            bytes_moved=nbytes_of(codes, out.codes),
            cache=True,
        )

    def weighted_sum(
        self,
        step: StepContext | None,
        results: cp.ndarray,
        places: cp.ndarray,
        weights: cp.ndarray | None,
        top_k: int,
        out: cp.ndarray,
        add: bool,
        addend: Addend | None = None,
    ) -> None:
        """:func:`backend.experts.weighted_sum` of ``results`` fp16 of sorted pairs, fp32 ``[T, out]``, or added to it.

        ``weights`` fp32 ``[T, top_k]`` are ones if None. An ``addend`` is added to the sum.
        """
        rows, columns = out.shape
        self._launcher.launch(
            step,
            self.source,
            f"weighted_sum<{BOOLEANS[add]}>",
            (ceil_div(columns, 4 * SUM_THREADS), rows),
            SUM_THREADS,
            (
                results.data.ptr,
                pitch_of(results),
                places.data.ptr,
                address(weights),
                top_k,
                *addend_arguments(addend),
                out.data.ptr,
                pitch_of(out),
                columns,
            ),
            bytes_moved=nbytes_of(results, out, out if add else None),
            cache=rows > self._launcher.num_sms,
        )


def tokens_of_a_block(tokens: int, top_k: int, num_sms: int) -> int:
    """How many tokens' pairs a block sorts: every SM has a block, unless that would be too many pairs for one."""
    return min(ceil_div(tokens, num_sms), SORT_LIST // top_k)
