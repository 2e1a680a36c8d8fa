"""Norms of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from ...backend.base import Backend
from ...backend.values import Norm
from ...layers.loading import Weights
from ...layers.norm import NormLayer, layer_norm, rms_norm
from ..spec import Tensors, norm


class NormKind(Enum):
    """RMSNorm with a weight or without one, or LayerNorm with a bias, without one, or without a weight too."""

    RMS = "rms"
    RMS_WITHOUT_WEIGHT = "rms without weight"
    LAYER = "layer"
    LAYER_WITHOUT_BIAS = "layer without bias"
    LAYER_WITHOUT_WEIGHT = "layer without weight"

    @property
    def has_weight(self) -> bool:
        """Whether the norm has a weight."""
        return self not in (NormKind.RMS_WITHOUT_WEIGHT, NormKind.LAYER_WITHOUT_WEIGHT)


@dataclass(frozen=True)
class NormPart:
    """The norm ``name`` of ``features`` elements, to whose weight ``offset`` is added.

    ``factor`` multiplies the result.
    """

    name: str
    features: int
    eps: float
    kind: NormKind = NormKind.RMS
    offset: float = 0.0
    factor: float = 1.0

    @property
    def is_rms(self) -> bool:
        """Whether it is an RMSNorm with a weight."""
        return self.kind is NormKind.RMS

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias."""
        return self.kind is NormKind.LAYER

    @property
    def is_foldable(self) -> bool:
        """Whether factors per channel can move from its tensors to the matrices that read it."""
        return not self.offset and self.kind.has_weight

    @property
    def num_vectors(self) -> int:
        """Vectors that a product applies with it."""
        return 1 if self.kind in (NormKind.RMS, NormKind.RMS_WITHOUT_WEIGHT) else 2

    def full_name(self, layer: str = "") -> str:
        """Its name in the layer ``layer``, or outside of layers."""
        return f"{layer}.{self.name}" if layer else self.name

    def tensors(self, layer: str = "") -> Tensors:
        """Its weight, and its bias if it has one."""
        if not self.kind.has_weight:
            return {}
        return norm(self.full_name(layer), self.features, bias=self.has_bias)

    def build(self, ops: Backend, weights: Weights, layer: str = "", scale: float = 1.0) -> NormLayer:
        """The norm on a device, its result multiplied by ``scale``."""
        name, scale = self.full_name(layer), scale * self.factor
        if self.is_rms:
            return rms_norm(ops, weights, name, self.eps, scale, self.offset)
        if not self.kind.has_weight:
            ones = ops.vector(np.full(self.features, scale, np.float32))
            return NormLayer(ops, Norm(ones, self.eps, center=self.kind is NormKind.LAYER_WITHOUT_WEIGHT))
        return layer_norm(ops, weights, name, self.eps, scale, self.offset, self.has_bias)
