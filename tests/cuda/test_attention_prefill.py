"""Attention of new tokens: its tiles fit every GPU; on a GPU, it is compared with the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from checked import repeats

from bminf_lite.backend.base import attend
from bminf_lite.cuda.kernels.attention import prefill as attention
from bminf_lite.cuda.kernels.attention.heads import MAX_HEAD_DIM
from bminf_lite.cuda.kernels.attention.prefill import (
    AttentionMask,
    AttentionTileConfig,
    PrefillAttention,
    tile_config_for,
)
from bminf_lite.cuda.runtime.driver import Device

MOST_SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB of shared memory a block, from the CUDA programming guide's table of compute capabilities."""


def tile_configs(capability: tuple[int, int], depths: Sequence[int]) -> set[AttentionTileConfig]:
    """Of plain causal attention over heads of ``depths``, and of other kinds over heads of 64 and 128."""
    others = [
        (64, True, AttentionMask.CAUSAL, True),
        (64, False, AttentionMask.CROSS),
        (64, True, AttentionMask.BIDIRECTIONAL, True),
        (128, True, AttentionMask.BIDIRECTIONAL, True),
    ]
    chosen = [(depth, small) for depth in depths for small in (False, True)]
    return {tile_config_for(capability, *kind) for kind in [*chosen, *others]}


