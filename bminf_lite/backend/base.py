"""Every operation, defined once, over NumPy: the reference for other backends.

A backend is a device (:mod:`.device`) with operations. Layers call these and pass arrays on. A faster backend overrides
operations with kernels. It must return the same integers bit for bit, and the same floats within the tolerances that
``tests/backend/tolerances.py`` gives with their reasons.

Numbers (see docs/numerics.md): the residual stream, norms, softmax, rotary angles and logits are fp32. Other
activations are rounded to ``activation_dtype`` between operations: fp32 here, fp16 on a GPU. Constructed with
``activation_dtype=np.float16`` this class rounds where a GPU rounds, so that the two can be compared tightly.

Shapes: ``T`` tokens of a step, of ``B`` sequences; see :class:`~bminf_lite.backend.values.ForwardBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np

from . import chunked_state, delta_net, mamba2
from .adapter_slots import AdapterBank, AdapterSlots, Bank, SavedBank
from .attention import attend, cached
from .blas_threads import blas_threads
from .calibration import CalibrationOps
from .communicator import Communicator
from .device import HostDevice
from .expert_values import ExpertActivation, ExpertBiases, RouterSpec
from .functions import ACTIVATIONS, normalise, product_by_row, rotate, silently, silu, soft_capped, softmax, stored
from .latent import (
    NumpyLatentWeight,
    by_token_and_head,
    cached_rows,
    float_matrix,
    latent_queries,
    latent_rows,
    store_rows,
)
from .latent import split_heads as split_latent_heads
from .mixture import (
    Mixture,
    SharedExpert,
    choose_experts,
    expert_result,
    input_factors,
    make_mixture,
    mix,
    result_weights,
    shared_result,
)
from .quantization import (
    HostWeight,
    int8_parts,
    quantize_heads,
    quantize_rows,
    scale_columns,
    stack_biases,
    stack_outliers,
)
from .rotation import rotated, rotated_heads
from .routing import sigmoid
from .sampling import SamplerState, score
from .sampling import sample as sample_tokens
from .side_products import Adapter, SideProduct, added
from .values import (
    BLOCK_SIZE,
    LATENT_SEGMENT,
    NULL_BLOCK,
    POOLING_LANES,
    Array,
    AttentionSpec,
    DeltaNetSpec,
    ForwardBatch,
    LatentCache,
    LatentSpec,
    LayerCache,
    Mamba2Spec,
    Norm,
    Pooling,
    ProductEpilogue,
    ShortConvolution,
    StateCache,
)

T = TypeVar("T")

FEW_ROWS = 4
"""Float products of up to ``FEW_ROWS`` rows are computed row by row, which takes BLAS no longer than one product."""
EXACT_IN_FP32 = 1024
"""Products of int8 codes summed over this many terms stay below 2**24, so fp32 arithmetic is exact."""


@dataclass(frozen=True)
class NumpyWeight:
    """A weight matrix ``[out, in]`` on the device.

    ``values`` holds fp32 weights, or int8 codes as fp32 numbers (exact, and BLAS multiplies them) with ``scale`` fp32
    ``[out]``, or ``[out, groups]`` with one for each group of neighbouring columns. ``dynamic``: activations are
    quantized, per token, or with an ``input_group_size`` per group of that many elements. ``bias`` is fp32 ``[out]``.
    ``side_products`` are added to its product. ``rotation`` is the block of its inputs' transform, see
    :mod:`.rotation`.

    A weight with a ``tp_size`` defines what that many ranks compute under tensor parallelism: each rank has an equal
    run of the columns, and quantizes its own inputs. Their products are added in the order of the ranks, in fp32.
    """

    values: np.ndarray
    scale: np.ndarray | None
    bias: np.ndarray | None
    dynamic: bool
    side_products: tuple[SideProduct, ...] = ()
    rotation: int = 1
    input_group_size: int = 0
    tp_size: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    @property
    def group_size(self) -> int:
        """Columns whose sum is scaled by itself; 0 if all are."""
        if self.scale is None or self.scale.ndim == 1:
            return self.input_group_size
        return int(self.shape[1] // self.scale.shape[1])

    def columns(self, columns: slice) -> NumpyWeight:
        """Some columns, without a bias; they divide no block of the rotation and no group."""
        found = (side.within(columns) for side in self.side_products)
        return replace(
            self, values=self.values[:, columns], bias=None, tp_size=1,
            scale=None if self.scale is None else scale_columns(self.scale, self.shape[1], columns),
            side_products=tuple(side for side in found if side is not None),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads: values, scale and bias."""
        return sum(x.nbytes for x in (self.values, self.scale, self.bias) if x is not None)


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


