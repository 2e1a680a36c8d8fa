"""What a model is loaded into: weights, tables, vectors and banks of adapters on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ..adapter_slots import AdapterBank, Bank, SavedBank
from ..calibration import CalibrationOps
from ..expert_values import ExpertActivation, ExpertBiases, RouterSpec
from ..functions import silently
from ..latent import NumpyLatentWeight, float_matrix
from ..latent import split_heads as split_latent_heads
from ..mixture import Mixture, make_mixture, with_expert_banks
from ..quantization import HostWeight, int8_parts, scale_columns, stack_biases, stack_outliers
from ..side_products import Adapter, SideProduct
from ..values import Array, DeltaNetSpec, LatentSpec, Mamba2Spec, ShortConvolution
from .step import StepOperations

T = TypeVar("T")


@dataclass(frozen=True)
class NumpyWeight:
    """A weight matrix ``[out, in]`` on the device.

    ``values`` holds fp32 weights, or int8 codes as fp32 numbers (exact, and BLAS multiplies them) with ``scale`` fp32
    ``[out]``, or ``[out, groups]`` with one for each group of neighbouring columns. ``dynamic``: activations are
    quantized, per token, or with an ``input_group_size`` per group of that many elements. ``bias`` is fp32 ``[out]``.
    ``side_products`` are added to its product. ``rotation`` is the block of its inputs' transform, see
    :mod:`..rotation`.

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
            self,
            values=self.values[:, columns],
            bias=None,
            tp_size=1,
            scale=None if self.scale is None else scale_columns(self.scale, self.shape[1], columns),
            side_products=tuple(side for side in found if side is not None),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads: values, scale and bias."""
        return sum(x.nbytes for x in (self.values, self.scale, self.bias) if x is not None)


class WeightOperations(StepOperations):
    """Operations that load a model, and those that make what a calibration and an adapter need."""

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

    def with_expert_adapters(self, base: Any, widths: Sequence[int], features: int) -> tuple[Any, Bank]:
        """The mixture ``base`` with a bank of adapters of its experts, and the bank. There must be ``adapter_slots``.

        ``widths`` are the rows of an expert's matrices, those before the activation first, which have ``features``
        columns; the last one has ``widths[0]``. The bank's sections are the matrices of one expert after another.
        """
        return with_expert_banks(self, base, widths, features)

    def saved_bank(self, rows: int, columns: int) -> Any:
        """Room for a matrix ``[rows, columns]`` in each of the ``adapter_slots``; two operations read it."""
        assert self.adapter_slots is not None
        return SavedBank(self.adapter_slots, self._round)

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

    def delta_net_spec(self, spec: DeltaNetSpec) -> DeltaNetSpec:
        """``spec``, whose arrays are fp32 on the host, with them on the device."""
        return replace(
            spec,
            convolution=ShortConvolution(self.array(spec.convolution.taps)),
            decay_rates=self.vector(spec.decay_rates),
            decay_bias=self.vector(spec.decay_bias),
            norm=replace(spec.norm, weight=self.vector(spec.norm.weight)),
        )

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

    def calibration_ops(self) -> CalibrationOps:
        """The operations of a calibration on this device."""
        return CalibrationOps(self)
