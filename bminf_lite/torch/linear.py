"""A linear layer whose weight is int8 codes and scales: a drop-in for ``torch.nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..backend.quantization import BLOCK_ELEMENTS, CODE_MAX, FP16_LARGEST, FP16_SMALLEST_NORMAL
from ..backend.rotation import MAX_ROTATION, is_rotation
from ..errors import UsageError
from . import ops

ROW_BLOCKS = 64
"""A GPU quantizes ``ROW_BLOCKS`` of the CPU's blocks of rows at once."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[out, in]`` and scales fp32 ``[out]`` of a float matrix ``[out, in]``, on its device.

    They equal those of :func:`bminf_lite.backend.quantization.quantize_weight`: the scales are fp16 numbers, unless one
    of the rows is too small or too large for that. Raises ``ValueError`` for a NaN or an infinity.
    """
    rows, columns = weight.shape
    if not columns:
        raise ValueError(f"a weight {list(weight.shape)} has no columns to quantize")
    weight = weight.detach().float() if weight.dtype == torch.float64 else weight.detach()
    scale = torch.linalg.vector_norm(weight, ord=torch.inf, dim=1, dtype=torch.float32) / CODE_MAX
    if not torch.isfinite(scale).all():
        bad = int((~torch.isfinite(scale)).nonzero()[0])
        raise ValueError(f"row {bad} of a weight {list(weight.shape)} holds a NaN or an infinity")
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if ((scale >= FP16_SMALLEST_NORMAL) & (scale <= FP16_LARGEST)).all():
        scale = scale.half().float()
    codes = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    step = max(1, BLOCK_ELEMENTS * ROW_BLOCKS // max(columns, 1))
    for first in range(0, rows, step):
        block = slice(first, first + step)
        ratio = weight[block].float() / scale[block, None]
        codes[block] = ratio.round_().clamp_(-CODE_MAX, CODE_MAX).to(torch.int8)
    return codes, scale


class CodesView(Tensor):
    """What ``Int8Linear.weight`` shows to code that expects a float weight: dtype, device and shape.

    Every use of its values raises :class:`UsageError`: adding a float to codes, as a merge of adapters does, would
    destroy the weight silently.
    """

    ALLOWED = frozenset(
        {
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "element_size",
            "stride",
            "is_floating_point",
            "is_complex",
            "is_contiguous",
            "data_ptr",
            "detach",
            "__repr__",
            "__len__",
            "__hash__",
            "get_device",
            "untyped_storage",
            "storage_offset",
            "is_shared",
            "is_inference",
            "requires_grad_",
        }
    )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        freezes = function == Tensor.requires_grad.__set__  # type: ignore[attr-defined]
        if name == "__get__" or name in cls.ALLOWED or freezes:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise UsageError(
            f"Int8Linear.weight holds int8 codes, which {name} would misread. Read the weight with dequantize(); merge "
            f"an adapter into the float model, or keep it unmerged; if the model itself reads the weight, keep this "
            f"layer float by skip=[...] of wrap"
        )


class HostCodes(Protocol):
    """Codes in host memory that come to a device when they are used."""

    @property
    def device(self) -> torch.device:
        """Where the codes are used."""
        ...

    def fetch(self) -> Tensor:
        """The codes on the device, valid for work enqueued before the next fetch of another block's codes."""
        ...

    def store(self, codes: Tensor) -> Tensor:
        """Replace the codes by others of the same shape; returns where they are in host memory."""
        ...


