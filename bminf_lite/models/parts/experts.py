"""A mixture of experts: feed-forward layers of which a router chooses some for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...backend.adapter_slots import AdapterSite
from ...backend.base import Backend
from ...backend.cache_values import LayerCache
from ...backend.communicator import shard
from ...backend.expert_values import ExpertActivation, ExpertBiases, RouterSpec
from ...backend.mixture import Mixture, SharedExpert
from ...backend.quantization import HostWeight
from ...backend.side_products import Adapter
from ...backend.values import Array, ForwardBatch, Norm
from ...layers.linear import ColumnsOfRank, Linear, fitted
from ...layers.loading import RowTransform
from ...layers.norm import NormLayer
from ..spec import Fold, FusedExperts, GatedProduct, Parameter, Role, Tensors, linear, router, weights_of
from .feed_forward import FeedForwardPart
from .norms import NormPart
from .part import LayerSource, Part, PartLayer, PartTensors


@dataclass(frozen=True)
class LatentWidth:
    """The ``width`` of the rows that experts read and write, and the matrices ``before`` and ``behind`` them."""

    width: int
    before: str
    behind: str
    bias: bool = False


@dataclass(frozen=True)
class ExpertNorms:
    """RMSNorms of the residual stream: the ``experts``', and the router's, whose weight is the tensor ``router``.

    That is multiplied by ``router_scale``. Both have the epsilon of ``experts``.
    """

    experts: NormPart
    router: str
    router_scale: float = 1.0


@dataclass(frozen=True)
class ExpertsPart(Part):
    """Feed-forward layers of ``inner_size`` hidden units, of which ``router`` chooses some for each token.

    The matrices of expert ``e`` are ``{experts}.{e}.{gate}`` and so on; experts without a gate have none. ``fused`` are
    the names of tensors that hold gate and up of all experts ``[experts, 2 * inner_size, in]``, and all ``down``.
    ``correction_bias`` names the router's, if it has one, stored ``[experts]``, or ``[1, experts]`` with
    ``correction_bias_is_row``. ``shared`` is a feed-forward layer for every token, whose output is added; with a
    ``shared_gate``, multiplied by the sigmoid of that matrix ``[1, in]`` times the input. With a ``latent`` the experts
    read and write rows of that width, which two matrices for all experts bring the input to, and their sum back.

    ``activation`` may have options. ``bias``: the router and all matrices of experts have one; those of all experts are
    ``{fused}_bias``. ``fused_transposed``: the matrices of fused tensors are ``[in, out]``; ``fused_alternate``: the
    rows of gate and up alternate. A quantized file has such tensors ``[experts, out, in]`` under ``{fused}_blocks``.

    With ``input_norms`` the part reads the residual stream, the experts and the router each through a norm of their
    own. ``expert_scales`` names factors ``[experts]`` of the experts' results.
    """

    hidden_size: int
    inner_size: int
    activation: str | ExpertActivation
    router: RouterSpec
    router_name: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    fused_transposed: bool = False
    fused_alternate: bool = False
    bias: bool = False
    correction_bias: str | None = None
    correction_bias_is_row: bool = False
    shared: FeedForwardPart | None = None
    shared_gate: str | None = None
    latent: LatentWidth | None = None
    input_norms: ExpertNorms | None = None
    expert_scales: str | None = None

    @property
    def function(self) -> ExpertActivation:
        """What stands between the two products of an expert."""
        if isinstance(self.activation, str):
            return ExpertActivation(self.activation, gated=self.gate is not None)
        return self.activation

    @property
    def expert_features(self) -> int:
        """Elements that an expert reads and writes."""
        return self.hidden_size if self.latent is None else self.latent.width

    @property
    def adds_first(self) -> bool:
        return self.latent is None

    @property
    def divided(self) -> Mapping[str, int]:
        own = {"hidden units of an expert": self.inner_size}
        return own if self.shared is None else {**own, **self.shared.divided}

    @property
    def undivided(self) -> str | None:
        if self.shared is not None and self.shared.bias:
            return "the layer beside the experts has a bias, which each rank would add"
        return None if self.latent is None else "experts in a latent width are not divided among ranks"

    def stated(self, layer: str) -> PartTensors:
        """Factors move from the ``up`` of an expert to its ``down``, if a plain product or a ReLU is between.

        None move from the norm before the router: they would be the same for all experts.
        """
        chooser, experts = f"{layer}.{self.router_name}", self._expert_names(layer)
        tensors: Tensors = router(chooser, (self.router.num_experts, self.hidden_size), self.bias)
        if self.correction_bias is not None:
            rows = (1,) if self.correction_bias_is_row else ()
            tensors[f"{layer}.{self.correction_bias}"] = Parameter((*rows, self.router.num_experts), Role.VECTOR)
        weights, shape = [weights_of(*names) for names in experts], (self.inner_size, self.expert_features)
        inside, outside = linear("", shape, self.bias), linear("", shape[::-1], self.bias)  # the same for all experts
        for *inner, down in experts:
            for name in inner:
                for kind, parameter in inside.items():
                    tensors[name + kind] = parameter
            for kind, parameter in outside.items():
                tensors[down + kind] = parameter
        readers = [name for *inner, _ in experts for name in inner]
        writers = {name: self.bias for *_, down in experts for name in (down,)}
        if self.latent is not None:
            before, behind = f"{layer}.{self.latent.before}", f"{layer}.{self.latent.behind}"
            tensors |= linear(before, (self.latent.width, self.hidden_size), self.latent.bias)
            tensors |= linear(behind, (self.hidden_size, self.latent.width), self.latent.bias)
            readers, writers = [before], {behind: self.latent.bias}
        if self.expert_scales is not None:
            tensors[f"{layer}.{self.expert_scales}"] = Parameter((self.router.num_experts,), Role.VECTOR)
        is_plain, is_gated = self.function.limit is None, self.gate is not None
        commutes = is_plain and (is_gated or self.function.function == "relu")
        own = PartTensors(
            tensors,
            weights_of(chooser, *readers),
            tuple(f"{name}.{kind}" for name, bias in writers.items() for kind in ("weight", "bias")[: 1 + bias]),
            tuple(Fold((up,), (down,)) for *_, up, down in weights) if commutes else (),
            rotatable=tuple(down for *_, down in weights),
            foldable=False,
            fused=self._fused(layer, experts, weights),
            bounded=tuple((gate, up, down) for gate, up, down in weights)
            if is_plain and is_gated and not self.bias
            else (),
        )
        if self.input_norms is not None:
            norm = self.input_norms.experts
            own.tensors.update(norm.tensors(layer))
            own.tensors[f"{layer}.{self.input_norms.router}"] = Parameter((self.hidden_size,), Role.VECTOR)
            (weight,) = weights_of(norm.full_name(layer))
            own = replace(own, bounded=(), gated=tuple(GatedProduct(*x, weight, norm.offset) for x in own.bounded))
        if self.shared is None:
            return own
        other = self.shared.stated(layer)
        tensors |= other.tensors
        gates = () if self.shared_gate is None else (f"{layer}.{self.shared_gate}",)
        for gate in gates:
            tensors |= router(gate, (1, self.hidden_size))
        return replace(
            own,
            readers=own.readers + weights_of(*gates) + other.readers,
            writers=own.writers + other.writers,
            folds=own.folds + other.folds,
            rotatable=own.rotatable + other.rotatable,
            bounded=own.bounded + other.bounded,
        )

    def _fused(
        self, layer: str, experts: Sequence[tuple[str, ...]], weights_of_experts: Sequence[tuple[str, ...]]
    ) -> dict[str, FusedExperts]:
        """The tensors that may hold those of all experts: of gate and up, and of down."""
        found = {}
        for name, part in zip(self.fused, (slice(-1), slice(-1, None)), strict=True):
            weights = tuple(names[part] for names in weights_of_experts)
            rows_alternate = self.fused_alternate and len(weights[0]) > 1
            found[f"{layer}.{name}"] = FusedExperts(weights, self.fused_transposed, rows_alternate)
            if self.fused_transposed:
                found[f"{layer}.{name}_blocks"] = FusedExperts(weights, interleaved=rows_alternate)
            if self.bias:
                biases = tuple(tuple(f"{matrix}.bias" for matrix in names[part]) for names in experts)
                found[f"{layer}.{name}_bias"] = FusedExperts(biases, interleaved=rows_alternate)
        return found

    def _expert_names(self, layer: str) -> list[tuple[str, ...]]:
        """Gate, if there is one, up and down of each expert."""
        names = [name for name in (self.gate, self.up, self.down) if name is not None]
        prefixes = (f"{layer}.{self.experts}.{expert}" for expert in range(self.router.num_experts))
        return [tuple(f"{prefix}.{name}" for name in names) for prefix in prefixes]

    def build(self, source: LayerSource) -> PartLayer:
        weights, experts = source.weights, self._expert_names(source.name)
        ranks = source.ops.communicator
        rows, columns = RowTransform(shard(self.inner_size, ranks)), ColumnsOfRank(weights, ranks)

        def before(*names: str) -> Sequence[HostWeight]:
            found = [weights.weight(name) for name in weights_of(*names)]
            return found if ranks.tp_size == 1 else [rows.apply_to_matrix(matrix) for matrix in found]

        def vector(name: str) -> np.ndarray:
            return np.asarray(weights.vector(f"{source.name}.{name}")).astype(np.float32)

        scales = None if self.expert_scales is None else vector(self.expert_scales)

        def behind(expert: int, name: str) -> Sequence[HostWeight]:
            (full,) = weights_of(name)
            matrix = weights.weight(full) if ranks.tp_size == 1 else columns.weight(full)
            return [matrix if scales is None else RowTransform(factors=scales[expert]).apply_to_matrix(matrix)]

        mixture = source.ops.mixture(
            self.router,
            vector(f"{self.router_name}.weight"),
            (before(*inner) for *inner, _ in experts),
            (behind(expert, down) for expert, (*_, down) in enumerate(experts)),
            self.function,
            None if self.correction_bias is None else vector(self.correction_bias).ravel(),
            self._biases(source) if self.bias else None,
        )
        mixture = self._with_adapters(source, mixture, scales)
        if self.latent is not None:
            assert self.shared_gate is None
            narrow, wide = (
                Linear(source.ops, weights, [f"{source.name}.{name}"], self.latent.bias)
                for name in (self.latent.before, self.latent.behind)
            )
            shared = None if self.shared is None else self.shared.build(source)
            return LatentExperts(source.ops, mixture, narrow, wide, shared)
        is_partial = ranks.tp_size > 1
        if self.input_norms is not None:
            assert self.shared is None
            norm = self.input_norms.experts
            chooser = Norm(
                source.ops.vector(vector(self.input_norms.router) * np.float32(self.input_norms.router_scale)), norm.eps
            )
            own = norm.build(source.ops, weights, source.name)
            return ExpertsOfStream(source.ops, mixture, is_partial, own, NormLayer(source.ops, chooser))
        if self.shared is None:
            return Experts(source.ops, mixture, is_partial)
        shared = self.shared.build(source)
        activation = ExpertActivation(shared.activation, self.shared.gated)
        gate = None if self.shared_gate is None else source.ops.vector(vector(f"{self.shared_gate}.weight")[0])
        beside = SharedExpert(shared.inner.weight, shared.down.product.weight, activation, gate)
        return ExpertsWithShared(source.ops, mixture, is_partial, beside)

    def _with_adapters(self, source: LayerSource, mixture: Mixture, scales: np.ndarray | None) -> Mixture:
        """The mixture with room for adapters of its experts, if there is any. ``scales`` multiply experts' results."""
        ops, ranks, slots = source.ops, source.ops.communicator, source.ops.adapter_slots
        experts = [weights_of(*names) for names in self._expert_names(source.name)]
        names = tuple(name for expert in experts for name in expert)
        if slots is None or not slots.has_experts(names):
            return mixture
        own = shard(self.inner_size, ranks)
        downs = {down: expert for expert, (*_, down) in enumerate(experts)}

        def fit(name: str, adapter: Adapter) -> Adapter:
            given = fitted(source.weights, name, adapter)
            if name not in downs:
                return replace(given, b=given.b[own])
            given = given.within(own)
            return given if scales is None else replace(given, b=given.b * scales[downs[name]])

        units = self.inner_size // ranks.tp_size
        widths = [units] * (len(experts[0]) - 1) + [self.expert_features]
        mixture, bank = ops.with_expert_adapters(mixture, widths, self.expert_features)
        slots.sites.append(AdapterSite(names, fit, bank, of_experts=True))
        return mixture

    def _biases(self, source: LayerSource) -> ExpertBiases:
        """The biases of the router and the experts."""

        def vector(*names: str) -> np.ndarray:
            vectors = (np.asarray(source.weights.vector(f"{name}.bias")) for name in names)
            return np.concatenate([values.astype(np.float32) for values in vectors])

        experts, ranks = self._expert_names(source.name), source.ops.communicator
        own, is_first = shard(self.inner_size, ranks), np.float32(ranks.tp_rank == 0)
        return ExpertBiases(
            vector(f"{source.name}.{self.router_name}"),
            [np.concatenate([vector(name)[own] for name in inner]) for *inner, _ in experts],
            [vector(down) * is_first for *_, down in experts],  # which the sum over the ranks has once
        )


