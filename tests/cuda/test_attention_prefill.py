"""Attention of new tokens: its tiles fit every GPU. On a GPU, it is compared with the definition; and its bits are the
same however the work is divided.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from checked import repeats

from bminf_lite.backend.attention import attend
from bminf_lite.backend.values import AttentionSpec, LinearBias
from bminf_lite.cuda.kernels.attention import prefill as attention
from bminf_lite.cuda.kernels.attention.heads import LARGE_HEAD_DIM, max_head_dim, scores_of
from bminf_lite.cuda.kernels.attention.prefill import (
    CLUSTER_TILE,
    COUNTERS,
    PACKED_KEYS,
    SMALL_TILE,
    TILE,
    TILE_ROWS,
    AttentionMask,
    AttentionTileConfig,
    PrefillAttention,
    is_light,
    synchronous,
    tile_config_for,
    tile_rows,
)
from bminf_lite.cuda.kernels.constants import BLOCK_SIZE, SEGMENT, ScoreKind, attention_tile
from bminf_lite.cuda.runtime.driver import Device

MOST_SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB of shared memory a block, from the CUDA programming guide's table of compute capabilities."""


def tile_configs(capability: tuple[int, int], depths: Sequence[int]) -> set[AttentionTileConfig]:
    """Cases of plain causal attention over heads of ``depths``, and of other kinds over heads of 64 and 128."""
    others = [
        (64, SMALL_TILE, AttentionMask.CAUSAL, ScoreKind.BIASED),
        (64, TILE, AttentionMask.CROSS),
        (64, SMALL_TILE, AttentionMask.BIDIRECTIONAL, ScoreKind.BIASED),
        (64, SMALL_TILE, AttentionMask.BIDIRECTIONAL),
        (64, TILE, AttentionMask.BIDIRECTIONAL),
        (128, SMALL_TILE, AttentionMask.BIDIRECTIONAL, ScoreKind.BIASED),
        (256, SMALL_TILE, AttentionMask.CAUSAL, ScoreKind.CAPPED),
        (128, TILE, AttentionMask.CAUSAL, ScoreKind.ALIBI),
        (64, TILE, AttentionMask.CAUSAL, ScoreKind.SINKS),
    ]
    chosen = [
        (depth, rows, AttentionMask.CAUSAL, ScoreKind.PLAIN, int8)
        for depth in depths
        for rows in TILE_ROWS
        for int8 in (False, True)
    ]
    return {tile_config_for(capability, *kind) for kind in [*chosen, *others]}


@pytest.mark.parametrize("capability", MOST_SHARED)
def test_shared_memory_fits(capability: tuple[int, int]) -> None:
    for tile_config in tile_configs(capability, range(16, max_head_dim(capability) + 1, 16)):
        assert tile_config.shared <= MOST_SHARED[capability] << 10, tile_config


@pytest.mark.parametrize("capability", MOST_SHARED)
def test_a_segment_is_whole_tiles_and_a_tile_is_in_whole_blocks(capability: tuple[int, int]) -> None:
    for depth in range(16, max_head_dim(capability) + 1, 16):
        for mask in AttentionMask:
            keys = attention_tile(capability, depth, mask, False)
            assert SEGMENT % keys == 0
            assert keys % BLOCK_SIZE == 0 or BLOCK_SIZE % keys == 0


@pytest.mark.parametrize(
    ("tokens", "batch_size", "max_query_len", "max_context_len", "group", "rows"),
    [
        (16, 1, 16, 1 << 17, 4, SMALL_TILE),
        (512, 1, 512, 1 << 17, 4, TILE),
        (1024, 1, 1024, 1024, 4, TILE),
        (1024, 1, 1024, 8192, 4, CLUSTER_TILE),
        (2048, 16, 1024, 8192, 4, TILE),
        (2048, 1, 2048, 2048, 8, TILE),
        (8192, 1, 8192, 8192, 1, CLUSTER_TILE),
    ],
)
def test_two_blocks_share_a_tile_where_rows_and_keys_are_many(
    tokens: int, batch_size: int, max_query_len: int, max_context_len: int, group: int, rows: int
) -> None:
    assert tile_rows(tokens, batch_size, max_query_len, max_context_len, group) == rows


