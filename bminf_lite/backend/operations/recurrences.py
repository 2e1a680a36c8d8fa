"""Layers that keep a state of each sequence: short convolutions, gated DeltaNet, Kimi Delta Attention and Mamba 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import chunked_state, delta_net, mamba2
from ..cache_values import StateCache
from ..functions import normalise, silently, silu
from ..routing import sigmoid
from ..values import NULL_BLOCK, Array, DeltaNetSpec, ForwardBatch, Mamba2Spec, ShortConvolution
from .step import StepOperations, sequences


class RecurrenceOperations(StepOperations):
    """Recurrences of a step's tokens, each of which continues its sequence's state in the cache."""

    @silently
    def short_convolution(
        self, bcx: Array, convolution: ShortConvolution, cache: StateCache, batch: ForwardBatch
    ) -> Array:
        """``c * convolution(b * x)`` of a step's tokens: ``[T, 3 * channels]``, b, c and x, -> ``[T, channels]``.

        ``b * x`` is rounded to the activation type, and kept for later tokens in the ring ``inputs`` of the ``cache``,
        which has as many rows as the convolution has taps, and one more for each draft of a step. Inputs before the
        first token are 0. The sum is fp32.
        """
        b, c, x = np.split(bcx.astype(np.float32), 3, axis=1)
        inputs, ring = self._round(b * x), cache["inputs"]
        mixed = convolved(inputs, convolution, ring, batch.block_tables[cache.group][:, 0], batch)
        return self._round(c * mixed)

    def previous_rows(self, x: Array, previous: ShortConvolution, cache: StateCache, batch: ForwardBatch) -> Array:
        """The row of the token before each one of a step, 0 for a first token: ``[T, features]`` -> fp32, as many.

        Rows are rounded to the activation type, and kept for later tokens as the inputs of :meth:`short_convolution`.
        ``previous`` has the taps 0 and 1 for each feature, and no bias.
        """
        ones = np.ones((len(x), 2 * x.shape[1]), np.float32)
        bcx = np.concatenate([ones, x.astype(np.float32)], axis=1)
        return self.short_convolution(bcx, previous, cache, batch).astype(np.float32)

    @silently
    def gated_delta_net(
        self, qkvz: Array, gates: Array, spec: DeltaNetSpec, cache: StateCache, batch: ForwardBatch
    ) -> Array:
        """Gated DeltaNet of a step's tokens, as :mod:`..delta_net` defines it: -> ``[T, value_features]``.

        ``qkvz`` is ``[T, channels + value_features]``: queries, keys, values and the output's gate. ``gates`` is fp32
        ``[T, 2 * value_heads]``: what becomes the rates of learning, and then what becomes the decays. The ``cache``
        has the arrays of :func:`..chunked_state.state_arrays`.

        Queries, keys and values are convolved and activated by SiLU in fp32. A head's output is normalised, multiplied
        by SiLU of the gate, all in fp32, and rounded.
        """
        slots = batch.block_tables[cache.group][:, 0]
        mixed = silu(convolved(qkvz[:, : spec.channels], spec.convolution, cache["inputs"], slots, batch))
        inputs = delta_net.token_inputs(mixed, gates[:, : spec.value_heads], gates[:, spec.value_heads :], spec)
        out = in_chunks(delta_net.DeltaChunk, inputs, cache, batch)
        gate = silu(qkvz[:, spec.channels :].astype(np.float32).reshape(out.shape))
        return self._round((normalise(out, spec.norm) * gate).reshape(len(mixed), -1))

    @silently
    def kimi_delta(
        self,
        qkv: Array,
        rates: Array,
        decays: Array,
        gate: Array,
        spec: DeltaNetSpec,
        cache: StateCache,
        batch: ForwardBatch,
    ) -> Array:
        """Kimi Delta Attention of a step's tokens, as :mod:`..delta_net` defines it: -> ``[T, value_features]``.

        It is :meth:`gated_delta_net` with a ``spec`` that is ``per_channel``. ``qkv`` is ``[T, channels]``, ``rates``
        fp32 ``[T, value_heads]`` and ``decays`` fp32 ``[T, value_heads * key_dim]`` before their functions, and
        ``gate`` ``[T, value_features]`` becomes a sigmoid.
        """
        slots = batch.block_tables[cache.group][:, 0]
        mixed = silu(convolved(qkv, spec.convolution, cache["inputs"], slots, batch))
        out = in_chunks(delta_net.ChannelChunk, delta_net.token_inputs(mixed, rates, decays, spec), cache, batch)
        gates = sigmoid(gate.astype(np.float32).reshape(out.shape))
        return self._round((normalise(out, spec.norm) * gates).reshape(len(mixed), -1))

    @silently
    def mamba2(self, inputs: Array, spec: Mamba2Spec, cache: StateCache, batch: ForwardBatch) -> Array:
        """The state space of Mamba 2 of a step's tokens, as :mod:`..mamba2` defines it: -> ``[T, features]``.

        ``inputs`` is ``[T, features + channels + heads]``: the output's gate, x, B, C, and what becomes the time steps.
        The ``cache`` has the arrays of :func:`..chunked_state.state_arrays`.

        x, B and C are convolved and activated by SiLU in fp32. The output is normalised and gated in fp32, and rounded.
        """
        slots, ends = batch.block_tables[cache.group][:, 0], (spec.features, spec.features + spec.channels)
        gate, xbc, steps = inputs[:, : ends[0]], inputs[:, ends[0] : ends[1]], inputs[:, ends[1] :]
        mixed = silu(convolved(xbc, spec.convolution, cache["inputs"], slots, batch))
        out = in_chunks(mamba2.StateSpaceChunk, mamba2.token_inputs(mixed, steps, spec), cache, batch)
        return self._round(mamba2.gated(out.reshape(len(mixed), -1), gate, spec.norm))


def convolved(
    inputs: np.ndarray, convolution: ShortConvolution, ring: np.ndarray, slots: np.ndarray, batch: ForwardBatch
) -> np.ndarray:
    """The convolution of a step's inputs ``[T, channels]``, fp32; they replace those of earlier tokens in the ring.

    ``ring`` is ``[slots, n, channels]``, and ``n`` at least the number of taps, with one more for each draft of a step.
    """
    taps, size = convolution.taps, ring.shape[1]
    mixed = np.zeros(inputs.shape, np.float32)
    for sequence, rows in sequences(batch):
        start, own = int(batch.context_lens[sequence]), inputs[rows]
        past = np.zeros((len(taps) - 1, own.shape[1]), own.dtype)
        known = min(start, len(past))
        past[len(past) - known :] = ring[slots[sequence], np.arange(start - known, start) % size]
        seen = np.concatenate([past, own]).astype(np.float32)
        for j, tap in enumerate(taps):
            mixed[rows] += tap * seen[len(past) - j : len(seen) - j]
        last = np.arange(max(start + len(own) - size, start), start + len(own))
        ring[slots[sequence], last % size] = own[last - start]
    if convolution.bias is not None:
        mixed += convolution.bias
    return mixed


def in_chunks(kind: type[chunked_state.Chunk], tokens: Any, cache: StateCache, batch: ForwardBatch) -> np.ndarray:
    """The results of a recurrence of a step's tokens: see :func:`..chunked_state.outputs`."""
    slots, found = (
        batch.block_tables[cache.group][:, 0],
        np.zeros((len(tokens), *cache["deltas"].shape[2:]), np.float32),
    )
    for b, rows in sequences(batch):
        is_draft = bool(batch.has_drafts and b > 0 and slots[b] == slots[b - 1] != NULL_BLOCK)
        start = int(batch.context_lens[b])
        found[rows] = chunked_state.outputs(kind, tokens.of(rows), cache, int(slots[b]), start, is_draft)
    return found
