"""A mixture of experts: feed-forward layers of which a router chooses some for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...backend.base import Backend
from ...backend.expert_values import ExpertActivation, RouterSpec
from ...backend.mixture import Mixture
from ...backend.quantization import HostWeight
from ...backend.values import Array, ForwardBatch, LayerCache
from ..spec import Fold, Tensors, linear, router, weights_of
from .part import LayerSource, Part, PartTensors


@dataclass(frozen=True)
class ExpertsPart(Part):
    """Gated feed-forward layers of ``inner_size`` hidden units, of which ``router`` chooses some for each token.

    The matrices of expert ``e`` are ``{experts}.{e}.{gate}`` and so on. ``fused`` are the names, after ``experts``, of
    tensors that hold gate and up of all experts ``[experts, 2 * inner_size, in]``, and all ``down``.
    """

    hidden_size: int
    inner_size: int
    activation: str
    router: RouterSpec
    router_name: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: tuple[str, str] = ("gate_up_proj", "down_proj")

    @property
    def undivided(self) -> str | None:
        return "experts are not divided among ranks"

    def stated(self, layer: str) -> PartTensors:
        """Factors move from the ``up`` of an expert to its ``down``.

        None move from the norm before the router: they would be the same for all experts.
        """
        chooser, experts = f"{layer}.{self.router_name}", self._expert_names(layer)
        tensors: Tensors = router(chooser, (self.router.num_experts, self.hidden_size))
        for gate, up, down in experts:
            tensors |= linear(gate, (self.inner_size, self.hidden_size))
            tensors |= linear(up, (self.inner_size, self.hidden_size))
            tensors |= linear(down, (self.hidden_size, self.inner_size))
        readers = (chooser, *(name for gate, up, _ in experts for name in (gate, up)))
        inner, outer = (f"{layer}.{self.experts}.{name}" for name in self.fused)
        return PartTensors(
            tensors,
            weights_of(*readers),
            weights_of(*(down for _, _, down in experts)),
            tuple(Fold(weights_of(up), weights_of(down)) for _, up, down in experts),
            rotatable=weights_of(*(down for _, _, down in experts)),
            foldable=False,
            fused={
                inner: tuple(weights_of(gate, up) for gate, up, _ in experts),
                outer: tuple(weights_of(down) for _, _, down in experts),
            },
            bounded=tuple((gate, up, down) for gate, up, down in (weights_of(*names) for names in experts)),
        )

    def _expert_names(self, layer: str) -> list[tuple[str, str, str]]:
        """Gate, up and down of each expert."""
        prefixes = (f"{layer}.{self.experts}.{expert}" for expert in range(self.router.num_experts))
        return [(f"{prefix}.{self.gate}", f"{prefix}.{self.up}", f"{prefix}.{self.down}") for prefix in prefixes]

    def build(self, source: LayerSource) -> Experts:
        weights, experts = source.weights, self._expert_names(source.name)

        def matrices(*names: str) -> Sequence[HostWeight]:
            return [weights.weight(name) for name in weights_of(*names)]

        mixture = source.ops.mixture(
            self.router,
            np.asarray(weights.vector(f"{source.name}.{self.router_name}.weight")).astype(np.float32),
            (matrices(gate, up) for gate, up, _ in experts),
            (matrices(down) for _, _, down in experts),
            ExpertActivation(self.activation),
        )
        return Experts(source.ops, mixture)


@dataclass(frozen=True)
class Experts:
    """Computes :class:`ExpertsPart`."""

    ops: Backend
    mixture: Mixture

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool) -> Array:
        """The sum of what each token's experts make of it, fp32 ``[T, features]``."""
        return self.ops.experts(x, self.mixture)

    def fp32(self, hidden: Array) -> Array:
        return hidden

    def add_to(self, residual: Array, hidden: Array) -> Array:
        residual += hidden
        return residual
