"""Decode attention: its memory fits every GPU; on a GPU its bits depend on nothing but the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checked import repeats

from bminf_lite.backend.attention import biases
from bminf_lite.backend.cache_values import LayerCache
from bminf_lite.backend.rotation import pairs_of_rotation, rotated_heads
from bminf_lite.backend.values import AttentionSpec, LinearBias, Norm, RelativeBias, Rope
from bminf_lite.cuda.kernels.arrays import address
from bminf_lite.cuda.kernels.attention.decode import (
    UNIT_WORK,
    UNITS,
    AttentionDecode,
    DecodeGrid,
    decode_config,
    launch_config,
    max_unit,
    padded_head_dim,
    pair_groups,
    prepares_drafts,
    record_size,
)
from bminf_lite.cuda.kernels.attention.heads import ELEMENTS, max_head_dim, scores_of
from bminf_lite.cuda.kernels.attention.prefill import COUNTERS, PrefillAttention
from bminf_lite.cuda.kernels.attention.prepare_heads import PrepareHeads
from bminf_lite.cuda.kernels.constants import (
    BLOCK_SIZE,
    DECODE_MAX_DRAFTS,
    SEGMENT,
    AttentionMask,
    DecodeMask,
    DecodeWork,
    ScoreKind,
    attention_tile,
)
from bminf_lite.cuda.kernels.launcher import Launcher, StepContext
from bminf_lite.cuda.kernels.rowwise.rows import array_source
from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.engine.speculative import MAX_DRAFT_TOKENS

MOST_SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB of shared memory a block, from the CUDA programming guide's table of compute capabilities."""
STATIC = 10 << 10
"""More than the kernel's static shared memory."""
LARGE_STATIC = 14 << 10
"""The same for heads of 512."""
SMALL_STATIC = 7 << 10
"""The same for heads of up to 128 elements."""
CONTEXT_LENS = sorted(
    {max(0, edge + d) for edge in (0, 16, 64, 128, 256, 512, 1024, 1152, 2048, 3072, 4999) for d in (-2, -1, 0, 1)}
)
LONG_CONTEXT_LENS = [3500, 8191, 9000, 20_000, 33_000, 70_000]
"""Some have enough segments for several blocks to merge them, and one has more than are merged at a time."""
CHECKED_CONTEXT_LENS, CHECKED_LONG_CONTEXT_LENS = [0, 70, 1100], [1100, 8191]
"""The same for a checker: of one segment and of two, and of enough segments that two blocks merge them."""
ITEM_BLOCKS = (264, 24, 1)
"""Blocks that find their items."""


@pytest.fixture
def context_lens(pytestconfig: pytest.Config) -> list[int]:
    return CHECKED_CONTEXT_LENS if pytestconfig.getoption("--under-checker") else CONTEXT_LENS


@pytest.fixture
def long_context_lens(pytestconfig: pytest.Config) -> list[int]:
    return CHECKED_LONG_CONTEXT_LENS if pytestconfig.getoption("--under-checker") else LONG_CONTEXT_LENS


@pytest.mark.parametrize("capability", MOST_SHARED)
def test_shared_memory_fits(capability: tuple[int, int]) -> None:
    for head_dim in range(16, max_head_dim(capability) + 1, 16):
        for kind in map(int, DecodeMask):
            for (unit, work), element in itertools.product(UNIT_WORK, ELEMENTS):
                config = launch_config(capability, head_dim, kind, unit, work, element)
                if unit > max_unit(capability, config.depth):
                    continue
                shared = config.shared(element, unit)
                static = SMALL_STATIC if config.depth <= 128 else STATIC if config.depth <= 256 else LARGE_STATIC
                assert shared + static <= MOST_SHARED[capability] << 10, config
                assert config.blocks * (shared + static + 1024) <= (MOST_SHARED[capability] + 1) << 10
                if prepares_drafts(capability, config, kind, unit, work, element):
                    shared += config.draft_bytes(element)
                    blocks = config.blocks if unit <= 2 else 1
                    assert blocks * (shared + config.static() + 1024) <= (MOST_SHARED[capability] + 1) << 10
                    assert shared + config.static() <= MOST_SHARED[capability] << 10