def test_short_texts_have_small_tiles_of_which_an_sm_runs_several() -> None:
    tile_of = functools.partial(tile_config_for, (9, 0), mask=AttentionMask.BIDIRECTIONAL)
    for mean, rows in ((266, SMALL_TILE), (2048, TILE)):
        sizes = 64 * mean, 64, 2 * mean, 2 * mean, 1
        assert tile_rows(*sizes, AttentionMask.BIDIRECTIONAL, light=True) == rows
        assert tile_rows(*sizes, AttentionMask.BIDIRECTIONAL) == TILE
    assert [tile_of(depth, SMALL_TILE).blocks for depth in (32, 64, 80, 128)] == [4, 4, 2, 2]
    assert [is_light(capability, 64) for capability in ((8, 0), (9, 0), (10, 0))] == [False, True, False]
    assert tile_rows(64 * 266, 64, 512, 512, 1) == TILE


@pytest.mark.parametrize("rows", TILE_ROWS)
def test_texts_with_heads_of_64_have_a_kernel_of_their_own_on_90(rows: int) -> None:
    """Unless all are short. The order of sums is the same."""
    within, plain = AttentionMask.BIDIRECTIONAL, ScoreKind.PLAIN
    name = "prefill.cu" if rows == SMALL_TILE else "packed_hopper.cu"
    assert tile_config_for((9, 0), 64, rows, within).source == f"attention/{name}"
    assert attention_tile((9, 0), 64, within, False) == PACKED_KEYS
    others = [((8, 0), within, plain), ((10, 0), within, plain), ((9, 0), within, ScoreKind.BIASED)]
    for capability, mask, scores in (*others, ((9, 0), AttentionMask.CROSS, plain)):
        assert tile_config_for(capability, 64, rows, mask, scores).source == "attention/prefill.cu"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("depth", [64, 80, 128, 256])
def test_tiles_have_at_most_the_rows_that_are_asked_for(depth: int, int8: bool) -> None:
    for capability, rows in itertools.product(MOST_SHARED, TILE_ROWS):
        tile_config = tile_config_for(capability, depth, rows, int8=int8)
        assert tile_config.rows <= rows
        assert tile_config.cluster == (2 if tile_config.rows == CLUSTER_TILE else 1)


