"""Mixtures of experts by kernels; :mod:`bminf_lite.backend.operations.experts` defines them."""

from __future__ import annotations

from ....cuda.kernels.experts.layer import ExpertLayerWeights
from ...mixture import SharedExpert, shared_result
from ...operations.experts import ExpertOperations
from ...values import Array
from ..device import CudaDevice
from ..mixtures import MixtureLayers


class CudaExpertOperations(CudaDevice, ExpertOperations):
    """A mixture by the kernels of :mod:`..mixtures`."""

    def __init__(self, device: int = 0, memory_limit: int | str | None = None):
        super().__init__(device, memory_limit)
        self.mixtures = MixtureLayers(self.arrays, self.kernels, self.materializer)

    def experts(  # type: ignore[override]
        self,
        x: Array,
        mixture: ExpertLayerWeights,
        residual: Array = None,
        addend: Array = None,
        gate: Array = None,
        routed: Array = None,
        shared: SharedExpert | None = None,
    ) -> Array:
        if shared is not None and not self.mixtures.takes_shared(x, mixture, routed, shared):
            (addend, gate), shared = shared_result(self, x, shared), None
        out, chosen = self.mixtures.forward(x, mixture, residual, addend, gate, routed, shared)
        if self.choices is not None:
            self.choices.append(chosen)
        return out

    def add_experts(self, found: Array, residual: Array, addend: Array, gate: Array) -> Array:
        if addend is not None:
            with self.arrays.current():
                values = self.materializer.materialize(addend)
                found = found + (values if gate is None else gate * values)
        return found if residual is None else self.add(residual, found)

    def scalar_gate(self, x: Array, vector: Array) -> Array:
        return self.mixtures.scalar_gate(x, vector)
