"""What lies around the products, row by row: embeddings, norms, softmax, and pooling of a sequence's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..functions import normalise, silently, soft_capped, softmax, stored, xielu
from ..values import POOLING_LANES, Array, ForwardBatch, Norm, Pooling, Xielu
from .step import StepOperations, positions_of, sequences


@dataclass(frozen=True)
class HeadsOfRank:
    """Where queries ``q`` and keys ``k`` of a rank lie among those of all ranks, in ``total`` columns.

    ``own_q`` and ``own_k`` are their widths. Of ranks that share heads of keys, the first one ``adds_k``.
    """

    q: slice
    k: slice
    own_q: int
    own_k: int
    total: int
    adds_k: bool

    @classmethod
    def of(cls, ranks: Communicator, width: int, q: int, k: int) -> HeadsOfRank:
        """For a rank with ``width`` columns of queries, keys and values, and ``q`` and ``k`` columns of all ranks."""
        own_q = q // ranks.tp_size
        own_k = (width - own_q) // 2
        sharing = ranks.tp_size * own_k // k
        first_q, first_k = ranks.tp_rank * own_q, q + ranks.tp_rank // sharing * own_k
        is_first = ranks.tp_rank % sharing == 0
        return cls(slice(first_q, first_q + own_q), slice(first_k, first_k + own_k), own_q, own_k, q + k, is_first)


class RowOperations(StepOperations):
    """Operations on the rows of the residual stream and of activations."""

    def embed(self, tokens: Array, table: Array, scale: float = 1.0) -> Array:
        """Rows of ``table``, multiplied by ``scale`` in fp32, as the start of the residual stream.

        ``tokens`` int32 ``[T]`` -> fp32 ``[T, features]``.
        """
        rows = table[tokens].astype(np.float32)
        return rows if scale == 1 else rows * np.float32(scale)

    def saved_embed(self, tokens: Array, bank: Any, residual: Array, scale: float = 1.0) -> Array:
        """:meth:`embed` of the tables of the tokens' slots, where these have one; ``residual`` is overwritten."""
        for table, rows in bank.rows():
            residual[rows] = table[tokens[rows]] * np.float32(scale)
        return residual

    @silently
    def add_positions(self, residual: Array, table: Array, batch: ForwardBatch) -> Array:
        """``residual`` plus the row of ``table`` at each token's position, fp32 ``[T, features]``.

        ``residual`` may be overwritten with the result. Positions count from 0 and must be rows of the table.
        """
        residual += table[positions_of(batch)].astype(np.float32)
        return residual

    @silently
    def add_token_types(self, residual: Array, table: Array, batch: ForwardBatch) -> Array:
        """``residual`` plus the row of ``table`` of each token's type, row 0 in a step without ``token_types``.

        fp32 ``[T, features]``; ``residual`` may be overwritten with the result.
        """
        residual += table[0 if batch.token_types is None else batch.token_types].astype(np.float32)
        return residual

    def add(self, residual: Array, addend: Array) -> Array:
        """``residual + addend``, both fp32 ``[T, features]``; ``residual`` may be overwritten with the sum."""
        residual += addend
        return residual

    def norm(self, residual: Array, norm: Norm, out: Array = None) -> Array:
        """RMSNorm or LayerNorm of each row in fp32, not rounded before the quantization that follows.

        fp32 ``[T, features]`` -> ``[T, features]``, written to ``out`` if given, which may be ``residual``.
        """
        return stored(normalise(residual, norm), out)

    def norm_add(self, x: Array, norm: Norm, residual: Array, scale: float = 1.0) -> Array:
        """``(residual + norm(x)) * scale``: fp32 ``[T, features]``. ``residual`` may be overwritten with the result."""
        residual += normalise(x, norm)
        if scale != 1:
            residual *= np.float32(scale)
        return residual

    @silently
    def layer_inputs(
        self, tokens: Array, table: Array, projected: Array, norm: Norm, table_scale: float, scale: float
    ) -> Array:
        """``(norm(projected) + table[tokens] * table_scale) * scale``, what layers read beside the residual stream.

        ``projected`` is fp32 ``[T, layers * size]``, of which ``norm`` normalises each ``size`` columns. The sum is
        fp32, and rounded to the activation type: ``[T, layers * size]``.
        """
        size = len(norm.weight)
        normed = normalise(projected.reshape(len(projected), -1, size), norm).reshape(projected.shape)
        rows = table[tokens].astype(np.float32) * np.float32(table_scale)
        return self._round((normed + rows) * np.float32(scale))

    def xielu(self, x: Array, values: Xielu) -> Array:
        """:func:`..functions.xielu` of each element in fp32, rounded: ``[T, n]`` -> the same.

        ``x`` is in the activation type, or a product that is; it may be overwritten.
        """
        return self._round(xielu(x.astype(np.float32), values))

    @silently
    def multiply_columns(self, x: Array, inputs: Array, first: int) -> Array:
        """``x`` times as many columns of ``inputs`` from ``first`` on, in fp32, rounded: ``[T, size]`` -> the same.

        ``x`` and ``inputs`` ``[T, n]`` are in the activation type; ``x`` may be overwritten.
        """
        columns = inputs[:, first : first + x.shape[1]]
        return self._round(x.astype(np.float32) * columns.astype(np.float32))

    def norm_qk(self, qkv: Array, q_norm: Norm, k_norm: Norm) -> Array:
        """``qkv`` with all queries of a row normalised together, and all keys; values stay as they are.

        fp32 ``[T, q + k + v]`` -> ``[T, q + k + v]`` in the activation type; the norms' weights are ``[q]`` and
        ``[k]``.
        """
        q, k = len(q_norm.weight), len(k_norm.weight)
        parts = normalise(qkv[:, :q], q_norm), normalise(qkv[:, q : q + k], k_norm), qkv[:, q + k :]
        return self._round(np.concatenate(parts, axis=1))

    def norm_qk_of_rank(self, qkv: Array, q_norm: Norm, k_norm: Norm) -> Array:
        """:meth:`norm_qk` where ``qkv`` has this rank's heads, and the norms are those of the heads of all ranks.

        The ranks exchange queries and keys, so the bits are those of one rank.
        """
        places = HeadsOfRank.of(self.communicator, qkv.shape[1], len(q_norm.weight), len(k_norm.weight))
        whole = np.zeros((len(qkv), places.total), np.float32)
        whole[:, places.q] = qkv[:, : places.own_q]
        if places.adds_k:
            whole[:, places.k] = qkv[:, places.own_q : places.own_q + places.own_k]
        whole, values = self.communicator.all_reduce_add(whole), qkv[:, places.own_q + places.own_k :]
        normed = self.norm_qk(np.concatenate([whole, values], axis=1), q_norm, k_norm)
        return np.concatenate([normed[:, places.q], normed[:, places.k], normed[:, places.total :]], axis=1)

    def soft_cap(self, x: Array, cap: float) -> Array:
        """``cap * tanh(x / cap)`` of fp32 ``[T, features]``, which may be overwritten with the result."""
        return soft_capped(x, cap)

    @silently
    def softmax(self, x: Array, scale: float = 1.0, bias: Array = None, mask: Array = None, out: Array = None) -> Array:
        """Softmax of ``scale * x + bias`` over each row, in fp32: ``[T, features]`` fp32 or fp16 -> the same.

        ``bias`` fp32 and ``mask`` bool are ``[T, features]``, or ``[features]`` for all rows. Where ``mask`` is false
        the result is exactly 0, also for a whole row. The result is written to ``out`` if given, of the shape and type
        of ``x``; it may be ``x``.
        """
        scores = x.astype(np.float32) * np.float32(scale)
        return stored(softmax(scores if bias is None else scores + bias, mask).astype(x.dtype), out)

    @silently
    def pool(self, x: Array, batch: ForwardBatch, pooling: Pooling, skipped: Array = None) -> Array:
        """One vector for each sequence: ``[T, features]`` -> fp32 ``[B, features]``, as :class:`Pooling` says.

        ``skipped`` int32 ``[B]`` leaves out that many of a sequence's first tokens, whose successors keep their
        positions. A sequence of which nothing is left has zeros. Sums have :data:`POOLING_LANES` lanes, of which each
        adds in fp32 every ``POOLING_LANES``-th of the tokens that are left; then neighbouring lanes are added.
        """
        x = x.astype(np.float32)
        out = np.zeros((batch.batch_size, x.shape[1]), np.float32)
        for b, rows in sequences(batch):
            first = 0 if skipped is None else min(int(skipped[b]), rows.stop - rows.start)
            if first < rows.stop - rows.start:
                out[b] = pooled(x[rows.start + first : rows.stop], pooling, first)
        return out


def pooled(x: np.ndarray, pooling: Pooling, first: int = 0) -> np.ndarray:
    """The vector fp32 ``[features]`` of tokens with vectors fp32 ``[n, features]``, at positions from ``first`` on."""
    if pooling in (Pooling.FIRST, Pooling.LAST):
        row: np.ndarray = x[0 if pooling is Pooling.FIRST else -1]
        return row
    if pooling is Pooling.MAX:
        largest: np.ndarray = x.max(axis=0)
        return largest
    count = len(x)
    weights = np.arange(first + 1, first + count + 1, dtype=np.int64)
    total = np.float32(count)
    if pooling is Pooling.MEAN_SQRT_LEN:
        total = np.sqrt(total)
    if pooling is Pooling.WEIGHTED_MEAN:
        x, total = x * weights.astype(np.float32)[:, None], np.float32(weights.sum())
    lanes = np.zeros((-(-count // POOLING_LANES) * POOLING_LANES, x.shape[1]), np.float32)
    lanes[:count] = x
    sums = lanes.reshape(-1, POOLING_LANES, x.shape[1]).sum(axis=0)
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    mean: np.ndarray = sums[0] / total
    return mean
