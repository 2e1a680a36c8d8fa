"""Random layers of experts: as the definition takes them, and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from expert_layer import ExpertLayer

from bminf_lite.backend.expert_values import ExpertActivation, RouterSpec
from bminf_lite.backend.experts import ExpertWeights
from bminf_lite.backend.functions import normalise
from bminf_lite.backend.values import Norm
from bminf_lite.cuda.kernels.arrays import PAD, round_up
from bminf_lite.cuda.kernels.experts.layer import ExpertLayerWeights
from bminf_lite.cuda.kernels.experts.weights import ExpertMatrices, RouterWeights, alternate_gate_and_up


def padded(x: np.ndarray, fill: Any = 0) -> np.ndarray:
    """Rows padded to ``PAD`` elements."""
    width = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % PAD)]
    return np.pad(x, width, constant_values=fill)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, whether it has biases, and the blocks in which its matrices rotate their input.

    A layer that is not ``normed`` reads the residual stream itself.
    """

    hidden: int
    features: int
    out: int
    experts: int
    top_k: int
    bias: bool = True
    rotations: tuple[int, int] = (1, 1)
    normed: bool = True


class RandomLayer:
    """A layer of int8 experts with its router and its norm."""

    def __init__(self, sizes: Sizes, activation: ExpertActivation, seed: int = 0, **spec: Any) -> None:
        random = np.random.default_rng(seed)
        self.sizes, self.activation = sizes, activation
        self.spec = RouterSpec(sizes.experts, sizes.top_k, **spec)
        width = sizes.features * (2 if activation.gated else 1)

        def weights(out: int, features: int, rotation: int) -> ExpertWeights:
            codes = random.integers(-127, 128, (sizes.experts, out, features)).astype(np.int8)
            scale = random.uniform(0.5, 1.5, (sizes.experts, out)) / 64 / np.sqrt(features)
            bias = random.normal(size=(sizes.experts, out)).astype(np.float32) if sizes.bias else None
            return ExpertWeights(codes, scale.astype(np.float32), bias, True, rotation)

        before, behind = sizes.rotations
        hidden, down = weights(width, sizes.hidden, before), weights(sizes.out, sizes.features, behind)
        self.layer = ExpertLayer(hidden, down, activation, self.spec.scales_input)
        matrix = random.normal(size=(sizes.experts, sizes.hidden)) / np.sqrt(sizes.hidden) * 2
        self.router = matrix.astype(np.float16)
        self.router_bias = random.normal(size=sizes.experts).astype(np.float32) if sizes.bias else None
        self.norm_weight = random.uniform(0.5, 1.5, sizes.hidden).astype(np.float32)
        self.eps = 1e-6
        self.random = random

    def norm(self, array: Any = np.asarray) -> Norm | None:
        """The norm before the router and the experts, if there is one."""
        if not self.sizes.normed:
            return None
        return Norm(array(padded(self.norm_weight))[: self.sizes.hidden], self.eps)

    def read(self, x: np.ndarray) -> np.ndarray:
        """What the router and the experts read of a residual stream."""
        norm = self.norm()
        return x if norm is None else normalise(x, norm)

    def tokens(self, count: int) -> np.ndarray:
        """A residual stream, fp32 ``[count, hidden]``."""
        return (self.random.normal(size=(count, self.sizes.hidden)) * 3).astype(np.float32)

    def on_device(self, array: Any) -> ExpertLayerWeights:
        """What the kernels take."""

        def matrices(weights: ExpertWeights, gated: bool) -> ExpertMatrices:
            order = alternate_gate_and_up if gated else np.asarray
            assert weights.scale is not None
            bias = None if weights.bias is None else array(order(weights.bias))
            codes = padded(order(weights.values), 77)  # what the padding holds does not matter
            return ExpertMatrices(
                array(codes), array(order(weights.scale)), bias, weights.in_features, weights.rotation
            )

        bias = None if self.router_bias is None else array(self.router_bias)
        router = RouterWeights(self.spec, array(padded(self.router)), self.sizes.hidden, bias)
        hidden = matrices(self.layer.hidden, self.activation.gated)
        return ExpertLayerWeights(router, hidden, matrices(self.layer.down, False), self.activation)


def rows_on_device(x: np.ndarray, array: Any) -> Any:
    """A matrix with padded rows on the device, as a view of its elements."""
    return array(padded(x, 7))[:, : x.shape[1]]


def codes_on_device(codes: np.ndarray, array: Any) -> Any:
    """Rows of codes: padded with zeros up to a multiple of 16, and with anything behind."""
    whole = np.full((len(codes), round_up(codes.shape[1], PAD)), 99, np.int8)
    whole[:, : round_up(codes.shape[1], 16)] = 0
    whole[:, : codes.shape[1]] = codes
    return array(whole)
