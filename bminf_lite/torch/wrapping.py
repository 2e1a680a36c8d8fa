"""PyTorch models in int8: :func:`wrap` replaces the linear layers of a model in memory."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..checkpoint.recipe import Recipe, Scheme, load_recipe
from ..errors import UsageError
from . import streaming
from .experts import ExpertStack, compute_one_by_one
from .folders import bind_save, has_adapters, replace_module
from .linear import Int8Linear
from .places import owner_of

Model = TypeVar("Model", bound=nn.Module)
TRANSFORMERS_LAYERS = ("Conv1D", "FalconLinear")
"""Classes of transformers that compute what ``torch.nn.Linear`` computes."""
EXPERTS = {"Llama4TextExperts": True}
"""Classes of experts, and whether their matrices are ``[in, out]``, beside those that say so (``is_transposed``)."""
EXPERT_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


def wrap(
    model: Model,
    recipe: str | Path | Recipe = "w8a8",
    *,
    skip: str | Sequence[str] = (),
    memory_limit: int | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """Replace the linear layers of ``model`` by int8 layers, in place, and return the same model.

    ``torch.nn.Linear``, and of transformers ``Conv1D`` and ``FalconLinear``, become :class:`.Int8Linear`, quantized
    from fp32, fp16 or bf16 on the device where they are, one after another. A parameter of three dimensions in which
    transformers holds the matrices of a layer's experts becomes an int8 layer for each, and the model computes its
    experts one after another. Other subclasses of ``Linear`` stay, and so do layers whose weight is computed from other
    parameters (weight norm, pruning). ``recipe`` decides which are w8a8, w8a16 or float, by the names of their weights
    and, for a transformers model, for its output head; patterns of ``skip`` (``*`` matches any characters) name modules
    that stay float. Parameters other than those weights keep ``requires_grad``, their dtype and their identity, and
    layers their hooks. Everything else of the model is untouched, except that a transformers model's
    ``save_pretrained`` becomes :func:`~bminf_lite.torch.save_pretrained`. Resize embeddings before: a wrapped head is
    neither resized nor tied again.

    ``device`` moves the model. ``memory_limit`` is the number of bytes that its parameters and buffers may take there:
    layers that do not fit stay in pinned host memory and stream to the device before forward and backward need them
    (:mod:`.streaming`). It needs ``device``.

    Raises :class:`UsageError` for a recipe that needs a calibration, rotates or leaves everything float, for a pattern
    that matches nothing, for a limit that is too small, for a model with adapters of peft, and for weights without
    values; ``ValueError`` for a weight with a NaN or an infinity. A model whose wrapping failed is partly wrapped.
    """
    chosen = load_recipe(recipe)
    if chosen.calibration is not None:
        raise UsageError(
            f"recipe {chosen.name} needs a text to calibrate on; migrate the checkpoint with it (bminf-lite migrate) "
            f"and open the result with bminf_lite.torch.from_migrated"
        )
    if chosen.rotation > 1 or chosen.offline_rotation:
        raise UsageError(
            f"recipe {chosen.name} rotates weights, which wrap does not; migrate the checkpoint with it (bminf-lite "
            f"migrate) and open the result with bminf_lite.torch.from_migrated, or choose w8a8"
        )
    streaming.check_limit(device, memory_limit)
    if has_adapters(model):
        raise UsageError("the model has adapters of peft, which wrap would quantize; wrap it before get_peft_model")
    candidates, stacks = dict(_linear_layers(model)), dict(_experts(model))
    if not candidates:
        raise UsageError(
            f"{type(model).__name__} has no float linear layers in it to replace; for a single layer use "
            f"Int8Linear.from_float(layer.weight, layer.bias)"
        )
    patterns = [skip] if isinstance(skip, str) else skip
    unused = [pattern for pattern in patterns if not fnmatch.filter([*candidates, *stacks], pattern)]
    if unused:
        raise UsageError(f"skip: no linear layer matches {', '.join(map(repr, unused))}")
    head = _head(model)
    chosen.check_patterns([*(f"{name}.weight" for name in candidates), *stacks])

    def stays_float(name: str, scheme: Scheme) -> bool:
        return scheme is Scheme.FLOAT or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    replaced: dict[int, nn.Module] = {}
    for name, transposed in stacks.items():
        scheme = chosen.scheme_of(name, False)
        if not stays_float(name, scheme):
            stack = _stacked(model, name, transposed, dynamic=scheme is Scheme.W8A8)
            replaced[id(stack)] = stack
    if replaced:
        compute_one_by_one(model)
    for name, layer in candidates.items():
        scheme = chosen.scheme_of(f"{name}.weight", layer is head)
        if stays_float(name, scheme):
            continue
        if id(layer) not in replaced:
            if layer.weight.is_meta:
                raise UsageError(f"{name}.weight is on the meta device, without values; wrap the model before that")
            replaced[id(layer)] = made = _quantized(name, layer, dynamic=scheme is Scheme.W8A8)
            if layer is head:
                made.show_floats(candidates[name].weight.dtype)
        replace_module(model, name, replaced[id(layer)])
    if not replaced:
        raise UsageError(f"recipe {chosen.name} and skip leave every linear layer of this model float")
    bind_save(model, chosen)
    streaming.move(model, device, memory_limit)
    return model


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers to replace, by name; a layer that is used in several places has several names."""
    for name, module in model.named_modules(remove_duplicate=False):
        kind, own = type(module), dict(module.named_parameters(recurse=False))
        of_transformers = kind.__module__.startswith("transformers.") and kind.__name__ in TRANSFORMERS_LAYERS
        if name and "weight" in own and (kind is nn.Linear or of_transformers):
            yield name, module


def _experts(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """The parameters of all experts of a layer, by name, and whether their matrices are ``[in, out]``."""
    if not hasattr(model, "set_experts_implementation"):
        return
    for path, module in model.named_modules():
        transposed = EXPERTS.get(type(module).__name__, getattr(module, "is_transposed", None))
        if transposed is None or not type(module).__module__.startswith("transformers."):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name in EXPERT_MATRICES and parameter.dim() == 3:
                yield f"{path}.{name}", transposed


def _stacked(model: nn.Module, name: str, transposed: bool, dynamic: bool) -> ExpertStack:
    """Put the int8 layers of experts in the place of the parameter ``name``."""
    owner, attribute = owner_of(model, name)
    values = owner.get_parameter(attribute)
    if values.is_meta:
        raise UsageError(f"{name} is on the meta device, without values; wrap the model before that")
    try:
        layers = [Int8Linear.from_float(w.t() if transposed else w, dynamic=dynamic) for w in values.detach()]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    del owner._parameters[attribute]
    stack = ExpertStack(layers, transposed).train(owner.training)
    owner.add_module(attribute, stack)
    return stack


def _quantized(name: str, layer: Any, dynamic: bool) -> Int8Linear:
    """The int8 layer that takes the place of ``layer``."""
    transposed = not isinstance(layer, nn.Linear)
    try:
        made = Int8Linear.from_float(layer.weight, layer.bias, dynamic=dynamic, transposed=transposed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    _take_hooks(made, layer)
    return made.train(layer.training)


def _take_hooks(layer: nn.Module, source: nn.Module) -> None:
    """Give ``layer`` the hooks of forward and backward of ``source``; their handles still remove them."""
    for name in vars(nn.Module()):
        if "_hook" in name and "state_dict" not in name:
            setattr(layer, name, getattr(source, name))


def _head(model: nn.Module) -> nn.Module | None:
    """The output head of a transformers model."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    return model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
