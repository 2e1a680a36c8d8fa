"""Single kernels to time, and plain formulas that compute the same, for comparison.

The formulas work over NumPy or CuPy, one expression per step, without any optimization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import Int8Weight, quantize_rows
from ..backend.random_matrix import RandomMatrix
from ..backend.values import Norm

WIDTHS = (256, 1024, 4096, 8192, 16384)
"""Row widths."""
MATRICES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""Shapes ``[out, in]`` of weights."""
GEMM_ROWS = (2, 8, 16, 32, 512, 2048)
"""Numbers of activation rows of a product."""


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size.

    ``run(i)`` runs the kernel for the ``i``-th time, on several inputs in turn where the device's cache would hold a
    single one. ``plain(i)`` computes the same by a plain formula. ``nbytes`` is what one run must read and write.
    ``operations`` are those of a product, or 0 for a kernel that is bound by memory, whose rate is in bytes per second.
    """

    kernel: str
    shape: str
    run: Callable[[int], Any]
    nbytes: int
    operations: int = 0
    plain: Callable[[int], Any] | None = None


def softmax(xp: Any, x: Any) -> Any:
    """fp32, over the last axis."""
    weights = xp.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def rms_norm(xp: Any, x: Any, weight: Any) -> Any:
    """fp32 rows -> fp16."""
    return (x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight).astype(np.float16)


def layer_norm(xp: Any, x: Any, weight: Any, bias: Any) -> Any:
    """fp32 rows -> fp16."""
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)
    return (centred * inverse * weight + bias).astype(np.float16)


def quantize(xp: Any, x: Any) -> tuple[Any, Any]:
    """fp16 rows -> int8 codes and fp32 scales; a row of zeros gives NaN."""
    x = x.astype(np.float32)
    a = xp.abs(x).max(axis=-1, keepdims=True)
    return xp.clip(xp.rint(x * (127 / a)), -127, 127).astype(np.int8), a / 127


def gemv(xp: Any, x: Any, weight: Any, scale: Any) -> Any:
    """fp16 ``[1, in]`` and int8 ``[out, in]`` -> fp16 ``[1, out]``, with float activations."""
    return ((x.astype(np.float32) @ weight.astype(np.float32).T) * scale).astype(np.float16)


def cycle(function: Callable[..., Any], *inputs: tuple[Any, ...]) -> Callable[[int], Any]:
    """``run(i)`` that calls ``function`` with the ``i``-th of the inputs, cyclically."""
    return lambda i: function(*inputs[i % len(inputs)])


def plain_cases(xp: Any, ops: Backend, elements: int = 1 << 22) -> Iterator[KernelCase]:
    """The cases of the CPU: each formula, and the backend's own operation where it has one."""
    random = np.random.default_rng(0)
    for width in WIDTHS:
        rows = max(1, elements // width)
        x = random.standard_normal((rows, width), np.float32)
        half, weight, shape = x.astype(np.float16), np.ones(width, np.float32), f"{rows} x {width}"
        norm, plain_norm = cycle(ops.norm, (x, Norm(weight, 1e-5))), cycle(rms_norm, (xp, x, weight))
        yield KernelCase("softmax", shape, cycle(softmax, (xp, x)), 2 * x.nbytes)
        yield KernelCase("rms_norm", shape, norm, 2 * x.nbytes, plain=plain_norm)
        plain_quantize = cycle(quantize, (xp, half))
        yield KernelCase("quantize", shape, cycle(quantize_rows, (half,)), 3 * half.size, plain=plain_quantize)
    for n, k in MATRICES:
        matrix = ops.weight([Int8Weight(np.asarray(RandomMatrix((n, k))), np.ones(n, np.float32))])
        for rows in (1, 16):
            run = cycle(ops.linear, (random.standard_normal((rows, k), np.float32), matrix))
            kernel, operations = ("matvec", 0) if rows == 1 else ("product", 2 * rows * n * k)
            yield KernelCase(kernel, f"{rows} x {n} x {k}", run, matrix.nbytes, operations)
