"""Layers with a state of each sequence, by kernels; :mod:`bminf_lite.backend.operations.recurrences` defines them."""

from __future__ import annotations

import numpy as np

from ....cuda.kernels.constants import DELTA_NET_MAX_KEY_DIM, MAMBA2_MAX_STATE_DIM
from ....cuda.kernels.recurrent.chunks import Prepared
from ....cuda.kernels.recurrent.delta_net import heads_of as delta_net_heads
from ....cuda.kernels.recurrent.mamba2 import heads_of as mamba2_heads
from ....errors import UsageError
from ...cache_values import StateCache
from ...operations.recurrences import RecurrenceOperations
from ...values import Array, DeltaNetSpec, ForwardBatch, Mamba2Spec, ShortConvolution
from ..deferred import ResidualStream
from ..device import CudaDevice


class CudaRecurrenceOperations(CudaDevice, RecurrenceOperations):
    """Recurrences of a step's tokens, whose chunks are prepared beside each other."""

    def short_convolution(
        self, bcx: Array, convolution: ShortConvolution, cache: StateCache, batch: ForwardBatch
    ) -> Array:
        rows, table = self.materializer.to_half(bcx), batch.block_tables[cache.group]
        out = self.arrays.rows(len(rows), rows.shape[1] // 3, np.float16)
        self.kernels.short_convolution.launch(self.kernels.step, rows, convolution, cache["inputs"], table, batch, out)
        return out

    def previous_rows(self, x: Array, previous: ShortConvolution, cache: StateCache, batch: ForwardBatch) -> Array:
        rows, width = x.shape
        values = self.materializer.materialize(x)
        gated, out = self.arrays.rows(rows, 3 * width, np.float16), self.arrays.rows(rows, width, np.float32)
        with self.arrays.current():
            gated[:, : 2 * width] = 1
            gated[:, 2 * width :] = values
        before = self.short_convolution(gated, previous, cache, batch)
        with self.arrays.current():
            out[...] = before
        return ResidualStream(out)

    def gated_delta_net(
        self, qkvz: Array, gates: Array, spec: DeltaNetSpec, cache: StateCache, batch: ForwardBatch
    ) -> Array:
        rows, gates = self.materializer.to_half(qkvz), self.materializer.materialize(gates)
        rates, decays = gates[:, : spec.value_heads], gates[:, spec.value_heads :]
        return self._delta_rule(rows, rates, decays, rows[:, spec.channels :], spec, cache, batch)

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
        to_half, materialize = self.materializer.to_half, self.materializer.materialize
        return self._delta_rule(
            to_half(qkv), materialize(rates), materialize(decays), to_half(gate), spec, cache, batch
        )

    def _delta_rule(
        self,
        rows: Array,
        rates: Array,
        decays: Array,
        gate: Array,
        spec: DeltaNetSpec,
        cache: StateCache,
        batch: ForwardBatch,
    ) -> Array:
        if spec.key_dim > DELTA_NET_MAX_KEY_DIM:
            raise UsageError(
                f"keys of a gated DeltaNet have {spec.key_dim} elements; a GPU computes up to {DELTA_NET_MAX_KEY_DIM}: "
                "load the model with device='cpu'"
            )
        tokens, values, table = len(rows), spec.value_features, batch.block_tables[cache.group]
        heads, out = delta_net_heads(spec), self.arrays.rows(tokens, values, np.float16)
        if self.kernels.delta_net.is_one_token(heads, spec.convolution, batch):
            self.kernels.delta_net.launch_token_of(
                self.kernels.step, rows, rates, decays, gate, spec, cache, table, batch, out
            )
            return out
        mixed, found = (self.arrays.rows(tokens, width, np.float32) for width in (spec.channels, values))
        self.kernels.short_convolution.launch(
            self.kernels.step, rows, spec.convolution, cache["inputs"], table, batch, mixed
        )
        sums = self.arrays.empty((tokens, heads.sums), np.float32)
        memory = self._prepared(self.kernels.delta_net.prepared(heads, cache["keys"].shape[1], batch))
        self.kernels.delta_net.launch(
            self.kernels.step, mixed, rates, decays, gate, spec, cache, table, batch, memory, sums, found, out
        )
        return out

    def mamba2(self, inputs: Array, spec: Mamba2Spec, cache: StateCache, batch: ForwardBatch) -> Array:
        if spec.state_dim > MAMBA2_MAX_STATE_DIM:
            raise UsageError(
                f"states of Mamba 2 have {spec.state_dim} rows; a GPU computes up to {MAMBA2_MAX_STATE_DIM}: "
                "load the model with device='cpu'"
            )
        rows, table = self.materializer.to_half(inputs), batch.block_tables[cache.group]
        tokens, features, channels = len(rows), spec.features, spec.channels
        if self.kernels.mamba2.computes_token(spec, batch):
            out = self.arrays.rows(tokens, features, np.float16)
            self.kernels.mamba2.launch_token_of(
                self.kernels.step, rows[:, features:], rows[:, features + channels :], rows[:, :features], spec, cache,
                table, batch, out,
            )  # fmt: skip
            return out
        mixed, found = (self.arrays.rows(tokens, width, np.float32) for width in (channels, features))
        self.kernels.short_convolution.launch(
            self.kernels.step, rows[:, features:], spec.convolution, cache["inputs"], table, batch, mixed
        )
        out, sums = self.arrays.rows(tokens, features, np.float16), self.arrays.empty((tokens, spec.heads), np.float32)
        memory = self._prepared(self.kernels.mamba2.prepared(mamba2_heads(spec), cache["keys"].shape[1], batch))
        self.kernels.mamba2.launch(
            self.kernels.step, mixed, rows[:, features + channels :], rows[:, :features], spec, cache, table, batch,
            memory, sums, found, out,
        )  # fmt: skip
        return out

    def _prepared(self, prepared: Prepared) -> Array:
        """Memory for the chunks of a recurrence that are prepared, or None."""
        return self.arrays.empty((prepared.nbytes,), np.int8) if prepared.places else None
