"""The head of a model that classifies texts or tokens. It is small, stays float, and runs on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...backend.functions import ACTIVATIONS, normalise, product_by_row
from ...backend.values import Norm, Pooling
from ...layers.loading import Weights
from ..spec import Tensors, classifier
from .norms import NormKind, NormPart

HEAD_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"tanh": np.tanh, **ACTIVATIONS}
"""The functions that a head may have, over fp32."""


@dataclass(frozen=True)
class ClassifierPart:
    """``out(norm(f(dense(x))))``: numbers for ``labels`` labels, of the pooled vector of a text or of each token.

    ``pooling`` is None for a head that classifies tokens. ``dense`` is a square matrix before the function
    ``activation``; without it ``out`` reads ``x``. ``norm`` may be missing too.
    """

    hidden_size: int
    labels: int
    out: str
    pooling: Pooling | None
    out_bias: bool = True
    dense: str | None = None
    dense_bias: bool = True
    activation: str = "tanh"
    norm: NormPart | None = None

    def tensors(self) -> Tensors:
        """The head's matrices, biases and norm."""
        found = classifier(self.out, (self.labels, self.hidden_size), self.out_bias)
        if self.dense is not None:
            found |= classifier(self.dense, (self.hidden_size, self.hidden_size), self.dense_bias)
        return found | (self.norm.tensors() if self.norm else {})

    def build(self, weights: Weights) -> Classifier:
        """The head with its weights."""

        def values(name: str) -> np.ndarray:
            return np.array(weights.vector(name), np.float32)

        def layer(name: str, bias: bool) -> HostLinear:
            return HostLinear(values(f"{name}.weight"), values(f"{name}.bias") if bias else None)

        norm = None
        if self.norm is not None:
            bias = values(f"{self.norm.name}.bias") if self.norm.has_bias else None
            center = self.norm.kind is not NormKind.RMS
            norm = Norm(values(f"{self.norm.name}.weight"), self.norm.eps, bias, center)
        dense = None if self.dense is None else layer(self.dense, self.dense_bias)
        return Classifier(dense, self.activation, norm, layer(self.out, self.out_bias), self.pooling)


@dataclass(frozen=True)
class HostLinear:
    """``x @ weight.T + bias`` in fp32 on the host, each row by itself; ``weight`` is ``[out, in]``."""

    weight: np.ndarray
    bias: np.ndarray | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """fp32 ``[n, in]`` -> fp32 ``[n, out]``."""
        y = product_by_row(x, self.weight.T)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Classifier:
    """Computes :class:`ClassifierPart`."""

    dense: HostLinear | None
    activation: str
    norm: Norm | None
    out: HostLinear
    pooling: Pooling | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Vectors fp32 ``[n, features]`` -> fp32 ``[n, labels]``."""
        if self.dense is not None:
            x = HEAD_ACTIVATIONS[self.activation](self.dense(x))
        if self.norm is not None:
            x = normalise(x, self.norm)
        return self.out(x)