def test_room_for_the_drafts_of_a_sequence() -> None:
    assert DECODE_MAX_DRAFTS >= MAX_DRAFT_TOKENS


@pytest.mark.parametrize("capability", MOST_SHARED)
def test_tiles_divide_segments(capability: tuple[int, int]) -> None:
    for head_dim in range(16, max_head_dim(capability) + 1, 16):
        for mask in AttentionMask:
            for biased in (False, True):
                tile = attention_tile(capability, head_dim, mask, biased)
                assert SEGMENT % tile == 0
                assert tile % 16 == 0


@pytest.mark.parametrize("capability", MOST_SHARED)
def test_every_segment_has_a_unit(capability: tuple[int, int]) -> None:
    """The units of a grid suffice for all contexts beneath the bound, and the scratch memory for all units."""
    decode = AttentionDecode(SimpleNamespace(num_sms=132, device=SimpleNamespace(compute_capability=capability)))  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    for _ in range(300):
        spec = AttentionSpec(
            heads=32, kv_heads=int(rng.choice([1, 8, 32])), head_dim=int(rng.choice([64, 80, 256])), scale=1.0,
            window=int(rng.integers(1, 5000)) if rng.random() < 0.5 else None,
        )  # fmt: skip
        batch_size, bound = int(rng.choice([1, 2, 3, 16, 17, 64, 1000])), int(2 ** rng.uniform(0, 17))
        config = decode_config(capability, spec.head_dim, 0)
        grid = decode.grid(spec, batch_size, bound)
        pairs, places = batch_size * pair_groups(spec), config.blocks * 132
        assert 1 <= grid.unit <= max_unit(capability, config.depth)
        assert grid.unit == 1 or grid.units * grid.unit <= places  # all run at the same time
        assert decode.arrival_elements(spec, batch_size) >= pairs * grid.unit
        records = decode.record_elements(spec, batch_size, bound) // record_size(spec)
        if grid.work is DecodeWork.ITEMS:
            assert (grid.unit, grid.units) == (1, places)
            assert records >= places
            continue
        assert grid.units == pairs * grid.max_segments
        if grid.work is DecodeWork.ONE_PAIR:
            assert bound <= SEGMENT
            continue
        assert records >= grid.units
        for context_len in rng.integers(1, bound + 1, 20):
            begin = max(0, context_len - (spec.window or context_len))
            assert (context_len - 1) // SEGMENT - begin // SEGMENT < grid.max_segments


