"""Softmax, norms, quantization and int8 products on PyTorch tensors: differentiable, in place, and traceable.

Tensors are fp32, fp16 or bf16, on the CPU also fp64; operations are over the last dimension and compute in fp32 (fp64
for fp64). On a GPU they launch this engine's kernels on torch's current stream, in memory of torch's caching allocator,
without copies of tensors whose rows are contiguous and equally far apart, and without waiting for the device. On the
CPU they are the definitions over NumPy. All are custom operators of the library ``bminf_lite``: ``torch.compile`` and
CUDA graphs take them. ``torch.vmap``, the transforms of ``torch.func``, forward-mode gradients and second gradients of
softmax and norms are refused.

Operations whose names end in ``_`` overwrite their first argument, which shares no memory with the others, and return
it. Eager mode then allocates no result; a compiler may make a copy.

Every function raises ``ValueError`` for shapes that do not fit, before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backend.functions import silently
from . import _definitions, _kernels

LIBRARY = torch.library.Library("bminf_lite", "DEF")
"""Owns the registrations; they end with it."""
PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.dtype, float, int, bool, type(None)})
"""Types of arguments: of tensors those without a ``__torch_dispatch__`` of their own."""
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_profiler_enabled = torch._C._autograd._profiler_enabled
_tracing_state = torch._C._get_tracing_state
SCHEMAS = {
    "softmax": "(Tensor x, float scale, Tensor? bias, Tensor? mask) -> Tensor",
    "softmax_": "(Tensor(a!) x, float scale, Tensor? bias, Tensor? mask) -> ()",
    "softmax_backward": "(Tensor y, Tensor dy, float scale) -> Tensor",
    "norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool center) -> Tensor",
    "norm_": "(Tensor(a!) x, Tensor? weight, Tensor? bias, float eps, bool center) -> ()",
    "norm_with_statistics": (
        "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool center) -> (Tensor, Tensor, Tensor)"
    ),
    "norm_with_statistics_": (
        "(Tensor(a!) x, Tensor? weight, Tensor? bias, float eps, bool center) -> (Tensor, Tensor)"
    ),
    "norm_backward": (
        "(Tensor dy, Tensor x, bool from_output, Tensor? weight, Tensor? bias, Tensor mean, Tensor inverse, "
        "bool center, bool parameters) -> (Tensor, Tensor, Tensor)"
    ),
    "quantize_rows": "(Tensor x) -> (Tensor, Tensor)",
    "int8_dot": "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType dtype) -> Tensor",
    "int8_linear": "(Tensor x, Tensor codes, Tensor scale, Tensor? bias, bool dynamic) -> Tensor",
    "int8_linear_backward": "(Tensor dy, Tensor codes, Tensor scale) -> Tensor",
    "square_linear_": "(Tensor(a!) x, Tensor w, bool transpose) -> ()",
}
"""The operators; ``_definitions`` and ``_kernels`` have a function of the same name for each.

``norm`` and ``norm_`` record no gradients; those ``with_statistics`` also return what backward needs.
"""
OVERWRITING = frozenset(name for name in SCHEMAS if name.endswith("_"))


# -- the functions -----------------------------------------------------------------------------------------------------


def softmax(x: Tensor, scale: float = 1.0, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Softmax of ``scale * x + bias`` over the last dimension: ``[..., k]`` -> the same, in the dtype of ``x``.

    ``bias`` (float) and ``mask`` (bool) broadcast against ``x``. Where ``mask`` is false the result is exactly 0, also
    for a whole row. Differentiable in ``x`` and ``bias``. On a GPU a ``bias`` that is not fp32 is converted, and one
    whose present leading dimensions are not neighbours is expanded in a copy.
    """
    _check_scores(x, bias, mask)
    result: Tensor = _call("softmax", (x, bias), (x, scale, bias, mask))
    return result


