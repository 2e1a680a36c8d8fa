"""Adapters of experts that the tokens of a step choose: the launchers of ``adapters.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.expert_values import ExpertActivation
from ..arrays import PAD, address, ceil_div, nbytes_of, pitch_of, round_up
from ..constants import EXPERT_FLOAT_THREADS, Epilogue
from ..instantiations import BOOLEANS, Capability, KernelFamily, numbers
from ..launcher import Launcher, StepContext
from ..rowwise.adapters import HEADER
from .grouped_gemm import EPILOGUES, FUNCTIONS, epilogue_of, possible_epilogue
from .weights import ExpertMatrices, clamp_arguments

if TYPE_CHECKING:
    import cupy as cp

ROWS = 8
"""Rows of one expert in a tile."""
WARPS = EXPERT_FLOAT_THREADS // 32
BLOCKS_PER_SM = 4
TYPES = ("bminf::int8", "__half")


def expert_slot_bytes(rank: int, experts: int, widths: Sequence[int], features: int) -> int:
    """Bytes of the adapters of a padded ``rank`` of matrices ``[width, features]``, as ``adapters.cu`` lays them out.

    ``widths`` are those of one expert's matrices, which are equal.
    """
    of_expert = rank * (len(widths) * (4 + 2 * round_up(features, PAD)) + 2 * sum(widths))
    return round_up(HEADER + experts * of_expert, HEADER)


@dataclass(frozen=True)
class ExpertAdapterArrays:
    """The slots of one weight of all experts, uint8 ``[slots, bytes]``, as ``adapters.cu`` describes them.

    Each has room for ``rank_pitch`` ranks of ``features`` inputs, and ``sections`` matrices of ``width`` rows.
    """

    memory: cp.ndarray
    rank_pitch: int
    sections: int
    width: int
    features: int

    @property
    def columns(self) -> int:
        """Ranks of all sections."""
        return self.sections * self.rank_pitch


@dataclass(frozen=True)
class ExpertAdapters:
    """Adapters of both weights of a layer's experts."""

    hidden: ExpertAdapterArrays
    down: ExpertAdapterArrays


@dataclass(frozen=True)
class StepAdapters:
    """The adapters that the tokens of a step choose: the tokens' ``slots`` int32 ``[T]``, and what they read.

    That is ``x``, fp16 ``[T, in]`` with padded rows, in no other coordinates.
    """

    adapters: ExpertAdapters
    slots: cp.ndarray
    x: cp.ndarray


@dataclass(frozen=True)
class PairSide:
    """The side product of the sorted pairs of a step with one weight: ``inputs`` fp16 ``[pairs, columns]``.

    ``order`` is that of :class:`.SortedPairs`, and ``topk_ids`` are int32 ``[T, top_k]``. Rows of pairs without an
    adapter, and ranks behind that of a pair's slot, are not written.
    """

    of: ExpertAdapterArrays
    slots: cp.ndarray
    order: cp.ndarray
    topk_ids: cp.ndarray
    inputs: cp.ndarray

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ``PairAdapters`` of a kernel."""
        of = self.of
        return (
            self.slots.data.ptr,
            of.memory.data.ptr,
            of.memory.shape[1],
            self.order.data.ptr,
            self.inputs.data.ptr,
            self.topk_ids.shape[1],
            of.sections,
            of.rank_pitch,
            round_up(of.features, PAD),
            of.width,
        )


class PairAdapterKernels:
    """The products of the pairs whose tokens have adapters, once more, with what the adapters add."""

    source = "experts/adapters.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._name = functools.cache(_expression)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "shrink_pairs", (BOOLEANS,))
        choices = TYPES, TYPES, BOOLEANS, numbers(EPILOGUES), FUNCTIONS
        yield KernelFamily(cls.source, "expand_pairs", choices, _possible)

    def shrink(
        self, step: StepContext | None, x: cp.ndarray, by_pair: bool, factors: cp.ndarray | None, side: PairSide
    ) -> None:
        """Write the inputs of the side product.

        ``x`` are padded fp16 rows, of the sorted pairs if ``by_pair``, else of the tokens. These are multiplied by
        ``factors`` fp32 ``[T, top_k]``, if there are any.
        """
        self._launcher.launch(
            step,
            self.source,
            f"shrink_pairs<{BOOLEANS[by_pair]}>",
            (len(side.inputs), ceil_div(side.of.columns, WARPS)),
            EXPERT_FLOAT_THREADS,
            (
                *side.arguments,
                side.topk_ids.data.ptr,
                x.data.ptr,
                pitch_of(x),
                address(factors),
                side.of.features,
            ),
            bytes_moved=nbytes_of(x, side.inputs),
        )

    def expand(
        self,
        step: StepContext | None,
        x: cp.ndarray | tuple[cp.ndarray, cp.ndarray],
        by_pair: bool,
        offsets: cp.ndarray,
        weight: ExpertMatrices,
        out: cp.ndarray,
        side: PairSide,
        activation: ExpertActivation | None = None,
    ) -> None:
        """Write the rows of ``out`` again whose pairs have adapters, fp16 ``[P, features]`` of sorted pairs.

        ``x`` is what the product before has read: codes and scales of sorted pairs, or fp16 rows, as in
        :meth:`shrink`. So are ``offsets``, ``weight``, ``out`` and ``activation``.
        """
        pairs, (epilogue, function) = len(out), epilogue_of(activation)
        codes, scales = x if isinstance(x, tuple) else (x, None)
        assert (scales is not None) == weight.dynamic and (by_pair or scales is None)
        expression = self._name(codes.itemsize, weight.matrix.itemsize, by_pair, int(epilogue), function)
        outputs = weight.out_features // 2 if epilogue is Epilogue.GATED else weight.out_features
        most = min(pairs, weight.num_experts + pairs // ROWS) * ceil_div(outputs, WARPS)  # tiles
        columns = weight.in_features if scales is None else round_up(weight.in_features, 16)
        clamp = (0.0, 0.0) if activation is None else clamp_arguments(activation)
        self._launcher.launch(
            step, self.source, expression, min(most, BLOCKS_PER_SM * self._launcher.num_sms), EXPERT_FLOAT_THREADS,
            (
                *side.arguments, codes.data.ptr, pitch_of(codes), address(scales), offsets.data.ptr, *weight.arguments,
                out.data.ptr, pitch_of(out), weight.num_experts, weight.out_features, columns, weight.pitch, *clamp,
            ),
            bytes_moved=weight.bytes_of(min(pairs, weight.num_experts)) + nbytes_of(codes, side.inputs, out),
        )  # fmt: skip


def _expression(x_bytes: int, weight_bytes: int, by_pair: bool, epilogue: int, function: int) -> str:
    types = f"{TYPES[x_bytes - 1]}, {TYPES[weight_bytes - 1]}"
    return f"expand_pairs<{types}, {BOOLEANS[by_pair]}, {epilogue}, {function}>"


def _possible(x: str, weight: str, by_pair: str, epilogue: int, function: int) -> bool:
    """Inputs of a second product are rows of pairs, and so are codes; the first product of floats reads tokens."""
    codes, of_pairs = x == TYPES[0], by_pair == BOOLEANS[1]
    if codes and weight != TYPES[0]:
        return False
    return of_pairs == (codes or epilogue == Epilogue.TO_HALF) and possible_epilogue(0, epilogue, function)
