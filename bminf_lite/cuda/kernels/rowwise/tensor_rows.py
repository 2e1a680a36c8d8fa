"""Kernels over rows of other libraries' tensors: any width, alignment and row distance, in fp32, fp16 or bf16.

These are the launchers of ``norm.cu``, ``softmax_backward.cu`` and ``quantize.cu``. The engine's own row kernels
(:mod:`.rows`) need padded rows and fuse what its layers do between products. Arguments are addresses and numbers, so
that no array library is needed. Launches are not dependent: the kernel before one may be PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from ...runtime.kernel import Kernel
from ..arrays import PAD, ceil_div
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together
from ..launcher import Launcher
from .rows import KERNEL_CACHE_SIZE, MAX_NORM_WIDTH, ROWS_EACH, RowKernels, row_shape, row_shapes

KINDS = ("float", "__half", "__nv_bfloat16")
"""Types of elements in CUDA C++."""
BACKWARD_ROW = MAX_NORM_WIDTH // 2
"""Elements of a row whose gradient is computed in registers: two arrays of them."""
LONG_THREADS = 512
PARAMETER_COLUMNS = 256
"""Columns of a block of ``norm_parameter_gradients``."""
PARAMETER_ROWS = 8
CONVERT_THREADS = 256
CONVERTED_CODES = CONVERT_THREADS * 4 * 8
"""Codes that a block of ``dequantize_codes`` converts."""

PERSISTENT_ROW = 8192
"""Above this width, reads of weight and bias from L2 bound a LayerNorm of fp32 rows."""
PERSISTENT_THREADS = 1024

Rows = tuple[int, int]
"""An address, and the elements from one row to the next."""
QuantizeLaunch = tuple[Kernel, int, int, tuple[int, ...]]
"""A kernel, its blocks, threads per block, and last arguments."""
NormLaunch = tuple[Kernel, int, int, int, tuple[int | float, ...]]
"""The same with the shared memory in bytes before the last arguments."""


class TensorRows:
    """The kernels over rows of tensors."""

    norm_source = "rowwise/norm.cu"
    softmax_source = "rowwise/softmax_backward.cu"
    quantize_source = "rowwise/quantize.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._norm_backward = self._cached(self.norm_source, "norm_backward", "multi_pass", BACKWARD_ROW)
        self._softmax_backward = self._cached(self.softmax_source, "softmax_backward", "two_pass", BACKWARD_ROW)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        whole = BOOLEANS[::-1]
        shapes = tuple(Together(s) for s in sorted(row_shapes(4)) if s[0] * s[1] * 8 <= MAX_NORM_WIDTH)
        narrow = tuple(s for s in shapes if int(str(s[0])) * int(str(s[1])) * 8 <= BACKWARD_ROW)
        types = tuple(Together((kind, weight)) for kind in KINDS for weight in dict.fromkeys((kind, "float")))
        yield KernelFamily(cls.norm_source, "norm_rows", (types, BOOLEANS, whole, shapes))
        yield KernelFamily(cls.norm_source, "norm_backward", (types, BOOLEANS, whole, narrow))
        for name in ("norm_rows_multi_pass", "norm_backward_multi_pass", "norm_parameter_gradients"):
            yield KernelFamily(cls.norm_source, name, (types, BOOLEANS, whole))
        yield KernelFamily(cls.softmax_source, "softmax_backward", (KINDS, whole, narrow))
        yield KernelFamily(cls.softmax_source, "softmax_backward_two_pass", (KINDS, whole))
        yield KernelFamily(cls.quantize_source, "quantize_rows", (KINDS, whole, shapes))
        yield KernelFamily(cls.quantize_source, "quantize_rows_two_pass", (KINDS, whole))
        yield KernelFamily(cls.quantize_source, "dequantize_codes", (KINDS, whole))
        yield KernelFamily(cls.quantize_source, "scale_sums", (("int", "float"), KINDS))

    def norm_launch(
        self, types: str, center: bool, whole: bool, rows: int, k: int, weight: bool, bias: bool, alone: bool
    ) -> NormLaunch:
        """The launch of a norm of ``rows`` of ``k`` elements.

        The arguments of the kernel are ``x`` and its pitch, the addresses of weight and bias, ``eps``, ``out`` and its
        pitch, the addresses of means and inverse deviations (fp32 ``[rows]`` or 0) unless the norm is ``alone``, and
        the last ones of :data:`NormLaunch`. ``out`` may be ``x``; weight and bias are contiguous ``[k]`` or 0.

        ``types`` are the elements' and the weight's types, such as ``"__half, float"``. ``whole``: ``k`` is a multiple
        of 8, and all rows, weight and bias start at multiples of 16 bytes. ``weight``, ``bias``: there is one.
        """
        if center and whole and weight and alone and self._keeps_parameters(rows, k, types):
            return *self._persistent(k, bias), (rows, k)
        names = "norm_rows", "norm_rows_multi_pass"
        kernel, grid, block, sizes = self._find(self.norm_source, *names, MAX_NORM_WIDTH, rows, k, types, center, whole)
        last = *sizes, 1 / k
        return kernel, grid, block, 0, (0, 0, *last) if alone else last

    def _keeps_parameters(self, rows: int, k: int, types: str) -> bool:
        """Whether a LayerNorm is faster by blocks that keep its parameters in shared memory; see ``PERSISTENT_ROW``."""
        launcher = self._launcher
        return (
            PERSISTENT_ROW < k <= MAX_NORM_WIDTH
            and k % PAD == 0
            and types == "float, float"
            and rows >= ROWS_EACH * launcher.num_sms
            and launcher.half_shared > 4 * MAX_NORM_WIDTH
        )

    def _persistent(self, k: int, has_bias: bool) -> tuple[Kernel, int, int, int]:
        """The kernel, its blocks, threads per block, and shared memory."""
        expression = f"layer_norm_persistent<{str(has_bias).lower()}, float, {PERSISTENT_THREADS}>"
        kernel = self._launcher.kernel(RowKernels.persistent_source, expression, True)
        return kernel, self._launcher.num_sms, PERSISTENT_THREADS, 4 * k * (1 + has_bias)

    def norm_backward(
        self,
        stream: int,
        types: str,
        center: bool,
        whole: bool,
        dout: Rows,
        x: Rows,
        from_out: bool,
        weight: int,
        bias: int,
        mean: int,
        inverse: int,
        dx: Rows,
        rows: int,
        k: int,
    ) -> None:
        """``dx`` is the gradient of the norm's input; ``x`` is its input, or with ``from_out`` its output."""
        kernel, grid, block, sizes = self._norm_backward(rows, k, types, center, whole)
        kernel(grid, block, (*dout, *x, from_out, weight, bias, mean, inverse, *dx, *sizes), 0, stream)

    def parameter_parts(self, rows: int, k: int) -> int:
        """Parts in which :meth:`norm_parameter_gradients` adds up its rows."""
        strips = ceil_div(k, PARAMETER_COLUMNS)
        return max(1, min(ceil_div(rows, 4 * PARAMETER_ROWS), ceil_div(4 * self._launcher.num_sms, strips)))

    def norm_parameter_gradients(
        self,
        stream: int,
        types: str,
        center: bool,
        whole: bool,
        dout: Rows,
        x: Rows,
        from_out: bool,
        weight: int,
        bias: int,
        mean: int,
        inverse: int,
        dweight: int,
        dbias: int,
        parts: int,
        rows: int,
        k: int,
    ) -> None:
        """The gradients of weight and bias (0: not wanted) in ``parts``, fp32 ``[parts, k]``."""
        template = f"{types}, {str(center).lower()}, {str(whole).lower()}"
        kernel = self._launcher.kernel(self.norm_source, f"norm_parameter_gradients<{template}>", True)
        arguments = (*dout, *x, from_out, weight, bias, mean, inverse, dweight, dbias, rows, k)
        kernel((ceil_div(k, PARAMETER_COLUMNS), parts), 256, arguments, 0, stream)

    def softmax_backward(
        self, stream: int, kind: str, whole: bool, y: Rows, dy: Rows, scale: float, dx: Rows, rows: int, k: int
    ) -> None:
        """``dx = scale * y * (dy - sum(dy * y))``; ``dx`` may be ``dy``."""
        kernel, grid, block, sizes = self._softmax_backward(rows, k, kind, whole)
        kernel(grid, block, (*y, *dy, scale, *dx, *sizes), 0, stream)

    def quantize_launch(self, kind: str, whole: bool, rows: int, k: int) -> QuantizeLaunch:
        """The launch that quantizes ``rows`` of ``k`` elements.

        The arguments of the kernel are ``x`` and its pitch, int8 codes and their pitch, scales fp32 ``[rows]``, and the
        last ones of :data:`QuantizeLaunch`. Codes behind column ``k`` of a row are zeros.
        """
        names = "quantize_rows", "quantize_rows_two_pass"
        return self._find(self.quantize_source, *names, MAX_NORM_WIDTH, rows, k, kind, whole)

    def dequantize_codes(self, stream: int, kind: str, codes: int, scale: int, out: int, rows: int, k: int) -> None:
        """``out[rows, k] = scale[row] * codes``, or the codes as numbers where ``scale`` is 0; all contiguous."""
        whole = k % 8 == 0 and rows * k < 8 << 32
        kernel = self._launcher.kernel(self.quantize_source, f"dequantize_codes<{kind}, {str(whole).lower()}>", True)
        kernel(ceil_div(rows * k, CONVERTED_CODES), CONVERT_THREADS, (codes, scale, out, rows * k, k), 0, stream)

    def scale_sums(
        self,
        stream: int,
        kind: str,
        integer: bool,
        sums: Rows,
        x_scale: int,
        w_scale: int,
        bias: int,
        out: int,
        rows: int,
        n: int,
    ) -> None:
        """``out = x_scale * (w_scale * sums) + bias``; sums int32 or fp32, ``x_scale`` and ``bias`` may be 0."""
        kernel = self._launcher.kernel(
            self.quantize_source, f"scale_sums<{'int' if integer else 'float'}, {kind}>", True
        )
        kernel(ceil_div(rows * ceil_div(n, 8), 256), 256, (*sums, x_scale, w_scale, bias, out, rows, n), 0, stream)

    def _cached(self, source: str, name: str, long_suffix: str, most: int) -> Callable[..., QuantizeLaunch]:
        """:meth:`_find` for a kernel, with the results of recent arguments kept."""
        find = functools.partial(self._find, source, name, f"{name}_{long_suffix}", most)
        return functools.lru_cache(KERNEL_CACHE_SIZE)(find)

    def _find(
        self, source: str, name: str, long_name: str, most: int, rows: int, k: int, *template: str | bool
    ) -> QuantizeLaunch:
        """The kernel for rows of ``k`` elements, its blocks, threads per block, and last arguments."""
        arguments = ", ".join(str(v).lower() if isinstance(v, bool) else v for v in template)
        fills_gpu = rows > self._launcher.num_sms
        if k > most:
            return self._launcher.kernel(source, f"{long_name}<{arguments}>", fills_gpu), rows, LONG_THREADS, (k,)
        threads, vectors = row_shape(k, 4 if fills_gpu else 1)
        kernel = self._launcher.kernel(source, f"{name}<{arguments}, {threads}, {vectors}>", fills_gpu)
        return kernel, ceil_div(rows * threads, max(threads, 128)), max(threads, 128), (rows, k)
