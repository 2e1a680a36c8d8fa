"""Float products of sorted pairs with the weights of their experts: the launcher of ``float_products.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.expert_values import ExpertActivation
from ...runtime.kernel import Kernel
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import EXPERT_FLOAT_THREADS, Epilogue
from ..instantiations import Capability, KernelFamily, numbers
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE
from .adapters import PairSide
from .grouped_gemm import EPILOGUES, FUNCTIONS, epilogue_of, possible_epilogue
from .weights import ExpertMatrices, clamp_arguments

if TYPE_CHECKING:
    import cupy as cp

ROWS = (1, 8)
"""Rows of one expert that a warp computes together."""
WARPS = EXPERT_FLOAT_THREADS // 32
BLOCKS_PER_SM = 4
TYPES = ("bminf::int8", "__half")


class ExpertFloatProducts:
    """One launch for all experts whose inputs stay float."""

    source = "experts/float_products.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        for name in ("float_products", "float_products_adapted"):
            yield KernelFamily(cls.source, name, (TYPES, ROWS, numbers(EPILOGUES), FUNCTIONS), _possible)

    def launch(
        self,
        step: StepContext | None,
        x: cp.ndarray,
        order: cp.ndarray | None,
        top_k: int,
        offsets: cp.ndarray,
        weight: ExpertMatrices,
        out: cp.ndarray,
        activation: ExpertActivation | None = None,
        side: PairSide | None = None,
    ) -> None:
        """The products of sorted pairs, as fp16 ``out`` ``[P, features]``, half as many with a gated ``activation``.

        Sorted pair ``p`` has row ``order[p] // top_k`` of ``x``, fp16 with padded rows, or row ``p`` without an
        ``order``. ``order`` int32 ``[P]`` and ``offsets`` int32 ``[experts + 1]`` are those of :class:`.SortedPairs`.
        A ``side`` product is added to each.
        """
        pairs, (epilogue, function) = len(out), epilogue_of(activation)
        kind = TYPES[weight.matrix.itemsize - 1]
        kernel, grid = self._plan(
            kind, pairs, weight.num_experts, weight.out_features, epilogue, function, side is not None
        )
        clamp = (0.0, 0.0) if activation is None else clamp_arguments(activation)
        kernel(
            grid,
            EXPERT_FLOAT_THREADS,
            (
                *(side.arguments if side is not None else ()),
                x.data.ptr,
                pitch_of(x),
                address(order),
                top_k,
                offsets.data.ptr,
                *weight.arguments,
                out.data.ptr,
                pitch_of(out),
                weight.num_experts,
                weight.out_features,
                weight.in_features,
                weight.pitch,
                *clamp,
            ),
            0,
            self._launcher.stream,
            True,
            None,
            weight.bytes_of(min(pairs, weight.num_experts)) + nbytes_of(x, out),
        )
        if step is not None:
            step.one_block_per_sm = False

    def _find_plan(
        self, kind: str, pairs: int, experts: int, channels: int, epilogue: Epilogue, function: int, adapted: bool
    ) -> tuple[Kernel, int]:
        """The kernel and its number of blocks. With fewer pairs than experts most of these have one row at most."""
        rows = ROWS[pairs > experts]
        name = "float_products_adapted" if adapted else "float_products"
        kernel = self._launcher.kernel(self.source, f"{name}<{kind}, {rows}, {int(epilogue)}, {function}>")
        outputs = channels // 2 if epilogue is Epilogue.GATED else channels
        most = min(pairs, experts + pairs // rows) * ceil_div(outputs, WARPS)  # tiles
        return kernel, min(most, BLOCKS_PER_SM * self._launcher.num_sms)


def _possible(kind: str, rows: int, epilogue: int, function: int) -> bool:
    return possible_epilogue(rows, epilogue, function)
