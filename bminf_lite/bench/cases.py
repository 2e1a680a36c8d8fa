"""Formulas of single kernels over any array library that follows NumPy: what a benchmark of a kernel compares with.

They are written as one would write them first, an expression per step. The same inputs go to the kernels.
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
"""Elements of a row."""
MATRICES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""Outputs and inputs of weights."""
GEMM_ROWS = (2, 8, 16, 32, 512, 2048)


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size.

    ``run(i)`` does the work for the ``i``-th time, on inputs of its own where the device's cache would hold the same
    ones; ``plain(i)`` does it by a formula of :mod:`.plain`. ``nbytes`` is what one run must read and write,
    ``operations`` are those of a product (0: the kernel is bound by memory, and its rate is bytes per second).
    """

    kernel: str
    shape: str
    run: Callable[[int], Any]
    nbytes: int
    operations: int = 0
    plain: Callable[[int], Any] | None = None


def softmax(xp: Any, x: Any) -> Any:
    """Over the last axis, fp32."""
    weights = xp.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def rms_norm(xp: Any, x: Any, gain: Any) -> Any:
    """fp32 rows -> fp16."""
    return (x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * gain).astype(np.float16)


def layer_norm(xp: Any, x: Any, gain: Any, bias: Any) -> Any:
    """fp32 rows -> fp16."""
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)
    return (centred * inverse * gain + bias).astype(np.float16)


def quantize(xp: Any, x: Any) -> tuple[Any, Any]:
    """fp16 rows -> int8 codes and fp32 scales; rows of zeros are not looked after."""
    x = x.astype(np.float32)
    a = xp.abs(x).max(axis=-1, keepdims=True)
    return xp.clip(xp.rint(x * (127 / a)), -127, 127).astype(np.int8), a / 127


def gemv(xp: Any, x: Any, weight: Any, scale: Any) -> Any:
    """fp16 ``[1, in]`` and int8 ``[out, in]`` -> fp16 ``[1, out]``, with float activations."""
    return ((x.astype(np.float32) @ weight.astype(np.float32).T) * scale).astype(np.float16)


def cycle(function: Callable[..., Any], *inputs: tuple[Any, ...]) -> Callable[[int], Any]:
    """``run(i)`` calls ``function`` with the ``i``-th of the inputs, from the first again after the last."""
    return lambda i: function(*inputs[i % len(inputs)])


def plain_cases(xp: Any, ops: Backend, elements: int = 1 << 22) -> Iterator[KernelCase]:
    """What NumPy takes for each formula, and the backend's own operation where it has one."""
    random = np.random.default_rng(0)
    for width in WIDTHS:
        rows = max(1, elements // width)
        x = random.standard_normal((rows, width), np.float32)
        half, gain, shape = x.astype(np.float16), np.ones(width, np.float32), f"{rows} x {width}"
        yield KernelCase("softmax", shape, cycle(softmax, (xp, x)), 2 * x.nbytes)
        yield KernelCase("rms_norm", shape, cycle(ops.norm, (x, Norm(gain, 1e-5))), 2 * x.nbytes,
                   plain=cycle(rms_norm, (xp, x, gain)))  # fmt: skip
        yield KernelCase("quantize", shape, cycle(quantize_rows, (half,)), 3 * half.size,
                   plain=cycle(quantize, (xp, half)))  # fmt: skip
    for n, k in MATRICES:
        weight = ops.weight([Int8Weight(np.asarray(RandomMatrix((n, k))), np.ones(n, np.float32))])
        for rows in (1, 16):
            x = random.standard_normal((rows, k), np.float32)
            yield KernelCase("matvec" if rows == 1 else "product", f"{rows} x {n} x {k}", cycle(ops.linear, (x, weight)
                       ), weight.nbytes, operations=0 if rows == 1 else 2 * rows * n * k)  # fmt: skip
