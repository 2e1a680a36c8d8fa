"""Attention to latent rows on a GPU: the matrices of heads, and the launches of an operation.

Up to five kernels: new rows go to the cache, and the queries' ends are rotated; the keys' matrices are absorbed into
the queries, for few tokens in the same launch; attention to the rows, and the merge of its segments if it is not a part
of that; the values' matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import pitch_of
from ...cuda.kernels.attention.latent import TOKENS, LatentGrid, depth_of, element_of, unsupported
from ...errors import DeviceError, OutOfMemory
from ..cache_values import LatentCache
from ..latent import float_matrix
from ..quantization import HostWeight, Int8Weight
from ..values import LATENT_SEGMENT, Array, ForwardBatch, LatentSpec
from .arrays import Arrays, ZeroedScratch
from .deferred import DeferredMatmul
from .kernels import Kernels
from .materialize import Materializer
from .weight_loader import Loader


@dataclass(frozen=True)
class LatentMatrices:
    """fp16 ``[heads * (nope_dim + value_dim), rank]`` with padded rows, a head's keys before its values."""

    matrix: cp.ndarray


def load_latent_matrices(loader: Loader, matrix: HostWeight, spec: LatentSpec) -> LatentMatrices:
    """See :meth:`.Backend.latent_weight`. Raises ``DeviceError`` for sizes that no kernel takes."""
    problem = unsupported(spec)
    if problem is not None:
        raise DeviceError(f"{problem}: load the model with device='cpu'")
    values = float_matrix(matrix) if isinstance(matrix, Int8Weight) else matrix
    return LatentMatrices(loader.half_matrix(values))


class LatentLaunches:
    """The launches of the operation; records of a launch take at most ``max_record_bytes``."""

    def __init__(
        self,
        arrays: Arrays,
        kernels: Kernels,
        materializer: Materializer,
        scratch: ZeroedScratch,
        max_record_bytes: int,
    ):
        self.arrays = arrays
        self.kernels = kernels
        self.materializer = materializer
        self.scratch = scratch
        self.max_record_bytes = max_record_bytes

    def attention(
        self, q: Array, kv: Array, spec: LatentSpec, expand: LatentMatrices, cache: LatentCache, batch: ForwardBatch
    ) -> cp.ndarray:
        """See :meth:`.Backend.latent_attention`."""
        queries = self._queries(q, kv, spec, expand, cache, batch)
        means, records, grid = self._means(queries, spec, cache, batch)
        del queries
        tokens, pitch = len(means), means.shape[2]
        out = self.arrays.rows(tokens, spec.heads * spec.value_dim, np.float16)
        if records is not None and self.kernels.latent_attention.merges(tokens, grid):
            self.kernels.head_products.values(self.kernels.step, records, grid, means, spec, batch, expand.matrix, out)
            return out
        del records
        self.kernels.head_products.launch(
            self.kernels.step, means, spec.heads * pitch, pitch, expand.matrix, spec.nope_dim,
            spec.nope_dim + spec.value_dim, spec.heads, spec.rank, spec.value_dim, False, out, pitch_of(out),
            spec.value_dim, tokens,
        )  # fmt: skip
        return out

    def _queries(
        self, q: Array, kv: Array, spec: LatentSpec, expand: LatentMatrices, cache: LatentCache, batch: ForwardBatch
    ) -> cp.ndarray:
        """Queries that meet latent rows, fp16 ``[T, heads, depth]``; the rows of the step's tokens go to the cache."""
        step, (tokens, depth) = self.kernels.step, (q.shape[0], depth_of(spec))
        half, rows = self.materializer.to_half(q), self._fp32(kv)
        factors = None if spec.position_scale is None else self.arrays.empty((tokens,), np.float32)
        queries = self.arrays.empty((tokens, spec.heads, depth), np.float16)
        table = batch.block_tables[cache.group]
        if tokens <= TOKENS[0] and factors is None:
            self.kernels.latent_rows.launch_queries(step, half, rows, spec, cache, batch, table, expand.matrix, queries)
            return queries
        self.kernels.latent_rows.launch(step, half, rows, spec, cache, batch, table, queries, factors)
        self.kernels.head_products.launch(
            step, half, pitch_of(half), spec.nope_dim + spec.rope_dim, expand.matrix, 0,
            spec.nope_dim + spec.value_dim, spec.heads, spec.nope_dim, spec.rank, True, queries, spec.heads * depth,
            depth, tokens, factors,
        )  # fmt: skip
        return queries

    def _means(
        self, queries: cp.ndarray, spec: LatentSpec, cache: LatentCache, batch: ForwardBatch
    ) -> tuple[cp.ndarray, cp.ndarray | None, LatentGrid]:
        """The means of latents, fp16 ``[T, heads, rank]``, or the records of which the next kernel makes them."""
        means = self.arrays.empty((len(queries), spec.heads, spec.rank), np.float16)
        kernel, records, pairs = self.kernels.latent_attention, None, len(queries) * spec.heads
        grid = kernel.grid(spec, batch, element_of(cache), self.max_record_bytes)
        if batch.max_context_len > LATENT_SEGMENT:
            try:
                records = self.arrays.empty((grid.record_elements(spec.rank, pairs),), np.float32)
            except OutOfMemory:
                grid = kernel.grid(spec, batch, element_of(cache), 0)  # slower, and the same bits
                records = self.arrays.empty((grid.record_elements(spec.rank, pairs),), np.float32)
        table = batch.block_tables[cache.group]
        arrivals = None
        if records is None or not kernel.merges(len(queries), grid):
            arrivals = self.scratch.zeros("latent arrivals", kernel.arrival_elements, np.int32)
        kernel.launch(self.kernels.step, queries, spec, cache, batch, table, grid, records, arrivals, means)
        return means, records, grid

    def _fp32(self, x: Array) -> cp.ndarray:
        """``x`` as padded fp32 rows, or columns of such."""
        if isinstance(x, DeferredMatmul):
            return self.materializer.dequantize(x, np.float32)
        values = self.arrays.aligned(self.materializer.materialize(x))
        if values.dtype == np.float32:
            return values
        out = self.arrays.rows(values.shape[0], values.shape[1], np.float32)
        with self.arrays.current():
            out[...] = values
        return out
