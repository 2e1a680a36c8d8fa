"""The experts of a few tokens by matrix-vector products: the launchers of ``few_tokens.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....backend.expert_values import ExpertActivation, RouterSpec, Score
from ...runtime.driver import shared_memory_per_block
from ...runtime.kernel import Kernel
from ..arrays import PAD, WeightRows, address, ceil_div, nbytes_of, pitch_of, round_up
from ..constants import CLAMPED_SWIGLU, FEW_CHUNK, FEW_THREADS, MAX_EXPERTS, MAX_FEW_PAIRS, MAX_FEW_TOKENS, Activation
from ..gemv.gemv import LARGE_SHARED_MEMORY, LONG_CODES, UNIT_OVERHEAD, defines_for, pipeline_chunks
from ..instantiations import BOOLEANS, Capability, KernelFamily, numbers
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE
from .adapters import PairSide
from .pairs import Addend, addend_arguments
from .router import EACH, MAX_TOP_K, experts_of_a_lane
from .weights import (
    GROUP,
    SPARSE_MIXER,
    ExpertMatrices,
    RouterWeights,
    SharedExpertWeights,
    activation_number,
    clamp_arguments,
    shared_arguments,
)

if TYPE_CHECKING:
    import cupy as cp

WARPS = FEW_THREADS // 32
ROUTING_SCRATCH = 2 * 4 * MAX_EXPERTS
"""Bytes of shared memory of the warp that chooses a token's experts."""
STATIC_SHARED_MEMORY = 8 << 10
"""Static shared memory of a block, at most."""
FUNCTIONS = (*numbers(Activation), CLAMPED_SWIGLU)
UNITS = (2048, 1536, 768, 512)
"""Bytes of a unit of a row."""
SHORT_UNIT = 768
"""Those of pipelines of ``FIRST_CHUNKS`` and ``SECOND_CHUNKS``."""
FIRST_CHUNKS, SECOND_CHUNKS = 16, 6
"""Chunks in the pipelines of both products, where a block of the second one has the rows of one to two of them.

The first product gets more of the bandwidth then and ends earlier, and the rest of the second one's rows is loaded
while it multiplies. A layer of one token of Qwen3-30B-A3B on an H200 takes 18.6 us instead of 19.7 with 12 and 12.
"""
SHORT_EACH = EACH[:-1]
"""Experts of a lane for which there are such kernels: with the most, threads spill 116 bytes of their registers."""
PIPELINES_TO_LAUNCH_LATE = 2
"""The second product lets its successor start late, if its blocks read at most that many pipelines of bytes.

That is when its warps have started their last loads, behind its wait at the earliest: the successor's first loads would
only delay its own. Microseconds of a layer of a whole model on an H200, with a successor behind the wait and one that
starts at once: Qwen3-30B-A3B, with 1 pipeline, 53.0 and 54.3; Qwen3.6-35B-A3B, with 1.1, 98.5 and 99.8; but
gpt-oss-20b, with 2.7, 112.6 and 111.4. Behind the last loads Qwen3-30B-A3B takes 0.76 less than behind the wait.
"""
BESIDE = 4 << 10
"""Bytes of shared memory for the static part of a block of each product, and what the driver reserves for one more."""
PAIRS_OF_EXPERTS = 1 / 8
"""Several tokens are taken while they have at most this many pairs for each expert: few pairs share an expert then.

The kernels read an expert for each of its pairs. Microseconds of a layer on an H200, beside those of grouped products,
for two tokens: Qwen3-30B-A3B, with 1/8, 31 beside 40; gpt-oss-20b, with 1/4, 69 beside 66; Mixtral 8x7B, with 1/2, 181
beside 166.
"""


@dataclass(frozen=True)
class _Plan:
    """The part of a launch that depends on sizes.

    ``pipelines`` are the most bytes that a block reads of the weights, in units of what its pipelines hold by default.
    """

    kernel: Kernel
    grid: int
    shared: int
    scratch: int
    pipelines: float