class Backend(HostDevice):
    """The operations over NumPy, on the host's memory."""

    computes_in_threads = True
    """Whether several threads may call operations at once, and gain by it."""

    def __init__(self, activation_dtype: type = np.float32):
        super().__init__(activation_dtype)
        self.choices: list[Array] | None = None
        """A list to which each :meth:`experts` appends the experts of its tokens, int32 ``[T, top_k]``, or None."""
        self.adapter_slots: AdapterSlots | None = None
        """Room for adapters beside the weights of the model that is built next; None for a model without adapters."""

    @contextmanager
    def step(self, batch: ForwardBatch) -> Iterator[None]:
        slots = self.adapter_slots
        if slots is None:
            yield
            return
        before, slots.rows = slots.rows, batch.lora_ids
        try:
            yield
        finally:
            slots.rows = before

    def _go_on_with_last_tokens(self, batch: ForwardBatch) -> None:
        """The rows of the products that follow in the step are those whose logits are wanted."""
        if self.adapter_slots is not None and not (batch.logit_rows is None and batch.is_decode):
            self.adapter_slots.rows = batch.logit_lora_ids

    # -- loading --------------------------------------------------------------------------------------------------

    @silently
    def weight(self, parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None] = ()) -> NumpyWeight:
        """A device weight from host matrices stacked along ``out``; all int8 with equal ``dynamic``, or all float.

        ``biases``, if given, has an entry fp32 ``[out]`` or None for each part; None counts as zeros if another part
        has a bias. Raises ``ValueError`` for parts that are not quantized alike.
        """
        bias = stack_biases(parts, biases)
        if quantized := int8_parts(parts):
            codes = np.concatenate([p.codes for p in quantized]).astype(np.float32)
            scale = np.concatenate([p.scale.astype(np.float32) for p in quantized])
            first, outliers = quantized[0], stack_outliers(quantized)
            side_products = () if outliers is None else (outliers,)
            return NumpyWeight(codes, scale, bias, first.dynamic, side_products, first.rotation, first.input_group_size)
        values = np.concatenate([self._round(np.asarray(p).astype(np.float32)) for p in parts])
        return NumpyWeight(values.astype(np.float32), None, bias, False)

    def mixture(
        self,
        spec: RouterSpec,
        router: np.ndarray,
        hidden: Iterable[Sequence[HostWeight]],
        down: Iterable[Sequence[HostWeight]],
        activation: ExpertActivation,
        correction_bias: np.ndarray | None = None,
        biases: ExpertBiases | None = None,
    ) -> Mixture:
        """A router, fp32 ``[experts, in]``, and its experts.

        ``hidden`` and ``down`` give the matrices of each expert that are stacked along ``out``, as :meth:`weight` takes
        them: those before the ``activation``, and the one behind it. All of ``hidden`` is read before ``down``.
        """
        return make_mixture(self.weight, spec, router, hidden, down, activation, correction_bias, biases)

    @silently
    def latent_weight(self, matrix: HostWeight, spec: LatentSpec) -> NumpyLatentWeight:
        """The matrix ``[heads * (nope_dim + value_dim), rank]`` that expands latents, for :meth:`latent_attention`.

        Each head has its keys before its values. The matrix is multiplied in the activation type: an int8 one, whose
        scales of the keys lie on the axis that a query sums over, becomes float.
        """
        keys, values = split_latent_heads(self._round(float_matrix(matrix)).astype(np.float32), spec)
        return NumpyLatentWeight(np.ascontiguousarray(keys), np.ascontiguousarray(values.swapaxes(1, 2)))

    @silently
    def adapted(self, base: NumpyWeight, adapter: Adapter) -> NumpyWeight:
        """The weight ``base`` with one more side product, ``adapter`` rounded to the activation type.

        Both share the matrix. Raises ``ValueError`` if the adapter's shapes do not fit the weight's.
        """
        adapter.check(base.shape)
        a, b = (self._round(np.asarray(x).astype(np.float32)).astype(np.float32) for x in (adapter.a, adapter.b))
        return replace(base, side_products=(*base.side_products, Adapter(a, b, adapter.scale)))

    def with_adapters(self, base: Any, widths: Sequence[int], features: int) -> tuple[Any, Bank]:
        """The weight ``base`` with a bank of adapters as one more side product, and the bank.

        ``widths`` are the rows of the matrices, of ``features`` columns, that ``base`` was stacked from. There must be
        ``adapter_slots``.
        """
        assert self.adapter_slots is not None
        bank = AdapterBank(self.adapter_slots, widths, self._round)
        return replace(base, side_products=(*base.side_products, bank)), bank

    def saved_bank(self, rows: int, columns: int) -> Any:
        """Room for a matrix ``[rows, columns]`` in each of the ``adapter_slots``; two operations read it."""
        assert self.adapter_slots is not None
        return SavedBank(self.adapter_slots, self._round)

    @silently
    def saved_linear(self, x: Array, bank: Any, y: Array) -> Array:
        """``y`` fp32 ``[T, rows]`` with ``x @ matrix.T`` in the rows whose slot has a matrix; ``y`` is overwritten.

        ``x`` ``[T, columns]`` is rounded to the activation type; each row is computed by itself.
        """
        for matrix, rows in bank.rows():
            y[rows] = product_by_row(self._round(x[rows]).astype(np.float32), matrix.T)
        return y

    def saved_embed(self, tokens: Array, bank: Any, residual: Array, scale: float = 1.0) -> Array:
        """:meth:`embed` of the tables of the tokens' slots, where these have one; ``residual`` is overwritten."""
        for table, rows in bank.rows():
            residual[rows] = table[tokens[rows]] * np.float32(scale)
        return residual

    @silently
    def table(self, values: np.ndarray) -> Array:
        """An embedding table ``[rows, features]`` in the activation type."""
        return self._round(np.asarray(values).astype(np.float32))

    def vector(self, values: np.ndarray) -> Array:
        """A norm's weight, a bias or frequencies, fp32 ``[n]``."""
        return np.array(values, np.float32)

    def blocks(self, build: Callable[[int], T], count: int) -> Iterable[T]:
        """The layers of a stack, which ``build(i)`` makes. A step iterates over them.

        A model with several stacks makes the decoding stack last; the others run once per prompt. The weight matrices
        that ``build(i)`` makes must belong to layer ``i`` alone: as :attr:`placement` says, a backend may keep them on
        the host and copy them to the device when an iteration reaches the layer.
        """
        return [build(index) for index in range(count)]

    def calibration_ops(self) -> CalibrationOps:
        """The operations of a calibration on this device."""
        return CalibrationOps(self)

    # -- quantization and products --------------------------------------------------------------------------------

    def quantize(self, x: Array) -> tuple[Array, Array]:
        """Per-token dynamic int8: ``[T, K]`` -> codes int8 ``[T, K]``, scale fp32 ``[T]``; see ``quantize_rows``."""
        return quantize_rows(x)

    def igemm(self, x: Array, w: Array) -> Array:
        """The exact product ``x @ w.T`` of int8 codes: ``[T, K]``, ``[N, K]`` -> int32 ``[T, N]``; K up to 131,071."""
        return exact_int_matmul(x.astype(np.float32), w.astype(np.float32)).astype(np.int32)

    @silently
    def product(
        self,
        x: Array,
        weight: NumpyWeight,
        epilogue: ProductEpilogue = ProductEpilogue.STORE,
        activation: str | None = None,
        target: Array = None,
    ) -> Array:
        """``epilogue`` of ``x @ weight.T``: ``[T, in]`` -> ``[T, out]``, or ``[T, out / 2]`` of a gate.

        The product with the matrix comes in fp32. For an int8 weight with dynamic activations, ``x`` is quantized per
        token and ``y = s_x * (s_w * fp32(acc))``. For an int8 weight without, ``y = s_w * sum(code * x)``. If the
        weight or its input has a scale for each group of columns, ``y`` is the sum of these of the groups, added in
        fp32 one after another; a scale of a whole row is then that of each of its groups. An int8
        weight may have a rotation: then ``x`` is first transformed as :func:`.rotation.rotated` says, and for float
        activations rounded to the activation type. The weight's side products are added to it (:mod:`.side_products`),
        and then the bias. :class:`ProductEpilogue` says what becomes of the sum.

        ``activation`` names the function of ``GATE`` and ``ACTIVATE``, one of :data:`ACTIVATIONS`. ``target`` is the
        residual stream of ``ADD``, fp32 ``[T, out]``, which may be overwritten with the result. A stored product is
        written to ``target`` if given, of its shape and type.
        """
        y = self._sums(x, weight)
        if epilogue is ProductEpilogue.STORE_FP32:
            return stored(y, target)
        y = self._round(y)
        if epilogue is ProductEpilogue.STORE:
            return stored(y, target)
        if epilogue is ProductEpilogue.ADD:
            target += y
            return target
        assert activation is not None
        if epilogue is ProductEpilogue.ACTIVATE:
            return self._round(ACTIVATIONS[activation](y.astype(np.float32)))
        return self._gated(y, activation)

    def _gated(self, y: Array, activation: str) -> Array:
        gate, up = np.split(y.astype(np.float32), 2, axis=-1)
        return self._round(ACTIVATIONS[activation](gate) * up)

    def linear(self, x: Array, weight: Any, fp32: bool = False, out: Array = None) -> Array:
        """``x @ weight.T + bias``, see :meth:`product`: ``[T, in]`` -> ``[T, out]`` in the activation type, or fp32.

        ``weight`` is this backend's, here and in the operations that follow, which are products under other names.
        The result is written to ``out`` if given, of that shape and type. ``out`` may be ``x`` if the weight is square.
        """
        return self.product(x, weight, ProductEpilogue.STORE_FP32 if fp32 else ProductEpilogue.STORE, target=out)

    @silently
    def float_linear(self, x: Array, matrix: Any) -> Array:
        """``linear`` in fp32 of a float weight with few outputs, in an order of sums that no other row changes.

        ``matrix`` stays float in every recipe, so nothing observes it.
        """
        return product_by_row(x.astype(np.float32), matrix.values.T)

    def linear_add(self, x: Array, weight: Any, residual: Array) -> Array:
        """``residual + linear(x, weight)``, fp32 ``[T, out]``.

        ``residual`` may be overwritten with the result, and ``x`` with the product if the weight is square.
        """
        return self.product(x, weight, ProductEpilogue.ADD, target=residual)

    @silently
    def all_reduce_add(self, partial: Array, bias: Array = None, residual: Array = None) -> Array:
        """The sum of the ranks' products, as if one rank had computed the whole: fp32 ``[T, out]``.

        ``partial`` is fp32 ``[T, out]``, ``linear`` of this rank's columns, and may be overwritten. ``bias``, fp32
        ``[out]``, is added to the sum. With a ``residual``, fp32 ``[T, out]``, the result is ``residual`` plus the sum
        rounded to the activation type, as :meth:`linear_add` adds it; ``residual`` may be overwritten with it.
        """
        y = self.communicator.all_reduce_add(partial)
        if bias is not None:
            y = y + bias
        if residual is None:
            return y
        residual += self._round(y)
        return residual

    def all_gather_columns(self, part: Array, columns: slice, count: int) -> Array:
        """The columns of all ranks beside each other: fp32 ``[T, count]``.

        ``part`` fp32 ``[T, n]`` are this rank's ``columns``. The others count as zeros, and are added.
        """
        whole = np.zeros((len(part), count), np.float32)
        whole[:, columns] = part
        return self.communicator.all_reduce_add(whole)

    def gated_linear(self, x: Array, weight: Any, activation: str) -> Array:
        """``f(gate) * up`` where ``[gate, up] = linear(x, weight)``: ``[T, in]`` -> ``[T, out / 2]``.

        ``activation`` names ``f``, one of :data:`ACTIVATIONS`, which is computed in fp32.
        """
        return self.product(x, weight, ProductEpilogue.GATE, activation)

    def activated_linear(self, x: Array, weight: Any, activation: str) -> Array:
        """``f(linear(x, weight))``: ``[T, in]`` -> ``[T, out]``.

        ``activation`` names ``f``, one of :data:`ACTIVATIONS`, which is computed in fp32.
        """
        return self.product(x, weight, ProductEpilogue.ACTIVATE, activation)

    @silently
    def experts(
        self,
        x: Array,
        mixture: Mixture,
        residual: Array = None,
        addend: Array = None,
        gate: Array = None,
        routed: Array = None,
        shared: SharedExpert | None = None,
    ) -> Array:
        """The sum of what each token's experts make of it: ``[T, in]`` -> fp32 ``[T, out]``; see :mod:`.mixture`.

        The router reads ``routed``, by default ``x``, which is a :meth:`norm`. An ``addend`` fp32 ``[T, out]``, times
        the ``gate`` fp32 ``[T, 1]`` if there is one, is added to the sum, or what a ``shared`` expert makes of ``x``.
        With a ``residual`` fp32 ``[T, out]``, which may be overwritten, the result is added to that.

        An expert computes :meth:`linear` of :meth:`gated_linear` or :meth:`activated_linear`, each rounded to the
        activation type. The results of a token are multiplied by the router's weights, unless these multiply the
        inputs, and added in fp32 in the order of the experts' ranks.
        """
        if shared is not None:
            addend, gate = shared_result(self, x, shared)
        topk_ids, topk_weights = choose_experts(x if routed is None else routed, mixture)
        if self.choices is not None:
            self.choices.append(topk_ids)

        def result_of(expert: int, tokens: np.ndarray) -> Array:
            factors = input_factors(topk_ids, topk_weights, mixture, expert, tokens)
            if factors is None:
                return expert_result(self, x[tokens], mixture, expert)
            return self._result_of_scaled(x[tokens], factors, mixture, expert)

        found = mix(topk_ids, result_weights(topk_weights, mixture), result_of)
        return self.add_experts(found, residual, addend, gate)

    def _result_of_scaled(self, x: Array, factors: Array, mixture: Mixture, expert: int) -> Array:
        """What one expert makes of rows times ``factors`` fp32 ``[n]``: ``[n, in]`` -> ``[n, out]``.

        The factors multiply the scales of rows that are quantized, else the rows, which are then rounded to the
        activation type: see :func:`.experts.expert_linear`. They also multiply the rows of a weight with side products,
        or with scales of groups.
        """
        weight, activation = mixture.hidden[expert], mixture.activation
        assert activation.gated and activation.limit is None
        if not weight.dynamic or weight.group_size or weight.side_products:
            y = self._sums(self._round(x.astype(np.float32) * factors[:, None]), weight)
        else:
            codes, scale = self.quantize(rotated(x, weight.rotation) if weight.rotation > 1 else x)
            acc = exact_int_matmul(codes.astype(np.float32), weight.values).astype(np.float32)
            y = (scale * factors)[:, None] * (weight.scale * acc)
            y = y if weight.bias is None else y + weight.bias
        return self.linear(self._gated(self._round(y), activation.function), mixture.down[expert])

    def add_experts(self, found: Array, residual: Array, addend: Array, gate: Array) -> Array:
        """What :meth:`experts` returns, of the sum of the experts, fp32 ``[T, out]``; the arguments are its own."""
        if addend is not None:
            found = found + (addend if gate is None else gate * addend)
        return found if residual is None else self.add(residual, found)

    def add(self, residual: Array, addend: Array) -> Array:
        """``residual + addend``, both fp32 ``[T, features]``; ``residual`` may be overwritten with the sum."""
        residual += addend
        return residual

    @silently
    def scalar_gate(self, x: Array, vector: Array) -> Array:
        """``sigmoid(x @ vector)`` of each row: ``[T, in]``, fp32 ``[in]`` -> fp32 ``[T, 1]``, row by row."""
        return sigmoid(product_by_row(x.astype(np.float32), vector[:, None]))

    # -- around the products --------------------------------------------------------------------------------------

    def embed(self, tokens: Array, table: Array, scale: float = 1.0) -> Array:
        """Rows of ``table``, multiplied by ``scale`` in fp32, as the start of the residual stream.

        ``tokens`` int32 ``[T]`` -> fp32 ``[T, features]``.
        """
        rows = table[tokens].astype(np.float32)
        return rows if scale == 1 else rows * np.float32(scale)

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

    def last_tokens(self, x: Array, batch: ForwardBatch) -> Array:
        """The rows whose logits are wanted: ``[T, features]`` -> ``[L, features]``, by default each sequence's last.

        The products that follow in the step are of these rows.
        """
        self._go_on_with_last_tokens(batch)
        if batch.logit_rows is not None:
            return x[batch.logit_rows]
        return x if batch.is_decode else x[batch.cu_seqlens[1:] - 1]

    def last_token_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """The step whose only tokens are each sequence's last one, behind which all others are in the cache.

        Layers get it behind :meth:`last_tokens`. ``batch`` has ``last_positions``.
        """
        assert batch.last_positions is not None
        last = self._of_last_tokens(batch)
        if batch.layer_inputs is not None:
            last = replace(last, layer_inputs=self.last_tokens(batch.layer_inputs, batch))
        return replace(
            last, context_lens=batch.last_positions, max_query_len=1, num_decodes=batch.batch_size, has_drafts=False,
            last_positions=None,
        )  # fmt: skip

    def _of_last_tokens(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` with the last token of each sequence alone."""
        ends = np.arange(batch.batch_size + 1, dtype=np.int32)
        return replace(batch, tokens=batch.tokens[batch.cu_seqlens[1:] - 1], cu_seqlens=ends)

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

    @silently
    def attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """Causal self-attention of a step's tokens over the cache, to which their keys and values are added.

        ``qkv`` is ``[T, spec.qkv_features]``: query, key and value heads side by side, and before them the output's
        gate if there is one. Query and key heads are normalised if the ``spec`` has norms, rotated to their position,
        transformed by :func:`.rotation.rotated_heads` if the cache is int8, and rounded. Keys and values are stored in
        the cache. Then each query attends to its own sequence, with scores and softmax in fp32. The result ``[T, heads
        * head_dim]`` is rounded; if there is a gate it is multiplied by the sigmoid of that in fp32, and rounded again.
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
        return self._round(found * sigmoid(gate.astype(np.float32))) if spec.output_gate else found

    @silently
    def shared_attention(self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """:meth:`attention` whose keys and values another layer added to the cache in this step: nothing is stored.

        ``q`` is ``[T, heads * head_dim]``. The layer has no gate of the output.
        """
        spec = spec.for_cache(cache.key_scales is not None)
        (heads,) = split_heads(q, spec, spec.heads)
        heads = rotate(normalise(heads, spec.q_norm) if spec.q_norm else heads, positions_of(batch), spec.rope)
        heads = self._round(heads if cache.key_scales is None else rotated_heads(heads))
        out, table = np.zeros(heads.shape, np.float32), batch.block_tables[cache.group]
        for b, rows in sequences(batch):
            context_len = int(batch.context_lens[b])
            keys, values = cached(cache, table[b], context_len + rows.stop - rows.start, self.activation_dtype)
            out[rows] = self._attend(heads[rows], keys, values, spec, context_len, spec.window)
        return self._round(out.reshape(q.shape))

    def last_token_shared_attention(
        self, q: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch
    ) -> Array:
        """The rows of :meth:`shared_attention` of each sequence's last token; ``batch`` has ``last_positions``."""
        assert batch.last_positions is not None
        return self.last_tokens(self.shared_attention(q, spec, cache, batch), batch)

    def last_token_attention(self, qkv: Array, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The rows of :meth:`attention` of each sequence's last token, ``[B, heads * head_dim]``.

        ``batch`` has ``last_positions``. The keys and values of all tokens are added to the cache.
        """
        assert batch.last_positions is not None
        return self.last_tokens(self.attention(qkv, spec, cache, batch), batch)

    @silently
    def latent_attention(
        self, q: Array, kv: Array, spec: LatentSpec, expand: Any, cache: LatentCache, batch: ForwardBatch
    ) -> Array:
        """Causal self-attention of a step's tokens over latent rows, to which their own are added; see :mod:`.latent`.

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
                queries[rows], keys, keys[..., : spec.rank], spec.scale, first, segment=LATENT_SEGMENT,
                weight_dtype=self.activation_dtype,
            )  # fmt: skip
        return self._round(by_token_and_head(self._round(means), expand.values).reshape(len(q), -1))

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

    def delta_net_spec(self, spec: DeltaNetSpec) -> DeltaNetSpec:
        """``spec``, whose arrays are fp32 on the host, with them on the device."""
        return replace(
            spec,
            convolution=ShortConvolution(self.array(spec.convolution.taps)),
            decay_rates=self.vector(spec.decay_rates),
            decay_bias=self.vector(spec.decay_bias),
            norm=replace(spec.norm, weight=self.vector(spec.norm.weight)),
        )

    @silently
    def gated_delta_net(
        self, qkvz: Array, gates: Array, spec: DeltaNetSpec, cache: StateCache, batch: ForwardBatch
    ) -> Array:
        """Gated DeltaNet of a step's tokens, as :mod:`.delta_net` defines it: -> ``[T, value_features]``.

        ``qkvz`` is ``[T, channels + value_features]``: queries, keys, values and the output's gate. ``gates`` is fp32
        ``[T, 2 * value_heads]``: what becomes the rates of learning, and then what becomes the decays. The ``cache``
        has the arrays of :func:`.delta_net.state_arrays`.

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
        self, qkv: Array, rates: Array, decays: Array, gate: Array, spec: DeltaNetSpec, cache: StateCache,
        batch: ForwardBatch,
    ) -> Array:  # fmt: skip
        """Kimi Delta Attention of a step's tokens, as :mod:`.delta_net` defines it: -> ``[T, value_features]``.

        It is :meth:`gated_delta_net` with a ``spec`` that is ``per_channel``. ``qkv`` is ``[T, channels]``, ``rates``
        fp32 ``[T, value_heads]`` and ``decays`` fp32 ``[T, value_heads * key_dim]`` before their functions, and
        ``gate`` ``[T, value_features]`` becomes a sigmoid.
        """
        slots = batch.block_tables[cache.group][:, 0]
        mixed = silu(convolved(qkv, spec.convolution, cache["inputs"], slots, batch))
        out = in_chunks(delta_net.ChannelChunk, delta_net.token_inputs(mixed, rates, decays, spec), cache, batch)
        gates = sigmoid(gate.astype(np.float32).reshape(out.shape))
        return self._round((normalise(out, spec.norm) * gates).reshape(len(mixed), -1))

    def mamba2_spec(self, spec: Mamba2Spec) -> Mamba2Spec:
        """``spec``, whose arrays are fp32 on the host, with them on the device."""
        convolution, norm = spec.convolution, spec.norm
        bias = None if convolution.bias is None else self.vector(convolution.bias)
        if norm is not None:
            norm = replace(norm, norm=replace(norm.norm, weight=self.vector(norm.norm.weight)))
        return replace(
            spec,
            convolution=ShortConvolution(self.array(convolution.taps), bias),
            decay_rates=self.vector(spec.decay_rates),
            step_bias=self.vector(spec.step_bias),
            skip=self.vector(spec.skip),
            norm=norm,
        )

    @silently
    def mamba2(self, inputs: Array, spec: Mamba2Spec, cache: StateCache, batch: ForwardBatch) -> Array:
        """The state space of Mamba 2 of a step's tokens, as :mod:`.mamba2` defines it: -> ``[T, features]``.

        ``inputs`` is ``[T, features + channels + heads]``: the output's gate, x, B, C, and what becomes the time steps.
        The ``cache`` has the arrays of :func:`.chunked_state.state_arrays`.

        x, B and C are convolved and activated by SiLU in fp32. The output is normalised and gated in fp32, and rounded.
        """
        slots, ends = batch.block_tables[cache.group][:, 0], (spec.features, spec.features + spec.channels)
        gate, xbc, steps = inputs[:, : ends[0]], inputs[:, ends[0] : ends[1]], inputs[:, ends[1] :]
        mixed = silu(convolved(xbc, spec.convolution, cache["inputs"], slots, batch))
        out = in_chunks(mamba2.StateSpaceChunk, mamba2.token_inputs(mixed, steps, spec), cache, batch)
        return self._round(mamba2.gated(out.reshape(len(mixed), -1), gate, spec.norm))

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

    def sample(self, logits: Array, sampler: SamplerState) -> Array:
        """Choose the next token of each row of a step, as :mod:`.sampling` defines it, from fp32 ``[B, vocab]``.

        Returns int32 ``[2, B]``, or ``[2 + 2 * MAX_LOGPROBS, B]`` in the variant ``FULL``: what ``Choice.packed`` says.
        Row 0 holds the tokens (-1 where no token can be chosen), row 1 the bits of their fp32 log-probabilities. The
        sampler's state advances by the tokens that its sequences get.
        """
        return sample_tokens(logits, sampler).packed()

    def insert_last_tokens(self, tokens: Array, sampler: SamplerState) -> None:
        """Replace -1 among a step's first tokens by the newest token of its sequence, in place.

        ``tokens`` is int32 ``[T]``; token ``i`` belongs to the sequence in row ``sampler.rows[i]``, for the leading
        sequences of the step. So the host can launch a step before it knows the tokens that the previous step chose.
        """
        count = min(len(tokens), len(sampler.rows))
        newest = sampler.columns["last_token"][sampler.rows[:count]]
        tokens[:count] = np.where(tokens[:count] < 0, newest, tokens[:count])

    def write_step(self, target: Array, values: np.ndarray, num_tokens: int, sampler: SamplerState) -> None:
        """:meth:`write` the integers of a step, then :meth:`insert_last_tokens` into the first ``num_tokens`` of them.

        ``target`` and ``values`` are int32 ``[n]``, and hold ``sampler.rows`` too.
        """
        self.write(target, values)
        self.insert_last_tokens(target[:num_tokens], sampler)

    def insert_guesses(self, tokens: Array, drafts: Array, guesses: Array) -> Array:
        """Replace ``-1 - i`` among a step's drafts by guess ``i``, and the token at the same place too, in place.

        Returns the drafts again, in an array that is used for nothing else, so that they can be fetched.

        ``drafts`` is int32 ``[B]``, ``tokens`` int32 with at least as many, and ``guesses`` int32, contiguous. So the
        host can launch a step before it knows the guesses that the step checks.
        """
        places = np.flatnonzero(drafts < 0)
        drafts[places] = tokens[places] = guesses.reshape(-1)[-1 - drafts[places]]
        return drafts.copy()

    def insert_positions(self, positions: Array, sampler: SamplerState) -> None:
        """Replace ``-1 - p`` by ``p`` and the number of tokens that the sequence has been given, in place.

        ``positions`` is int32 ``[..., B]``, contiguous; the sequences are those of ``sampler.rows``. So the host can
        launch a step before it knows how many drafts the previous step accepted.
        """
        moved = -1 - positions + sampler.columns["step"][sampler.rows]
        positions[...] = np.where(positions < 0, moved, positions)

    def most_likely(self, logits: Array, out: Array, ids: Array = None) -> None:
        """Write the most likely token of each row of ``logits`` fp32 ``[n, vocab]`` to ``out`` int32 ``[n]``.

        It is the first of equal ones, and 0 for a row with a NaN or whose largest logit is infinite. With ``ids`` int32
        ``[vocab]``, what stands at its place there is written instead.
        """
        tokens = np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), 0)
        out[...] = tokens if ids is None else ids[tokens]

    def token_logprobs(self, logits: Array, tokens: Array) -> Array:
        """The log-softmax of each row of ``logits`` at its token, and the largest: fp32 ``[n, vocab]``, int32 ``[n]``.

        Returns int32 ``[3, n]``, see :meth:`.TokenScores.packed`. Sums have the same order as in :meth:`sample`.
        """
        return score(logits, tokens).packed()

    # -- shared by the operations ---------------------------------------------------------------------------------

    @silently
    def _round(self, x: Array) -> Array:
        """``x`` in the activation type; too large numbers become infinities."""
        return x.astype(self.activation_dtype, copy=False)

    def _prepared_heads(
        self, qkv: Array, spec: AttentionSpec, positions: Array, int8: bool = False
    ) -> tuple[Array, Array, Array]:
        """Query and key heads of ``qkv``, normalised, rotated and rounded, and value heads as they are.

        Those for an ``int8`` cache are transformed before they are rounded.
        """
        spec = spec.for_cache(int8)
        q, k, v = split_heads(qkv, spec, spec.heads, spec.kv_heads, spec.kv_heads)
        q = rotate(normalise(q, spec.q_norm) if spec.q_norm else q, positions, spec.rope)
        k = rotate(normalise(k, spec.k_norm) if spec.k_norm else k, positions, spec.rope)
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
        """:func:`.attention.attend` with weights in the activation type."""
        return attend(
            q, keys, values, spec.scale, context_len, window, spec.bias, causal, spec.softcap, spec.sinks,
            weight_dtype=self.activation_dtype,
        )  # fmt: skip

    @silently
    def _sums(self, x: Array, weight: NumpyWeight) -> Array:
        """``x @ weight.T`` with its side products and its bias, fp32 ``[T, out]``."""
        if weight.tp_size == 1:
            y = self._rank_product(x, weight)
        else:
            runs = column_groups(weight.shape[1], weight.shape[1] // weight.tp_size)
            y = reduce(add, (self._rank_product(x[:, run], weight.columns(run)) for run in runs))
        return y if weight.bias is None else y + weight.bias

    def _rank_product(self, x: Array, weight: NumpyWeight) -> Array:
        """The product of one rank's columns with its side products."""
        rest = x
        for side in weight.side_products:
            rest = side.remaining(rest)
        y = self._matrix_product(rest, weight)
        for side in weight.side_products:
            y = added(y, side.product(x, self._round))
        return y

    def _matrix_product(self, x: Array, weight: NumpyWeight) -> Array:
        if weight.rotation > 1:
            x = rotated(x, weight.rotation)
        product = product_by_row if x.shape[0] <= FEW_ROWS else np.matmul
        with blas_threads.for_product(x.shape[0], *weight.values.T.shape):
            if weight.scale is None:
                return product(x.astype(np.float32), weight.values.T)
            if weight.group_size:
                return self._grouped_product(x, weight, product)
            if weight.dynamic:
                codes, scale = self.quantize(x)
                acc = exact_int_matmul(codes.astype(np.float32), weight.values).astype(np.float32)
                return scale[:, None] * (weight.scale * acc)
            return weight.scale * product(self._round(x).astype(np.float32), weight.values.T)

    def _grouped_product(self, x: Array, weight: NumpyWeight, product: Callable[[Array, Array], Array]) -> Array:
        """The product whose sums over groups of columns are scaled by themselves, and added one after another."""
        assert weight.scale is not None
        groups = column_groups(weight.shape[1], weight.group_size)
        w_scale = np.broadcast_to(weight.scale.reshape(weight.shape[0], -1), (weight.shape[0], len(groups)))
        if not weight.dynamic:
            x = self._round(x).astype(np.float32)
            sums = (product(x[:, k], weight.values[:, k].T) for k in groups)
            return reduce(add, (w_scale[:, g] * total for g, total in enumerate(sums)))
        codes, scale = quantize_rows(x, weight.input_group_size)
        x, x_scale = codes.astype(np.float32), np.broadcast_to(scale.reshape(len(x), -1), (len(x), len(groups)))
        exact = (exact_int_matmul(x[:, k], weight.values[:, k]).astype(np.float32) for k in groups)
        return reduce(add, (x_scale[:, g, None] * (w_scale[:, g] * acc) for g, acc in enumerate(exact)))


def column_groups(columns: int, size: int) -> list[slice]:
    """Runs of ``size`` neighbouring columns, of which ``columns`` is a multiple."""
    return [slice(first, first + size) for first in range(0, columns, size)]


def exact_int_matmul(x: Array, w: Array) -> Array:
    """``x @ w.T`` of integers held in fp32, exactly: fp32 ``[T, K]``, ``[N, K]`` -> fp32 or int32 ``[T, N]``."""
    if x.shape[1] <= EXACT_IN_FP32:
        return x @ w.T
    acc = np.zeros((x.shape[0], w.shape[0]), np.int32)
    for i in range(0, x.shape[1], EXACT_IN_FP32):
        chunk = slice(i, i + EXACT_IN_FP32)
        acc += (x[:, chunk] @ w[:, chunk].T).astype(np.int32)
    return acc


def sequences(batch: ForwardBatch) -> Iterator[tuple[int, slice]]:
    """The number of each sequence that has tokens, and its rows among the step's tokens."""
    ends = batch.cu_seqlens
    for b in range(batch.batch_size):
        if ends[b] < ends[b + 1]:
            yield b, slice(int(ends[b]), int(ends[b + 1]))


def in_chunks(kind: type[chunked_state.Chunk], tokens: Any, cache: StateCache, batch: ForwardBatch) -> np.ndarray:
    """The results of a recurrence of a step's tokens: see :func:`.chunked_state.outputs`."""
    slots, found = (
        batch.block_tables[cache.group][:, 0],
        np.zeros((len(tokens), *cache["deltas"].shape[2:]), np.float32),
    )
    for b, rows in sequences(batch):
        is_draft = bool(batch.has_drafts and b > 0 and slots[b] == slots[b - 1] != NULL_BLOCK)
        start = int(batch.context_lens[b])
        found[rows] = chunked_state.outputs(kind, tokens.of(rows), cache, int(slots[b]), start, is_draft)
    return found


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


def positions_of(batch: ForwardBatch) -> Array:
    """Each token's position in its sequence, ``[T]``; 0 for the padding of a step."""
    ends = batch.cu_seqlens
    positions = np.zeros(len(batch.tokens), np.int64)
    positions[: ends[-1]] = np.arange(int(ends[-1])) - np.repeat(ends[:-1] - batch.context_lens, np.diff(ends))
    return positions


def split_heads(x: np.ndarray, spec: AttentionSpec, *counts: int) -> list[np.ndarray]:
    """``[T, sum(counts) * head_dim]`` split into parts of ``counts`` heads, each fp32 ``[T, count, head_dim]``."""
    heads = x.astype(np.float32).reshape(x.shape[0], sum(counts), spec.head_dim)
    return np.split(heads, np.cumsum(counts)[:-1], axis=1)