class Int8Linear(nn.Linear):
    """``x @ (scale[:, None] * codes).T + bias``, as :func:`.ops.int8_linear`.

    ``codes`` int8 ``[out, in]`` and ``scale`` fp32 ``[out]`` are buffers, ``bias`` is a parameter or None, and
    ``dynamic`` says whether inputs are quantized too (w8a8). Conversions of the module (``.half()``, ``.to(dtype)``)
    change the bias alone; ``.to(device)`` moves all. ``weight`` shows the codes' dtype, device and shape only.
    ``transposed``: the source stored its weight ``[in, out]``, as transformers' ``Conv1D`` does.

    With a ``rotation`` above 1 the codes are those of a weight whose rows were rotated in blocks of that size, and each
    input is rotated likewise (:func:`.ops.rotated`). As in the engine, w8a8 quantizes the rotated values in fp32, and
    w8a16 rounds them to the dtype of ``x``. The rotation belongs to the codes: ``state_dict`` has it, as ``rotation``,
    and loading codes sets it. Raises ``ValueError`` unless it is a power of two up to 256 that divides ``in``.
    """

    codes: Tensor
    scale: Tensor

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        dynamic: bool = True,
        transposed: bool = False,
        rotation: int = 1,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = codes.shape
        self.dynamic = dynamic
        self.transposed = transposed
        if problem := self._rotation_problem(rotation):
            raise ValueError(problem)
        self.rotation = rotation
        self.host_codes: HostCodes | None = None
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.to(torch.float32))
        kept = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        self.register_parameter("bias", kept)

    @classmethod
    def from_float(
        cls, weight: Tensor, bias: Tensor | None = None, *, dynamic: bool = True, transposed: bool = False
    ) -> Int8Linear:
        """Quantize a float weight ``[out, in]``, or ``[in, out]`` if ``transposed``."""
        matrix = weight.detach()
        codes, scale = quantize_weight(matrix.t().contiguous() if transposed else matrix)
        return cls(codes, scale, bias, dynamic=dynamic, transposed=transposed)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The device and the shape of the codes, and their dtype or that of :meth:`show_floats`; :class:`CodesView`."""
        shown = self._buffers.get("shown")
        if shown is not None:
            return shown.expand(self.codes.shape).as_subclass(CodesView)
        if self.host_codes is not None and self.host_codes.device != self.codes.device:
            shown = torch.zeros((), dtype=torch.int8, device=self.host_codes.device)
            return shown.expand(self.codes.shape).as_subclass(CodesView)
        return self.codes.as_subclass(CodesView)

    def show_floats(self, dtype: torch.dtype) -> None:
        """Have ``weight`` show ``dtype``, and that of later conversions: some models convert a head's input to it."""
        self.register_buffer("shown", torch.zeros((), dtype=dtype, device=self.codes.device), persistent=False)

    def dequantize(self) -> Tensor:
        """The weight as fp32 ``[out, in]``, for inputs that are not rotated."""
        return ops.rotated(self.scale.to(self.codes.device)[:, None] * self.codes.float(), self.rotation)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.int8:
            raise UsageError(
                "the model converted this Int8Linear's input to the dtype of its weight, which is int8; keep the layer "
                "float by skip=[...] of wrap"
            )
        if self.rotation == 1:
            return self._product(x)
        x = ops.autocast(x)
        turned = ops.rotated(x, self.rotation)
        # Autocast would round what is to be quantized.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return self._product(turned if self.dynamic else turned.to(x.dtype)).to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self.host_codes is not None:
            return _streamed_linear(x, self.host_codes, self.scale, self.bias, self.dynamic)
        return ops.int8_linear(x, self.codes, self.scale, self.bias, dynamic=self.dynamic)

    def _rotation_problem(self, block: int) -> str | None:
        """Why an input cannot be rotated in blocks of ``block`` elements, None if it can."""
        if is_rotation(block) and self.in_features % block == 0:
            return None
        return f"rotation is {block!r}; it must be a power of two up to {MAX_ROTATION} that divides {self.in_features}"

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As any module; a ``weight``, which assigning or tying one would make, is refused."""
        if name == "weight":
            raise UsageError(
                "an Int8Linear has codes in place of a weight, so none can be assigned or tied to it; keep the layer "
                "float by skip=[...] of wrap"
            )
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        rotation = f", rotation={self.rotation}" if self.rotation > 1 else ""
        return f"{super().extra_repr()}, {'w8a8' if self.dynamic else 'w8a16'}{rotation}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Keep the scales fp32 whatever type ``fn`` converts to, and codes that are streamed in host memory."""
        codes, scale = self.codes, self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.scale.device)
        if self.host_codes is not None:
            self.codes = codes
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.rotation > 1:
            destination[f"{prefix}rotation"] = torch.tensor(self.rotation)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        rotation = int(state_dict.pop(f"{prefix}rotation", 1))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if f"{prefix}codes" in state_dict:
            if problem := self._rotation_problem(rotation):
                arguments[-1].append(f"{prefix}{problem}")  # load_state_dict raises it
            else:
                self.rotation = rotation
        if self.host_codes is not None:
            self.codes = self.host_codes.store(self.codes)


class _StreamedLinear(torch.autograd.Function):
    """Fetches the codes for forward and again for backward, and saves none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: HostCodes, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
        ctx.codes, ctx.bias_dtype = codes, None if bias is None else bias.dtype
        ctx.save_for_backward(scale)
        return ops.int8_linear(x, codes.fetch(), scale, bias, dynamic=dynamic)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        (scale,) = ctx.saved_tensors
        dx = ops.int8_linear_backward(dy, ctx.codes.fetch(), scale) if ctx.needs_input_grad[0] else None
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return dx, None, None, dbias, None


@torch.compiler.disable
def _streamed_linear(x: Tensor, codes: HostCodes, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    result: Tensor = _StreamedLinear.apply(ops.autocast(x), codes, scale, bias, dynamic)
    return result
