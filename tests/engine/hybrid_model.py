"""A model for tests with layers of attention and layers with a chunked recurrence, over NumPy.

The recurrence is linear attention with a decay. With ``q``, ``k`` and ``v`` of a token,
``S = decay * S + outer(k, v)``, and the token's output is ``q @ S``. A token is computed from ``S`` at its chunk's
start and the ``k`` and ``v`` of the chunk, as gated linear attention does on a GPU
(https://arxiv.org/abs/2312.06635). A short convolution weighs the last inputs of each channel, and has no state but
them. Both keep the contract of :class:`bminf_lite.layers.cache.State`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from model_kit import RowwiseBackend

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import LayerCache, StateArray, StateCache
from bminf_lite.backend.operations.step import sequences
from bminf_lite.backend.values import Array, AttentionSpec, ForwardBatch
from bminf_lite.engine.config import EngineConfig
from bminf_lite.engine.core import Engine
from bminf_lite.engine.model_runner import ModelRunner
from bminf_lite.layers.cache import CacheLayout, KeyValues, KVCache, Layout, State

VOCAB, WIDTH, SIZE, CHUNK, TAPS = 53, 24, 6, 16, 3
DECAY = np.float32(0.9)
WINDOW = 40


def recurrence_state(size: int = SIZE) -> State:
    """The state of a layer of ``size * size`` numbers, with a ring of a chunk's keys and values."""
    return State(
        (
            StateArray("state", (size, size)),
            StateArray("inputs", (2 * size,), "float32", ring=CHUNK),
            StateArray("end", (), "int32"),
        )
    )


LAYOUTS: dict[str, Layout] = {
    "a": KeyValues(1, 8),
    "w": KeyValues(1, 8, window=WINDOW),
    "r": recurrence_state(),
    "c": State((StateArray("inputs", (WIDTH,), "float32", ring=TAPS),)),
}


def random_weight(ops: Backend, rng: np.random.Generator, rows: int, columns: int) -> Any:
    return ops.weight([rng.standard_normal((rows, columns)).astype(np.float32) / np.sqrt(columns).astype(np.float32)])


