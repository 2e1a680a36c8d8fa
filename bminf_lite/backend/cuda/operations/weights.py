"""What a model is loaded into on a GPU; :mod:`bminf_lite.backend.operations.weights` defines it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ....cuda.kernels.experts.layer import ExpertLayerWeights
from ...adapter_slots import Bank
from ...calibration import CalibrationOps
from ...expert_values import ExpertActivation, ExpertBiases, RouterSpec
from ...operations.weights import WeightOperations
from ...quantization import HostWeight
from ...side_products import Adapter
from ...values import Array, LatentSpec
from ..adapter_bank import AdapterBank, ExpertBank, SavedBank
from ..calibration import CudaCalibrationOps
from ..deferred import Weight
from ..device import CudaDevice
from ..latent import LatentMatrices, load_latent_matrices
from ..mixtures import AdaptedExperts

T = TypeVar("T")


class CudaWeightOperations(CudaDevice, WeightOperations):
    """Operations that load a model; :mod:`..weight_loader` lays weights out."""

    def weight(self, parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None] = ()) -> Weight:  # type: ignore[override]
        return self.loader.weight(parts, biases)

    def adapted(self, base: Weight, adapter: Adapter) -> Weight:  # type: ignore[override]
        return self.loader.adapted(base, adapter)

    def with_adapters(self, base: Weight, widths: Sequence[int], features: int) -> tuple[Weight, Bank]:
        assert self.adapter_slots is not None
        with self.arrays.within(self.arena):
            bank = AdapterBank(self.arrays, self.adapter_slots, widths, features)
        return replace(base, adapters=bank), bank

    def with_expert_adapters(
        self, base: ExpertLayerWeights, widths: Sequence[int], features: int
    ) -> tuple[ExpertLayerWeights, Bank]:
        assert self.adapter_slots is not None
        with self.arrays.within(self.arena):
            bank = ExpertBank(self.arrays, self.adapter_slots, base.hidden.num_experts, widths, features)
        return AdaptedExperts.of(base, bank), bank

    def saved_bank(self, rows: int, columns: int) -> SavedBank:
        assert self.adapter_slots is not None
        with self.arrays.within(self.arena):
            return SavedBank(self.arrays, self.adapter_slots, rows, columns)

    def mixture(  # type: ignore[override]
        self,
        spec: RouterSpec,
        router: np.ndarray,
        hidden: Iterable[Sequence[HostWeight]],
        down: Iterable[Sequence[HostWeight]],
        activation: ExpertActivation,
        correction_bias: np.ndarray | None = None,
        biases: ExpertBiases | None = None,
    ) -> ExpertLayerWeights:
        slots = self.placement.experts
        return self.mixture_loader.load(spec, router, hidden, down, activation, correction_bias, biases, slots)

    def latent_weight(self, matrix: HostWeight, spec: LatentSpec) -> LatentMatrices:  # type: ignore[override]
        return load_latent_matrices(self.loader, matrix, spec)

    def blocks(self, build: Callable[[int], T], count: int) -> Iterable[T]:
        return self.loader.blocks(build, count, self.placement)

    def table(self, values: np.ndarray) -> Array:
        return self.loader.table(values, self.placement.host_tables)

    def vector(self, values: np.ndarray) -> Array:
        return self.arrays.vector(np.asarray(values))

    def calibration_ops(self) -> CalibrationOps:
        return CudaCalibrationOps(self, self.materializer, self.loader, self.int8_gemm, self.float_gemm)
