"""Attention of one token reads the cache before its predecessor has ended: only what the step found there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from random_values import forbid_reading, make_batch

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import LayerCache
from bminf_lite.backend.values import AttentionSpec, ForwardBatch, sequential_tables
from bminf_lite.cuda.kernels.launcher import StepContext
from bminf_lite.cuda.runtime.kernel import Kernel

SPEC = AttentionSpec(4, 2, 16, 0.25)
TABLE = sequential_tables(1, 16)


class Chain:
    """Operations on a GPU, and for each launch whether it may start before its predecessor has ended."""

    def __init__(self, backend: Backend, monkeypatch: pytest.MonkeyPatch):
        self.backend, self.dependent = backend, []
        launch = Kernel.__call__

        def recording(kernel, grid, block, args, shared=0, stream=0, dependent=False, cluster=None, bytes_moved=0):
            self.dependent.append(dependent)
            launch(kernel, grid, block, args, shared, stream, dependent, cluster, bytes_moved)

        monkeypatch.setattr(Kernel, "__call__", recording)
        self.table = backend.table(np.zeros((3, 32), np.float16))
        self.qkv = backend.array(np.ones((1, SPEC.qkv_features), np.float16))

    def cache(self) -> LayerCache:
        cache = self.backend.layer_cache(2, SPEC.kv_heads, SPEC.head_dim)
        forbid_reading(self.backend, cache)
        return cache

    def step(self, context_len: int) -> ForwardBatch:
        return make_batch(self.backend, [1], [context_len], TABLE)

    def begins(self) -> None:
        """A new step, whose first kernel is launched."""
        self.backend.kernels.step = StepContext()
        self.backend.embed(self.backend.array(np.zeros(1, np.int32)), self.table)

    def attends_early(self, cache: LayerCache, context_len: int) -> bool:
        self.backend.attention(self.qkv, SPEC, cache, self.step(context_len))
        return self.dependent[-1]


@pytest.fixture
def chain(cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    with cuda_backend.kernels.in_step():  # which restores the context afterwards
        cuda_backend.kernels.step = StepContext(in_step=False)
        yield Chain(cuda_backend, monkeypatch)


@pytest.mark.gpu
def test_once_for_each_cache_of_a_step(chain):
    first, second = chain.cache(), chain.cache()
    for context_len in range(2):
        chain.begins()
        assert chain.attends_early(first, 2 * context_len)
        assert chain.attends_early(second, 2 * context_len)
        assert not chain.attends_early(first, 2 * context_len + 1)


@pytest.mark.gpu
def test_not_outside_of_a_step(chain):
    cache = chain.cache()
    assert not chain.attends_early(cache, 0)
    chain.begins()
    chain.backend.kernels.step = StepContext(in_step=False)
    assert not chain.attends_early(cache, 1)


@pytest.mark.gpu
def test_not_behind_a_prefill_of_the_same_step(chain):
    cache = chain.cache()
    chain.begins()
    rows = chain.backend.array(np.ones((3, SPEC.qkv_features), np.float16))
    chain.backend.attention(rows, SPEC, cache, make_batch(chain.backend, [3], [0], TABLE))
    assert not chain.attends_early(cache, 3)


@pytest.mark.gpu
def test_drafts_are_stored_by_attention_itself(chain):
    """One kernel, which starts early, and gives what it gives behind one that stores keys and values first."""
    rows = chain.backend.array(np.random.default_rng(3).standard_normal((3, SPEC.qkv_features)).astype(np.float16))
    batch = make_batch(chain.backend, [1, 1, 1], [5, 6, 7], np.repeat(TABLE, 3, axis=0))
    offsets = chain.backend.array(np.arange(3, dtype=np.int32))
    found, caches = [], []
    for draft_offsets, launches in ((offsets, [True]), (None, [True, True])):
        cache = chain.backend.layer_cache(2, SPEC.kv_heads, SPEC.head_dim)
        for pool in (cache.keys, cache.values):
            chain.backend.assign(pool, np.ones(pool.shape, np.float16))
        chain.begins()
        chain.dependent.clear()
        drafts = replace(batch, has_drafts=True, draft_offsets=draft_offsets)
        found.append(chain.backend.host(chain.backend.attention(rows, SPEC, cache, drafts)))
        assert chain.dependent == launches
        caches.append([chain.backend.host(pool) for pool in (cache.keys, cache.values)])
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(*caches)
