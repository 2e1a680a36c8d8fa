"""Attention by kernels; :mod:`bminf_lite.backend.operations.attention` defines it."""

from __future__ import annotations

from dataclasses import replace

import cupy as cp
import numpy as np

from ....cuda.kernels.arrays import HEAD_PAD, PAD, round_up
from ....cuda.kernels.attention.heads import head_pitch_of
from ....cuda.kernels.constants import AttentionMask
from ...cache_values import LatentCache, LayerCache
from ...operations.attention import AttentionOperations
from ...values import Array, AttentionSpec, ForwardBatch, LatentSpec
from ..attention import AttentionLaunches
from ..latent import LatentLaunches, LatentMatrices
from .step import CudaStepOperations


class CudaAttentionOperations(CudaStepOperations, AttentionOperations):
    """Attention by the launches of :mod:`..attention` and :mod:`..latent`."""

    def __init__(self, device: int = 0, memory_limit: int | str | None = None):
        super().__init__(device, memory_limit)
        self.launches = AttentionLaunches(self.arrays, self.kernels, self.materializer, self.scratch, self.arena.limit)
        self.latents = LatentLaunches(
            self.arrays, self.kernels, self.materializer, self.scratch, self.launches.max_record_bytes
        )

    # No reference to an input outlives its last reader here, so that its memory is free for what comes next.

    def attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        if spec.output_gate:
            gate, heads = self._gate_and_heads(qkv, spec)
            decodes, prompts = batch.parts
            if prompts is None and decodes is not None and self.launches.gates_outputs(spec, decodes):
                out = self.arrays.rows(gate.shape[0], gate.shape[1], np.float16)
                plain, count = replace(spec, output_gate=False), decodes.batch_size
                table = decodes.block_tables[cache.group]
                self.launches.decode(heads[:count], plain, cache, decodes, table, out[:count], gate=gate)
                return out
            out = self.attention(heads, replace(spec, output_gate=False), cache, batch)
            self.kernels.pointwise.gate_rows(self.kernels.step, out, gate, spec)
            return out
        out = self.arrays.rows(qkv.shape[0], spec.heads * spec.head_dim, np.float16)
        decodes, prompts = batch.parts
        if decodes is not None:
            qkv, count = self.materializer.to_half(qkv), decodes.batch_size
            table = decodes.block_tables[cache.group]
            self.launches.decode(qkv[:count], spec, cache, decodes, table, out[:count])
        if prompts is not None:
            table = prompts.block_tables[cache.group]
            q = self.launches.prepared_heads(qkv, spec, cache, prompts, table)
            self.launches.prefill(q, spec, cache, prompts, table, prompts.max_context_len, out)
        return out

    def _gate_and_heads(self, qkv: Array, spec: AttentionSpec) -> tuple[cp.ndarray, cp.ndarray]:
        """The gates of the outputs, in rows at any pitch, and the heads."""
        rows, width = self.materializer.to_half(qkv), spec.gate_features
        return rows[:, :width], self.arrays.aligned(rows[:, width:])

    def last_token_attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The kernel for one token per sequence computes it, with the bits that several tokens get."""
        if spec.output_gate:
            gate, heads = self._gate_and_heads(qkv, spec)
            out = self.last_token_attention(heads, replace(spec, output_gate=False), cache, batch)
            self.kernels.pointwise.gate_rows(self.kernels.step, out, self._last_rows(gate, batch), spec)
            return out
        table, features = batch.block_tables[cache.group], spec.heads * spec.head_dim
        qkv = self.materializer.to_half(qkv)
        _, prompts = batch.parts
        if prompts is not None:
            self.launches.store_heads(qkv, spec, cache, prompts, prompts.block_tables[cache.group])
        out, decoded = self.arrays.rows(batch.batch_size, features, np.float16), self._last_rows(qkv, batch)
        last = replace(batch, context_lens=batch.last_positions, has_drafts=False)
        self.launches.decode(decoded, spec, cache, last, table, out)
        self._go_on_with_last_tokens(batch)
        return out

    def shared_attention(self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        out = self.arrays.rows(q.shape[0], spec.heads * spec.head_dim, np.float16)
        decodes, prompts = batch.parts
        if decodes is not None:
            rows, count = self.materializer.to_half(q), decodes.batch_size
            table = decodes.block_tables[cache.group]
            self.launches.decode(rows[:count], spec, cache, decodes, table, out[:count], is_shared=True)
        if prompts is not None:
            table = prompts.block_tables[cache.group]
            heads = self.launches.prepared_heads(q, replace(spec, kv_heads=0), cache, prompts, table)
            self.launches.prefill(heads, spec, cache, prompts, table, prompts.max_context_len, out)
        return out

    def last_token_shared_attention(
        self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch
    ) -> Array:
        table, rows = batch.block_tables[cache.group], self._last_rows(self.materializer.to_half(q), batch)
        out = self.arrays.rows(batch.batch_size, spec.heads * spec.head_dim, np.float16)
        last = replace(batch, context_lens=batch.last_positions, has_drafts=False)
        self.launches.decode(rows, spec, cache, last, table, out, is_shared=True)
        self._go_on_with_last_tokens(batch)
        return out

    def latent_attention(
        self, q: Array, kv: Array, spec: LatentSpec, expand: LatentMatrices, cache: LatentCache, batch: ForwardBatch
    ) -> Array:
        return self.latents.attention(q, kv, spec, expand, cache, batch)

    def encoder_attention(self, qkv: Array, spec: AttentionSpec, batch: ForwardBatch) -> Array:
        out = self.arrays.rows(qkv.shape[0], spec.heads * spec.head_dim, np.float16)
        q, packed = self._heads_of_step(qkv, spec, batch)
        self.launches.prefill(q, spec, packed, batch, None, batch.max_query_len, out, AttentionMask.BIDIRECTIONAL)
        return out

    def _heads_of_step(self, qkv: Array, spec: AttentionSpec, batch: ForwardBatch) -> tuple[cp.ndarray, LayerCache]:
        """Queries, keys and values ``[T, heads, head_pitch]``: in ``qkv`` itself, if nothing is to be done to them.

        There the rows of ``qkv`` are padded to whole heads.
        """
        tokens, pitch = qkv.shape[0], round_up(spec.head_dim, HEAD_PAD)
        is_plain = spec.rope is None and spec.q_norm is None and spec.k_norm is None
        is_ready = is_plain and pitch == spec.head_dim and round_up(qkv.shape[1], PAD) % pitch == 0
        if not is_ready:
            keys, values = (self.arrays.empty((tokens, spec.kv_heads, pitch), np.float16) for _ in range(2))
            packed = LayerCache(keys, values)
            return self.launches.prepared_heads(qkv, spec, packed, batch, None), packed
        heads = self.materializer.to_half(qkv).reshape(tokens, -1, pitch)
        first, behind = spec.heads, spec.heads + spec.kv_heads
        return heads[:, :first], LayerCache(heads[:, first:behind], heads[:, behind:])

    def store_source(self, kv: Array, spec: AttentionSpec, source: LayerCache, batch: ForwardBatch) -> None:
        self.launches.store_heads(kv, replace(spec, heads=0), source, batch, batch.source_tables, is_source=True)

    def cross_attention(self, q: Array, spec: AttentionSpec, source: LayerCache, batch: ForwardBatch) -> Array:
        out = self.arrays.rows(q.shape[0], spec.heads * spec.head_dim, np.float16)
        spec, table, lengths = replace(spec, bias=None), batch.source_tables, batch.source_lens
        if batch.is_decode:
            self.launches.decode(self.materializer.to_half(q), spec, source, batch, table, out, lengths)
            return out
        heads = self.materializer.to_half(q).reshape(-1, spec.heads, spec.head_dim)
        if spec.head_dim % HEAD_PAD:
            padded = self.arrays.zeros((*heads.shape[:2], head_pitch_of(source)), np.float16)
            with self.arrays.current():
                padded[..., : spec.head_dim] = heads
            heads = padded
        longest = batch.max_source_len
        self.launches.prefill(heads, spec, source, batch, table, longest, out, AttentionMask.CROSS, lengths)
        return out