@dataclass(frozen=True)
class Experts:
    """Computes :class:`ExpertsPart`."""

    ops: Backend
    mixture: Mixture
    is_partial: bool

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool) -> Any:
        """The input itself: the router and the experts are one operation."""
        return x

    def fp32(self, hidden: Any) -> Array:
        found = self._experts(hidden, None)
        return self.ops.all_reduce_add(found) if self.is_partial else found

    def add_to(self, residual: Array, hidden: Any) -> Array:
        if self.is_partial:
            return self.ops.all_reduce_add(self._experts(hidden, None), None, residual)
        return self._experts(hidden, residual)

    def _experts(self, hidden: Any, residual: Array) -> Array:
        return self.ops.experts(hidden, self.mixture, residual)


@dataclass(frozen=True)
class ExpertsOfStream(Experts):
    """The same of the residual stream, which the experts and the router read through a norm each."""

    norm: NormLayer
    router_norm: NormLayer

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool) -> tuple[Array, Array]:
        """The input of the experts and that of the router."""
        return self.norm(x), self.router_norm(x)

    def _experts(self, hidden: tuple[Array, Array], residual: Array) -> Array:
        return self.ops.experts(hidden[0], self.mixture, residual, routed=hidden[1])


@dataclass(frozen=True)
class ExpertsWithShared(Experts):
    """The same beside a feed-forward layer for every token, of which a rank computes its part."""

    shared: SharedExpert

    def _experts(self, hidden: Array, residual: Array) -> Array:
        return self.ops.experts(hidden, self.mixture, residual, shared=self.shared)


@dataclass(frozen=True)
class LatentExperts:
    """Experts of rows of another width, beside a ``shared`` feed-forward layer that reads the input itself, or none.

    ``before`` brings the input to that width, and ``behind`` the sum of the experts back.
    """

    ops: Backend
    mixture: Mixture
    before: Linear
    behind: Linear
    shared: PartLayer | None

    def hidden(self, x: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool) -> tuple[Array, Array]:
        """The sum of the experts, fp32 ``[T, width]``, and what the shared layer's last matrix reads."""
        found = self.ops.experts(self.before(x), self.mixture, routed=x)
        return found, None if self.shared is None else self.shared.hidden(x, cache, batch, False)

    def fp32(self, hidden: tuple[Array, Array]) -> Array:
        found = self.behind.fp32(hidden[0])
        return found if self.shared is None else self.shared.add_to(found, hidden[1])

    def add_to(self, residual: Array, hidden: tuple[Array, Array]) -> Array:
        residual = self.behind.add_to(residual, hidden[0])
        return residual if self.shared is None else self.shared.add_to(residual, hidden[1])