@dataclass(frozen=True)
class AttentionLayer:
    ops: Backend
    spec: AttentionSpec
    qkv: Any
    out: Any

    @classmethod
    def make(cls, ops: Backend, rng: np.random.Generator, window: int | None) -> AttentionLayer:
        spec = AttentionSpec(heads=2, kv_heads=1, head_dim=8, scale=0.5, window=window)
        return cls(ops, spec, random_weight(ops, rng, spec.qkv_features, WIDTH), random_weight(ops, rng, WIDTH, 16))

    def __call__(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        return self.ops.linear(self.ops.attention(self.ops.linear(x, self.qkv), self.spec, cache, batch), self.out)


@dataclass(frozen=True)
class Recurrence:
    ops: Backend
    qkv: Any
    out: Any

    @classmethod
    def make(cls, ops: Backend, rng: np.random.Generator) -> Recurrence:
        return cls(ops, random_weight(ops, rng, 3 * SIZE, WIDTH), random_weight(ops, rng, WIDTH, SIZE))

    def __call__(self, x: Array, cache: StateCache, batch: ForwardBatch) -> Array:
        qkv, slots = self.ops.linear(x, self.qkv), batch.block_tables[cache.group][:, 0]
        mixed = np.zeros((len(qkv), SIZE), np.float32)
        for b, rows in sequences(batch):
            if slots[b]:  # not padding
                is_draft = batch.has_drafts and b > 0 and slots[b] == slots[b - 1]
                mixed[rows] = self._mix(qkv[rows], cache, int(slots[b]), int(batch.context_lens[b]), is_draft)
        return self.ops.linear(mixed, self.out)

    def _mix(self, qkv: np.ndarray, cache: StateCache, slot: int, start: int, is_draft: bool) -> np.ndarray:
        """The outputs of a sequence's tokens from ``start`` on; drafts leave nothing but their inputs."""
        ring, end = cache["inputs"][slot], 0
        state = np.zeros((SIZE, SIZE), np.float32)
        if start:
            state, end = cache["state"][slot].copy(), int(cache["end"][slot])
            assert end % CHUNK == 0 and start - len(ring) <= end <= start
        inputs = {p: ring[p % len(ring)].copy() for p in range(end, start)}
        mixed = np.empty((len(qkv), SIZE), np.float32)
        for i, position in enumerate(range(start, start + len(qkv))):
            inputs[position] = qkv[i, SIZE:]
            while end + CHUNK <= position:
                state, end = advanced(state, [inputs.pop(p) for p in range(end, end + CHUNK)]), end + CHUNK
            chunk = [inputs[p] for p in range(end, position + 1)]
            mixed[i] = (qkv[i, :SIZE, None] * advanced(state, chunk)).sum(0)
        for i, position in enumerate(range(start, start + len(qkv))):
            ring[position % len(ring)] = qkv[i, SIZE:]
        if not is_draft:
            cache["state"][slot], cache["end"][slot] = state, end
        return mixed


@dataclass(frozen=True)
class ShortConvolution:
    """``y[t] = sum(kernel[j] * x[t - j])`` of each channel; inputs before the first token are 0."""

    ops: Backend
    project: Any
    kernel: np.ndarray

    @classmethod
    def make(cls, ops: Backend, rng: np.random.Generator) -> ShortConvolution:
        return cls(ops, random_weight(ops, rng, WIDTH, WIDTH), rng.standard_normal((TAPS, WIDTH)).astype(np.float32))

    def __call__(self, x: Array, cache: StateCache, batch: ForwardBatch) -> Array:
        inputs, slots = self.ops.linear(x, self.project), batch.block_tables[cache.group][:, 0]
        out = np.zeros_like(inputs)
        for b, rows in sequences(batch):
            if slots[b]:  # not padding
                ring, start = cache["inputs"][slots[b]], int(batch.context_lens[b])
                for position, row in enumerate(range(rows.start, rows.stop), start):
                    ring[position % len(ring)] = inputs[row]
                    for j in range(min(TAPS, position + 1)):
                        out[row] += self.kernel[j] * ring[(position - j) % len(ring)]
        return out


def advanced(state: np.ndarray, inputs: Iterable[np.ndarray]) -> np.ndarray:
    """The state behind more tokens."""
    for token in inputs:
        state = DECAY * state + token[:SIZE, None] * token[SIZE:]
    return state


class Hybrid:
    """Layers named by ``kinds``: ``a`` attention, ``w`` with a window, ``r`` a recurrence, ``c`` a convolution."""

    def __init__(self, kinds: str = "arwc", ops: Backend | None = None):
        self.ops = ops or RowwiseBackend()
        rng = np.random.default_rng(5)
        self.embedding = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
        makers = {
            "a": lambda: AttentionLayer.make(self.ops, rng, None),
            "w": lambda: AttentionLayer.make(self.ops, rng, WINDOW),
            "r": lambda: Recurrence.make(self.ops, rng),
            "c": lambda: ShortConvolution.make(self.ops, rng),
        }
        self.layers: list[Any] = [makers[kind]() for kind in kinds]
        self.head = random_weight(self.ops, rng, VOCAB, WIDTH)
        self.cache_layout = CacheLayout(tuple(LAYOUTS[kind] for kind in kinds))

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        with self.ops.step(batch):
            residual = self.embedding[batch.tokens]
            for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
                residual = np.tanh(residual + layer(residual, layer_cache, batch))
            if not all_logits:
                residual = self.ops.last_tokens(residual, batch)
            return 4 * self.ops.linear(residual, self.head)


class HybridModel:
    """An engine over a :class:`Hybrid`, used as a model is by ``model_kit.run``."""

    def __init__(
        self, kinds: str = "arwc", slots: int = 30, blocks: int = 80, ops: Backend | None = None, **limits: Any
    ):
        self.network = Hybrid(kinds, ops)
        layout = self.network.cache_layout
        counts = tuple(slots if kept.per_sequence else blocks for kept in layout.groups)
        config = EngineConfig(512, VOCAB, layout, counts, max_num_seqs=8)
        self.config = replace(config, **limits)
        self._engine = Engine(self.config, lambda blocks: ModelRunner([self.network], self.config, blocks))

    def __enter__(self) -> HybridModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
