"""Launches of the kernels that some architectures need beside the common ones: encoders, GPTs, learned positions."""

from __future__ import annotations

from enum import IntEnum

import cupy as cp

from ...errors import DeviceError
from ..values import AttentionSpec, LayerCache, Step
from .arrays import pitch_of
from .launches import PRODUCT, Launches, address, ceil_div, head_pitch_of, read_arguments, size_of
from .unfinished import Outliers, Product, Weight


class Keys(IntEnum):
    """Whose keys a token sees; see ``attention_general.cu``."""

    CACHED = 0
    SOURCE = 1
    WITHIN = 2


class GeneralLaunches(Launches):
    """All kernels of one GPU, on one stream."""

    def activate(self, source: cp.ndarray | Product, out: cp.ndarray, activation: int) -> None:
        """A function of each value, fp16 ``[rows, n]``. ``activation`` is one of ``launches.ACTIVATIONS``."""
        data, kind, order = read_arguments(source)
        expression = f"activate_rows<{'true' if kind == PRODUCT else 'false'}, {order}, {activation}>"
        rows, n = source.shape
        self._launch(
            "pointwise.cu", expression, "ppppqpqii", ceil_div(rows * n, 256), 256,
            (*data, out.data.ptr, pitch_of(out), rows, n), moved=size_of(source, out),
        )  # fmt: skip

    def add_positions(self, step: Step, table: cp.ndarray, residual: cp.ndarray) -> None:
        """Add to each token's row, fp32, the row of an fp16 table at its position."""
        self._launch(
            "pointwise.cu", "add_positions", "ppipqpqi", len(residual), 256,
            (address(step.starts), address(step.past), step.count, table.data.ptr, pitch_of(table),
             residual.data.ptr, pitch_of(residual), residual.shape[1]),
            moved=2 * size_of(residual),
        )  # fmt: skip

    def split_columns(self, x: cp.ndarray, outliers: Outliers, rest: cp.ndarray, kept: cp.ndarray) -> None:
        """Rows of ``x`` to ``rest`` with zeros in some columns, and those to ``kept``, fp16 ``[rows, n]``, dense."""
        kind = "__half" if x.dtype == cp.float16 else "float"
        self._launch(
            "outliers.cu", f"split_columns<{kind}>", "pqpipqpi", len(x), 256,
            (x.data.ptr, pitch_of(x), outliers.index.data.ptr, kept.shape[1], rest.data.ptr, pitch_of(rest),
             kept.data.ptr, x.shape[1]),
            moved=size_of(x, rest, kept),
        )  # fmt: skip

    def add_columns(self, sums: cp.ndarray, kept: cp.ndarray, weight: Weight, out: cp.ndarray) -> None:
        """``sums`` fp32 plus the product of ``kept`` with the weight's outlier columns, plus its bias."""
        outliers = weight.outliers
        assert outliers is not None
        kind, (rows, n), columns = "__half" if out.dtype == cp.float16 else "float", out.shape, kept.shape[1]
        self._launch(
            "outliers.cu", f"add_columns<{kind}>", "pqpipqppqi", (rows, ceil_div(n, 256)), 256,
            (sums.data.ptr, pitch_of(sums), kept.data.ptr, columns, outliers.values.data.ptr,
             pitch_of(outliers.values), address(weight.bias), out.data.ptr, pitch_of(out), n),
            shared=4 * columns, moved=size_of(sums, kept, outliers.values, out),
        )  # fmt: skip

    def attend_cached(self, q: cp.ndarray, spec: AttentionSpec, cache: LayerCache, step: Step, out: cp.ndarray) -> None:
        """Causal attention with a bias: ``q`` is ``[T, heads, head_pitch]``, the cache has the new tokens already."""
        self._attend(Keys.CACHED, q, q.shape[1] * q.shape[2], q.shape[2], *cache_place(cache), None, spec, step, out)

    def attend_source(
        self, q: cp.ndarray, spec: AttentionSpec, source: LayerCache, lengths: cp.ndarray, step: Step, out: cp.ndarray
    ) -> None:
        """Attention over encoded sources of ``lengths`` tokens; ``q`` is ``[T, heads * head_dim]`` in padded rows."""
        self._attend(Keys.SOURCE, q, pitch_of(q), spec.head_dim, *cache_place(source), lengths, spec, step, out)

    def attend_within(self, qkv: cp.ndarray, spec: AttentionSpec, step: Step, out: cp.ndarray) -> None:
        """Attention of each token to all of its sequence; ``qkv`` is fp16 ``[T, qkv_features]`` in padded rows."""
        pitch, size = pitch_of(qkv), spec.head_dim
        keys = qkv.data.ptr + 2 * spec.heads * size
        place = keys, keys + 2 * spec.kv_heads * size, (0, size, pitch)
        self._attend(Keys.WITHIN, qkv, pitch, size, *place, None, spec, step, out)

    def _attend(
        self, kind: Keys, q: cp.ndarray, q_pitch: int, q_head: int, keys: int, values: int,
        strides: tuple[int, int, int], lengths: cp.ndarray | None, spec: AttentionSpec, step: Step, out: cp.ndarray,
    ) -> None:  # fmt: skip
        assert spec.window is None
        parts = 1 << (ceil_div(spec.head_dim, 32) - 1).bit_length()
        bias = spec.bias
        self._launch(
            "attention_general.cu", f"attend_general<{int(kind)}, {parts}>", "pqippqqqpippppipqiiif",
            (len(out), spec.heads), 128,
            (q.data.ptr, q_pitch, q_head, keys, values, *strides,
             address(bias.values) if bias else 0, bias.reach if bias else 0,
             address(step.starts), address(step.past), address(step.slots), address(lengths), step.count,
             out.data.ptr, pitch_of(out), spec.heads, spec.kv_heads, spec.head_dim, spec.scale),
            moved=2 * size_of(out),
        )  # fmt: skip


def cache_place(cache: LayerCache) -> tuple[int, int, tuple[int, int, int]]:
    """Where keys and values are, and the elements from one sequence, head and token to the next."""
    if cache.keys.dtype != cp.float16:
        raise DeviceError("an int8 key-value cache is not supported for encoder-decoders; take fp16 (kv_cache)")
    pitch = head_pitch_of(cache)
    _, kv_heads, capacity, _ = cache.keys.shape
    return cache.keys.data.ptr, cache.values.data.ptr, (kv_heads * capacity * pitch, capacity * pitch, pitch)
