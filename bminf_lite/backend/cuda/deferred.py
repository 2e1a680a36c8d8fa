"""The values that the GPU's operations exchange beside arrays: weights, codes, and deferred values.

An operation may return a deferred value (:class:`DeferredMatmul`, :class:`DeferredActivation`, :class:`ResidualStream`,
:class:`DeferredNorm`) instead of an array: an int32 product that is not scaled yet, a norm that is not computed yet.
The next operation's kernel computes it while reading, which saves a pass over memory. The results are bit-identical.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import cupy as cp

from ...cuda.kernels.arrays import address
from ...cuda.kernels.constants import Source, Target
from ...cuda.kernels.gemm.igemm import GemmPlan
from ...cuda.kernels.gemm.layouts import Layout
from ...cuda.kernels.rowwise.rows import NO_ROWS, RowSource, RowTarget, array_source, array_target
from ..values import Norm
from .adapter_bank import AdapterBank

FROM_INT32, CODES = int(Source.FROM_INT32), int(Target.CODES)


@dataclass(frozen=True)
class Outliers:
    """Input columns of an int8 weight that stay fp16: ``index`` int32 ``[n]``, and ``values`` fp16 ``[n, out]``.

    Rows of ``values`` are padded; the codes of these columns are zero.
    """

    index: cp.ndarray
    values: cp.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.index.nbytes + self.values.nbytes)


@dataclass(frozen=True)
class LowRank:
    """An adapter (:class:`~bminf_lite.backend.side_products.Adapter`): ``down`` is an fp16 weight ``[rank, in]``.

    ``scale`` is fp32 ``[rank]``, and ``values`` fp16 ``[rank, out]``; rows of ``values`` are padded.
    """

    down: Weight
    scale: cp.ndarray
    values: cp.ndarray

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + int(self.scale.nbytes + self.values.nbytes)


SideProduct = Outliers | LowRank
"""What is added to a weight's product: inputs fp16 ``[T, n]`` times ``values`` ``[n, out]``."""


@dataclass(eq=False, slots=True)
class QuantizedActivations:
    """Quantized activations int8 in ``layout``, and the rows' scales fp32."""

    layout: Layout
    values: cp.cuda.MemoryPointer
    scales: cp.cuda.MemoryPointer

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes + 4 * self.layout.rows


@dataclass(frozen=True)
class Weight:
    """A weight matrix on the GPU, ``[out_features, in_features]``.

    ``matrix`` holds int8 codes as ``plan`` lays them out, or rows of ``pitch`` int8 or fp16 numbers. ``scale`` fp32
    ``[out]`` is None for fp16; if ``group_size`` columns share a scale, it is fp16 or fp32 ``[groups, out]`` in padded
    rows. With a ``plan``, activations are quantized per token. ``side_products`` are added to the product. ``rotation``
    is the block of its inputs' transform, see :mod:`bminf_lite.backend.rotation`. ``adapters`` are those that the rows
    of a step choose among.
    """

    matrix: cp.ndarray
    scale: cp.ndarray | None
    bias: cp.ndarray | None
    out_features: int
    in_features: int
    pitch: int
    plan: GemmPlan | None = None
    side_products: tuple[SideProduct, ...] = ()
    rotation: int = 1
    group_size: int = 0
    adapters: AdapterBank | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        parts = (self.matrix, self.scale, self.bias, *self.side_products)
        return sum(int(part.nbytes) for part in parts if part is not None)

    @cached_property
    def alone(self) -> Weight:
        """The matrix without what is added to its product: side products, adapters and bias."""
        return replace(self, bias=None, side_products=(), adapters=None)

    @cached_property
    def without_adapters(self) -> Weight:
        """The weight for a step whose rows have no adapter."""
        return replace(self, adapters=None)

    @property
    def is_row_major(self) -> bool:
        """Whether ``matrix`` holds rows of ``pitch`` numbers."""
        return self.plan is None or self.plan.layouts.is_row_major


@dataclass(frozen=True)
class DeferredMatmul:
    """``x @ weight.T`` before scaling: int32 sums ``acc`` in ``layout``, and the rows' scales."""

    acc: cp.ndarray
    layout: Layout
    x_scale: cp.cuda.MemoryPointer
    weight: Weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.rows, self.weight.out_features


@dataclass(frozen=True)
class DeferredActivation:
    """``activation(source)``, or if ``gated`` ``activation(gate) * up`` of a source with gate and up side by side."""

    source: DeferredMatmul | cp.ndarray
    activation: str
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape[0], self.source.shape[1] // (2 if self.gated else 1)


@dataclass(frozen=True)
class NormAddend:
    """``norm(values)``, which is to be added to the residual stream; ``values`` fp32 ``[T, features]``.

    The sum is then multiplied by ``scale``.
    """

    values: cp.ndarray
    norm: Norm
    scale: float = 1.0


