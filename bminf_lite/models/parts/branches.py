"""Feed-forward parts that read the same residual stream, each through norms of its own: Gemma 4's dense and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from ...backend.base import Backend
from ...backend.values import Array, ForwardBatch
from ...layers.norm import NormLayer
from .._config import common_divisors
from ..spec import Fold, GatedProduct, weights_of
from .norms import NormPart
from .part import LayerSource, Part, PartLayer, PartTensors


@dataclass(frozen=True)
class Branch:
    """``post_norm(part(norm(r)))``; without a ``norm``, ``part`` reads the residual stream ``r`` itself."""

    part: Part
    norm: NormPart | None
    post_norm: NormPart

    def stated(self, layer: str) -> PartTensors:
        """The part's tensors and those of its norms, of which factors may move to the part's readers."""
        own = self.part.stated(layer)
        tensors = own.tensors | self.post_norm.tensors(layer)
        if self.norm is None:
            return replace(own, tensors=tensors)
        (weight,) = weights_of(self.norm.full_name(layer))
        folds = (Fold(tuple(self.norm.tensors(layer)), own.readers),) if own.foldable and self.norm.is_foldable else ()
        gated = tuple(GatedProduct(*product, weight, self.norm.offset) for product in own.bounded)
        return replace(
            own,
            tensors=tensors | self.norm.tensors(layer),
            folds=(*folds, *own.folds),
            bounded=(),
            gated=(*gated, *own.gated),
        )


@dataclass(frozen=True)
class BranchesPart(Part):
    """The sum of ``branches``, which read the residual stream."""

    branches: tuple[Branch, ...]

    @property
    def num_readers(self) -> int:
        return len(self.branches)

    @property
    def divided(self) -> Mapping[str, int]:
        return common_divisors(branch.part.divided for branch in self.branches)

    @property
    def undivided(self) -> str | None:
        return next((b.part.undivided for b in self.branches if b.part.undivided is not None), None)

    def stated(self, layer: str) -> PartTensors:
        return reduce(PartTensors.beside, (branch.stated(layer) for branch in self.branches))

    def build(self, source: LayerSource) -> Branches:
        def norm(part: NormPart | None) -> NormLayer | None:
            return None if part is None else part.build(source.ops, source.weights, source.name)

        parts = tuple(branch.part.build(source) for branch in self.branches)
        post_norms = tuple(branch.post_norm.build(source.ops, source.weights, source.name) for branch in self.branches)
        return Branches(source.ops, parts, tuple(norm(branch.norm) for branch in self.branches), post_norms)


@dataclass(frozen=True)
class Branches:
    """Computes :class:`BranchesPart`."""

    ops: Backend
    parts: tuple[PartLayer, ...]
    norms: tuple[NormLayer | None, ...]
    post_norms: tuple[NormLayer, ...]

    def hidden(self, x: Array, cache: Any, batch: ForwardBatch, only_last: bool) -> tuple[Any, ...]:
        """What each part has; ``x`` is the residual stream, fp32 ``[T, features]``."""
        inputs = (norm(x) if norm else x for norm in self.norms)
        return tuple(part.hidden(own, cache, batch, only_last) for part, own in zip(self.parts, inputs, strict=True))

    def fp32(self, hidden: tuple[Any, ...]) -> Array:
        found = self.post_norms[0](self.parts[0].fp32(hidden[0]))
        for part, norm, own in zip(self.parts[1:], self.post_norms[1:], hidden[1:], strict=True):
            found = self.ops.norm_add(part.fp32(own), norm.norm, found)
        return found

    def add_to(self, residual: Array, hidden: tuple[Any, ...]) -> Array:
        return self.ops.add(residual, self.fp32(hidden))