@pytest.mark.parametrize("capability", MOST_SHARED)
def test_shared_memory_fits(capability: tuple[int, int]) -> None:
    for tile_config in tile_configs(capability, range(16, MAX_HEAD_DIM + 1, 16)):
        assert tile_config.shared <= MOST_SHARED[capability] << 10, tile_config


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

    @property
    def depth(self) -> int:
        return -(-self.head_dim // 16) * 16

    @property
    def capacity(self) -> int:
        return max(n + p for n, p in zip(self.new, self.context_lens, strict=True)) + 5


class Problem:
    """A case's arrays on the host. The cache is NaN where no token is, and the output is NaN before the launch."""

    def __init__(self, case: Case, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case, depth, dim = case, case.depth, case.head_dim
        tokens, count = sum(case.new), len(case.new)
        self.cu_seqlens = np.concatenate([[0], np.cumsum(case.new)]).astype(np.int32)
        self.context_lens = np.array(case.context_lens, np.int32)
        self.slots = rng.permutation(count + 2)[:count].astype(np.int32)
        self.q = np.zeros((tokens, case.heads, depth), np.float16)
        self.q[..., :dim] = rng.standard_normal((tokens, case.heads, dim)) * case.sharpness
        shape = (count + 2, case.kv_heads, case.capacity, depth)
        self.keys, self.values = np.full(shape, np.nan, np.float16), np.full(shape, np.nan, np.float16)
        for b in range(count):
            total = case.new[b] + case.context_lens[b]
            for cache in (self.keys, self.values):
                cache[self.slots[b], :, :total] = 0
                cache[self.slots[b], :, :total, :dim] = rng.standard_normal((case.kv_heads, total, dim))
        self.scale = float(np.float32(dim**-0.5))
        self.codes: tuple[np.ndarray, ...] | None = None

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
        for b in range(len(case.new)):
            q = self.q[self.cu_seqlens[b] : self.cu_seqlens[b + 1]]
            total = case.new[b] + case.context_lens[b]
            keys, values = (c[self.slots[b], :, :total].astype(np.float32) for c in (self.keys, self.values))
            rest = (self.scale, case.context_lens[b], case.window)
            outputs.append(attend(q, keys, values, *rest)[..., : case.head_dim])
            # A weight, at most 1, is rounded to fp16: by 2^-11 of itself, or by 2^-25 where it is subnormal, for each
            # of the keys. Their sum is at least 1. Rounding the output adds 2^-11 of it, and it is at most the average
            # magnitude of the values. A tenth more covers what fp32 sums and exp2 add.
            magnitude = attend(q, keys, np.abs(values), *rest)[..., : case.head_dim]
            bounds.append(1.1 * 2**-10 * magnitude + total * 2**-25 * np.abs(values).max())
        return np.concatenate(outputs), np.concatenate(bounds)

    def compute(self, device: Device) -> np.ndarray:
        """What the kernel writes, ``[T, heads, head_dim]``; checks that it writes nothing else."""
        import cupy as cp

        case, tokens = self.case, sum(self.case.new)
        width = case.heads * case.head_dim
        q_width, pitch = case.heads * case.depth, -(-width // 16) * 16
        q = cp.full((tokens, q_width + 16), cp.nan, cp.float16)
        q[:, :q_width] = cp.asarray(self.q.reshape(tokens, -1))
        out = cp.full((tokens, pitch), cp.nan, cp.float16)
        cu_seqlens, context_lens, slots = map(cp.asarray, (self.cu_seqlens, self.context_lens, self.slots))
        keys, values, *scales = map(cp.asarray, self.codes or (self.keys, self.values))
        key_scales, value_scales = (s.data.ptr for s in scales) if scales else (0, 0)
        PrefillAttention(device).launch(
            q.data.ptr, q_width + 16, keys.data.ptr, values.data.ptr, out.data.ptr, pitch,
            cu_seqlens.data.ptr, context_lens.data.ptr, slots.data.ptr,
            heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, capacity=case.capacity,
            scale=self.scale, window=case.window, tokens=tokens, batch_size=len(case.new),
            key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip
        device.synchronize()
        result = cp.asnumpy(out)
        assert np.isnan(result[:, width:]).all()
        return result[:, :width].reshape(tokens, case.heads, case.head_dim).astype(np.float32)


def check(case: Case, device: Device, seed: int = 0) -> None:
    problem = Problem(case, seed)
    got = problem.compute(device)
    want, bound = problem.expected()
    excess = np.abs(got - want) - bound
    assert (excess <= 0).all(), f"{case}: {(~(excess <= 0)).mean():.2%} of the output is wrong, by {np.nanmax(excess)}"


@pytest.fixture(params=["chosen", "64 rows", "128 rows"])
def gpu(request: pytest.FixtureRequest, cuda_device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The GPU, with the tile_config that it would choose or with one for any GPU, of small or large blocks."""
    if request.param != "chosen":
        capability, small = min((8, 0), cuda_device.compute_capability), request.param == "64 rows"
        monkeypatch.setattr(
            attention, "tile_config_for", lambda _, depth, *__: tile_config_for(capability, depth, small)
        )
    return cuda_device


RAGGED = {"new": (1, 70, 300, 0, 2, 64, 129), "context_lens": (40, 0, 17, 9, 255, 64, 3)}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 12, 16, 24, 31, 48, 64, 80, 96, 128, 160, 192, 256])
def test_head_dims(head_dim: int, gpu: Device) -> None:
    check(Case(**RAGGED, head_dim=head_dim), gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 12, 16, 48, 64, 80, 96, 128, 160, 256])
def test_an_int8_cache_gives_exactly_what_its_values_in_fp16_give(head_dim: int, gpu: Device) -> None:
    problem = Problem(Case(**RAGGED, head_dim=head_dim), 0)
    problem.quantize(np.random.default_rng(1))
    found = problem.compute(gpu)
    problem.codes = None
    np.testing.assert_array_equal(found, problem.compute(gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), *repeats((4, 4), (6, 2), (8, 1), (71, 1))])
def test_grouped_heads(heads: int, kv_heads: int, head_dim: int, gpu: Device) -> None:
    check(Case(**RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim), gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [48, 128])
@pytest.mark.parametrize("window", [1, 65, *repeats(2, 63, 64, 200, 100_000)])
def test_windows(window: int, head_dim: int, gpu: Device) -> None:
    check(Case(**RAGGED, window=window, head_dim=head_dim), gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1, *repeats(*range(2, 12))])
def test_random_steps(seed: int, gpu: Device) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    new = tuple(int(n) for n in rng.integers(1, 301, count))
    context_lens = tuple(int(p) for p in rng.integers(0, 301, count) * rng.integers(0, 2, count))
    kv_heads = int(rng.integers(1, 4))
    window = int(rng.integers(1, 400)) if rng.integers(2) else None
    head_dim = int(rng.choice([16, 64, 80, 128]))
    case = Case(new, context_lens, kv_heads * int(rng.integers(1, 5)), kv_heads, head_dim, window, sharpness=8.0)
    check(case, gpu, seed)


@pytest.mark.gpu
@pytest.mark.repeats
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_long_prompt(head_dim: int, gpu: Device) -> None:
    check(Case((2048,), (0,), head_dim=head_dim), gpu)
    check(Case((2048, 5), (100, 0), head_dim=head_dim, window=700), gpu)


@pytest.mark.gpu
def test_a_nan_stays_in_its_sequence_and_its_heads(gpu: Device) -> None:
    problem = Problem(Case((80, 90), (0, 30), head_dim=128), 0)
    problem.keys[problem.slots[1], 1, 100, 7] = np.nan
    bad = np.isnan(problem.compute(gpu)).any(axis=-1)
    want = np.zeros_like(bad)
    want[80 + 100 - 30 :, 2:] = True
    assert (bad == want).all()