class FewTokens:
    """From the router's logits and the quantized tokens to the result, for up to ``MAX_FEW_TOKENS`` tokens."""

    source = "experts/few_tokens.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        shared = shared_memory_per_block(capability)
        for chunks in sorted({pipeline_chunks(shared), pipeline_chunks(shared, LONG_CODES + 1)}):
            defines = defines_for(chunks)
            values = (EACH, BOOLEANS[::-1], FUNCTIONS, UNITS[::-1])
            adapted = (EACH, BOOLEANS[1:], FUNCTIONS, UNITS[::-1])
            yield KernelFamily(cls.source, "few_tokens_hidden", values, _possible_hidden, defines)
            yield KernelFamily(cls.source, "few_tokens_hidden_adapted", adapted, defines=defines)
            for name in ("few_tokens_down", "few_tokens_down_adapted"):
                yield KernelFamily(cls.source, name, (EACH, BOOLEANS, UNITS[::-1], BOOLEANS), defines=defines)
            yield from cls._of_sparse_mixers(defines)
        if shared >= LARGE_SHARED_MEMORY:
            defines = defines_for(FIRST_CHUNKS)
            yield KernelFamily(cls.source, "few_tokens_hidden", (SHORT_EACH, *values[1:]), _possible_hidden, defines)
            short = (SHORT_EACH, BOOLEANS, (SHORT_UNIT,), BOOLEANS)
            yield KernelFamily(cls.source, "few_tokens_down", short, defines=defines_for(SECOND_CHUNKS))

    @classmethod
    def _of_sparse_mixers(cls, defines: tuple[str, ...]) -> Iterator[KernelFamily]:
        """The kernels for routers with that score, whose experts have gates."""
        defines, each, gated = (*defines, *SPARSE_MIXER), EACH[:1], BOOLEANS[1:]
        for name in ("few_tokens_hidden", "few_tokens_hidden_adapted"):
            yield KernelFamily(cls.source, name, (each, gated, numbers(Activation), UNITS[::-1]), defines=defines)
        for name in ("few_tokens_down", "few_tokens_down_adapted"):
            yield KernelFamily(cls.source, name, (each, BOOLEANS, UNITS[::-1], BOOLEANS), defines=defines)

    def supports(
        self,
        tokens: int,
        spec: RouterSpec,
        hidden: ExpertMatrices,
        down: ExpertMatrices,
        shared_parts: int = 0,
        adapted: bool = False,
    ) -> bool:
        """Whether the kernels take ``tokens`` tokens: inputs are quantized, and their codes fit shared memory.

        Several tokens are taken if they seldom have an expert in common. ``shared_parts`` are those of the shared
        expert of :meth:`takes_shared`, which each token also has. ``adapted``: adapters add to the products, which
        have gates then.
        """
        pairs, num_sms = tokens * (spec.top_k + shared_parts), self._launcher.num_sms
        if tokens > MAX_FEW_TOKENS or pairs > MAX_FEW_PAIRS or not (hidden.dynamic and down.dynamic):
            return False
        if shared_parts > 1 and pairs > WARPS:  # the kernel finds one scale for the parts while each row has a warp
            return False
        if tokens > 1 and tokens * spec.top_k > PAIRS_OF_EXPERTS * spec.num_experts:
            return False
        matrices = hidden.out_features // down.in_features
        if matrices == 1 and (adapted or spec.score is Score.SPARSE_MIXER):
            return False
        if spec.score is Score.SPARSE_MIXER and experts_of_a_lane(spec.num_experts) > 1:
            return False
        rows = share_of(pairs * down.in_features, matrices, num_sms)[1]
        first = self._shared(tokens, tokens, hidden.pitch, rows, 4 + 4 * adapted)
        rows = pairs * share_of(down.out_features, 1, num_sms)[1]
        second = self._shared(tokens, pairs, down.pitch, rows, 12 + 4 * adapted)
        return max(first[0], second[0]) <= self._launcher.max_shared - STATIC_SHARED_MEMORY

    @staticmethod
    def takes_shared(
        spec: RouterSpec, hidden: ExpertMatrices, down: ExpertMatrices, shared: SharedExpertWeights
    ) -> bool:
        """Whether a shared expert can be one more expert of each token, or several of them.

        Its hidden values are those of a whole number of experts, each of which would be quantized and rotated apart.
        """
        parts = shared.parts(down)
        if parts > 1 and (down.in_features % PAD or down.in_features % down.rotation or down.pitch != down.in_features):
            return False
        pairs = (
            (hidden, shared.hidden, (parts * hidden.out_features, hidden.in_features), hidden.pitch),
            (down, shared.down, (down.out_features, parts * down.in_features), parts * down.pitch),
        )
        return 0 < parts <= MAX_TOP_K - spec.top_k and all(
            own.bias is None
            and other.bias is None
            and other.group_size == 0
            and other.matrix.dtype == np.int8
            and (other.out_features, other.in_features, other.pitch) == (*shape, pitch)
            for own, other, shape, pitch in pairs
        )

    def hidden(
        self,
        step: StepContext | None,
        logits: cp.ndarray,
        router: RouterWeights,
        codes: cp.ndarray,
        scales: cp.ndarray,
        weight: ExpertMatrices,
        activation: ExpertActivation,
        down: ExpertMatrices,
        out: cp.ndarray,
        shared: SharedExpertWeights | None = None,
        side: PairSide | None = None,
    ) -> None:
        """Choose experts by ``logits`` fp32 ``[T, experts]``, and compute their hidden values of the quantized tokens.

        ``codes`` int8 ``[T, pitch]``, of rotated tokens if the weights rotate their input, and ``scales`` fp32 ``[T]``
        -> ``out`` fp16 ``[T * top_k, features]``. With a ``shared`` expert of ``parts`` parts each token has ``top_k +
        parts`` rows, of which the last are those of the shared expert. A ``side`` product, of pairs in their own order,
        is added to each.

        Where the router's kernel has a block on an SM, there may be no room for one of these, which then shares
        another SM with its like. So a block requests half of an SM's shared memory, if one of the second product, by
        ``down``, fits beside it.
        """
        tokens, spec = len(logits), router.spec
        pairs = len(out)
        parts = pairs // tokens - spec.top_k
        is_short = side is None and tokens * weight.pitch <= LONG_CODES and self._is_short(pairs, down, spec)
        features = weight.out_features // (2 if activation.gated else 1)
        plan = self._plan(
            "hidden" if side is None else "hidden_adapted",
            spec.num_experts,
            f"{BOOLEANS[activation.gated]}, {activation_number(activation)}",
            tokens,
            tokens,
            pairs * features,
            2 if activation.gated else 1,
            4 if side is None else 8,
            weight.pitch,
            chunks=FIRST_CHUNKS if is_short else None,
            defines=router.defines,
        )
        room = plan.shared
        if side is None and self._launcher.has_clusters and self._fits_beside(tokens, pairs, down):
            room = max(room, self._launcher.half_shared)
        plan.kernel(
            plan.grid,
            FEW_THREADS,
            (
                *(side.arguments if side is not None else ()),
                *router.arguments,
                logits.data.ptr,
                codes.data.ptr,
                scales.data.ptr,
                *weight.arguments,
                *shared_arguments(shared.hidden if shared else None, parts),
                out.data.ptr,
                pitch_of(out),
                tokens,
                features,
                round_up(weight.in_features, 16),
                weight.pitch,
                spec.scales_input,
                *clamp_arguments(activation),
                plan.scratch,
            ),
            room,
            self._launcher.stream,
            True,
            None,
            _bytes_read(weight, tokens * spec.top_k, shared.hidden if shared else None) + nbytes_of(codes, out),
        )
        _one_block_per_sm(step)

    def down(
        self,
        step: StepContext | None,
        logits: cp.ndarray,
        router: RouterWeights,
        hidden: cp.ndarray,
        weight: ExpertMatrices,
        topk_ids: cp.ndarray,
        topk_weights: cp.ndarray,
        out: cp.ndarray,
        add: bool,
        addend: Addend | None = None,
        shared: SharedExpertWeights | None = None,
        gate: cp.ndarray | None = None,
        side: PairSide | None = None,
    ) -> None:
        """The result from what :meth:`hidden` has written; fp32 ``[T, out]``.

        That must be the kernel before, but for one that writes the inputs of a ``side`` product, which is added to each
        product; its pairs have their own order.

        Also ``topk_ids`` int32 and ``topk_weights`` fp32, ``[T, top_k]``. The kernel reads ``logits`` before its
        predecessor has ended. An ``addend`` is added to the sum, or the result of the ``shared`` expert, times its
        ``gate`` fp32 ``[T]`` if there is one. With ``add`` the result is added to ``out``.
        """
        assert addend is None or shared is None
        tokens, spec = len(logits), router.spec
        pairs = len(hidden)
        parts = pairs // tokens - spec.top_k
        values, pitch, factors = addend_arguments(addend)
        plan = self._plan(
            "down" if side is None else "down_adapted",
            spec.num_experts,
            BOOLEANS[add],
            tokens,
            pairs,
            weight.out_features,
            pairs,
            12 if side is None else 16,
            weight.pitch,
            f", {BOOLEANS[weight.rotation > 1]}",
            SECOND_CHUNKS if side is None and self._is_short(pairs, weight, spec) else None,
            router.defines,
        )
        plan.kernel(
            plan.grid,
            FEW_THREADS,
            (
                *(side.arguments if side is not None else ()),
                *router.arguments,
                logits.data.ptr,
                topk_ids.data.ptr,
                topk_weights.data.ptr,
                hidden.data.ptr,
                pitch_of(hidden),
                *weight.arguments,
                *shared_arguments(shared.down if shared else None, parts),
                out.data.ptr,
                pitch_of(out),
                tokens,
                weight.out_features,
                weight.in_features,
                weight.pitch,
                spec.scales_input,
                weight.rotation,
                weight.rotation**-0.5,
                values,
                pitch,
                factors or address(gate),
                plan.scratch,
                plan.pipelines > PIPELINES_TO_LAUNCH_LATE,
            ),
            plan.shared,
            self._launcher.stream,
            True,
            None,
            _bytes_read(weight, tokens * spec.top_k, shared.down if shared else None) + nbytes_of(hidden, out),
        )
        _one_block_per_sm(step)

    def _is_short(self, pairs: int, down: ExpertMatrices, spec: RouterSpec) -> bool:
        """Whether pipelines have ``FIRST_CHUNKS`` and ``SECOND_CHUNKS``."""
        if experts_of_a_lane(spec.num_experts) not in SHORT_EACH or spec.score is Score.SPARSE_MIXER:
            return False
        rows = pairs * share_of(down.out_features, 1, self._launcher.num_sms)[1]
        unit, pipelines = SHORT_UNIT, WARPS * SECOND_CHUNKS * FEW_CHUNK
        if self._launcher.max_shared < LARGE_SHARED_MEMORY or best_unit(rows, down.pitch) != unit:
            return False
        return pipelines < rows * round_up(down.pitch, unit) <= 2 * pipelines

    def _fits_beside(self, tokens: int, pairs: int, down: ExpertMatrices) -> bool:
        """Whether a block of the second product fits an SM beside a block with half of its shared memory."""
        rows = pairs * share_of(down.out_features, 1, self._launcher.num_sms)[1]
        needed = self._shared(tokens, pairs, down.pitch, rows, 12, best_unit(rows, down.pitch))[0]
        return self._launcher.half_shared + needed + BESIDE <= self._launcher.max_shared

    def _find_plan(
        self,
        name: str,
        experts: int,
        arguments: str,
        tokens: int,
        rows: int,
        outputs: int,
        matrices: int,
        each: int,
        pitch: int,
        more: str = "",
        chunks: int | None = None,
        defines: tuple[str, ...] = (),
    ) -> _Plan:
        """For ``rows`` rows of codes, and ``outputs`` outputs with ``matrices`` rows of the weight.

        ``each``: bytes of shared memory for each row of the weight that a block has. ``arguments`` stand before the
        unit's size in the template, ``more`` behind it. ``chunks`` are those of a pipeline; ``defines``: more macros.
        """
        grid, own = share_of(outputs, matrices, self._launcher.num_sms)
        unit = best_unit(own, pitch)
        default = self._shared(tokens, rows, pitch, own, each, unit)[1]
        shared, chunks, scratch = self._shared(tokens, rows, pitch, own, each, unit, chunks)
        expression = f"few_tokens_{name}<{experts_of_a_lane(experts)}, {arguments}, {unit}{more}>"
        kernel = self._launcher.kernel(self.source, expression, False, (*defines_for(chunks), *defines))
        return _Plan(kernel, grid, shared, scratch, own * round_up(pitch, unit) / (WARPS * default * FEW_CHUNK))

    def _shared(
        self,
        tokens: int,
        rows: int,
        pitch: int,
        own: int,
        each: int,
        unit: int = UNITS[0],
        chunks: int | None = None,
    ) -> tuple[int, int, int]:
        """Bytes of dynamic shared memory; chunks in flight per warp; bytes of that for pipelines or the choice."""
        codes = rows * round_up(pitch, unit)
        if chunks is None:
            chunks = pipeline_chunks(self._launcher.max_shared, codes)
        scratch = WARPS * chunks * FEW_CHUNK if self._launcher.has_clusters else tokens * ROUTING_SCRATCH
        return scratch + codes + each * own, chunks, scratch


def share_of(outputs: int, matrices: int, num_sms: int) -> tuple[int, int]:
    """The number of blocks, and the rows of one of them at most: blocks of a gated layer share whole groups of rows."""
    group = 1 if matrices == 1 else GROUP
    grid = min(num_sms, outputs // group)
    return grid, ceil_div(outputs // group, grid) * group * matrices


def best_unit(rows: int, pitch: int) -> int:
    """The element of :data:`UNITS` for a block's ``rows`` rows: as in ``gemv``, a chunk may be half of one."""

    def cost(unit: int) -> float:
        units = rows * ceil_div(pitch, unit)
        return ceil_div(units, WARPS) * (ceil_div(unit, FEW_CHUNK) + UNIT_OVERHEAD)

    return min(UNITS, key=cost)


def _bytes_read(weight: ExpertMatrices, pairs: int, shared: WeightRows | None) -> int:
    return weight.bytes_of(min(pairs, weight.num_experts)) + (0 if shared is None else shared.nbytes)


def _one_block_per_sm(step: StepContext | None) -> None:
    if step is not None:
        step.one_block_per_sm = True


def _possible_hidden(each: int, gated: str, function: int, unit: int) -> bool:
    return gated == BOOLEANS[1] or function != CLAMPED_SWIGLU
