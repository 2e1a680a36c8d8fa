"""Launches of attention: one token per sequence, several tokens, and the preparation of heads for several tokens.

The decode kernel normalises and rotates heads itself, and updates the cache. For several tokens a kernel does that
before the prefill kernel reads the cache.
"""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import HEAD_PAD, address, pitch_of, round_up
from ...cuda.kernels.attention.heads import scores_of
from ...cuda.kernels.attention.prefill import COUNTERS, MAX_RECORD_BYTES
from ...cuda.kernels.constants import AttentionMask
from ...errors import OutOfMemory
from ..cache_values import LayerCache
from ..rotation import pairs_of_rotation
from ..values import Array, AttentionSpec, ForwardBatch
from .arrays import Arrays, ZeroedScratch
from .deferred import DeferredMatmul, row_source
from .kernels import Kernels
from .layer_caches import reserved_blocks
from .materialize import Materializer

RECORD_SHARE = 256
"""The records of a launch take at most 1 / ``RECORD_SHARE`` of the memory that the backend may use."""


class AttentionLaunches:
    """The launches of which the operations on attention are made, with the scratch that each needs.

    ``memory`` is what the backend may use, in bytes.
    """

    def __init__(
        self, arrays: Arrays, kernels: Kernels, materializer: Materializer, scratch: ZeroedScratch, memory: int
    ):
        self.max_record_bytes = min(MAX_RECORD_BYTES, memory // RECORD_SHARE)
        self.arrays = arrays
        self.kernels = kernels
        self.materializer = materializer
        self.scratch = scratch

    def prefill(
        self, q: cp.ndarray, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch, table: cp.ndarray | None,
        max_context_len: int, out: cp.ndarray, mask: AttentionMask = AttentionMask.CAUSAL,
        lengths: cp.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Attention of the tokens of ``batch``; ``q`` is fp16 ``[T, heads, head_pitch]``, tokens at any pitch.

        ``cache`` is paged by ``table``, or without one has the step's, ``[T, kv_heads, head_pitch]``, tokens at any
        multiple of ``head_pitch``.
        """
        prefill, scores = self.kernels.attention_prefill, scores_of(spec)
        assert table is not None or pitch_of(cache.keys) % cache.keys.shape[2] == 0
        kind: dict[str, Any] = {
            "heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "tokens": len(batch.tokens),
            "batch_size": batch.batch_size, "max_query_len": batch.max_query_len, "max_context_len": max_context_len,
            "mask": mask,
        }  # fmt: skip
        int8 = cache.key_scales is not None

        def scratch_of(max_record_bytes: int) -> cp.ndarray | None:
            nbytes = prefill.scratch_bytes(**kind, scores=scores.kind, int8=int8, max_record_bytes=max_record_bytes)
            return self.arrays.empty((nbytes,), np.uint8) if nbytes else None

        try:
            scratch = scratch_of(self.max_record_bytes)
        except OutOfMemory:
            scratch = scratch_of(0)  # slower, and the same bits
        prefill.launch(
            q.data.ptr, pitch_of(q), cache.keys.data.ptr, cache.values.data.ptr, out.data.ptr, pitch_of(out),
            batch.cu_seqlens.data.ptr, batch.context_lens.data.ptr, address(table), **kind,
            table_pitch=0 if table is None else table.shape[1],
            num_blocks=pitch_of(cache.keys) // cache.keys.shape[2] if table is None else reserved_blocks(cache),
            scores=scores, window=spec.window, scratch=address(scratch),
            scratch_bytes=0 if scratch is None else scratch.nbytes,
            counters=self.scratch.zeros("attention counters", COUNTERS, np.int32).data.ptr,
            source_lens=address(lengths),
            key_scales=address(cache.key_scales), value_scales=address(cache.value_scales),
            stream=self.arrays.stream.ptr, dependent=True,
        )  # fmt: skip

    def gates_outputs(self, spec: AttentionSpec, batch: ForwardBatch) -> bool:
        """Whether :meth:`decode` multiplies the outputs of ``batch`` by their gates."""
        is_plain = spec.gate_function == "sigmoid" and not spec.gate_by_head
        decode = self.kernels.attention_decode
        return is_plain and decode.gates_outputs(spec, batch.batch_size, batch.max_context_len)

    def decode(
        self, x: cp.ndarray, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch, table: cp.ndarray,
        out: cp.ndarray, lengths: cp.ndarray | None = None, is_shared: bool = False, gate: cp.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Attention of one token per sequence over its cache, or over a source of ``lengths``.

        If the cache ``is_shared``, it has the token's key and value already, and ``x`` has queries alone. In a batch
        that has drafts, it has those of the drafts before a token too, as many as there are other rows at most.
        Otherwise tokens see those of the drafts before them: the kernel prepares these itself if it can, or another one
        stores all of them first. Outputs are multiplied by the sigmoid of a ``gate``, fp16 ``[B, heads * head_dim]``;
        see :meth:`gates_outputs`.
        """
        decode, count = self.kernels.attention_decode, batch.batch_size
        longest = batch.max_context_len if lengths is None else batch.max_source_len
        offsets, written = None, (count - 1) * batch.has_drafts
        if batch.has_drafts and lengths is None and not is_shared:
            if batch.draft_offsets is not None and decode.prepares_drafts(spec, cache, count, longest):
                offsets, written = batch.draft_offsets, 0
            else:
                self.store_heads(x, spec, cache, batch, table)
        spec = spec.for_cache(cache.key_scales is not None)
        records = self.arrays.empty((decode.record_elements(spec, count, longest),), np.float32)
        arrivals = self.scratch.zeros("arrival counts", decode.arrival_elements(spec, count), np.int32)
        decode.launch(
            self.kernels.step, x, spec, cache, batch.context_lens, table, records, arrivals, out, longest, lengths,
            is_shared, written, offsets, gate,
        )  # fmt: skip

    def prepared_heads(
        self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch, table: cp.ndarray | None
    ) -> cp.ndarray:
        """The query heads ``[T, heads, head_pitch]``, normalised and rotated; keys and values go into the cache.

        ``T`` are all tokens of the step, of which only those of ``batch`` are prepared.
        """
        q = self.arrays.empty((qkv.shape[0], spec.heads, round_up(spec.head_dim, HEAD_PAD)), np.float16)
        self._prepare_heads(qkv, spec, cache, batch, table, q)
        return q

    def store_heads(
        self,
        qkv: Array,
        spec: AttentionSpec,
        cache: LayerCache,
        batch: ForwardBatch,
        table: cp.ndarray,
        is_source: bool = False,
    ) -> None:
        """Keys, normalised and rotated, and values of the tokens of ``batch`` into the cache.

        Those of a source are not transformed for an int8 cache.
        """
        self._prepare_heads(qkv, spec, cache, batch, table, None, rotates=not is_source)

    def _prepare_heads(
        self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch, table: cp.ndarray | None,
        q: cp.ndarray | None, rotates: bool = True,
    ) -> None:  # fmt: skip
        heads = qkv if isinstance(qkv, DeferredMatmul) else self.materializer.to_half(qkv)
        rotated_pairs = pairs_of_rotation(spec.head_dim) if rotates and cache.key_scales is not None else 0
        self.kernels.prepare_heads.launch(
            self.kernels.step, row_source(heads), spec.for_cache(cache.key_scales is not None), cache,
            batch.cu_seqlens, batch.context_lens, table, q, len(batch.tokens), self.kernels.nbytes_moved(heads, q),
            rotated_pairs,
        )  # fmt: skip
