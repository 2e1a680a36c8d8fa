"""Attention of a step's tokens to a cache, to latent rows, to their own sequence, and to an encoded source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..attention import attend, cached
from ..cache_values import LatentCache, LayerCache
from ..functions import normalise, rotate, silently, softplus
from ..latent import by_token_and_head, cached_rows, latent_queries, latent_rows, store_rows
from ..quantization import quantize_heads
from ..rotation import rotated_heads
from ..routing import sigmoid
from ..values import BLOCK_SIZE, LATENT_SEGMENT, Array, AttentionSpec, ForwardBatch, LatentSpec, Norm
from .step import StepOperations, positions_of, sequences

GATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"sigmoid": sigmoid, "softplus": softplus}
"""The functions of gates of attention's output, by their names in :class:`..values.AttentionSpec`."""


class AttentionOperations(StepOperations):
    """Attention as the layers call it, whose order of sums is that of :mod:`..attention`."""

    @silently
    def attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """Causal self-attention of a step's tokens over the cache, to which their keys and values are added.

        ``qkv`` is ``[T, spec.qkv_features]``: query, key and value heads side by side, and before them the output's
        gate if there is one. Query and key heads are normalised if the ``spec`` has norms, rotated to their position
        (in the other order with ``norm_after_rope``), transformed by :func:`..rotation.rotated_heads` if the cache is
        int8, and rounded. Keys and values are stored in the cache. Then each query attends to its own sequence, with
        scores and softmax in fp32. The result ``[T, heads * head_dim]`` is rounded; if there is a gate it is multiplied
        by the ``gate_function`` of that in fp32, and rounded again.
        """
        tokens = qkv.shape[0]
        gate, qkv = qkv[:, : spec.gate_features], qkv[:, spec.gate_features :]
        q, k, v = self._prepared_heads(qkv, spec, positions_of(batch), cache.key_scales is not None)
        out = np.zeros((tokens, spec.heads, spec.head_dim), np.float32)
        table = batch.block_tables[cache.group]
        for b, rows in sequences(batch):
            context_len = int(batch.context_lens[b])
            self._store(cache, table[b], context_len, k[rows], v[rows])
            keys, values = cached(cache, table[b], context_len + rows.stop - rows.start, self.activation_dtype)
            out[rows] = self._attend(q[rows], keys, values, spec, context_len, spec.window)
        found = self._round(out.reshape(tokens, -1))
        if not spec.output_gate:
            return found
        factors = GATES[spec.gate_function](gate.astype(np.float32))
        return self._round(found * (np.repeat(factors, spec.head_dim, axis=1) if spec.gate_by_head else factors))

    @silently
    def shared_attention(self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """:meth:`attention` whose keys and values another layer added to the cache in this step: nothing is stored.

        ``q`` is ``[T, heads * head_dim]``. The layer has no gate of the output.
        """
        spec = spec.for_cache(cache.key_scales is not None)
        (heads,) = split_heads(q, spec, spec.heads)
        heads = normed_and_rotated(heads, spec.q_norm, spec, positions_of(batch))
        heads = self._round(heads if cache.key_scales is None else rotated_heads(heads))
        out, table = np.zeros(heads.shape, np.float32), batch.block_tables[cache.group]
        for b, rows in sequences(batch):
            context_len = int(batch.context_lens[b])
            keys, values = cached(cache, table[b], context_len + rows.stop - rows.start, self.activation_dtype)
            out[rows] = self._attend(heads[rows], keys, values, spec, context_len, spec.window)
        return self._round(out.reshape(q.shape))

    def last_token_attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The rows of :meth:`attention` of each sequence's last token, ``[B, heads * head_dim]``.

        ``batch`` has ``last_positions``. The keys and values of all tokens are added to the cache.
        """
        assert batch.last_positions is not None
        return self.last_tokens(self.attention(qkv, spec, cache, batch), batch)

    def last_token_shared_attention(
        self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch
    ) -> Array:
        """The rows of :meth:`shared_attention` of each sequence's last token; ``batch`` has ``last_positions``."""
        assert batch.last_positions is not None
        return self.last_tokens(self.shared_attention(q, spec, cache, batch), batch)

    @silently
    def latent_attention(
        self, q: Array, kv: Array, spec: LatentSpec, expand: Any, cache: LatentCache, batch: ForwardBatch
    ) -> Array:
        """Causal self-attention of a step's tokens over latent rows, to which their own are added; see :mod:`..latent`.

        ``q`` is ``[T, spec.query_features]``, and ``kv`` fp32 ``[T, row_dim]`` a latent and a key side by side.
        ``expand`` is a :meth:`latent_weight`. The latent is normalised, the key and the queries' last ``rope_dim``
        elements are rotated to their position, and rows and absorbed queries are rounded. Scores and softmax are fp32,
        and so is the mean of the latents, which is rounded before the product with the values' matrix. Returns ``[T,
        heads * value_dim]``.
        """
        positions, table = positions_of(batch), batch.block_tables[cache.group]
        queries = self._round(latent_queries(q, expand.keys, spec, positions))
        own = self._round(latent_rows(kv, spec, positions))
        means = np.zeros((len(q), spec.heads, spec.rank), np.float32)
        for b, rows in sequences(batch):
            first = int(batch.context_lens[b])
            store_rows(cache, table[b], first, own[rows], spec.rank)
            keys = cached_rows(cache, table[b], first + rows.stop - rows.start, spec.rank, self.activation_dtype)[None]
            means[rows] = attend(
                queries[rows],
                keys,
                keys[..., : spec.rank],
                spec.scale,
                first,
                segment=LATENT_SEGMENT,
                weight_dtype=self.activation_dtype,
            )
        return self._round(by_token_and_head(self._round(means), expand.values).reshape(len(q), -1))

    @silently
    def encoder_attention(self, qkv: Array, spec: AttentionSpec, batch: ForwardBatch) -> Array:
        """Self-attention in both directions: each token sees its whole sequence, all of which is in this step.

        ``qkv`` is ``[T, spec.qkv_features]``: query, key and value heads side by side, which are normalised and rotated
        as in :meth:`attention`. With a window a token sees those less than ``spec.window`` tokens away. Returns ``[T,
        heads * head_dim]``.
        """
        q, k, v = self._prepared_heads(qkv, spec, positions_of(batch))
        v, out = self._round(v), np.zeros((qkv.shape[0], spec.heads, spec.head_dim), np.float32)
        for _, rows in sequences(batch):
            keys, values = k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1)
            out[rows] = self._attend(q[rows], keys, values, spec, window=spec.window, causal=False)
        return self._round(out.reshape(qkv.shape[0], -1))

    def store_source(self, kv: Array, spec: AttentionSpec, source: LayerCache, batch: ForwardBatch) -> None:
        """Store the keys and values of whole sources in the blocks of ``batch.source_tables``.

        ``kv`` is ``[T, 2 * kv_heads * head_dim]``: key and value heads side by side.
        """
        k, v = split_heads(kv, spec, spec.kv_heads, spec.kv_heads)
        for b, rows in sequences(batch):
            self._store(source, batch.source_tables[b], 0, k[rows], v[rows])

    def cross_attention(self, q: Array, spec: AttentionSpec, source: LayerCache, batch: ForwardBatch) -> Array:
        """Attention of a step's tokens over their sequence's source.

        ``q`` is ``[T, heads * head_dim]``. The sources lie in the blocks of ``batch.source_tables`` and have
        ``batch.source_lens`` tokens. Every token sees the whole source; there are no positions and no bias. Returns
        ``[T, heads * head_dim]``.
        """
        (heads,) = split_heads(q, spec, spec.heads)
        out = np.zeros(heads.shape, np.float32)
        for b, rows in sequences(batch):
            keys, values = cached(source, batch.source_tables[b], int(batch.source_lens[b]), self.activation_dtype)
            out[rows] = self._attend(self._round(heads[rows]), keys, values, replace(spec, bias=None), causal=False)
        return self._round(out.reshape(q.shape))

    def _prepared_heads(
        self, qkv: Array, spec: AttentionSpec, positions: Array, int8: bool = False
    ) -> tuple[Array, Array, Array]:
        """Query and key heads of ``qkv``, normalised, rotated and rounded, and value heads as they are.

        Those for an ``int8`` cache are transformed before they are rounded.
        """
        spec = spec.for_cache(int8)
        q, k, v = split_heads(qkv, spec, spec.heads, spec.kv_heads, spec.kv_heads)
        q, k = normed_and_rotated(q, spec.q_norm, spec, positions), normed_and_rotated(k, spec.k_norm, spec, positions)
        if int8:
            q, k = rotated_heads(q), rotated_heads(k)
        return self._round(q), self._round(k), normalise(v, spec.v_norm) if spec.v_norm else v

    def _store(self, cache: LayerCache, table: np.ndarray, first: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store the keys and values ``[n, kv_heads, head_dim]`` of a sequence's tokens from ``first`` on."""
        position = np.arange(first, first + len(keys))
        block, place = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        keys, values = self._round(keys), self._round(values)
        if cache.key_scales is not None:
            (keys, key_scales), (values, value_scales) = quantize_heads(keys), quantize_heads(values)
            cache.key_scales[block, :, place], cache.value_scales[block, :, place] = key_scales, value_scales
        cache.keys[block, :, place], cache.values[block, :, place] = keys, values

    def _attend(
        self,
        q: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        spec: AttentionSpec,
        context_len: int = 0,
        window: int | None = None,
        causal: bool = True,
    ) -> np.ndarray:
        """:func:`..attention.attend` with weights in the activation type."""
        return attend(
            q, keys, values, spec.scale, context_len, window, spec.bias, causal, spec.softcap, spec.sinks,
            weight_dtype=self.activation_dtype,
        )  # fmt: skip


def normed_and_rotated(heads: np.ndarray, norm: Norm | None, spec: AttentionSpec, positions: Array) -> np.ndarray:
    """Query or key heads fp32 ``[T, n, head_dim]``, normalised by ``norm`` if that is given, and rotated."""
    if norm is None:
        return rotate(heads, positions, spec.rope)
    if spec.norm_after_rope:
        return normalise(rotate(heads, positions, spec.rope), norm)
    return rotate(normalise(heads, norm), positions, spec.rope)


def split_heads(x: np.ndarray, spec: AttentionSpec, *counts: int) -> list[np.ndarray]:
    """``[T, sum(counts) * head_dim]`` split into parts of ``counts`` heads, each fp32 ``[T, count, head_dim]``."""
    heads = x.astype(np.float32).reshape(x.shape[0], sum(counts), spec.head_dim)
    return np.split(heads, np.cumsum(counts)[:-1], axis=1)
