"""What layers read of a token beside the residual stream: the launchers of ``layer_inputs.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.values import Norm
from ..arrays import ceil_div, nbytes_of, pitch_of
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

THREADS, WARP = 256, 32


class LayerInputKernels:
    """The kernels of ``layer_inputs.cu``."""

    source = "rowwise/layer_inputs.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "layer_inputs")
        yield KernelFamily(cls.source, "multiply_columns")

    def launch(
        self,
        step: StepContext,
        tokens: cp.ndarray,
        table: cp.ndarray,
        projected: cp.ndarray,
        norm: Norm,
        table_scale: float,
        scale: float,
        out: cp.ndarray,
    ) -> None:
        """``(norm(projected) + table[tokens] * table_scale) * scale`` into ``out``, fp16 ``[T, layers * size]``.

        ``projected`` is fp32 of that shape, ``table`` fp16, and ``norm.weight`` fp32 ``[size]``.
        """
        size = len(norm.weight)
        layers = out.shape[1] // size
        self._launcher.launch(
            step,
            self.source,
            "layer_inputs",
            (len(out), ceil_div(layers * WARP, THREADS)),
            THREADS,
            (
                tokens.data.ptr,
                table.data.ptr,
                pitch_of(table),
                projected.data.ptr,
                pitch_of(projected),
                norm.weight.data.ptr,
                norm.eps,
                table_scale,
                scale,
                out.data.ptr,
                pitch_of(out),
                layers,
                size,
            ),
            bytes_moved=nbytes_of(projected, out, out),
        )

    def multiply_columns(self, step: StepContext, x: cp.ndarray, inputs: cp.ndarray) -> None:
        """``x * inputs`` in place, fp16 ``[T, size]`` at any pitch."""
        rows, n = x.shape
        self._launcher.launch(
            step,
            self.source,
            "multiply_columns",
            ceil_div(rows * n, THREADS),
            THREADS,
            (x.data.ptr, pitch_of(x), inputs.data.ptr, pitch_of(inputs), rows, n),
            bytes_moved=3 * nbytes_of(x),
        )