@dataclass(frozen=True)
class Shape:
    """An attention layer and its cache."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    int8: bool = False
    window: int | None = None
    scores: ScoreKind = ScoreKind.PLAIN
    rotated: bool = False
    cross: bool = False


@dataclass(frozen=True)
class Problem:
    """A step of one new token per sequence. Memory that was never written is NaN."""

    shape: Shape
    spec: AttentionSpec
    cache: LayerCache
    qkv: Any
    context_lens: np.ndarray
    tables: np.ndarray

    @classmethod
    def random(cls, shape: Shape, context_lens: list[int], seed: int) -> Problem:
        import cupy as cp

        rng = np.random.default_rng(seed)
        new = 0 if shape.cross else 1
        counts = [-(-(length + new) // BLOCK_SIZE) for length in context_lens]
        num_blocks = 3 + sum(counts)
        free, tables = iter(rng.permutation(num_blocks - 1) + 1), np.zeros((len(counts), max(counts) + 1), np.int32)
        for row, count in zip(tables, counts, strict=True):
            row[:count] = [next(free) for _ in range(count)]
        pitch = -(-shape.head_dim // 16) * 16
        size = num_blocks, shape.kv_heads, BLOCK_SIZE
        never_written = np.ones((num_blocks, 1, BLOCK_SIZE), bool)
        never_written[0] = False
        for row, length in zip(tables, context_lens, strict=True):
            for i, block in enumerate(row[: -(-length // BLOCK_SIZE)]):
                never_written[block, :, : length - i * BLOCK_SIZE] = False
        pools: list[Any] = []
        for _ in range(2):
            if shape.int8:
                pool = rng.integers(-127, 128, (*size, pitch), np.int8)
            else:
                pool = rng.standard_normal((*size, pitch), np.float32).astype(np.float16)
                pool[np.broadcast_to(never_written, size)] = np.nan
            pool[..., shape.head_dim :] = 0
            pools.append(pool)
        if shape.int8:
            for _ in range(2):
                scales = rng.uniform(0.002, 0.02, size).astype(np.float16)
                pools.append(np.where(never_written, np.float16(np.nan), scales))
        frequencies = 10000.0 ** -np.linspace(0, 1, shape.head_dim // 2)
        weight = rng.uniform(0.5, 1.5, (2, shape.head_dim)).astype(np.float32)
        spec = AttentionSpec(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=shape.window,
            bias={
                ScoreKind.BIASED: RelativeBias(cp.asarray(rng.standard_normal((shape.heads, 81)), cp.float32), 40),
                ScoreKind.ALIBI: LinearBias(cp.asarray(0.3 ** np.arange(1, shape.heads + 1), cp.float32)),
            }.get(shape.scores),
            softcap=1.5 if shape.scores is ScoreKind.CAPPED else None,
            sinks=cp.asarray(rng.uniform(-2, 4, shape.heads), cp.float32) if shape.scores is ScoreKind.SINKS else None,
            rope=Rope(cp.asarray(frequencies, cp.float32)) if shape.rotated else None,
            q_norm=Norm(cp.asarray(weight[0]), 1e-6) if shape.rotated else None,
            k_norm=Norm(cp.asarray(weight[1]), 1e-6) if shape.rotated else None,
        )
        width = shape.heads * shape.head_dim if shape.cross else spec.qkv_features
        qkv = cp.asarray(rng.standard_normal((len(counts), -(-width // 16) * 16)), cp.float16)
        return cls(shape, spec, LayerCache(*map(cp.asarray, pools)), qkv, np.array(context_lens, np.int32), tables)

    def copied(self) -> Problem:
        arrays = (self.cache.keys, self.cache.values, self.cache.key_scales, self.cache.value_scales)
        return replace(self, cache=LayerCache(*(None if x is None else x.copy() for x in arrays)))

    def of(self, rows: Any) -> Problem:
        """The same of some sequences only."""
        return replace(self, qkv=self.qkv[rows], context_lens=self.context_lens[rows], tables=self.tables[rows])

    def moved(self, seed: int) -> Problem:
        """The same with the cache's blocks in another order."""
        import cupy as cp

        num_blocks = len(self.cache.keys)
        to = np.concatenate([[0], np.random.default_rng(seed).permutation(num_blocks - 1) + 1])
        back = cp.asarray(np.argsort(to))
        arrays = (self.cache.keys, self.cache.values, self.cache.key_scales, self.cache.value_scales)
        cache = LayerCache(*(None if x is None else x[back] for x in arrays))
        return replace(self, cache=cache, tables=to[self.tables].astype(np.int32))

    def short(self) -> Problem:
        """The same of the sequences that have one segment, which are the first ones."""
        found = self.of(slice(np.searchsorted(self.context_lens, SEGMENT)))
        return replace(found, tables=found.tables[:, : SEGMENT // BLOCK_SIZE])

    def grids(self, capability: tuple[int, int]) -> list[DecodeGrid]:
        """Everything that may be launched."""
        count, longest = len(self.context_lens) * pair_groups(self.spec), int(self.context_lens.max()) + 1
        units = [unit for unit in UNITS if unit <= max_unit(capability, padded_head_dim(self.spec))]
        segments = -(-longest // SEGMENT)
        works = [(DecodeWork.ONE_SEGMENT, n) for n in (segments, segments + 1)]
        works += [(DecodeWork.ONE_PAIR, 1)] * (longest <= SEGMENT)
        grids = [DecodeGrid(work, unit, count * n, n) for unit in units for work, n in works]
        return grids + [DecodeGrid(DecodeWork.ITEMS, 1, blocks, segments) for blocks in ITEM_BLOCKS]

    def run(
        self, device: Device, grid: DecodeGrid | None = None, records: int | None = None, stores_first: bool = False,
        draft_offsets: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The bits of the output, uint16 ``[B, heads * head_dim]``; writes the new tokens into the cache.

        If it ``stores_first``, all of them before attention, in the same step: the sequences may be drafts of one. They
        may be with ``draft_offsets`` too.
        """
        import cupy as cp

        decode = AttentionDecode(Launcher(device, 0))
        if grid is not None:
            decode.grid = lambda *_: grid  # type: ignore[method-assign]
        spec, count, longest = self.spec, len(self.context_lens), self.tables.shape[1] * BLOCK_SIZE
        elements = decode.record_elements(spec, count, longest) if records is None else records * record_size(spec)
        arrivals = decode.arrival_elements(spec, count)
        if grid is not None and grid.work is not DecodeWork.ITEMS:  # more units than the launcher would choose
            elements = max(elements, grid.units * record_size(spec))
            arrivals = max(arrivals, count * pair_groups(spec) * grid.unit)
        scratch = cp.full(elements, cp.nan, cp.float32)
        arrival_counts = cp.zeros(arrivals, cp.int32)
        out = cp.full((count, spec.heads * spec.head_dim), cp.nan, cp.float16)
        context_lens = cp.asarray(self.context_lens)
        offsets = None if draft_offsets is None else cp.asarray(draft_offsets, cp.int32)
        step, tables = StepContext(in_step=stores_first or offsets is not None), cp.asarray(self.tables)
        if stores_first:
            PrepareHeads(Launcher(device, 0)).launch(
                step, array_source(self.qkv), spec, self.cache, cp.arange(count + 1, dtype=cp.int32), context_lens,
                tables, None, count, rotated_pairs=pairs_of_rotation(spec.head_dim) if self.shape.int8 else 0,
            )  # fmt: skip
        decode.launch(
            step, self.qkv, spec, self.cache, context_lens, tables, scratch, arrival_counts, out, longest,
            context_lens if self.shape.cross else None, written=(count - 1) * stores_first, draft_offsets=offsets,
        )  # fmt: skip
        assert not arrival_counts.get().any()
        return out.get().view(np.uint16)  # type: ignore[no-any-return]

    def queries(self) -> np.ndarray:
        """Those that attention uses, without norm and rotation to a position: fp16 ``[B, heads, head_dim]``."""
        shape = self.shape
        heads = self.qkv.get()[:, : shape.heads * shape.head_dim].reshape(-1, shape.heads, shape.head_dim)
        return rotated_heads(heads).astype(np.float16) if shape.int8 and not shape.cross else heads

    def expected(self) -> np.ndarray:
        """The output in float64, without norm and rotation, from the cache with the new tokens."""
        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        pools = [self.cache.keys.get(), self.cache.values.get()]
        if shape.int8:
            scales = self.cache.key_scales.get(), self.cache.value_scales.get()
            pools = [pool.astype(np.float16) * scale[..., None] for pool, scale in zip(pools, scales, strict=True)]
        queries = self.queries().astype(np.float64).reshape(len(self.context_lens), -1)
        outputs = []
        for q, context_len, table in zip(queries, self.context_lens, self.tables, strict=True):
            length = int(context_len) + (0 if shape.cross else 1)
            blocks = table[: -(-length // BLOCK_SIZE)]
            keys, values = (
                pool[blocks]
                .swapaxes(0, 1)
                .reshape(shape.kv_heads, len(blocks) * BLOCK_SIZE, pool.shape[-1])[:, :length, : shape.head_dim]
                for pool in pools
            )
            heads = q.reshape(shape.kv_heads, group, shape.head_dim)
            scores = np.einsum("kgd,kld->kgl", heads, keys.astype(np.float64)) * self.spec.scale
            if self.spec.bias is not None:
                fields = {name: x.get() if hasattr(x, "get") else x for name, x in vars(self.spec.bias).items()}
                bias = biases(type(self.spec.bias)(**fields), np.arange(length)[None] - (length - 1))
                scores += bias.reshape(shape.kv_heads, group, -1)
            if self.spec.softcap is not None:
                scores = self.spec.softcap * np.tanh(scores / self.spec.softcap)
            if shape.window is not None:
                scores[:, :, : max(0, length - shape.window)] = -np.inf
            if self.spec.sinks is not None:  # one more score, whose value is zero
                sinks = self.spec.sinks.get().reshape(shape.kv_heads, group, 1)
                scores = np.concatenate([scores, sinks], axis=-1)
            weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
            sums = np.maximum(weights.sum(-1, keepdims=True), 1e-300)
            weights = weights[..., :length]
            outputs.append(np.einsum("kgl,kld->kgd", weights / sums, values.astype(np.float64)).ravel())
        return np.array(outputs)


SHAPES = (
    Shape(),
    Shape(int8=True),
    Shape(heads=32, kv_heads=8, head_dim=64),
    Shape(heads=4, kv_heads=1, head_dim=64, int8=True),
    Shape(window=1000),
    Shape(window=77, int8=True),
    Shape(heads=4, kv_heads=4, head_dim=80),
    Shape(heads=24, kv_heads=2),
    Shape(kv_heads=4, head_dim=256),
    Shape(kv_heads=4, head_dim=256, int8=True),
    Shape(kv_heads=1, heads=8, head_dim=512),
    Shape(kv_heads=2, heads=12, head_dim=512, int8=True),
    Shape(kv_heads=8, head_dim=64, scores=ScoreKind.BIASED),
    Shape(kv_heads=4, head_dim=256, window=1000, scores=ScoreKind.CAPPED),
    Shape(scores=ScoreKind.CAPPED, int8=True),
    Shape(kv_heads=8, scores=ScoreKind.ALIBI),
    Shape(heads=12, kv_heads=1, head_dim=80, scores=ScoreKind.ALIBI, int8=True),
    Shape(heads=16, head_dim=64, window=128, scores=ScoreKind.SINKS),
    Shape(scores=ScoreKind.SINKS, int8=True),
    Shape(kv_heads=8, head_dim=64, cross=True),
)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_the_sequence_alone(device: Device, shape: Shape, context_lens: list[int]) -> None:
    """Grids, clusters, memory for records, other sequences and blocks of the cache change no bit."""
    problem = Problem.random(shape, context_lens, seed=1)
    written = problem.copied()
    bits = written.run(device)
    found, expected = bits.view(np.float16).astype(np.float64), written.expected()
    # A weight is rounded to fp16 once, and so is the output: each by 2^-11 of itself at most.
    errors = np.linalg.norm(found - expected, axis=1)
    assert (errors <= 2**-10 * np.linalg.norm(expected, axis=1)).all()
    capability = device.compute_capability
    for grid in problem.grids(capability):
        assert (problem.copied().run(device, grid) == bits).all(), grid
    few = DecodeGrid(DecodeWork.ITEMS, 1, 264, 1)
    assert (problem.copied().run(device, few, records=4) == bits).all()
    short = problem.short()
    for grid in short.grids(capability):
        assert (short.copied().run(device, grid) == bits[: len(short.context_lens)]).all(), grid
    assert (problem.moved(2).run(device) == bits).all()
    some = np.random.default_rng(3).permutation(len(bits))[: len(bits) // 2]
    assert (problem.of(some).copied().run(device) == bits[some]).all()
    for b in range(0, len(bits), 5):
        assert (problem.of(slice(b, b + 1)).copied().run(device) == bits[b]).all(), problem.context_lens[b]


@pytest.mark.gpu
@pytest.mark.parametrize("work", DecodeWork)
@pytest.mark.parametrize("scores", [ScoreKind.PLAIN, ScoreKind.SINKS])
def test_little_work_of_one_block_units(device: Device, scores: ScoreKind, work: DecodeWork) -> None:
    """Little enough for an interpreter of the kernel's code: six heads, which share two, over one or two segments."""
    lens = [5, 70] if work is DecodeWork.ONE_PAIR else [3, 1100]
    segments = -(-(max(lens) + 1) // SEGMENT)
    grid = DecodeGrid(work, 1, 3 if work is DecodeWork.ITEMS else 4 * segments, segments)
    problem = Problem.random(Shape(heads=6, kv_heads=2, head_dim=64, scores=scores), lens, seed=1)
    found = problem.run(device, grid).view(np.float16).astype(np.float64)
    expected = problem.expected()
    errors = np.linalg.norm(found - expected, axis=1)
    assert (errors <= 2**-10 * np.linalg.norm(expected, axis=1)).all()  # as in test_bits_depend_on_the_sequence_alone


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, kv_heads=2, head_dim=80),
        Shape(heads=5, kv_heads=1, head_dim=64, int8=True),
        Shape(head_dim=64, scores=ScoreKind.SINKS),
        *repeats(
            Shape(),
            Shape(int8=True, window=12_000),
            Shape(heads=4, kv_heads=1, head_dim=256, int8=True),
            Shape(heads=9, kv_heads=1, cross=True),
        ),
    ],
    ids=str,
)
def test_several_blocks_may_merge_a_long_context(device: Device, shape: Shape, long_context_lens: list[int]) -> None:
    """They give the bits that one block gives, also where contexts of other lengths are in the batch."""
    problem = Problem.random(shape, long_context_lens, seed=7)
    written = problem.copied()
    bits = written.run(device)
    found, expected = bits.view(np.float16).astype(np.float64), written.expected()
    errors = np.linalg.norm(found - expected, axis=1)
    assert (errors <= 2**-10 * np.linalg.norm(expected, axis=1)).all()
    for grid in problem.grids(device.compute_capability):
        assert (problem.copied().run(device, grid) == bits).all(), grid
    for b, context_len in enumerate(long_context_lens):
        alone = problem.of(slice(b, b + 1))
        tables = alone.tables[:, : context_len // BLOCK_SIZE + 1]
        for view in (alone, replace(alone, tables=tables)):  # beneath another bound of lengths, and its own
            assert (view.copied().run(device) == bits[b]).all(), context_len


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.cross], ids=str)
def test_bits_are_those_of_the_kernels_for_many_tokens(device: Device, shape: Shape, context_lens: list[int]) -> None:
    import cupy as cp

    problem = Problem.random(shape, context_lens, seed=5)
    expected = problem.run(device)  # which also writes the new tokens into the cache
    spec, cache, count = problem.spec, problem.cache, len(problem.context_lens)
    pitch, longest = cache.keys.shape[-1], problem.tables.shape[1] * BLOCK_SIZE
    q = cp.zeros((count, spec.heads, pitch), cp.float16)
    queries = problem.queries()
    q[..., : spec.head_dim] = cp.asarray(queries)
    out = cp.zeros((count, -(-spec.heads * spec.head_dim // 8) * 8), cp.float16)
    prefill, scores = PrefillAttention(device), scores_of(spec)
    sizes: dict[str, Any] = {"heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    sizes |= {"tokens": count, "batch_size": count, "max_query_len": 1, "max_context_len": longest}
    scratch = cp.zeros(prefill.scratch_bytes(**sizes, scores=scores.kind, int8=shape.int8), cp.uint8)
    cu_seqlens, context_lens = cp.arange(count + 1, dtype=cp.int32), cp.asarray(problem.context_lens)
    counters, tables = cp.zeros(COUNTERS, cp.int32), cp.asarray(problem.tables)
    prefill.launch(
        q.data.ptr, spec.heads * pitch, cache.keys.data.ptr, cache.values.data.ptr, out.data.ptr, out.shape[1],
        cu_seqlens.data.ptr, context_lens.data.ptr, tables.data.ptr,
        **sizes, table_pitch=tables.shape[1], num_blocks=len(cache.keys), scores=scores, window=spec.window,
        counters=counters.data.ptr, scratch=scratch.data.ptr, scratch_bytes=scratch.nbytes,
        key_scales=address(cache.key_scales), value_scales=address(cache.value_scales),
    )  # fmt: skip
    found = cp.asnumpy(out)[:, : spec.heads * spec.head_dim].view(np.uint16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("int8", [False, True])
def test_prepared_heads_have_the_same_bits(device: Device, int8: bool, head_dim: int) -> None:
    """``prepare_heads`` writes into the cache what decode attention writes."""
    import cupy as cp

    problem = Problem.random(Shape(rotated=True, int8=int8, head_dim=head_dim), [0, 5, 63, 64, 700, 1023, 4000], seed=4)
    decoded, prepared = problem.copied(), problem.copied()
    decoded.run(device)
    count, spec = len(problem.context_lens), problem.spec
    q = cp.zeros((count, spec.heads, spec.head_dim), cp.float16)
    PrepareHeads(Launcher(device, 0)).launch(
        StepContext(in_step=False), array_source(problem.qkv),
        spec, prepared.cache, cp.arange(count + 1, dtype=cp.int32), cp.asarray(problem.context_lens),
        cp.asarray(problem.tables), q, count,
        rotated_pairs=pairs_of_rotation(spec.head_dim) if int8 else 0,
    )  # fmt: skip
    arrays = [(c.keys, c.values, c.key_scales, c.value_scales) for c in (decoded.cache, prepared.cache)]
    for a, b in zip(*arrays, strict=True):
        assert a is None or (a.view(cp.uint8) == b.view(cp.uint8)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_blocks_that_prepare_many_tokens(device: Device, rotated: bool, int8: bool) -> None:
    """Blocks that take tokens in rounds write the bits of a block for each token, behind the first token too."""
    import cupy as cp

    shape = Shape(heads=40, rotated=rotated, int8=int8)
    problem = Problem.random(shape, [n * 7 for n in range(37)], seed=5)
    results = []
    for num_sms in None, 1:
        launcher, own = Launcher(device, 0), problem.copied()
        if num_sms is not None:
            launcher.num_sms = num_sms
        q = cp.zeros((37, shape.heads, shape.head_dim), cp.float16)
        PrepareHeads(launcher).launch(
            StepContext(in_step=False), array_source(problem.qkv), problem.spec, own.cache,
            cp.arange(3, 38, dtype=cp.int32), cp.asarray(problem.context_lens[3:]), cp.asarray(problem.tables[3:]),
            q, 34, rotated_pairs=pairs_of_rotation(shape.head_dim) if int8 else 0,
        )  # fmt: skip
        assert not q.get()[:3].any() and q.get()[3:].any(axis=(1, 2)).all()
        results.append((q, own.cache.keys, own.cache.values, own.cache.key_scales, own.cache.value_scales))
    for a, b in zip(*results, strict=True):
        assert a is None or (a.view(cp.uint8) == b.view(cp.uint8)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 61, 508, 1500])
@pytest.mark.parametrize("int8", [False, True])
def test_drafts_see_the_tokens_before_them(device: Device, int8: bool, first: int) -> None:
    """As many tokens of one sequence at once have the bits of one after another, though none waits for the cache."""
    problem = Problem.random(Shape(int8=int8), [first, first + 1, first + 2, first + 3], seed=6)
    problem = replace(problem, tables=np.repeat(problem.tables[-1:], 4, axis=0))
    expected = [problem.of(slice(b, b + 1)).run(device)[0] for b in range(4)]
    cache = problem.cache
    for grid in problem.grids(device.compute_capability):
        for position in problem.context_lens.tolist():
            block, place = int(problem.tables[0, position // BLOCK_SIZE]), position % BLOCK_SIZE
            for pool in (
                (cache.keys, cache.values) if cache.key_scales is None else (cache.key_scales, cache.value_scales)
            ):
                pool[block, :, place] = float("nan")
        np.testing.assert_array_equal(problem.run(device, grid, stores_first=True), expected, str(grid))


def drafted(shape: Shape, texts: Sequence[tuple[int, int]], seed: int) -> tuple[Problem, np.ndarray]:
    """A step of rows that are drafts, and their ``draft_offsets``: of each text its first position, and its rows."""
    positions = [first + i for first, count in texts for i in range(count)]
    offsets = np.concatenate([np.arange(count) for _, count in texts])
    problem = Problem.random(shape, positions, seed)
    ends = np.repeat(np.cumsum([count for _, count in texts]) - 1, [count for _, count in texts])
    return replace(problem, tables=problem.tables[ends]), offsets


def check_drafts(device: Device, shape: Shape, texts: Sequence[tuple[int, int]], units: Sequence[int]) -> None:
    """Rows that prepare the tokens before them have the bits of one after another, and so has what they store."""
    problem, offsets = drafted(shape, texts, seed=8)
    plain = problem.copied()
    expected = np.concatenate([plain.of(slice(b, b + 1)).run(device) for b in range(len(offsets))])
    checked = 0
    for grid in problem.grids(device.compute_capability):
        decode, found = AttentionDecode(Launcher(device, 0)), problem.copied()
        decode.grid = lambda *_, grid=grid: grid  # type: ignore[method-assign]
        if grid.unit not in units or not decode.prepares_drafts(found.spec, found.cache, len(offsets), 0):
            continue
        checked += 1
        np.testing.assert_array_equal(found.run(device, grid, draft_offsets=offsets), expected, str(grid))
        for name in ("keys", "values", "key_scales", "value_scales"):
            stored, other = getattr(found.cache, name), getattr(plain.cache, name)
            assert stored is None or (stored.get().view(np.uint8) == other.get().view(np.uint8)).all(), (name, grid)
    assert checked or padded_head_dim(problem.spec) > 128


ONE_SEGMENT = [(0, 3), (62, 4), (300, 1), (507, 8)]
SEVERAL_SEGMENTS = [(1020, 8), (2044, 7), (1500, 1)]
"""Texts with drafts: across blocks of the cache and segments, as many rows as there may be, and one without."""
DRAFT_SHAPES = (
    *(shape for shape in SHAPES if not shape.cross),
    Shape(rotated=True),
    Shape(heads=32, kv_heads=8, rotated=True, int8=True),
    Shape(kv_heads=4, head_dim=256, window=5, rotated=True),
    Shape(heads=4, kv_heads=4, head_dim=80, window=3, rotated=True, int8=True),
)


@pytest.mark.gpu
@pytest.mark.parametrize("texts", [ONE_SEGMENT, SEVERAL_SEGMENTS], ids=["one segment", "several"])
@pytest.mark.parametrize("shape", DRAFT_SHAPES, ids=str)
def test_drafts_prepare_the_tokens_before_them(device: Device, shape: Shape, texts: Sequence[tuple[int, int]]) -> None:
    check_drafts(device, shape, texts, UNITS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "texts"),
    [
        (Shape(heads=2, kv_heads=1, head_dim=64, rotated=True), [(62, 4), (3, 1)]),
        (Shape(heads=1, kv_heads=1, head_dim=64, rotated=True, int8=True, window=3), [(0, 5)]),
        (Shape(heads=2, kv_heads=2, head_dim=64, scores=ScoreKind.SINKS), [(1022, 4)]),
    ],
    ids=str,
)
def test_few_drafts_of_one_block_units(device: Device, shape: Shape, texts: Sequence[tuple[int, int]]) -> None:
    """Little enough for an interpreter of the kernel's code."""
    check_drafts(device, shape, texts, [1])
