"""The operators on CPU tensors: the definitions over NumPy, in fp32, or in fp64 for fp64 tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..backend.functions import norm_statistics, normalise
from ..backend.functions import softmax as softmax_of_scores
from ..backend.gradients import norm_gradients, normalised_from_output, softmax_gradient
from ..backend.operations.products import exact_int_matmul
from ..backend.quantization import quantize_rows as quantize
from ..backend.values import Norm

COMPUTE_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
NO_ROWS = "quantize_rows needs at least one dimension"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for the other float types that operations take; ``ValueError`` for all else."""
    found = COMPUTE_DTYPES.get(dtype)
    if found is None:
        raise ValueError(f"tensors must be fp32, fp16, bf16 or on the CPU fp64, not {dtype}; convert them with .to()")
    return found


def array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """The values of a tensor in ``dtype``."""
    values: np.ndarray = x.detach().to(dtype).numpy()
    return values


def optional_array(x: Tensor | None, dtype: torch.dtype) -> np.ndarray | None:
    """The same, None for None."""
    return None if x is None else array(x, dtype)


def tensor(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of its own of these values in ``dtype``."""
    return torch.from_numpy(np.array(x, order="C", ndmin=0)).to(dtype)


def softmax(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """``softmax(scale * x + bias)`` where ``mask`` is set."""
    dtype = compute_dtype(x.dtype)
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    scores = array(x, dtype)
    scores = scores * scores.dtype.type(scale)
    if bias is not None:
        scores = scores + array(bias, dtype)
    return tensor(softmax_of_scores(scores, None if mask is None else array(mask, torch.bool)), x.dtype)


def softmax_(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> None:
    """The same over ``x``."""
    x.copy_(softmax(x, scale, bias, mask))


def softmax_backward(y: Tensor, dy: Tensor, scale: float) -> Tensor:
    """The gradient of a softmax's input."""
    dtype = compute_dtype(y.dtype)
    return tensor(softmax_gradient(array(dy, dtype), array(y, dtype), scale), y.dtype)


def norm_with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A norm, and its means (none without ``center``) and inverse deviations."""
    dtype = compute_dtype(x.dtype)
    values = array(x, dtype)
    mean, inverse = norm_statistics(values, eps, center)
    gain = np.ones((), values.dtype) if weight is None else array(weight, dtype)
    y = normalise(values, Norm(gain, eps, optional_array(bias, dtype), center), values.dtype.type)
    return tensor(y, x.dtype), tensor(mean if center else np.empty(0), dtype), tensor(inverse, dtype)


def norm_with_statistics_(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor]:
    """The same over ``x``."""
    y, mean, inverse = norm_with_statistics(x, weight, bias, eps, center)
    x.copy_(y)
    return mean, inverse


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    """A norm."""
    return norm_with_statistics(x, weight, bias, eps, center)[0]


def norm_(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> None:
    """The same over ``x``."""
    x.copy_(norm(x, weight, bias, eps, center))


def norm_backward(
    dy: Tensor,
    x: Tensor,
    from_output: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    center: bool,
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a norm's input, weight and bias; empty without ``parameters``, or without a bias."""
    dtype = compute_dtype(x.dtype)
    values, gain, factor = array(x, dtype), optional_array(weight, dtype), array(inverse, dtype)
    if from_output:
        normalised = normalised_from_output(values, gain, optional_array(bias, dtype))
    else:
        normalised = (values - array(mean, dtype)[..., None] if center else values) * factor[..., None]
    gradients = norm_gradients(array(dy, dtype), normalised, gain, factor, center)
    if not parameters:
        return tensor(gradients.x, x.dtype), x.new_empty(0), x.new_empty(0)
    kind = x.dtype if weight is None else weight.dtype
    dbias = x.new_empty(0, dtype=kind) if bias is None else tensor(gradients.bias, kind)
    return tensor(gradients.x, x.dtype), tensor(gradients.weight, kind), dbias


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    compute_dtype(x.dtype)
    if not x.shape:
        raise ValueError(NO_ROWS)
    codes, scale = quantize(array(x, torch.float32))
    return tensor(codes, torch.int8), tensor(scale, torch.float32)


def int8_dot(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``a_scale * (b_scale * (a @ b.T))`` of codes."""
    compute_dtype(dtype)
    sums = exact_int_matmul(array(a, torch.float32), array(b, torch.float32))
    scales = array(a_scale, torch.float32)[:, None], array(b_scale, torch.float32)
    return tensor(scales[0] * (scales[1] * sums.astype(np.float32)), dtype)


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    """``x @ (scale * codes).T + bias``, with ``x`` quantized per row if ``dynamic``."""
    dtype = compute_dtype(x.dtype)
    weight, rows = array(codes, dtype), array(x, dtype).reshape(-1, x.shape[-1])
    if dynamic:
        row_codes, row_scale = quantize(rows.astype(np.float32, copy=False))
        sums = exact_int_matmul(row_codes.astype(np.float32), weight.astype(np.float32, copy=False))
        y = row_scale[:, None] * (array(scale, torch.float32) * sums.astype(np.float32))
    else:
        y = array(scale, dtype) * (rows @ weight.T)
    if bias is not None:
        y = y + array(bias, dtype)
    return tensor(y.reshape(*x.shape[:-1], codes.shape[0]), x.dtype)


def int8_linear_backward(dy: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """``dy @ (scale * codes)``."""
    dtype = compute_dtype(dy.dtype)
    weight = array(scale, dtype)[:, None] * array(codes, dtype)
    return tensor(array(dy, dtype) @ weight, dy.dtype)


def square_linear_(x: Tensor, w: Tensor, transpose: bool) -> None:
    """``x @ w.T``, or ``x @ w``, over ``x``."""
    dtype = compute_dtype(x.dtype)
    weight = array(w, dtype)
    x.copy_(tensor(array(x, dtype) @ (weight.T if transpose else weight), x.dtype))