def softmax_(x: Tensor, scale: float = 1.0, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """:func:`softmax` over ``x``, which is returned. Its gradient needs the result alone."""
    _check_scores(x, bias, mask)
    _call("softmax_", (x, bias), (x, scale, bias, mask))
    return x


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm (https://arxiv.org/abs/1607.06450) over the last dimension: ``[..., k]`` -> the same.

    ``weight`` and ``bias`` are ``[k]``, in the dtype of ``x`` or both in fp32. Differentiable in all three.
    """
    _check_norm(x, weight, bias)
    return _norm(x, weight, bias, eps, True)


def layer_norm_(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """:func:`layer_norm` over ``x``, which is returned.

    Backward reconstructs the normalized input as ``(y - bias) / weight`` from the result ``y``, so its gradients have
    the precision of ``y`` in its dtype, divided by the weight. Where a weight is 0 they are NaN.
    """
    _check_norm(x, weight, bias)
    return _norm_(x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMSNorm (https://arxiv.org/abs/1910.07467) over the last dimension: ``[..., k]`` -> the same.

    ``weight`` is ``[k]`` in the dtype of ``x`` or in fp32. Differentiable in both.
    """
    _check_norm(x, weight, None)
    return _norm(x, weight, None, eps, False)


def rms_norm_(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """:func:`rms_norm` over ``x``, which is returned; its gradients are those of :func:`layer_norm_`."""
    _check_norm(x, weight, None)
    return _norm_(x, weight, None, eps, False)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 codes ``[..., k]`` and fp32 scales ``[...]`` of the rows of ``x`` ``[..., k]``; not differentiable.

    ``scale * code`` is within half a step of ``x``; docs/numerics.md has the formula. A row of zeros has scale 0, a row
    with a NaN or an infinity the scale NaN.
    """
    result: tuple[Tensor, Tensor] = _call_below_autograd("quantize_rows", (x,))
    return result


def rotated(x: Tensor, block: int) -> Tensor:
    """Each block of ``block`` neighbouring elements times Sylvester's Hadamard matrix over the root of its size.

    ``[..., k]`` -> the same in fp32, or in fp64 for fp64, with the steps and the roundings of
    :func:`bminf_lite.backend.rotation.rotated`. Differentiable. The matrix is orthogonal and symmetric, so rotating
    twice gives ``x`` up to rounding. Raises ``ValueError`` unless ``block`` is a power of two that divides ``k``.
    """
    if x.dim() == 0 or block < 1 or block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"x {list(x.shape)} has no blocks of {block}: give a power of two that divides its last size")
    y = x.to(_definitions.compute_dtype(x.dtype))
    if block == 1:
        return y
    signs = torch.arange(1, -2, -2, dtype=y.dtype, device=y.device)[:, None]
    h = 1
    while h < block:
        a, b = y.reshape(*x.shape[:-1], x.shape[-1] // (2 * h), 2, h).split(1, -2)
        y = torch.addcmul(a, signs, b)  # a + b and a - b by one launch; unlike a matrix product, never in TF32
        h *= 2
    return y.reshape(x.shape) * block**-0.5


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = True) -> Tensor:
    """``x @ (scale[:, None] * codes).T + bias``: ``[..., in]`` -> ``[..., out]`` in the dtype of ``x``.

    ``codes`` is int8 ``[out, in]``, ``scale`` float ``[out]``, ``bias`` float ``[out]``. With ``dynamic`` (w8a8) each
    row of ``x`` is quantized too, and the sums are exact; without (w8a16) the codes are multiplied in the dtype of
    ``x`` and summed in fp32. Under autocast ``x`` is converted to the autocast dtype.

    Differentiable in ``x`` and ``bias``. The gradient of ``x`` is that of the dequantized weight, also with ``dynamic``
    (the straight-through estimator, https://arxiv.org/abs/1308.3432).

    On a GPU, ``dynamic`` allocates the codes and scales of ``x``; the other form and backward also allocate the weight
    in the dtype of ``x``. Where ``in`` is not a multiple of 16, ``codes`` is copied into padded rows.
    """
    sizes, device = codes.shape, x.get_device()
    if len(sizes) != 2 or not sizes[1] or codes.dtype != torch.int8:
        raise ValueError(f"codes must be int8 [out, in] with in at least 1, not {codes.dtype} {list(sizes)}")
    n, k = sizes
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x {list(x.shape)} must end in {k}, the columns of codes {list(codes.shape)}")
    if codes.get_device() != device:
        _check_device("codes", codes, x)
    for values in (scale, bias):
        if values is not None and (values.numel() != n or values.dim() != 1 or values.get_device() != device):
            name = "scale" if values is scale else "bias"
            _check_device(name, values, x)
            raise ValueError(f"{name} {list(values.shape)} must be [{n}], one for each row of codes")
    x = autocast(x)
    result: Tensor = _call("int8_linear", (x, scale, bias), (x, codes, scale, bias, dynamic))
    return result


def int8_linear_backward(dy: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The gradient of the ``x`` of :func:`int8_linear` for that of its result: ``dy @ (scale[:, None] * codes)``.

    ``dy`` is ``[..., out]``, the result ``[..., in]`` in its dtype. Differentiable in ``dy``.
    """
    n = codes.shape[0]
    if dy.dim() == 0 or dy.shape[-1] != n or tuple(scale.shape) != (n,):
        found = f"dy {list(dy.shape)} and scale {list(scale.shape)}"
        raise ValueError(f"{found} must end in {n}, the rows of codes {list(codes.shape)}")
    for name, values in (("codes", codes), ("scale", scale)):
        _check_device(name, values, dy, "dy")
    result: Tensor = _call("int8_linear_backward", (dy,), (dy, codes, scale))
    return result


def dot(
    a: Tensor,
    b: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """``op(a) @ op(b)``, where ``op`` transposes the last two dimensions if asked: ``[m, k]`` by ``[k, n]``.

    Floats are multiplied by cuBLAS through ``torch.matmul``, as the engine multiplies them by cuBLAS, and are
    differentiable; each gradient is the product with the other transposes.

    int8 codes need ``a_scale`` fp32 ``[m]`` and ``b_scale`` fp32 ``[n]``; the result ``a_scale[i] * (b_scale[j] *
    sum)`` has ``dtype``, and its sums are exact for ``k`` up to 131,071. Tensor cores read int8 with ``k`` contiguous,
    so ``a`` is copied if it is transposed, and ``b`` unless it is: one int8 copy each. Scales get no gradient.
    """
    if (a.dtype == torch.int8) != (b.dtype == torch.int8):
        raise ValueError(f"both factors must be int8 or both floats, not {a.dtype} and {b.dtype}")
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"factors must be matrices or batches of them, not {list(a.shape)} and {list(b.shape)}")
    inner = a.shape[-2 if transpose_a else -1], b.shape[-1 if transpose_b else -2]
    if inner[0] != inner[1]:
        raise ValueError(f"the inner sizes {inner[0]} and {inner[1]} differ")
    if a.dtype != torch.int8:
        if a_scale is not None or b_scale is not None:
            raise ValueError(f"scales belong to int8 factors, and these are {a.dtype}")
        return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)
    if a_scale is None or b_scale is None:
        raise ValueError("int8 factors need a_scale and b_scale")
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"int8 factors must be matrices, not {list(a.shape)} and {list(b.shape)}")
    left, right = (a.mT if transpose_a else a).contiguous(), (b if transpose_b else b.mT).contiguous()
    if tuple(a_scale.shape) != left.shape[:1] or tuple(b_scale.shape) != right.shape[:1]:
        raise ValueError(
            f"a_scale {list(a_scale.shape)} and b_scale {list(b_scale.shape)} must be "
            f"[{left.shape[0]}] and [{right.shape[0]}]"
        )
    for name, values in (("b", b), ("a_scale", a_scale), ("b_scale", b_scale)):
        _check_device(name, values, a, "a")
    result: Tensor = _call_below_autograd("int8_dot", (left, right, a_scale, b_scale, dtype))
    return result


def square_linear_(x: Tensor, w: Tensor, transpose: bool = True) -> Tensor:
    """``x @ w.T``, or without ``transpose`` ``x @ w``, written over ``x`` ``[..., n]``, which is returned.

    ``w`` is square, ``[n, n]``, in the dtype of ``x``, and does not share memory with it. On a GPU blocks of rows go
    through a workspace of at most 32 MiB (one row, if that is longer). Differentiable in ``x``. Raises ``ValueError``
    if ``w`` requires a gradient while gradients are recorded: that gradient needs the ``x`` that is overwritten.
    """
    n = x.shape[-1] if x.dim() else 0
    if tuple(w.shape) != (n, n) or w.dtype != x.dtype:
        raise ValueError(f"w must be square and fit x: [{n}, {n}] in {x.dtype}, not {list(w.shape)} in {w.dtype}")
    _check_device("w", w, x)
    if w.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "w requires a gradient, which needs the x that square_linear_ overwrites; use torch.nn.functional.linear, "
            "or w.detach() if w is not trained"
        )
    _call("square_linear_", (x,), (x, w, transpose))
    return x


def autocast(x: Tensor) -> Tensor:
    """``x`` in the autocast dtype of its device, where autocast is enabled; fp64 stays, as in PyTorch's operations."""
    kind = "cuda" if x.is_cuda else x.device.type  # of which the second is slow
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    result: Tensor
    if torch.is_grad_enabled() and _records_gradient((x, weight, bias)):
        result = _OPERATORS["norm_with_statistics"](x, weight, bias, eps, center)[0]
    else:
        result = _call_below_autograd("norm", (x, weight, bias, eps, center))
    return result


def _norm_(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    if torch.is_grad_enabled() and _records_gradient((x, weight, bias)):
        _OPERATORS["norm_with_statistics_"](x, weight, bias, eps, center)
    else:
        _call_below_autograd("norm_", (x, weight, bias, eps, center))
    return x


def _records_gradient(tensors: tuple[Tensor | None, ...]) -> bool:
    for tensor in tensors:  # noqa: SIM110 - any() takes the host twice as long
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _call(name: str, differentiable: tuple[Tensor | None, ...], arguments: tuple[Any, ...]) -> Any:
    """Call an operator, whose gradient may be recorded if one of ``differentiable`` requires it."""
    if torch.is_grad_enabled() and _records_gradient(differentiable):
        return _OPERATORS[name](*arguments)
    return _call_below_autograd(name, arguments)


def _call_below_autograd(name: str, arguments: tuple[Any, ...]) -> Any:
    """Call an operator that records no gradient, by the shortest way that does the same.

    Its autograd kernel, which is Python, is skipped. On a GPU so is the dispatcher, if it would only call the GPU's
    function.
    """
    if _is_compiling():
        return _OPERATORS[name](*arguments)
    if forward_ad._current_level >= 0:
        _refuse_tangents(name, arguments)
    if _only_dispatches_to_gpu(arguments):
        result = _ON_GPU[name](*arguments)
        if name in OVERWRITING:
            torch.autograd.graph.increment_version(arguments[0])
        return result
    with torch._C._AutoDispatchBelowAutograd():
        return _OPERATORS[name](*arguments)


def _forward(name: str, *arguments: Any) -> Any:
    """Call an operator from the forward of its ``autograd.Function``."""
    if _only_dispatches_to_gpu(arguments):
        return _ON_GPU[name](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _OPERATORS[name](*arguments)


def _refuse_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    """The operators have no forward-mode gradient, and PyTorch would drop it silently."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(f"bminf_lite::{name} has no forward-mode gradient; use backward()")


def _only_dispatches_to_gpu(arguments: tuple[Any, ...]) -> bool:
    """Whether all tensors are plain ones of the current GPU, and no mode, transform, tracer or profiler watches."""
    x = arguments[0]
    return (
        x.is_cuda
        and x.get_device() == torch._C._cuda_getDevice()
        and PLAIN.issuperset(map(type, arguments))
        and not _dispatch_modes()
        and _transform() is None
        and not _profiler_enabled()
        and _tracing_state() is None
    )


def _check_scores(x: Tensor, bias: Tensor | None, mask: Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError("a softmax needs at least one dimension")
    if bias is None and mask is None:
        return
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask.dtype}")
    for name, values in (("bias", bias), ("mask", mask)):
        if values is not None:
            _check_device(name, values, x)
            if not _broadcasts(values, x):
                raise ValueError(f"{name} {list(values.shape)} does not broadcast to x {list(x.shape)}")


def _broadcasts(values: Tensor, x: Tensor) -> bool:
    if not 1 <= values.dim() <= x.dim():
        return False
    return all(own in (1, size) for own, size in zip(values.shape, x.shape[x.dim() - values.dim() :], strict=True))


def _check_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError("a norm needs at least one dimension")
    k, device = x.shape[-1], x.get_device()
    if weight is not None and (weight.numel() != k or weight.dim() != 1 or weight.get_device() != device):
        _refuse_parameter("weight", weight, x)
    if bias is not None and (bias.numel() != k or bias.dim() != 1 or bias.get_device() != device):
        _refuse_parameter("bias", bias, x)


def _refuse_parameter(name: str, values: Tensor, x: Tensor) -> None:
    _check_device(name, values, x)
    raise ValueError(f"{name} {list(values.shape)} must be [{x.shape[-1]}], the last dimension of x")


def _check_device(name: str, values: Tensor, x: Tensor, other: str = "x") -> None:
    if values.get_device() != x.get_device():
        raise ValueError(f"{name} is on {values.device} and {other} on {x.device}; move one with .to()")


# -- shapes without values ---------------------------------------------------------------------------------------------


def _like(x: Tensor, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape if shape is None else shape, dtype=dtype or x.dtype, device=x.device)


def _fake_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor]:
    dtype = _definitions.compute_dtype(x.dtype)
    return _like(x, x.shape[:-1] if center else (0,), dtype), _like(x, x.shape[:-1], dtype)


def _fake_norm_with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), *_fake_statistics(x, weight, bias, eps, center)


def _fake_norm_backward(
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
    size, dtype = x.shape[-1:] if parameters else (0,), x.dtype if weight is None else weight.dtype
    return _like(x), _like(x, size, dtype), _like(x, (0,) if bias is None else size, dtype)


FAKES: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, scale, bias, mask: _like(x),
    "softmax_": lambda x, scale, bias, mask: None,
    "softmax_backward": lambda y, dy, scale: _like(y),
    "norm": lambda x, weight, bias, eps, center: _like(x),
    "norm_": lambda x, weight, bias, eps, center: None,
    "norm_with_statistics": _fake_norm_with_statistics,
    "norm_with_statistics_": _fake_statistics,
    "norm_backward": _fake_norm_backward,
    "quantize_rows": lambda x: (_like(x, dtype=torch.int8), _like(x, x.shape[:-1], torch.float32)),
    "int8_dot": lambda a, b, a_scale, b_scale, dtype: _like(a, (a.shape[0], b.shape[0]), dtype),
    "int8_linear": lambda x, codes, scale, bias, dynamic: _like(x, (*x.shape[:-1], codes.shape[0])),
    "int8_linear_backward": lambda dy, codes, scale: _like(dy, (*dy.shape[:-1], codes.shape[1])),
    "square_linear_": lambda x, w, transpose: None,
}
"""The results of each operator without values: shapes, dtypes and devices."""


# -- gradients ---------------------------------------------------------------------------------------------------------


def _sum_to(x: Tensor, values: Tensor) -> Tensor:
    """``x`` summed over the dimensions in which ``values`` was broadcast."""
    return x.sum_to_size(values.shape).to(values.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        y: Tensor = _forward("softmax", x, scale, bias, mask)
        ctx.scale = scale
        ctx.save_for_backward(y, bias if ctx.needs_input_grad[2] else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        y, bias = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return _call("softmax_backward", (y, dy), (y, dy, ctx.scale)), None, None, None
        scores = _call("softmax_backward", (y, dy), (y, dy, 1.0))
        return scores * ctx.scale, None, _sum_to(scores, bias), None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, inverse = _forward("norm_with_statistics", x, weight, bias, eps, center)
        ctx.mark_non_differentiable(mean, inverse)
        ctx.set_materialize_grads(False)
        ctx.from_output, ctx.center = False, center
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y, mean, inverse

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, *statistics: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if dy is None:
            return None, None, None, None, None
        x, weight, bias, mean, inverse = ctx.saved_tensors
        needed = ctx.needs_input_grad
        dx, dweight, dbias = _call(
            "norm_backward",
            (dy, x, weight, bias),
            (dy, x, ctx.from_output, weight, bias, mean, inverse, ctx.center, needed[1] or needed[2]),
        )
        return dx if needed[0] else None, dweight if needed[1] else None, dbias if needed[2] else None, None, None


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(codes, scale)
        y: Tensor = _forward("int8_linear", x, codes, scale, bias, dynamic)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        codes, scale = ctx.saved_tensors
        if ctx.needs_input_grad[2]:
            raise RuntimeError("int8_linear has no gradient of its scales; detach them, or train a float layer")
        dx = int8_linear_backward(dy, codes, scale) if ctx.needs_input_grad[0] else None
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return dx, None, None, dbias, None


def _save_linear_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale = inputs
    ctx.save_for_backward(codes, scale)


def _second_linear_gradients(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None]:
    codes, scale = ctx.saved_tensors
    return torch.ops.bminf_lite.int8_linear(ddx, codes, scale, None, False), None, None


def _refuse_second_gradient(ctx: Any, *gradients: Tensor) -> Any:
    raise RuntimeError(
        "bminf_lite.torch.ops has no second gradients of softmax and norms; use torch.softmax and "
        "torch.nn.functional.layer_norm or rms_norm where they are needed"
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves nothing: the gradient is refused."""


class _SoftmaxInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            torch.ops.bminf_lite.softmax_(x, scale, bias, mask)
        ctx.mark_dirty(x)
        ctx.scale = scale
        ctx.save_for_backward(x, bias if ctx.needs_input_grad[2] else None)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Softmax.backward(ctx, dy)


class _NormInPlace(torch.autograd.Function):
    """Returns ``x`` alone, because autograd lets no function with more results overwrite a view."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        center: bool,
        statistics: list[Tensor],
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            statistics += torch.ops.bminf_lite.norm_with_statistics_(x, weight, bias, eps, center)
        ctx.mark_dirty(x)
        ctx.from_output, ctx.center = True, center
        ctx.save_for_backward(x, weight, bias, *statistics)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *_Norm.backward(ctx, dy), None


class _SquareLinearInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, transpose: bool) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            torch.ops.bminf_lite.square_linear_(x, w, transpose)
        ctx.mark_dirty(x)
        ctx.transpose = transpose
        ctx.save_for_backward(w)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        return dy @ (w if ctx.transpose else w.mT), None, None


def _differentiable_softmax_(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> None:
    _SoftmaxInPlace.apply(x, scale, bias, mask)


def _differentiable_norm_(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor]:
    statistics: list[Tensor] = []
    _NormInPlace.apply(x, weight, bias, eps, center, statistics)
    mean, inverse = statistics
    return mean, inverse


def _without_gradient(name: str) -> Callable[..., Any]:
    """The operator's autograd kernel if its results have no gradient."""

    def call(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.bminf_lite, name)(*arguments)

    return call


def _differentiable_square_linear_(x: Tensor, w: Tensor, transpose: bool) -> None:
    _SquareLinearInPlace.apply(x, w, transpose)


# -- registration ------------------------------------------------------------------------------------------------------


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise NotImplementedError(
            f"bminf_lite::{name} does not work under torch.vmap; it takes any number of leading dimensions, so call it "
            f"with the batch as one of them"
        )

    return refuse


def _register() -> None:
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, silently(vars(_definitions)[name]), "CPU")
        LIBRARY.impl(name, _kernels.on_own_device(_ON_GPU[name]), "CUDA")
        qualified = f"bminf_lite::{name}"
        torch.library.register_fake(qualified, FAKES[name], lib=LIBRARY)
        if name in OVERWRITING:  # which register_vmap does not take
            LIBRARY.impl(name, _refuse_vmap(name), "FuncTorchBatched")
        else:
            torch.library.register_vmap(qualified, _refuse_vmap(name), lib=LIBRARY)
    for name, backward, save in (
        ("int8_linear_backward", _second_linear_gradients, _save_linear_backward),
        ("softmax_backward", _refuse_second_gradient, _save_nothing),
        ("norm_backward", _refuse_second_gradient, _save_nothing),
    ):
        torch.library.register_autograd(f"bminf_lite::{name}", backward, setup_context=save, lib=LIBRARY)
    for name in ("quantize_rows", "int8_dot", "norm", "norm_"):
        LIBRARY.impl(name, _without_gradient(name), "Autograd")
    for name, function in {
        "softmax": _Softmax.apply,
        "softmax_": _differentiable_softmax_,
        "norm_with_statistics": _Norm.apply,
        "norm_with_statistics_": _differentiable_norm_,
        "int8_linear": _Int8Linear.apply,
        "square_linear_": _differentiable_square_linear_,
    }.items():
        LIBRARY.impl(name, function, "Autograd")


_ON_GPU = {name: vars(_kernels)[name] for name in SCHEMAS}
"""The operators on tensors of the current GPU, without gradients."""
_register()
_OPERATORS = {name: getattr(torch.ops.bminf_lite, name).default for name in SCHEMAS}
"""The operators without their overloads' resolution."""
