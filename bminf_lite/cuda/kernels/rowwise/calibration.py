"""Calibration over float matrices and activations: the launcher of ``calibration.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import CALIBRATION_STRIP as STRIP
from ..constants import CALIBRATION_THREADS as THREADS
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher

if TYPE_CHECKING:
    import cupy as cp

BF16 = "bf16"
KINDS = {np.dtype(np.float16): "__half", np.dtype(np.float32): "float"}
"""The kernels' names of NumPy's types. ``BF16``, which NumPy lacks, is the third type that checkpoints store."""


@dataclass(frozen=True)
class FloatMatrix:
    """A dense float matrix ``[out, in]`` in its stored type; ``kind`` is the kernels' name of that type.

    bf16 numbers are held as uint16.
    """

    values: cp.ndarray
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns


class CalibrationKernels:
    """The kernels of a calibration, which are launched outside steps."""

    source = "rowwise/calibration.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        for name in ("row_absmax", "row_codes", "column_absmax", "take_columns", "to_half", "rotate_rows"):
            yield KernelFamily(cls.source, name, (("__half", BF16, "float"),))
        yield KernelFamily(cls.source, "take_rows", (("__half", "float"),))
        yield from (KernelFamily(cls.source, name) for name in ("divide_rows", "row_squares"))

    def row_absmax(
        self, matrix: FloatMatrix, factors: cp.ndarray | None, top: cp.ndarray, fp32_scales: cp.ndarray
    ) -> None:
        """The largest magnitude of each row. ``fp32_scales`` becomes 1 if the scale of any row does not fit fp16."""
        self._over(
            "row_absmax",
            matrix.kind,
            len(top),
            (matrix.values.data.ptr, address(factors), top.data.ptr, fp32_scales.data.ptr, matrix.shape[1]),
            matrix.values,
            top,
        )

    def row_codes(
        self,
        matrix: FloatMatrix,
        factors: cp.ndarray | None,
        top: cp.ndarray,
        fp32_scales: cp.ndarray,
        scales: cp.ndarray,
        codes: cp.ndarray,
    ) -> None:
        """Codes and scales from the results of :meth:`row_absmax`."""
        results = scales.data.ptr, codes.data.ptr, pitch_of(codes)
        arguments = (
            matrix.values.data.ptr,
            address(factors),
            top.data.ptr,
            fp32_scales.data.ptr,
            *results,
            matrix.shape[1],
        )
        self._over("row_codes", matrix.kind, len(top), arguments, matrix.values, codes)

    def column_absmax(self, x: cp.ndarray, kind: str, divisors: cp.ndarray | None, top: cp.ndarray) -> None:
        """Raise ``top`` to the largest magnitude of each column, after dividing rows by ``divisors``."""
        (rows, k), grid = x.shape, (ceil_div(x.shape[1], THREADS), ceil_div(x.shape[0], STRIP))
        self._over("column_absmax", kind, grid, (x.data.ptr, pitch_of(x), address(divisors), top.data.ptr, rows, k), x)

    def take_columns(self, matrix: FloatMatrix, factors: cp.ndarray | None, index: cp.ndarray, out: cp.ndarray) -> None:
        """Columns as rows of ``out``, fp16."""
        n, k = matrix.shape
        self._over(
            "take_columns",
            matrix.kind,
            (ceil_div(n, THREADS), len(index)),
            (matrix.values.data.ptr, address(factors), index.data.ptr, out.data.ptr, pitch_of(out), n, k),
            out,
        )

    def rotate_rows(self, matrix: FloatMatrix, factors: cp.ndarray | None, out: cp.ndarray, rotation: int) -> None:
        """The matrix times ``factors`` in fp32, dense, its rows transformed in blocks of ``rotation`` elements."""
        n, k = matrix.shape
        arguments = (matrix.values.data.ptr, address(factors), out.data.ptr, k, rotation, rotation**-0.5)
        self._over("rotate_rows", matrix.kind, n, arguments, matrix.values, out)

    def to_half(self, matrix: FloatMatrix, out: cp.ndarray) -> None:
        """All of a matrix in padded rows, fp16."""
        n, k = matrix.shape
        arguments = (matrix.values.data.ptr, out.data.ptr, pitch_of(out), k)
        self._over("to_half", matrix.kind, n, arguments, matrix.values, out)

    def take_rows(self, x: cp.ndarray, index: cp.ndarray, out: cp.ndarray) -> None:
        """Some rows of an activation, in fp32."""
        arguments = (x.data.ptr, pitch_of(x), index.data.ptr, out.data.ptr, pitch_of(out), out.shape[1])
        self._over("take_rows", KINDS[x.dtype], len(index), arguments, out)

    def divide_rows(self, x: cp.ndarray, factors: cp.ndarray | None, out: cp.ndarray) -> None:
        """Rows fp32, divided by ``factors`` or not, in fp16."""
        arguments = (x.data.ptr, pitch_of(x), address(factors), out.data.ptr, pitch_of(out), out.shape[1])
        self._over("divide_rows", "", len(out), arguments, x, out)

    def row_squares(self, got: cp.ndarray, expected: cp.ndarray, squares: cp.ndarray) -> None:
        """Squared differences and magnitudes of rows, fp64 ``[2, rows]``."""
        rows, n = got.shape
        arguments = (got.data.ptr, pitch_of(got), expected.data.ptr, pitch_of(expected), squares.data.ptr, rows, n)
        self._over("row_squares", "", rows, arguments, got, expected)

    def _over(
        self, name: str, kind: str, grid: int | tuple[int, int], arguments: tuple[object, ...], *bytes_moved: cp.ndarray
    ) -> None:
        expression = f"{name}<{kind}>" if kind else name
        self._launcher.launch(
            None, self.source, expression, grid, THREADS, arguments, bytes_moved=nbytes_of(*bytes_moved)
        )
