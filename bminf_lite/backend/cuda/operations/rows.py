"""What lies around the products, by kernels; :mod:`bminf_lite.backend.operations.rows` defines it."""

from __future__ import annotations

import weakref

import numpy as np

from ....cuda.kernels.arrays import PAD, round_up
from ...operations.rows import HeadsOfRank, RowOperations
from ...values import Array, ForwardBatch, Norm, Pooling, Xielu
from ..adapter_bank import SavedBank
from ..deferred import DeferredNorm, NormAddend, ResidualStream
from ..device import CudaDevice


class CudaRowOperations(CudaDevice, RowOperations):
    """Rows of the residual stream and of activations, several operations in one kernel where the stream allows."""

    def embed(self, tokens: Array, table: Array, scale: float = 1.0) -> Array:
        out = self.arrays.rows(len(tokens), table.shape[1], np.float32)
        self.kernels.rows.embed(self.kernels.step, tokens, table, out, scale)
        return ResidualStream(out)

    def saved_embed(self, tokens: Array, bank: SavedBank, residual: Array, scale: float = 1.0) -> Array:
        rows = bank.slots.rows
        if rows is None:
            return residual
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.adapters.saved_embed(self.kernels.step, tokens, rows, bank.saved, target.values, scale)
        return ResidualStream(target.values)

    def add_positions(self, residual: Array, table: Array, batch: ForwardBatch) -> Array:
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.pointwise.add_positions(self.kernels.step, batch, table, target.values)
        return ResidualStream(target.values)

    def add_token_types(self, residual: Array, table: Array, batch: ForwardBatch) -> Array:
        target = self.materializer.as_residual(residual)
        self.materializer.flush_residual(target)
        self.kernels.pointwise.add_rows(self.kernels.step, batch.token_types, table, target.values)
        return ResidualStream(target.values)

    def add(self, residual: Array, addend: Array) -> Array:
        target, values = self.materializer.as_residual(residual), self.materializer.materialize(addend)
        self.materializer.flush_residual(target)
        with self.arrays.current():
            target.values += values
        return ResidualStream(target.values)

    def norm(self, residual: Array, norm: Norm, out: Array = None) -> Array:
        if out is not None:
            if isinstance(residual, ResidualStream):
                self.materializer.flush_residual(residual)
            self.kernels.rows.norm(self.kernels.step, self.materializer.materialize(residual), norm, out)
            return out
        source = self.materializer.as_residual(residual)
        result = DeferredNorm(source, norm)
        source.norms.append(weakref.ref(result))
        return result

    def norm_add(self, x: Array, norm: Norm, residual: Array, scale: float = 1.0) -> Array:
        target, values = self.materializer.as_residual(residual), self.arrays.padded(self.materializer.materialize(x))
        self.materializer.flush_residual(target)
        return ResidualStream(target.values, NormAddend(values, norm, scale))

    def layer_inputs(
        self, tokens: Array, table: Array, projected: Array, norm: Norm, table_scale: float, scale: float
    ) -> Array:
        values = self.materializer.materialize(projected)
        out = self.arrays.rows(values.shape[0], values.shape[1], np.float16)
        self.kernels.layer_inputs.launch(self.kernels.step, tokens, table, values, norm, table_scale, scale, out)
        return out

    def xielu(self, x: Array, values: Xielu) -> Array:
        rows = self.materializer.to_half(x)
        self.kernels.pointwise.xielu(self.kernels.step, rows, values)
        return rows

    def multiply_columns(self, x: Array, inputs: Array, first: int) -> Array:
        rows = self.materializer.to_half(x)
        columns = self.materializer.materialize(inputs)[:, first : first + rows.shape[1]]
        self.kernels.layer_inputs.multiply_columns(self.kernels.step, rows, columns)
        return rows

    def norm_qk(self, qkv: Array, q_norm: Norm, k_norm: Norm) -> Array:
        values = self.arrays.padded(self.materializer.materialize(qkv))
        rows, width = values.shape
        out = self.arrays.rows(rows, width, np.float16)
        if self.kernels.rows.supports_norm_qk(width, q_norm, k_norm):
            self.kernels.rows.norm_qk(self.kernels.step, values, q_norm, k_norm, out)
            return out
        q, k = len(q_norm.weight), len(k_norm.weight)
        for begin, end, norm in ((0, q, q_norm), (q, q + k, k_norm), (q + k, width, None)):
            part = values[:, begin:end]
            normed = part if norm is None else self.materializer.materialize(self.norm(part, norm))
            with self.arrays.current():
                out[:, begin:end] = normed
        return out

    def norm_qk_of_rank(self, qkv: Array, q_norm: Norm, k_norm: Norm) -> Array:
        own = self.materializer.materialize(qkv)
        rows, width = own.shape
        places = HeadsOfRank.of(self.communicator, width, len(q_norm.weight), len(k_norm.weight))
        before = places.own_q + places.own_k
        part = self.arrays.zeros((rows, round_up(places.total, PAD)), np.float32)[:, : places.total]
        with self.arrays.current():
            part[:, places.q] = own[:, : places.own_q]
            if places.adds_k:
                part[:, places.k] = own[:, places.own_q : before]
        whole = self.communicator.all_reduce_add(part)
        joined = self.arrays.rows(rows, places.total + width - before, np.float32)
        with self.arrays.current():
            joined[:, : places.total] = whole
            joined[:, places.total :] = own[:, before:]
        normed, out = self.norm_qk(joined, q_norm, k_norm), self.arrays.rows(rows, width, np.float16)
        with self.arrays.current():
            out[:, : places.own_q] = normed[:, places.q]
            out[:, places.own_q : before] = normed[:, places.k]
            out[:, before:] = normed[:, places.total :]
        return out

    def soft_cap(self, x: Array, cap: float) -> Array:
        values = self.materializer.materialize(x)
        self.kernels.pointwise.soft_cap(self.kernels.step, values, cap)
        return values

    def softmax(self, x: Array, scale: float = 1.0, bias: Array = None, mask: Array = None, out: Array = None) -> Array:
        values = self.materializer.materialize(x)
        if out is None:
            rows, columns = values.shape
            out = self.arrays.rows(rows, columns, values.dtype)
        self.kernels.softmax.launch(self.kernels.step, values, scale, bias, mask, out)
        return out

    def pool(self, x: Array, batch: ForwardBatch, pooling: Pooling, skipped: Array = None) -> Array:
        rows = self.materializer.materialize(x)
        if rows.dtype != np.float32:
            with self.arrays.current():
                rows = rows.astype(np.float32)
        out = self.arrays.rows(batch.batch_size, rows.shape[1], np.float32)
        self.kernels.pooling.pool(self.kernels.step, rows, batch, pooling, skipped, out)
        return out
