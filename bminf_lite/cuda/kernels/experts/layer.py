"""A feed-forward layer of experts on a GPU, from the residual stream to its result.

The launches depend on the number of tokens alone, so that they can be captured: no number goes to the host. What a
token gets has the same bits whatever their number, as the kernels share their orders of sums and their roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ....backend.expert_values import ExpertActivation
from ....backend.values import Norm
from ..arrays import PAD, nbytes_of, pitch_of, round_up
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext
from ..rowwise.rows import CODES, ROW, RowKernels, array_source
from .few_tokens import FewTokens
from .grouped_gemm import GroupedGemm
from .grouped_gemm_hopper import GroupedGemmHopper
from .pairs import PairKernels, SortedPairs
from .router import FEW_ROWS, RouterKernels
from .weights import ExpertMatrices, RouterWeights

if TYPE_CHECKING:
    import cupy as cp

Empty = Callable[[tuple[int, ...], Any], "cp.ndarray"]
"""Uninitialised memory of a shape and a dtype, without gaps, aligned to 16 bytes."""


@dataclass(frozen=True)
class ExpertLayerWeights:
    """A router and the two matrices of each expert, whose ``activation`` stands between them."""

    router: RouterWeights
    hidden: ExpertMatrices
    down: ExpertMatrices
    activation: ExpertActivation

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
        self.few_tokens = FewTokens(launcher)
        hopper = GroupedGemmHopper(launcher)
        self.grouped = hopper if hopper.supported else GroupedGemm(launcher)
        self._rows = rows

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        for kernels in (RouterKernels, PairKernels, FewTokens, GroupedGemm, GroupedGemmHopper):
            yield from kernels.instantiations(capability)

    def forward(
        self, step: StepContext | None, x: cp.ndarray, norm: Norm, layer: ExpertLayerWeights, out: cp.ndarray,
        add: bool, empty: Empty,
    ) -> Routing:  # fmt: skip
        """``experts(norm(x))``: fp32 ``[T, in]`` -> ``out`` fp32 ``[T, out]``, or added to it. ``out`` may be ``x``.

        Both have padded rows. The router and the experts read the same norm. ``empty`` gives memory that must stay
        until the kernels have run.
        """
        tokens, router, pitch = len(x), layer.router, layer.hidden.pitch
        assert self.router.supports(router) and layer.hidden.rotation == 1
        logits = empty((tokens, router.spec.num_experts), np.float32)
        codes, scales = empty((tokens, pitch), np.int8), empty((tokens,), np.float32)
        normed = empty((tokens, pitch), np.float32) if tokens > FEW_ROWS else None
        self.router.logits(step, x, norm, router, logits, normed, codes, scales)
        routing = Routing(*(empty((tokens, router.spec.top_k), kind) for kind in (np.int32, np.float32)))
        if self.few_tokens.supports(tokens, router.spec, layer.hidden, layer.down):
            hidden = empty((tokens * router.spec.top_k, round_up(layer.features, PAD)), np.float16)
            self.few_tokens.hidden(step, logits, router, codes, scales, layer.hidden, layer.activation, hidden)
            self.few_tokens.down(step, logits, router, hidden, layer.down, routing.ids, routing.weights, out, add)
        else:
            self._many_tokens(step, logits, codes, scales, routing, layer, out, add, empty)
        return routing

    def _many_tokens(
        self, step: StepContext | None, logits: cp.ndarray, codes: cp.ndarray, scales: cp.ndarray, routing: Routing,
        layer: ExpertLayerWeights, out: cp.ndarray, add: bool, empty: Empty,
    ) -> None:  # fmt: skip
        """From logits fp32 ``[T, experts]`` and quantized tokens, int8 ``[T, pitch]`` and fp32 ``[T]``."""
        router, down, features = layer.router, layer.down, layer.features
        experts, pairs = router.spec.num_experts, routing.ids.size
        offsets, order, places = (empty((count,), np.int32) for count in (experts + 1, pairs, pairs))
        row_codes, row_scales = empty((pairs, pitch_of(codes)), np.int8), empty((pairs,), np.float32)
        ordered = SortedPairs(offsets, order, places, row_codes, row_scales)
        self.router.choose(step, logits, router, routing.ids, routing.weights)
        factors = routing.weights if router.spec.scales_input else None
        self.pairs.sort(step, routing.ids, codes, scales, factors, ordered)
        hidden = empty((pairs, round_up(features, PAD)), np.float16)
        self.grouped.launch(step, ordered.codes, ordered.scales, offsets, layer.hidden, hidden, layer.activation)
        hidden_codes, hidden_scales = empty((pairs, down.pitch), np.int8), empty((pairs,), np.float32)
        target = (hidden_codes.data.ptr, hidden_scales.data.ptr, down.pitch), CODES, ROW
        self._rows.transform(
            step, array_source(hidden), target, pairs, features, bytes_moved=nbytes_of(hidden, hidden_codes),
            rotation=down.rotation,
        )  # fmt: skip
        results = empty((pairs, round_up(down.out_features, PAD)), np.float16)
        self.grouped.launch(step, hidden_codes, hidden_scales, offsets, down, results, early=True)
        weights = None if router.spec.scales_input else routing.weights
        self.pairs.weighted_sum(step, results, places, weights, router.spec.top_k, out, add)
