"""Weights of experts on a GPU, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....backend.expert_values import WEIGHT_TYPES, ExpertActivation, RouterSpec, Score
from ..arrays import PAD, WeightRows, address, nbytes_of, round_up
from ..constants import ACTIVATIONS, CLAMPED_SWIGLU

if TYPE_CHECKING:
    import cupy as cp

GROUP = 8
"""Rows of the gate, or of up, that lie together: a thread of a tensor-core kernel has row ``r`` and row ``r + 8``."""


def alternate_gate_and_up(x: np.ndarray) -> np.ndarray:
    """The rows of gated layers as the kernels read them: ``[experts, 2 * features, ...]``, likewise, in new memory.

    They come as those of the gate and then those of up, and go as eight of the gate, eight of up, and so on.
    ``features`` is a multiple of 8. For scales and biases too.
    """
    experts, rows, *columns = x.shape
    grouped = x.reshape(experts, 2, rows // (2 * GROUP), GROUP, *columns)
    return np.ascontiguousarray(np.swapaxes(grouped, 1, 2)).reshape(x.shape)


def expert_matrix_shape(rows: int, columns: int, halves: int) -> tuple[int, int]:
    """The padded shape of an expert's matrix of ``rows`` rows; with 2 ``halves``, gate and up, each half is padded."""
    return halves * round_up(rows // halves, GROUP), round_up(columns, PAD)


@dataclass(frozen=True)
class ExpertMatrices:
    """int8 or fp16 weights ``[experts, out_features, pitch]``, of which ``in_features`` columns count.

    ``scale``, of int8 weights, and ``bias`` are fp32 ``[experts, out_features]``. Rows are padded to ``PAD`` elements;
    that of float products holds zeros. Those of a gated layer lie as :func:`alternate_gate_and_up` says. ``dynamic``:
    inputs are quantized too (w8a8). ``rotation`` is the block of the inputs' transform. With ``slots``, int32
    ``[experts]``, ``matrix`` is that of an :class:`.ExpertCache`: each of its slots has an expert or none.
    """

    matrix: cp.ndarray
    scale: cp.ndarray | None
    bias: cp.ndarray | None
    in_features: int
    rotation: int = 1
    dynamic: bool = True
    slots: cp.ndarray | None = None

    @property
    def num_experts(self) -> int:
        return len(self.matrix if self.slots is None else self.slots)

    @property
    def out_features(self) -> int:
        return int(self.matrix.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """That of one expert's matrix."""
        return self.out_features, self.in_features

    @property
    def pitch(self) -> int:
        return int(self.matrix.shape[2])

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """The addresses of the codes, the slots, the scales and the bias."""
        return self.matrix.data.ptr, address(self.slots), address(self.scale), address(self.bias)

    def bytes_of(self, experts: int) -> int:
        """Bytes that a product reads if ``experts`` of the experts were chosen."""
        return int(self.matrix[0].nbytes) * experts + nbytes_of(self.scale, self.bias) * experts // self.num_experts


@dataclass(frozen=True)
class SharedExpertWeights:
    """The matrices of an expert that every token has: int8, with the padding of the others, and without biases.

    It may have several times the hidden values of another expert. The fp32 result is multiplied by
    ``sigmoid(gate @ input)``, with ``gate`` fp32 ``[in]``, padded, or by 1 without it.
    """

    hidden: WeightRows
    down: WeightRows
    gate: cp.ndarray | None = None

    def parts(self, down: ExpertMatrices) -> int:
        """How many times the hidden values of an expert whose second matrices are ``down`` it has, rounded down."""
        return self.down.in_features // down.in_features


def shared_arguments(matrix: WeightRows | None, parts: int) -> tuple[int, int, int, int]:
    """The members of ``SharedExpert`` in ``row_stream.cuh``."""
    return (0, 0, 0, 0) if matrix is None else (matrix.matrix.data.ptr, address(matrix.scale), parts, matrix.pitch)


SPARSE_MIXER = ("SPARSE_MIXER_ROUTER=1",)
"""The macro of kernels for routers with that score."""


@dataclass(frozen=True)
class RouterWeights:
    """A router on a GPU: ``matrix`` fp16 or fp32 ``[experts, pitch]`` of which ``in_features`` columns count.

    ``bias``, ``correction_bias`` and ``expert_scale`` are fp32 ``[experts]`` or None, see :mod:`backend.routing`.
    """

    spec: RouterSpec
    matrix: cp.ndarray
    in_features: int
    bias: cp.ndarray | None = None
    correction_bias: cp.ndarray | None = None
    expert_scale: cp.ndarray | None = None

    @property
    def arguments(self) -> tuple[int | float, ...]:
        """The members of ``Router`` in ``routing.cuh``."""
        spec = self.spec
        return (
            address(self.correction_bias),
            address(self.expert_scale),
            spec.num_experts,
            spec.top_k,
            int(spec.score),
            int(spec.renormalise),
            spec.num_groups,
            spec.top_groups,
            int(spec.group_score),
            int(spec.masked),
            WEIGHT_TYPES.index(spec.weight_type),
            spec.epsilon,
            spec.min_sum,
            spec.scale,
            spec.closeness,
        )

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros of kernels that choose experts."""
        return SPARSE_MIXER if self.spec.score is Score.SPARSE_MIXER else ()


def activation_number(activation: ExpertActivation) -> int:
    """The template argument for an activation."""
    return int(ACTIVATIONS[activation.function]) if activation.limit is None else CLAMPED_SWIGLU


def clamp_arguments(activation: ExpertActivation) -> tuple[float, float]:
    """The members of ``Clamp`` in ``activation.cuh``."""
    return activation.limit or 0.0, activation.alpha
