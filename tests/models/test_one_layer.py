"""One layer of each shape that the package knows, on the GPU: engines launch these kernels, at these sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checked import repeats
from fake_gpu.real_shapes import configs
from random_values import make_batch

from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import ForwardBatch, sequential_tables
from bminf_lite.bench.model import BenchModel, random_model
from bminf_lite.layers.cache import KVCache

VOCABULARY = 1000
COUNTS = [150, 17, 1]
"""Tokens of three prompts: together more rows than a GPU has multiprocessors, apart many, few and one."""
SOURCES = [40, 64, 5]
SHAPES = {name: config | {"vocab_size": VOCABULARY} for name, config in configs()}
COVERED = (
    "eva.json",
    "eva-2.json",
    "eva-2-base.json",
    "llama-3-70b.json",
    "llama-3-8b.json",
    "mistral-7b.json",
    "qwen2.5-7b.json",
    "qwen3-8b.json",
    "olmo-2-7b.json",
    "phi-3-mini.json",
    "ministral-3-8b.json",
    "command-r.json",
    "codegen-2b.json",
    "flan-t5-xl.json",
    "mt5-xl.json",
    "umt5-xl.json",
)
"""Shapes whose kernels the others launch too."""


class Sequences:
    """Prompts, each followed by one more token, of a model with one layer."""

    def __init__(self, bench_model: BenchModel, chosen: list[int]):
        self.bench_model, self.ops = bench_model, bench_model.ops
        limits, count = bench_model.engine_config, len(chosen)
        self.counts = [COUNTS[i] for i in chosen]
        self.source: dict[str, Any] = {}
        self.tokens = [random_tokens(i) for i in chosen]
        self.cache = KVCache.for_sequences(self.ops, limits.cache_layout, count, max(COUNTS) + 1)
        if limits.is_encoder_decoder:
            self._read([SOURCES[i] for i in chosen], chosen)

    def _read(self, lengths: list[int], chosen: list[int]) -> None:
        limits = self.bench_model.engine_config
        source = KVCache.for_sequences(self.ops, limits.cache_layout, len(lengths), max(lengths))
        table = sequential_tables(len(lengths), max(lengths))
        tokens = np.concatenate([random_tokens(100 + i)[:n] for i, n in zip(chosen, lengths, strict=True)])
        batch = make_batch(self.ops, lengths, [0] * len(lengths), tokens=tokens, source_tables=table)
        self.bench_model.network.encode_to_cache(batch, source)
        self.cache.source = source
        self.source = {"source_tables": table, "source_lens": lengths}

    def logits(self) -> np.ndarray:
        """Behind the prompts, and behind one more token: ``[2, sequences, vocabulary]``."""
        tables = self.cache.tables(len(self.counts), max(COUNTS) + 1)
        prompts = [t[:n] for t, n in zip(self.tokens, self.counts, strict=True)]
        last = [t[n : n + 1] for t, n in zip(self.tokens, self.counts, strict=True)]
        steps = (prompts, [0] * len(prompts), tables), (last, self.counts, tables)
        batches = [ForwardBatch.packed(self.ops.array, *step, **self.source) for step in steps]
        found = [self.ops.host(self.bench_model.network(batch, self.cache)).copy() for batch in batches]
        self.cache.close()
        return np.stack(found)


def random_tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, max(COUNTS) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*(n for n in SHAPES if n not in COVERED), *repeats(*COVERED)])
def test_sequences_together_are_like_each_alone(cuda_backend: Backend, name: str) -> None:
    config: dict[str, Any] = SHAPES[name]
    bench_model = random_model(name, config, cuda_backend)
    together = Sequences(bench_model, [0, 1, 2]).logits()
    assert np.isfinite(together).all()
    for i in range(3):
        alone = Sequences(bench_model, [i]).logits()[:, 0]
        # Attention rounds otherwise for one token than for many, and then some codes of the next product differ by one.
        error = np.linalg.norm(together[:, i] - alone, axis=-1) / np.linalg.norm(alone, axis=-1)
        assert (error < 0.02).all(), f"sequence {i}: {error}"
