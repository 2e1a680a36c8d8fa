"""A feed-forward layer of experts on a GPU, from the residual stream to its result.

The launches depend on the number of tokens alone, so that they can be captured: no number goes to the host. What a
token gets has the same bits whatever their number, as the kernels share their orders of sums and their roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ....backend.expert_values import ExpertActivation
from ....backend.values import Norm
from ..arrays import PAD, nbytes_of, pitch_of, round_up
from ..constants import GROUPED_PRODUCTS
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext
from ..rowwise.rows import CODES, ROW, RowKernels, RowTarget, array_source, array_target
from .adapters import ExpertAdapterArrays, PairAdapterKernels, PairSide, StepAdapters
from .fetch import CachedLayer, FetchKernels
from .few_tokens import FewTokens
from .float_products import ExpertFloatProducts
from .grouped_gemm import GroupedGemm
from .grouped_gemm_hopper import GroupedGemmHopper
from .pairs import Addend, PairKernels, SortedPairs
from .router import FEW_ROWS, RouterKernels
from .weights import ExpertMatrices, RouterWeights, SharedExpertWeights

if TYPE_CHECKING:
    import cupy as cp

Empty = Callable[[tuple[int, ...], Any], "cp.ndarray"]
"""Uninitialised memory of a shape and a dtype, without gaps, aligned to 16 bytes."""


@dataclass(frozen=True)
class ExpertLayerWeights:
    """A router and the two matrices of each expert, whose ``activation`` stands between them.

    With ``cached`` the matrices have slots of its cache.
    """

    router: RouterWeights
    hidden: ExpertMatrices
    down: ExpertMatrices
    activation: ExpertActivation
    cached: CachedLayer | None = None

    @property
    def features(self) -> int:
        """Hidden values of an expert."""
        return self.down.in_features


@dataclass(frozen=True)
class Routing:
    """What a router said of ``T`` tokens: ``ids`` int32 and ``weights`` fp32, ``[T, top_k]``."""

    ids: cp.ndarray
    weights: cp.ndarray


class ExpertKernels:
    """The kernels of mixtures of experts on one GPU."""

    def __init__(self, launcher: Launcher, rows: RowKernels) -> None:
        self.router, self.pairs = RouterKernels(launcher), PairKernels(launcher)
        self.few_tokens, self.fetch = FewTokens(launcher), FetchKernels(launcher)
        self.floats, self.adapters = ExpertFloatProducts(launcher), PairAdapterKernels(launcher)
        hopper = GroupedGemmHopper(launcher)
        self.grouped = hopper if hopper.supported else GroupedGemm(launcher)
        self._rows = rows

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        for kernels in (
            *(RouterKernels, PairKernels, FetchKernels, FewTokens, GroupedGemm, GroupedGemmHopper, ExpertFloatProducts),
            PairAdapterKernels,
        ):
            yield from kernels.instantiations(capability)

    def forward(
        self,
        step: StepContext | None,
        x: cp.ndarray,
        norm: Norm | None,
        layer: ExpertLayerWeights,
        out: cp.ndarray,
        add: bool,
        empty: Empty,
        rows: cp.ndarray | None = None,
        addend: Addend | None = None,
        latent: cp.ndarray | None = None,
        shared: SharedExpertWeights | None = None,
        adapters: StepAdapters | None = None,
    ) -> Routing:
        """``experts(norm(x))``: fp32 ``[T, in]`` -> ``out`` fp32 ``[T, out]``, or added to it. ``out`` may be ``x``.

        Both have padded rows. The router and the experts read the same norm, or the rows themselves if there is none.
        Experts whose inputs are not quantized read ``rows``: the norm in fp16, transformed as they transform their
        input, with padded rows. An ``addend`` is added to their sum. Experts whose inputs are quantized read
        ``latent``, fp16 with padded rows, if it is given, and not the norm. ``empty`` gives memory that must stay until
        the kernels have run. What a ``shared`` expert makes of the norm, which needs :meth:`takes_shared`, is added to
        the sum instead of an ``addend``. With ``adapters`` there is no ``shared`` one.
        """
        tokens, router, hidden = len(x), layer.router, layer.hidden
        assert self.router.supports(router) and hidden.dynamic == (rows is None)
        logits = empty((tokens, router.spec.num_experts), np.float32)
        codes = empty((tokens, hidden.pitch), np.int8) if hidden.dynamic else None
        scales = empty((tokens,), np.float32) if hidden.dynamic else None
        normed = empty((tokens, round_up(router.in_features, PAD)), np.float32) if tokens > FEW_ROWS else None
        gate = None
        if shared is not None and shared.gate is not None:
            gate = shared.gate, empty((tokens,), np.float32)
        if latent is None:
            self.router.logits(step, x, norm, router, logits, normed, codes, scales, hidden.rotation, gate)
        else:
            self.router.logits(step, x, norm, router, logits, normed)
            if codes is not None and scales is not None:
                target: RowTarget = ((codes.data.ptr, scales.data.ptr, hidden.pitch), CODES, ROW)
                moved, rotation = nbytes_of(latent, codes), hidden.rotation
                source, features = array_source(latent), hidden.in_features
                self._rows.transform(step, source, target, tokens, features, bytes_moved=moved, rotation=rotation)
        routing = Routing(*(empty((tokens, router.spec.top_k), kind) for kind in (np.int32, np.float32)))
        shared_parts, adapted = 0 if shared is None else shared.parts(layer.down), adapters is not None
        is_few = self.few_tokens.supports(tokens, router.spec, hidden, layer.down, shared_parts, adapted)
        assert not (shared_parts and adapted)
        if layer.cached is not None or adapted or not is_few:
            self.router.choose(step, logits, router, routing.ids, routing.weights)
        if layer.cached is not None:
            self.fetch.launch(step, routing.ids, layer.cached)
        if is_few:
            pairs = tokens * (router.spec.top_k + shared_parts)
            values = empty((pairs, round_up(layer.features, PAD)), np.float16)
            chosen, factors = (routing.ids, routing.weights), None if gate is None else gate[1]
            before = behind = None
            if adapters is not None:
                slots, weights = empty((pairs,), np.int32), routing.weights if router.spec.scales_input else None
                before, behind = (
                    PairSide(of, slots, empty((pairs, of.columns), np.float16))
                    for of in (adapters.adapters.hidden, adapters.adapters.down)
                )
                self.adapters.shrink_unsorted(step, adapters.x, weights, routing.ids, adapters.slots, before)
            self.few_tokens.hidden(
                step, logits, router, codes, scales, hidden, layer.activation, layer.down, values, shared, before
            )
            if behind is not None:
                self.adapters.shrink_unsorted(step, values, None, routing.ids, None, behind)
            self.few_tokens.down(
                step, logits, router, values, layer.down, *chosen, out, add, addend, shared, factors, behind
            )
        else:
            inputs = rows if codes is None else (codes, scales)
            self.many_tokens(step, inputs, routing, layer, out, add, empty, addend, adapters)
        return routing

    def takes_shared(self, tokens: int, layer: ExpertLayerWeights, shared: SharedExpertWeights) -> bool:
        """Whether :meth:`forward` computes a shared expert of ``tokens`` tokens with the others."""
        spec, hidden, down = layer.router.spec, layer.hidden, layer.down
        return self.few_tokens.takes_shared(spec, hidden, down, shared) and self.few_tokens.supports(
            tokens, spec, hidden, down, shared.parts(down)
        )

    def many_tokens(
        self,
        step: StepContext | None,
        inputs: cp.ndarray | tuple[cp.ndarray, cp.ndarray],
        routing: Routing,
        layer: ExpertLayerWeights,
        out: cp.ndarray,
        add: bool,
        empty: Empty,
        addend: Addend | None = None,
        adapters: StepAdapters | None = None,
    ) -> None:
        """The same from the tokens' inputs and their experts.

        ``inputs`` are codes int8 ``[T, pitch]`` and their scales fp32 ``[T]``, or fp16 rows, of tokens that are
        transformed already if ``hidden`` transforms its input.
        """
        spec, down = layer.router.spec, layer.down
        pairs, factors = routing.ids.size, routing.weights if layer.router.spec.scales_input else None
        offsets, order, places = (empty((count,), np.int32) for count in (spec.num_experts + 1, pairs, pairs))
        hidden = empty((pairs, round_up(layer.features, PAD)), np.float16)
        slots, sorted_slots = None, None
        if adapters is not None:
            slots, sorted_slots = adapters.slots, empty((pairs,), np.int32)
        counters = empty((GROUPED_PRODUCTS,), np.int32)
        ordered = SortedPairs(offsets, order, places, slots=sorted_slots, claimed=counters)

        def side_of(x: cp.ndarray, of: ExpertAdapterArrays, by_pair: bool) -> PairSide | None:
            """The side product of sorted pairs with one of the weights, whose inputs are ready."""
            if adapters is None or sorted_slots is None:
                return None
            side = PairSide(of, sorted_slots, empty((pairs, of.columns), np.float16))
            self.adapters.shrink(step, x, by_pair, None if by_pair else factors, ordered, spec.top_k, side)
            return side

        side = None
        if isinstance(inputs, tuple):
            row_codes, row_scales = empty((pairs, pitch_of(inputs[0])), np.int8), empty((pairs,), np.float32)
            codes, scales = inputs
            quantized = replace(ordered, codes=row_codes, scales=row_scales)
            self.pairs.sort(step, routing.ids, codes, scales, factors, quantized, slots)
            if adapters is not None:
                side = side_of(adapters.x, adapters.adapters.hidden, False)
            claimed = counters[:1]
            self.grouped.launch(
                step, row_codes, row_scales, offsets, claimed, layer.hidden, hidden, layer.activation, side=side
            )
        else:
            assert not spec.scales_input, "the weights of experts multiply quantized inputs only"
            self.pairs.sort(step, routing.ids, None, None, None, ordered, slots)
            if adapters is not None:
                side = side_of(adapters.x, adapters.adapters.hidden, False)
            self.floats.launch(
                step, inputs, order, spec.top_k, offsets, layer.hidden, hidden, layer.activation, side=side
            )
        if adapters is not None:
            side = side_of(hidden, adapters.adapters.down, True)
        results = empty((pairs, round_up(down.out_features, PAD)), np.float16)
        if down.dynamic:
            codes, scales = empty((pairs, down.pitch), np.int8), empty((pairs,), np.float32)
            self._transform(step, hidden, ((codes.data.ptr, scales.data.ptr, down.pitch), CODES, ROW), codes, layer)
            early = layer.hidden.dynamic
            claimed = counters[1:]
            self.grouped.launch(step, codes, scales, offsets, claimed, down, results, early=early, side=side)
        else:
            rotated = hidden
            if down.rotation > 1:
                rotated = empty(hidden.shape, np.float16)
                self._transform(step, hidden, array_target(rotated), rotated, layer)
            self.floats.launch(step, rotated, None, 1, offsets, down, results, side=side)
        weights = None if spec.scales_input else routing.weights
        self.pairs.weighted_sum(step, results, places, weights, spec.top_k, out, add, addend)

    def _transform(
        self,
        step: StepContext | None,
        hidden: cp.ndarray,
        target: RowTarget,
        written: cp.ndarray,
        layer: ExpertLayerWeights,
    ) -> None:
        """Write the hidden values of all pairs as ``down`` reads them."""
        self._rows.transform(
            step,
            array_source(hidden),
            target,
            len(hidden),
            layer.features,
            bytes_moved=nbytes_of(hidden, written),
            rotation=layer.down.rotation,
        )
