"""Attention of one new token per sequence over the paged cache or a source: the launcher of ``decode.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....backend.cache_values import LayerCache
from ....backend.values import AttentionSpec
from ...runtime.driver import shared_memory_per_block
from ..arrays import HEAD_PAD, address, ceil_div, nbytes_of, pitch_of, pointer_and_pitch, round_up
from ..constants import (
    DECODE_GROUP,
    DECODE_HEADS,
    DECODE_LARGE_SCORES,
    DECODE_MAX_DRAFTS,
    DECODE_MAX_UNIT,
    DECODE_THREADS,
    LARGE_SHARED_MEMORY,
    SEGMENT,
    AttentionMask,
    DecodeMask,
    DecodeWork,
    ScoreKind,
    attention_tile,
)
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together, numbers
from ..launcher import Launcher, StepContext
from .heads import (
    ELEMENTS,
    INT8,
    LARGE_HEAD_DIM,
    ROPE_FIRST,
    defines_of,
    element_of,
    head_arguments,
    head_pitch_of,
    max_head_dim,
    scores_of,
)

if TYPE_CHECKING:
    import cupy as cp

DEPTHS = (64, 128, 256, 512)
"""Head sizes that the kernel is compiled for."""
TWO_BLOCKS = (8, 0), (9, 0)
"""Compute capabilities on which two blocks share an SM, which limits the registers of a thread to 96."""
THREE_BLOCKS = ((9, 0),)
"""Compute capabilities on which three blocks share an SM where each computes one pair over int8 codes. Their time is
that of instructions and of the latency of their phases, so other blocks count for more than loads in flight.
"""
HUGE_SHARED_MEMORY = 227 << 10
MAX_RECORDS = 8192
"""Records that are kept at most. With more segments than this in a step, no context is split over blocks."""
UNITS = (8, 4, 2, 1)
"""Blocks of a unit."""
UNIT_WORK: tuple[tuple[int, DecodeWork], ...] = (
    (1, DecodeWork.ITEMS),
    *((unit, work) for unit in UNITS for work in (DecodeWork.ONE_SEGMENT, DecodeWork.ONE_PAIR)),
)
"""The blocks of a unit and its work: the template arguments ``UNIT`` and ``WORK``."""
SMS_PER_BLOCK = 4
"""With at least ``SMS_PER_BLOCK`` SMs for each block, the next kernel may start with attention: it finds room."""
SEGMENT_WAVES = 2
"""Units of one segment that a launch may have for each one that runs at the same time."""
MAX_PREPARING_ROWS = 16
"""The most rows of a step with drafts whose keys attention prepares: more are prepared by a kernel of their own."""
RESERVED = 1 << 10
"""Bytes of shared memory that a block takes beside its own."""
CAUSAL, BIASED, CROSS, SHARED = map(int, (DecodeMask.CAUSAL, DecodeMask.BIASED, DecodeMask.CROSS, DecodeMask.SHARED))


@dataclass(frozen=True)
class DecodeConfig:
    """One kernel without its last template arguments; chunks of keys and values have ``chunk`` bytes.

    ``stages`` chunks are in shared memory at a time, and ``blocks`` blocks on an SM.
    """

    depth: int
    tile: int
    chunk: int
    stages: int
    blocks: int

    def template(self) -> Together:
        """The template arguments."""
        return Together((self.depth, self.tile, self.chunk, self.stages, self.blocks))

    def shared(self, element: str, unit: int) -> int:
        """Bytes of dynamic shared memory: chunks with the scales of their tokens, and scores."""
        keys = self.chunk // (self.depth * (1 if element == INT8 else 2))
        scales = round_up(keys * unit * 2, 128) if element == INT8 else 0
        scores = DECODE_LARGE_SCORES if self.depth > LARGE_HEAD_DIM else (SEGMENT + DECODE_GROUP) * DECODE_HEADS * 4
        return self.stages * (self.chunk + scales) + scores

    def static(self) -> int:
        """A bound of the bytes of static shared memory."""
        return (3 << 10) + 20 * self.depth

    def draft_bytes(self, element: str) -> int:
        """Bytes of dynamic shared memory for keys and values of drafts: ``DraftTokens`` in ``decode.cu``."""
        return DECODE_MAX_DRAFTS * 2 * (self.depth * (1 if element == INT8 else 2) + 2)

    def holds_drafts(self, capability: Capability, element: str, unit: int) -> bool:
        """Whether the keys and values of drafts fit too."""
        memory = shared_memory_per_block(capability)
        taken = self.shared(element, unit) + self.static() + self.draft_bytes(element)
        return taken <= memory and blocks_per_sm(self.blocks, unit) * (taken + RESERVED) <= memory + RESERVED


def decode_config(capability: Capability, head_dim: int, kind: int) -> DecodeConfig:
    """The kernel for heads of ``head_dim`` elements and a ``DecodeMask``."""
    depth = max(DEPTHS[0], 1 << (head_dim - 1).bit_length())
    mask = AttentionMask.CROSS if kind == CROSS else AttentionMask.CAUSAL
    tile = attention_tile(capability, round_up(head_dim, HEAD_PAD), mask, kind == BIASED)
    memory = shared_memory_per_block(capability)
    blocks = 2 if capability in TWO_BLOCKS and depth <= 128 else 1
    if memory >= HUGE_SHARED_MEMORY:
        chunk, stages = 16 << 10, 4
    elif memory >= LARGE_SHARED_MEMORY:
        chunk, stages = (8 << 10, 4) if blocks == 2 else (16 << 10, 4)
    elif capability >= (8, 0):
        chunk, stages = 16 << 10, 2 if depth > LARGE_HEAD_DIM else 3
    else:
        chunk, stages = 8 << 10, 2
    return DecodeConfig(depth, tile, chunk, stages, blocks)


def launch_config(
    capability: Capability, head_dim: int, kind: int, unit: int, work: DecodeWork, element: str
) -> DecodeConfig:
    """The same for units of ``unit`` blocks that have ``work``, with keys and values of type ``element``."""
    config = decode_config(capability, head_dim, kind)
    packed = (unit, work, element) == (1, DecodeWork.ONE_PAIR, INT8) and capability in THREE_BLOCKS
    return replace(config, stages=2, blocks=3) if packed and config.blocks == 2 else config


def blocks_per_sm(blocks: int, unit: int) -> int:
    """Blocks of an SM: not all SMs of a GPC hold two blocks of large clusters."""
    return blocks if unit <= 2 else 1


def prepares_drafts(
    capability: Capability, config: DecodeConfig, kind: int, unit: int, work: DecodeWork, element: str
) -> bool:
    """Whether a kernel may prepare the keys and values of drafts before a row itself.

    It does so for a row's own tokens, where blocks do not find their items, and where the memory suffices.
    """
    return (
        kind not in (CROSS, SHARED) and work is not DecodeWork.ITEMS and config.holds_drafts(capability, element, unit)
    )


def max_unit(capability: Capability, depth: int) -> int:
    """The blocks of a unit, at most: each has a group of elements of the values, or several."""
    return min(DECODE_MAX_UNIT, depth // DECODE_GROUP) if capability >= (9, 0) else 1


@dataclass(frozen=True)
class DecodeGrid:
    """``units`` units of ``unit`` blocks, for at most ``max_segments`` segments of each pair."""

    work: DecodeWork
    unit: int
    units: int
    max_segments: int


class AttentionDecode:
    """The kernel of ``decode.cu``."""

    source = "attention/decode.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        """For all head sizes: these differ in their tiles only below a power of two."""
        for kind in numbers(DecodeMask):
            launched = {
                (config.template(), (unit, int(work)), element, drafts)
                for size in range(HEAD_PAD, max_head_dim(capability) + 1, HEAD_PAD)
                for unit, work in UNIT_WORK
                for element in ELEMENTS
                if unit <= max_unit(capability, decode_config(capability, size, kind).depth)
                for config in (launch_config(capability, size, kind, unit, work, element),)
                for drafts in BOOLEANS[: 1 + prepares_drafts(capability, config, kind, unit, work, element)]
            }
            templates = dict.fromkeys(template for template, *_ in sorted(launched))
            works = tuple(Together((unit, int(work))) for unit, work in UNIT_WORK)
            drafts = tuple(sorted({each[-1] for each in launched}))
            for defines in ((), ROPE_FIRST) if kind == CAUSAL else ((),):
                yield KernelFamily(
                    cls.source,
                    "attention_decode",
                    (tuple(templates), works, (kind,), ELEMENTS, drafts),
                    lambda template, work, _, element, drafts, launched=launched: (
                        (template, work, element, drafts) in launched
                    ),
                    defines,
                )

    def grid(self, spec: AttentionSpec, batch_size: int, max_context_len: int) -> DecodeGrid:
        """Which blocks compute what for ``batch_size`` sequences.

        ``max_context_len`` is a bound of the tokens of a sequence; how long the contexts are beneath it changes
        nothing. A captured graph keeps the grid of the bound that it was captured with.
        """
        config, num_sms = self._config(spec, CAUSAL), self._launcher.num_sms
        pairs, max_segments = batch_size * pair_groups(spec), ceil_div(max_context_len, SEGMENT)
        if spec.window:
            max_segments = min(max_segments, ceil_div(spec.window - 1, SEGMENT) + 1)
        units = pairs * max_segments
        work = DecodeWork.ONE_PAIR if max_context_len <= SEGMENT else DecodeWork.ONE_SEGMENT
        for unit in UNITS:
            places = num_sms * blocks_per_sm(config.blocks, unit)
            if unit <= max_unit(self._launcher.device.compute_capability, config.depth) and units * unit <= places:
                return DecodeGrid(work, unit, units, max_segments)
        blocks = config.blocks * num_sms
        if work is DecodeWork.ONE_PAIR or units <= min(SEGMENT_WAVES * blocks, MAX_RECORDS):
            return DecodeGrid(work, 1, units, max_segments)
        return DecodeGrid(DecodeWork.ITEMS, 1, blocks, max_segments)

    def prepares_drafts(self, spec: AttentionSpec, cache: LayerCache, batch_size: int, max_context_len: int) -> bool:
        """Whether :meth:`launch` takes ``draft_offsets`` for ``batch_size`` rows and that bound of their tokens."""
        if batch_size > MAX_PREPARING_ROWS:
            return False
        kind, grid = int(scores_of(spec).decode_mask), self.grid(spec, batch_size, max_context_len)
        capability, element = self._launcher.device.compute_capability, element_of(cache)
        config = launch_config(capability, spec.head_dim, kind, grid.unit, grid.work, element)
        return prepares_drafts(capability, config, kind, grid.unit, grid.work, element)

    def gates_outputs(self, spec: AttentionSpec, batch_size: int, max_context_len: int) -> bool:
        """Whether :meth:`launch` takes a ``gate``: where a cluster of blocks computes each pair from its first key."""
        grid = self.grid(spec, batch_size, max_context_len)
        return grid.unit > 1 and grid.work is DecodeWork.ONE_PAIR

    def record_elements(self, spec: AttentionSpec, batch_size: int, max_context_len: int) -> int:
        """fp32 numbers of the scratch ``records``, for contexts of at most ``max_context_len`` tokens."""
        segments = batch_size * pair_groups(spec) * ceil_div(max_context_len, SEGMENT)
        return max(self._max_blocks(spec), min(segments, MAX_RECORDS)) * record_size(spec)

    def arrival_elements(self, spec: AttentionSpec, batch_size: int) -> int:
        """int32 numbers of the scratch ``arrival_counts``, which is zero before the first launch and after each."""
        return max(self._max_blocks(spec), batch_size * pair_groups(spec))

    def launch(
        self,
        step: StepContext,
        qkv: cp.ndarray,
        spec: AttentionSpec,
        cache: LayerCache,
        context_lens: cp.ndarray,
        block_table: cp.ndarray,
        records: cp.ndarray,
        arrival_counts: cp.ndarray,
        out: cp.ndarray,
        max_context_len: int,
        lengths: cp.ndarray | None = None,
        is_shared: bool = False,
        written: int = 0,
        draft_offsets: cp.ndarray | None = None,
        gate: cp.ndarray | None = None,
    ) -> None:
        """Attention of one new token per sequence, fp16 ``[B, heads * head_dim]``, into ``out``.

        ``qkv`` is fp16 ``[B, (heads + 2 * kv_heads) * head_dim]``, ``context_lens`` int32 ``[B]``, the tokens in the
        cache before the step, and ``block_table`` int32 ``[B, W]``, with rows that are contiguous. The new token's key
        and value are written to ``cache``. With ``lengths``, int32 ``[B]``, ``qkv`` holds queries only, and ``cache``
        holds encoded sources of those lengths. If the cache ``is_shared``, ``qkv`` holds queries only too, and the
        cache the new token's key and value. Of the tokens before a new one, earlier kernels of the step may have
        written the last ``written`` to the cache, and no others unless that is 0.

        With ``draft_offsets``, int32 ``[B]``, of which none is above ``DECODE_MAX_DRAFTS``, row ``b`` sees the keys and
        values of the tokens of that many rows before it, which are of the same sequence and one after another; see
        :meth:`prepares_drafts`. No earlier kernel of the step has stored them.

        With a ``gate``, fp16 ``[B, heads * head_dim]`` at any pitch, outputs are multiplied by its sigmoid, as
        :meth:`.PointwiseKernels.gate_rows` does; see :meth:`gates_outputs`.

        ``records`` is fp32, of at least :meth:`record_elements`, ``arrival_counts`` int32, of at least
        :meth:`arrival_elements`. No other kernel may use them at the same time. ``max_context_len`` is a
        bound of the tokens of a sequence after the step; see :meth:`grid`.
        """
        scores = scores_of(spec)
        assert (lengths is None and not is_shared) or scores.kind is ScoreKind.PLAIN
        assert not (spec.norm_after_rope and is_shared), "shared heads are normalised before their rotation"
        kind = SHARED if is_shared else int(scores.decode_mask) if lengths is None else CROSS
        batch_size, element = qkv.shape[0], element_of(cache)
        grid = self.grid(spec, batch_size, max_context_len)
        config = launch_config(
            self._launcher.device.compute_capability, spec.head_dim, kind, grid.unit, grid.work, element
        )
        has_drafts = draft_offsets is not None
        assert not has_drafts or self.prepares_drafts(spec, cache, batch_size, max_context_len)
        starts_next = grid.units * grid.unit * SMS_PER_BLOCK <= self._launcher.num_sms
        if kind != CROSS:  # a cross-attention over empty sources does not wait
            step.attends(starts_next)
        is_unwritten = step.is_unwritten(cache.keys.data.ptr, writes=kind not in (CROSS, SHARED))
        self._launcher.launch(
            step,
            self.source,
            f"attention_decode<{config.template()}, {grid.unit}, {int(grid.work)}, {kind}, {element}, "
            f"{BOOLEANS[has_drafts]}>",
            grid.units * grid.unit,
            DECODE_THREADS,
            (
                qkv.data.ptr,
                pitch_of(qkv),
                *head_arguments(spec),
                address(context_lens),
                block_table.data.ptr,
                pitch_of(block_table),
                batch_size,
                cache.keys.data.ptr,
                cache.values.data.ptr,
                address(cache.key_scales),
                address(cache.value_scales),
                records.data.ptr,
                records.size // record_size(spec),
                arrival_counts.data.ptr,
                out.data.ptr,
                pitch_of(out),
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                head_pitch_of(cache),
                spec.window or 0,
                scores.scale,
                scores.bias,
                scores.max_distance,
                address(lengths),
                grid.max_segments,
                scores.softcap,
                starts_next,
                written,
                address(draft_offsets),
                *pointer_and_pitch(gate),
            ),
            shared=config.shared(element, grid.unit) + (config.draft_bytes(element) if has_drafts else 0),
            cluster=grid.unit if grid.unit > 1 else None,
            dependent=is_unwritten or (written > 0 and step.is_under_way),
            defines=defines_of(spec),
            bytes_moved=nbytes_of(qkv, out)
            + batch_size * min(max_context_len, spec.window or max_context_len) * spec.kv_heads * 2 * head_bytes(cache),
        )

    def _config(self, spec: AttentionSpec, kind: int) -> DecodeConfig:
        return decode_config(self._launcher.device.compute_capability, spec.head_dim, kind)

    def _max_blocks(self, spec: AttentionSpec) -> int:
        return self._config(spec, CAUSAL).blocks * self._launcher.num_sms


def padded_head_dim(spec: AttentionSpec) -> int:
    """The head size that the kernel is compiled for."""
    return max(DEPTHS[0], 1 << (spec.head_dim - 1).bit_length())


def record_size(spec: AttentionSpec) -> int:
    """fp32 numbers of one record: ``Records<D>::FLOATS`` in ``decode.cuh``."""
    return DECODE_HEADS * (padded_head_dim(spec) + 2 * DECODE_MAX_UNIT)


def pair_groups(spec: AttentionSpec) -> int:
    """Groups of query heads that share a key-value head, and a block."""
    return spec.kv_heads * ceil_div(spec.heads // spec.kv_heads, DECODE_HEADS)


def head_bytes(cache: LayerCache) -> int:
    """Bytes of one token's key or value head, with its scale if it has one."""
    return int(cache.keys.strides[2] + (0 if cache.key_scales is None else cache.key_scales.itemsize))
