"""Experts of transformers, which holds the matrices of a layer's experts in one parameter, in int8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .linear import Int8Linear


class ExpertStack(nn.Module):
    """The matrices of all experts of a layer, in the place of a parameter of three dimensions.

    ``layers`` are the experts'. The parameter is ``[experts, out, in]``, or ``[experts, in, out]`` if ``transposed``.
    The model's own code takes an expert's matrix by its number and multiplies by it, or multiplies by all with
    ``torch.bmm``; no other use has a meaning.
    """

    def __init__(self, layers: Sequence[Int8Linear], transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)

    def __len__(self) -> int:
        return len(self._modules)

    def expert(self, index: int) -> Int8Linear:
        """The layer of an expert."""
        layer = self._modules[str(index)]
        assert isinstance(layer, Int8Linear)
        return layer

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        first = self.expert(0)
        sizes = first.out_features, first.in_features
        return torch.Size((len(self), *(sizes[::-1] if self.transposed else sizes)))

    def __getitem__(self, index: Tensor | int) -> ExpertMatrix:
        """The matrix of one expert."""
        if isinstance(index, Tensor) and index.numel() != 1:
            raise UsageError(
                "int8 experts are computed one after another: model.set_experts_implementation('eager') chooses that"
            )
        return ExpertMatrix(self.expert(int(index)), self.transposed)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.bmm and isinstance(stack := args[1], ExpertStack) and stack.transposed:
            return torch.stack([stack.expert(index)(x) for index, x in enumerate(args[0])])
        raise UsageError(_MISREAD.format(function=function.__name__))


class ExpertMatrix:
    """A matrix of an :class:`ExpertStack`, as ``torch.nn.functional.linear`` and ``@`` take it."""

    def __init__(self, layer: Int8Linear, transposed: bool) -> None:
        self.layer = layer
        self.transposed = transposed

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        matrix, bias = given.get("weight"), given.get("bias")
        is_linear = function is nn.functional.linear
        if isinstance(matrix, ExpertMatrix) and (is_linear or function in _PRODUCTS) and matrix.transposed != is_linear:
            result = matrix.layer(given["input"])
            return result if bias is None else result + bias
        raise UsageError(_MISREAD.format(function=function.__name__))


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_MISREAD = (
    "int8 experts hold codes, which {function} would misread; model.set_experts_implementation('eager') chooses code "
    "that multiplies by one expert after another"
)


def compute_one_by_one(model: Any) -> None:
    """Have a model of transformers 5 run its own code, which multiplies by one expert's matrix after another's."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def joined(parts: Sequence[Int8Linear], interleaved: bool) -> Int8Linear:
    """One layer with the rows of ``parts``, one part behind the other, or with ``interleaved`` alternating.

    Raises ``ValueError`` for parts that are quantized or rotated differently.
    """
    first = parts[0]
    if len({(part.dynamic, part.rotation) for part in parts}) > 1:
        raise ValueError("matrices of an expert that are multiplied together must be quantized alike")
    codes, scale = ([getattr(part, name) for part in parts] for name in ("codes", "scale"))
    return Int8Linear(
        stacked_rows(codes, interleaved),
        stacked_rows(scale, interleaved),
        dynamic=first.dynamic,
        rotation=first.rotation,
    )


def parts_of(layer: Int8Linear, count: int, interleaved: bool) -> list[Int8Linear]:
    """The layers of which :func:`joined` made ``layer``."""
    codes, scale = (split_rows(tensor, count, interleaved) for tensor in (layer.codes, layer.scale))
    return [
        Int8Linear(c.contiguous(), s.contiguous(), dynamic=layer.dynamic, rotation=layer.rotation)
        for c, s in zip(codes, scale, strict=True)
    ]


def stacked_rows(parts: Sequence[Tensor], interleaved: bool) -> Tensor:
    """The rows of all ``parts``."""
    return torch.stack(list(parts), 1).flatten(0, 1) if interleaved else torch.cat(list(parts))


def split_rows(rows: Tensor, count: int, interleaved: bool) -> Sequence[Tensor]:
    """The ``count`` parts of which :func:`stacked_rows` made ``rows``."""
    return [rows[i::count] for i in range(count)] if interleaved else rows.chunk(count)