@dataclass(frozen=True)
class Case:
    """A step: new tokens and context_lens of each sequence, and the attention's shape."""

    new: tuple[int, ...]
    context_lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    sharpness: float = 1.0
    scores: ScoreKind = ScoreKind.PLAIN

    @property
    def depth(self) -> int:
        return -(-self.head_dim // 16) * 16

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(n + p for n, p in zip(self.new, self.context_lens, strict=True))

    @property
    def table_pitch(self) -> int:
        return max(1, -(-max(self.totals) // BLOCK_SIZE))


@dataclass(frozen=True)
class Division:
    """How a launch divides its work: a tiling other than the chosen one, and whether it must or must not split.

    It then splits into about ``parts`` parts.
    """

    tile_config: AttentionTileConfig | None = None
    split: bool | None = None
    parts: int = 4096

    def attention(self, device: Device) -> PrefillAttention:
        prefill = PrefillAttention(device)
        if self.tile_config is not None:
            prefill._config = lambda *_: self.tile_config  # type: ignore[method-assign, assignment, return-value]
        if self.split is not None:
            prefill._may_split = lambda *_: self.split  # type: ignore[method-assign, assignment, return-value]
            prefill._parts = lambda _: self.parts  # type: ignore[method-assign]
        return prefill


class Problem:
    """A case's arrays on the host. Pools are NaN where no token is, and the output is NaN before the launch."""

    def __init__(self, case: Case, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case, depth, dim = case, case.depth, case.head_dim
        self.q = [np.zeros((total, case.heads, depth), np.float16) for total in case.totals]
        for q in self.q:
            q[..., :dim] = rng.standard_normal((len(q), case.heads, dim)) * case.sharpness
        counts = [-(-total // BLOCK_SIZE) for total in case.totals]
        self.num_blocks = 1 + sum(counts) + 2
        free = rng.permutation(np.arange(1, self.num_blocks))
        self.tables = np.zeros((len(case.new), case.table_pitch), np.int32)
        shape = (self.num_blocks, case.kv_heads, BLOCK_SIZE, depth)
        self.keys, self.values = np.full(shape, np.nan, np.float16), np.full(shape, np.nan, np.float16)
        for b, total in enumerate(case.totals):
            self.tables[b, : counts[b]], free = free[: counts[b]], free[counts[b] :]
            for pool in (self.keys, self.values):
                tokens = np.full((counts[b] * BLOCK_SIZE, case.kv_heads, depth), np.nan, np.float16)
                tokens[:total] = 0
                tokens[:total, :, :dim] = rng.standard_normal((total, case.kv_heads, dim))
                pool[self.tables[b, : counts[b]]] = self.in_blocks(tokens)
        self.keys[0] = self.values[0] = 1
        self.scale = float(np.float32(dim**-0.5))
        self.softcap = 1.5 if case.scores is ScoreKind.CAPPED else None
        self.bias = None
        if case.scores is ScoreKind.ALIBI:
            self.bias = LinearBias(np.float32(0.3) ** np.arange(1, case.heads + 1, dtype=np.float32))
        self.sinks = rng.uniform(-2, 4, case.heads).astype(np.float32) if case.scores is ScoreKind.SINKS else None
        self.codes: tuple[np.ndarray, ...] | None = None

    @staticmethod
    def in_blocks(tokens: np.ndarray) -> np.ndarray:
        return tokens.reshape(-1, BLOCK_SIZE, *tokens.shape[1:]).swapaxes(1, 2)

    def tokens_of(self, pool: np.ndarray, b: int) -> np.ndarray:
        """``[kv_heads, total, D]``, of one sequence."""
        total = self.case.totals[b]
        blocks = pool[self.tables[b, : -(-total // BLOCK_SIZE)]]
        return blocks.swapaxes(0, 1).reshape(self.case.kv_heads, -1, self.case.depth)[:, :total]

    def quantize(self, rng: np.random.Generator) -> None:
        """Take an int8 cache, or for ``codes = None`` the same one as fp16 values; scales are NaN where no token is."""
        codes = rng.integers(-127, 128, (2, *self.keys.shape), np.int8)
        codes[..., self.case.head_dim :] = 0
        scales = rng.uniform(0.005, 0.02, codes.shape[:-1]).astype(np.float16)
        scales[np.isnan(np.stack([self.keys, self.values])[..., 0])] = np.nan
        self.keys, self.values = scales[..., None] * codes.astype(np.float16)
        self.codes = (*codes, *scales)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The definition's output and the error that the kernel may have, both ``[T, heads, head_dim]``."""
        case = self.case
        outputs, bounds = [], []
        for b, total in enumerate(case.totals):
            q = self.q[b][case.context_lens[b] :]
            keys, values = (self.tokens_of(pool, b).astype(np.float32) for pool in (self.keys, self.values))
            rest = (self.scale, case.context_lens[b], case.window, self.bias, True, self.softcap, self.sinks)
            outputs.append(attend(q, keys, values, *rest)[..., : case.head_dim])
            # A weight, at most 1, is rounded to fp16: by 2^-11 of itself, or by 2^-25 where it is subnormal, for each
            # of the keys. Their sum is at least 1. Rounding the output adds 2^-11 of it, and it is at most the average
            # magnitude of the values. A tenth more covers what fp32 sums and exp2 add.
            magnitude = attend(q, keys, np.abs(values), *rest)[..., : case.head_dim]
            bounds.append(1.1 * 2**-10 * magnitude + total * 2**-25 * np.abs(values).max(initial=0))
        return np.concatenate(outputs), np.concatenate(bounds)

    def compute(self, device: Device, division: Division = Division()) -> np.ndarray:
        """What the kernel writes for the case's new tokens, ``[T, heads, head_dim]``."""
        pieces = [(b, p, n) for b, (p, n) in enumerate(zip(self.case.context_lens, self.case.new, strict=True))]
        return self.compute_pieces(device, pieces, division)

    def compute_pieces(
        self, device: Device, pieces: Sequence[tuple[int, int, int]], division: Division = Division()
    ) -> np.ndarray:
        """The same of pieces ``(sequence, first position, tokens)``; checks that the kernel writes nothing else."""
        import cupy as cp

        case, tokens = self.case, sum(n for _, _, n in pieces)
        width = case.heads * case.head_dim
        q_width, pitch = case.heads * case.depth, -(-width // 16) * 16
        q = cp.full((tokens, q_width + 16), cp.nan, cp.float16)
        rows = [self.q[b][p : p + n].reshape(n, q_width) for b, p, n in pieces]
        q[:, :q_width] = cp.asarray(np.concatenate(rows))
        out = cp.full((tokens, pitch), cp.nan, cp.float16)
        tables = self.tables[[b for b, _, _ in pieces]]
        for table, (_, p, _) in zip(tables, pieces, strict=True):
            if case.window is not None:  # blocks that the window has passed are given back
                table[: max(0, p - case.window + 1) // BLOCK_SIZE] = 0
        cu_seqlens = np.cumsum([0] + [n for _, _, n in pieces])
        cu_seqlens, context_lens, block_tables = (
            cp.asarray(np.asarray(x, np.int32)) for x in (cu_seqlens, [p for _, p, _ in pieces], tables)
        )
        keys, values, *scales = map(cp.asarray, self.codes or (self.keys, self.values))
        key_scales, value_scales = (s.data.ptr for s in scales) if scales else (0, 0)
        prefill = division.attention(device)
        shape = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim, "tokens": tokens}
        lengths = [n for _, _, n in pieces]
        longest = {"max_query_len": max(lengths), "max_context_len": max(p + n for _, p, n in pieces)}
        longest["batch_size"] = len(lengths)
        kind = {"scores": case.scores, "int8": bool(scales)}
        scratch = cp.full(prefill.scratch_bytes(**shape, **longest, **kind), 0xFF, cp.uint8)
        bias = None if self.bias is None else LinearBias(cp.asarray(self.bias.slopes))
        sinks = None if self.sinks is None else cp.asarray(self.sinks)
        sizes = case.heads, case.kv_heads, case.head_dim
        spec = AttentionSpec(*sizes, self.scale, bias=bias, softcap=self.softcap, sinks=sinks)
        counters = cp.zeros(COUNTERS, cp.int32)
        prefill.launch(
            q.data.ptr, q_width + 16, keys.data.ptr, values.data.ptr, out.data.ptr, pitch,
            cu_seqlens.data.ptr, context_lens.data.ptr, block_tables.data.ptr,
            **shape, **longest, table_pitch=tables.shape[1], num_blocks=self.num_blocks,
            scores=scores_of(spec), window=case.window, counters=counters.data.ptr,
            scratch=scratch.data.ptr, scratch_bytes=scratch.nbytes,
            key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip
        device.synchronize()
        assert not cp.asnumpy(counters).any()
        result = cp.asnumpy(out)
        assert np.isnan(result[:, width:]).all()
        return result[:, :width].reshape(tokens, case.heads, case.head_dim)


def check(case: Case, device: Device, division: Division, seed: int = 0) -> None:
    problem = Problem(case, seed)
    got = problem.compute(device, division).astype(np.float32)
    want, bound = problem.expected()
    excess = np.abs(got - want) - bound
    assert (excess <= 0).all(), f"{case}: {(~(excess <= 0)).mean():.2%} of the output is wrong, by {np.nanmax(excess)}"


def divisions(device: Device, depth: int, int8: bool = False, scores: ScoreKind = ScoreKind.PLAIN) -> list[Division]:
    """Every way to compute causal attention whose keys per tile are those of this GPU."""
    capability = device.compute_capability
    keys = attention_tile(capability, depth, AttentionMask.CAUSAL, False)
    kernels = [tile_config_for(capability, depth, rows, scores=scores, int8=int8) for rows in TILE_ROWS]
    warps = 8 if depth > LARGE_HEAD_DIM else 4
    kernels.append(synchronous(depth, 64, keys, 1, AttentionMask.CAUSAL, scores, warps))
    return [Division(kernel, split) for kernel in kernels for split in (False, True)]


@pytest.fixture(params=["chosen", "64 rows", "128 rows", "split"])
def division(request: pytest.FixtureRequest, cuda_device: Device, monkeypatch: pytest.MonkeyPatch) -> Division:
    """The launch that is chosen, one by the kernel for any GPU with small or large tiles, or one that splits."""
    if "rows" in request.param:
        capability, rows = min((8, 0), cuda_device.compute_capability), int(request.param.removesuffix(" rows"))
        monkeypatch.setattr(
            attention,
            "tile_config_for",
            lambda _, depth, __, mask, scores, int8: tile_config_for(capability, depth, rows, mask, scores, int8),
        )
    return Division(split=True) if request.param == "split" else Division()


RAGGED = {"new": (1, 70, 300, 0, 2, 64, 129), "context_lens": (40, 0, 17, 9, 255, 64, 1020)}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 12, 16, 24, 31, 48, 64, 80, 96, 128, 160, 192, 256, 320, 512])
def test_head_dims(head_dim: int, cuda_device: Device, division: Division) -> None:
    check(Case(**RAGGED, head_dim=head_dim), cuda_device, division)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [ScoreKind.CAPPED, ScoreKind.ALIBI, ScoreKind.SINKS])
@pytest.mark.parametrize("head_dim", [64, 128, 256, *repeats(24, 80)])
def test_soft_caps_alibi_and_sinks(head_dim: int, scores: ScoreKind, cuda_device: Device, division: Division) -> None:
    check(Case(**RAGGED, head_dim=head_dim, scores=scores), cuda_device, division)
    check(Case(**RAGGED, heads=6, head_dim=head_dim, window=70, scores=scores), cuda_device, division)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("scores", [ScoreKind.PLAIN, ScoreKind.SINKS])
def test_little_work(scores: ScoreKind, split: bool, cuda_device: Device) -> None:
    """Little enough for an interpreter of the kernels' code. The sequence that is split has a segment and a bit."""
    tokens = (9, 3) if not split else (9, 40)
    case = Case(tokens, (0, SEGMENT if split else 5), heads=4, kv_heads=2, head_dim=64, scores=scores)
    check(case, cuda_device, Division(split=split, parts=8))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 12, 16, 48, 64, 80, 96, 128, 160, 256])
def test_an_int8_cache_gives_exactly_what_its_values_in_fp16_give(
    head_dim: int, cuda_device: Device, division: Division
) -> None:
    problem = Problem(Case(**RAGGED, head_dim=head_dim), 0)
    problem.quantize(np.random.default_rng(1))
    found = problem.compute(cuda_device, division)
    problem.codes = None
    np.testing.assert_array_equal(found, problem.compute(cuda_device, division))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), *repeats((4, 4), (6, 2), (8, 1), (71, 1))])
def test_grouped_heads(heads: int, kv_heads: int, head_dim: int, cuda_device: Device, division: Division) -> None:
    check(Case(**RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim), cuda_device, division)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [48, 128])
@pytest.mark.parametrize("window", [1, 65, *repeats(2, 63, 64, 200, 100_000)])
def test_windows(window: int, head_dim: int, cuda_device: Device, division: Division) -> None:
    check(Case(**RAGGED, window=window, head_dim=head_dim), cuda_device, division)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1, *repeats(*range(2, 12))])
