"""Int8 products in tensor-core layouts, for compute capabilities 7.5 to 8.9: their buffers and operations.

cublasLt does not support these products on compute capability 9.0, where this project is measured. Tests compare the
layouts byte by byte with the output of ``cublasLtMatrixTransform`` and execute the descriptors by a NumPy model. Each
GPU runs the self-tests of :mod:`.igemm` before a plan is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...runtime.cublaslt import ComputeType, DataType, Order
from ..arrays import round_up
from .layouts import Layout
from .plans import GemmKind, GemmLayouts, MatmulOperand, MatmulProblem
from .tensor_core_layouts import GROUP

_WEIGHT_ORDER = {GemmKind.COL4_4R2_8C: Order.COL4_4R2_8C, GemmKind.COL32_2R_4R4: Order.COL32_2R_4R4}


@dataclass(frozen=True)
class TensorCoreGemmLayouts(GemmLayouts):
    """The weight in the order of its kind; activations and results in COL32."""

    @property
    def is_row_major(self) -> bool:
        return False

    @cached_property
    def padded(self) -> tuple[int, int]:
        return round_up(self.out_features, GROUP), round_up(self.in_features, GROUP)

    @cached_property
    def weight(self) -> Layout:
        return Layout.of(_WEIGHT_ORDER[self.kind], *self.padded)

    def activation(self, rows: int) -> Layout:
        return Layout.of(Order.COL32, rows, self.in_features)

    def result(self, rows: int) -> Layout:
        return Layout.of(Order.COL32, rows, self.out_features, itemsize=4)

    def product(self, rows: int) -> MatmulProblem:
        out, inner = self.padded
        return MatmulProblem(
            MatmulOperand(DataType.R_8I, Order.COL32, rows, inner, self.activation(rows).ld),
            MatmulOperand(DataType.R_8I, self.weight.order, out, inner, self.weight.ld),
            MatmulOperand(DataType.R_32I, Order.COL32, rows, out, self.result(rows).ld),
            transpose_a=False,
            transpose_b=True,
            compute=ComputeType.COMPUTE_32I,
        )


def gemm_layouts(kind: GemmKind, out_features: int, in_features: int) -> GemmLayouts:
    """The buffers of a plan of any kind for weights ``[out_features, in_features]``."""
    made = TensorCoreGemmLayouts if kind in _WEIGHT_ORDER else GemmLayouts
    return made(kind, out_features, in_features)
