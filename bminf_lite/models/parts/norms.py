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
    """RMSNorm, or LayerNorm with a bias, without one, or without a weight too."""

    RMS = "rms"
    LAYER = "layer"
    LAYER_WITHOUT_BIAS = "layer without bias"
    LAYER_WITHOUT_WEIGHT = "layer without weight"


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
        """Whether it is an RMSNorm."""
        return self.kind is NormKind.RMS

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias."""
        return self.kind is NormKind.LAYER

    @property
    def is_foldable(self) -> bool:
        """Whether factors per channel can move from its tensors to the matrices that read it."""
        return not self.offset and self.kind is not NormKind.LAYER_WITHOUT_WEIGHT

    @property
    def num_vectors(self) -> int:
        """Vectors that a product applies with it."""
        return 1 if self.is_rms else 2

    def full_name(self, layer: str = "") -> str:
        """Its name in the layer ``layer``, or outside of layers."""
        return f"{layer}.{self.name}" if layer else self.name

    def tensors(self, layer: str = "") -> Tensors:
        """Its weight, and its bias if it has one."""
        if self.kind is NormKind.LAYER_WITHOUT_WEIGHT:
            return {}
        return norm(self.full_name(layer), self.features, bias=self.has_bias)

    def build(self, ops: Backend, weights: Weights, layer: str = "", scale: float = 1.0) -> NormLayer:
        """The norm on a device, its result multiplied by ``scale``."""
        name, scale = self.full_name(layer), scale * self.factor
        if self.is_rms:
            return rms_norm(ops, weights, name, self.eps, scale, self.offset)
        if self.kind is NormKind.LAYER_WITHOUT_WEIGHT:
            return NormLayer(ops, Norm(ops.vector(np.full(self.features, scale, np.float32)), self.eps, center=True))
        return layer_norm(ops, weights, name, self.eps, scale, self.offset, self.has_bias)