def test_random_steps(seed: int, cuda_device: Device, division: Division) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    new = tuple(int(n) for n in rng.integers(1, 301, count))
    context_lens = tuple(int(p) for p in rng.integers(0, 2000, count) * rng.integers(0, 2, count))
    kv_heads = int(rng.integers(1, 4))
    window = int(rng.integers(1, 400)) if rng.integers(2) else None
    head_dim = int(rng.choice([16, 64, 80, 128]))
    case = Case(new, context_lens, kv_heads * int(rng.integers(1, 5)), kv_heads, head_dim, window, sharpness=8.0)
    check(case, cuda_device, division, seed)


@pytest.mark.gpu
@pytest.mark.repeats
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_long_prompt(head_dim: int, cuda_device: Device, division: Division) -> None:
    check(Case((2048,), (0,), head_dim=head_dim), cuda_device, division)
    check(Case((2048, 5), (100, 0), head_dim=head_dim, window=700), cuda_device, division)


@pytest.mark.gpu
def test_a_nan_stays_in_its_sequence_and_its_heads(cuda_device: Device, division: Division) -> None:
    problem = Problem(Case((80, 90), (0, 30), head_dim=128), 0)
    problem.keys[problem.tables[1, 100 // BLOCK_SIZE], 1, 100 % BLOCK_SIZE, 7] = np.nan
    bad = np.isnan(problem.compute(cuda_device, division)).any(axis=-1)
    want = np.zeros_like(bad)
    want[80 + 100 - 30 :, 2:] = True
    assert (bad == want).all()


EDGES, CHECKED_EDGES = (1, 63, 64, 65, 127, 129, 1023, 1025, 1100, 2049, 2300), (1, 65, 1025)
"""Lengths around the sizes of blocks, tiles and segments, and those that a checker gets."""


@pytest.fixture
def edges(pytestconfig: pytest.Config) -> tuple[int, ...]:
    return CHECKED_EDGES if pytestconfig.getoption("--under-checker") else EDGES


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "int8", "window", "scores"),
    [
        (128, False, None, ScoreKind.PLAIN),
        (64, True, 65, ScoreKind.PLAIN),
        (128, True, None, ScoreKind.ALIBI),
        (64, False, 128, ScoreKind.SINKS),
        *repeats(
            (128, True, None, ScoreKind.SINKS),
            (256, False, 700, ScoreKind.CAPPED),
            (128, True, None, ScoreKind.PLAIN),
            (256, False, None, ScoreKind.PLAIN),
            (80, True, 700, ScoreKind.PLAIN),
            (128, False, None, ScoreKind.CAPPED),
            (64, False, None, ScoreKind.ALIBI),
        ),
    ],
)
def test_bits_do_not_depend_on_how_the_work_is_divided(
    head_dim: int,
    int8: bool,
    window: int | None,
    scores: ScoreKind,
    edges: tuple[int, ...],
    cuda_device: Device,
    request: pytest.FixtureRequest,
) -> None:
    if request.config.getoption("--fake-gpu"):
        pytest.skip("NumPy's order of sums depends on shapes")
    case = Case(edges, (0,) * len(edges), head_dim=head_dim, window=window, scores=scores)
    problem, rng = Problem(case, 0), np.random.default_rng(1)
    if int8:
        problem.quantize(rng)
    whole = problem.compute(cuda_device)
    starts = np.cumsum([0, *edges])
    for division in [Division(), *divisions(cuda_device, case.depth, int8, scores)]:

        def check_pieces(pieces: Sequence[tuple[int, int, int]], division: Division = division) -> None:
            want = np.concatenate([whole[starts[b] + p : starts[b] + p + n] for b, p, n in pieces])
            found = problem.compute_pieces(cuda_device, pieces, division)
            np.testing.assert_array_equal(found, want, str(division))

        np.testing.assert_array_equal(problem.compute(cuda_device, division), whole, str(division))
        cuts = [sorted({0, n, *map(int, rng.integers(0, n + 1, 4))}) for n in edges]
        pieces = [(b, p, q - p) for b, places in enumerate(cuts) for p, q in itertools.pairwise(places)]
        rng.shuffle(pieces)
        for some in np.array_split(np.array(pieces), 4):  # pieces of one sequence may be computed in any order
            want = np.concatenate([whole[starts[b] + p : starts[b] + p + n] for b, p, n in some])
            np.testing.assert_array_equal(
                problem.compute_pieces(cuda_device, some.tolist(), division), want, str(division)
            )
        single = [(b, int(p), 1) for b, n in enumerate(edges) for p in {0, n // 2, n - 1, *(x for x in edges if x < n)}]
        check_pieces(single)


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
def test_bits_do_not_depend_on_the_number_of_parts(
    int8: bool, cuda_device: Device, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--fake-gpu"):
        pytest.skip("NumPy's order of sums depends on shapes")
    problem = Problem(Case((90, 10), (12_000, 7_000), heads=4, kv_heads=1, head_dim=128), 0)
    if int8:
        problem.quantize(np.random.default_rng(1))
    whole = problem.compute(cuda_device, Division(split=False))
    for parts in (2, 5, 7, 16, 40):
        division = Division(split=True, parts=parts)
        np.testing.assert_array_equal(problem.compute(cuda_device, division), whole, str(division))


@pytest.mark.gpu
@pytest.mark.repeats
def test_bits_do_not_depend_on_the_order_of_heads(cuda_device: Device, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--fake-gpu"):
        pytest.skip("NumPy's order of sums depends on shapes")
    problem = Problem(Case((2300, 40), (15_000, 60), heads=32, kv_heads=4, head_dim=128), 0)  # 36 MB of keys and values
    whole = problem.compute(cuda_device)
    other = synchronous(128, 64, 128, 1, AttentionMask.CAUSAL, ScoreKind.PLAIN)
    np.testing.assert_array_equal(problem.compute(cuda_device, Division(other, split=False)), whole)
