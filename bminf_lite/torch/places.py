"""Where a model of transformers has the tensors of a checkpoint, whose names and shapes it changes when it loads them.

It may have renamed a module (``Spec.aliases``), and have one parameter of the matrices of all experts (``Spec.fused``)
or of the kernels of three convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.expert_adapters import renamed
from ..errors import UsageError
from ..models.spec import FusedExperts, Role, Spec
from .experts import ExpertStack, joined, parts_of, split_rows, stacked_rows
from .linear import Int8Linear

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
"""The kernels of a checkpoint that transformers 5 has in one parameter, ``conv1d.weight``, in this order."""


@dataclass(frozen=True)
class Place:
    """The tensor of the checkpoint: the parameter ``name`` of the model, or a part of it.

    ``fused`` says how the parameter holds the tensors of experts, of which this is number ``part`` of ``expert``. Of
    other parameters it has ``rows``, None for all.
    """

    name: str
    fused: FusedExperts | None = None
    expert: int = 0
    part: int = 0
    rows: slice | None = None


def places(model: Any, spec: Spec) -> dict[str, Place]:
    """The places of the tensors of ``spec``. Raises :class:`UsageError` for a tensor that the model lacks."""
    found: dict[str, Place] = {}
    for own in _names(model):
        name = own if own in spec.parameters else renamed(own, spec)
        if name in spec.parameters:
            found[name] = Place(own)
        elif name in spec.fused:
            fused = spec.fused[name]
            for expert, names in enumerate(fused.experts):
                found |= {tensor: Place(own, fused, expert, part) for part, tensor in enumerate(names)}
        elif own.endswith(".conv1d.weight"):
            found |= _convolutions(own, spec)
    for name, parameter in spec.parameters.items():
        if parameter.role is Role.HEAD and name not in found:
            found[name] = Place(f"{_head(model)}.weight")
    lacking = [name for name in spec.parameters if name not in found and name not in spec.tied]
    if lacking:
        raise UsageError(
            f"{type(model).__name__} of this version of transformers has no {', '.join(lacking[:5])}"
            f"{f' and {len(lacking) - 5} more' if len(lacking) > 5 else ''}, which such a folder has; save its "
            f"state_dict by torch.save"
        )
    return found


def _names(model: nn.Module) -> Iterator[str]:
    """The names of parameters and buffers, of int8 layers that of the weight, and of stacks of experts the stack's."""
    stack = None
    for path, module in model.named_modules(remove_duplicate=False):
        if stack is not None and path.startswith(stack):
            continue
        if isinstance(module, ExpertStack):
            stack = f"{path}."
            yield path
        elif isinstance(module, Int8Linear):
            yield f"{path}.weight"
            yield f"{path}.bias"
        else:
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            yield from (f"{path}.{name}" if path else name for name, _ in own)


def _convolutions(own: str, spec: Spec) -> dict[str, Place]:
    module = own.removesuffix("conv1d.weight")
    names = [renamed(f"{module}{name}.weight", spec) for name in CONVOLUTIONS]
    if any(name not in spec.parameters for name in names):
        return {}
    found, first = {}, 0
    for name in names:
        rows = spec.parameters[name].shape[0]
        found[name] = Place(own, rows=slice(first, first + rows))
        first += rows
    return found


def _head(model: Any) -> str:
    """The name of the output head, which transformers may have renamed."""
    head = model.get_output_embeddings()
    if head is None:
        raise UsageError(
            f"{type(model).__name__} has no output head, which such a folder has; save its state_dict by torch.save"
        )
    return next(name for name, module in model.named_modules() if module is head)


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter ``name``, and the parameter's name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def layer_at(model: nn.Module, place: Place) -> Int8Linear | None:
    """The int8 layer of a matrix; None if it is float."""
    owner, attribute = owner_of(model, place.name)
    stack, fused = owner._modules.get(attribute), place.fused
    if isinstance(stack, ExpertStack) and fused is not None:
        return parts_of(stack.expert(place.expert), len(fused.experts[0]), fused.interleaved)[place.part]
    return owner if isinstance(owner, Int8Linear) and attribute == "weight" else None


def tensor_at(model: nn.Module, place: Place) -> Tensor:
    """The values of a tensor that is float."""
    owner, attribute = owner_of(model, place.name)
    values: Tensor = getattr(owner, attribute)
    if place.fused is None:
        return values if place.rows is None else values[place.rows]
    expert = values[place.expert]
    rows = expert.t() if place.fused.transposed and expert.dim() == 2 else expert
    return split_rows(rows, len(place.fused.experts[0]), place.fused.interleaved)[place.part]


def fused_value(tensors: dict[str, Tensor], fused: FusedExperts) -> Tensor:
    """The parameter that holds the float ``tensors`` of experts."""
    found = []
    for names in fused.experts:
        rows = stacked_rows([tensors[name] for name in names], fused.interleaved)
        found.append(rows.t() if fused.transposed and rows.dim() == 2 else rows)
    return torch.stack(found)


def fused_layers(layers: dict[str, Int8Linear], fused: FusedExperts) -> ExpertStack:
    """The stack that holds the ``layers`` of experts, by the names of their weights; see :func:`.experts.joined`."""
    made = [joined([layers[name] for name in names], fused.interleaved) for names in fused.experts]
    return ExpertStack(made, fused.transposed)