class AddingRank(Protocol):
    """A rank that adds sums over all ranks, see :class:`.peers.PeerRank`."""

    def add(self, partial: cp.ndarray, bias: cp.ndarray | None, out: cp.ndarray, add: bool) -> None:
        """``out`` = the sum of all ranks' ``partial``, plus ``bias``; or with ``add``, that rounded is added."""

    def add_and_quantize(
        self, pending: RankSum, values: cp.ndarray, norm: Norm, rotation: int, out: QuantizedActivations
    ) -> None:
        """Add a sum to ``values``, and write the codes of the rows' norm, rotated in blocks of ``rotation``."""


@dataclass(eq=False, slots=True)
class RankSum:
    """The sum of all ranks' ``partial``, fp32 ``[T, features]``, and a ``bias``: few rows.

    ``rank`` adds it. It can also write the codes of the rows' norm at once.
    """

    rank: AddingRank
    partial: cp.ndarray
    bias: cp.ndarray | None


class RowOwner(Protocol):
    """What has divided a residual stream, see :class:`.divided_rows.DividedRows`."""

    def codes(self, stream: ResidualStream, norm: Norm, layout: Layout, rotation: int) -> QuantizedActivations:
        """The codes of a norm of the stream, of all rows; they are valid until ranks meet again."""

    def gather(self, stream: ResidualStream) -> None:
        """Complete the stream: all ranks get all rows."""


@dataclass(eq=False, slots=True)
class OwnedRows:
    """The ``rows`` of a residual stream that are on this rank; others are stale. ``owner`` completes it.

    If it ``is_pending``, the ranks' parts of a product and the ``bias`` have not been added to these rows.
    """

    owner: RowOwner
    rows: slice
    bias: cp.ndarray | None
    is_pending: bool = True


@dataclass
class ResidualStream:
    """The residual stream fp32 ``[T, features]``, and a product, a norm or a sum that is not added to it yet.

    A product may be sums that are not scaled yet, or fp16 rows. A stream may be ``divided`` among ranks. Then nothing
    else is pending.

    ``norms`` are the deferred norms of its present value, which must be computed before the value changes. The
    references are weak because a norm refers to its stream: a cycle would keep the memory of both until the garbage
    collector runs.
    """

    values: cp.ndarray
    pending: DeferredMatmul | NormAddend | RankSum | cp.ndarray | None = None
    norms: list[weakref.ref[DeferredNorm]] = field(default_factory=list)
    divided: OwnedRows | None = None

    @property
    def shape(self) -> tuple[int, int]:
        shape: tuple[int, int] = self.values.shape
        return shape


@dataclass(eq=False)
class DeferredNorm:
    """A norm of the residual stream. ``values`` fp32 are set if the norm was computed into an array, which a kernel may
    do while it makes codes of it.

    A norm is ``used`` once a kernel has computed it while reading. If the residual stream changes after that, it is
    ``stale`` and must not be read again. If several products read one norm, as all layers of a decoder read the
    encoder's output, its ``codes``, and the block of their rotation, are kept from the second on. ``is_shared``: the
    next two products read it, see :meth:`.ProductOperations.shared`.
    """

    residual: ResidualStream
    norm: Norm
    values: cp.ndarray | None = None
    used: bool = False
    stale: bool = False
    codes: tuple[QuantizedActivations, int] | None = None
    is_shared: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.residual.shape


def row_source(x: cp.ndarray | DeferredMatmul | None) -> RowSource:
    """The kernel arguments for reading padded rows of values or an unscaled product; None reads no rows."""
    if x is None:
        return NO_ROWS
    if isinstance(x, DeferredMatmul):
        weight, layout = x.weight, x.layout
        scales = x.x_scale.ptr, address(weight.scale), address(weight.bias)
        return (x.acc.data.ptr, *scales, layout.ld), FROM_INT32, int(layout.order)
    return array_source(x)


def row_target(x: cp.ndarray | QuantizedActivations) -> RowTarget:
    """The kernel arguments for writing codes or padded rows of values."""
    if isinstance(x, QuantizedActivations):
        return (x.values.ptr, x.scales.ptr, x.layout.ld), CODES, int(x.layout.order)
    return array_target(x)


Deferred = DeferredMatmul | DeferredActivation
"""A deferred value that reads no residual stream."""


def nbytes_of(*values: cp.ndarray | QuantizedActivations | Deferred | None) -> int:
    """The sum of the values' bytes."""
    total = 0
    for value in values:
        value = value.source if isinstance(value, DeferredActivation) else value
        total += 0 if value is None else value.acc.nbytes if isinstance(value, DeferredMatmul) else value.nbytes
    return total
