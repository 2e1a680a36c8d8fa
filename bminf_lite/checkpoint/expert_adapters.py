"""Adapters of the experts of a mixture, whose matrices lie in one parameter in transformers (``target_parameters``).

PEFT wraps a module for each of its parameters, and each wrapper has ``lora_A`` ``[experts * rank, in]`` and ``lora_B``
``[out, rank * experts]`` for all experts: expert ``e`` has ``A.reshape(experts, rank, in)[e]`` and
``B.reshape(out, rank, experts)[:, :, e]``. The names in the file do not say which parameter a wrapper is of; its shapes
do.

PEFT before 0.19 takes each parameter for ``[experts, in, out]``. Of one that is ``[experts, out, in]``, its ``lora_A``
is then ``[experts * rank, out]``, and its ``lora_B`` ``[in, rank * experts]``: the adapter is turned. Later versions
look at the module's ``is_transposed``. Where both layouts fit the shapes, the version decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..backend.side_products import Adapter
from ..models.spec import FusedExperts, Parameter, Spec

IN_MEMORY = ("gate_up_proj", "down_proj")
"""The names that transformers gives the parameters of experts since version 5."""


def fused_of(module: str, spec: Spec) -> dict[str, FusedExperts]:
    """The parameters of a module that hold the matrices of all experts, by their full names.

    Modules around the experts may have other names in transformers than in files, such as ``mlp`` in Mixtral, and so
    may the parameters, such as Granite's.
    """
    place = _place(module)
    found = {name: fused for name, fused in spec.fused.items() if place and _place(name.rpartition(".")[0]) == place}
    for parameter in IN_MEMORY:
        name = renamed(f"{module}.{parameter}", spec)
        if name in spec.fused:
            found[name] = spec.fused[name]
    return {name: fused for name, fused in found.items() if len(_shape(fused, spec.parameters)) == 2}


def renamed(name: str, spec: Spec) -> str:
    """The name that the model has for a tensor."""
    matches = ((re.fullmatch(pattern, name), replacement) for pattern, replacement in spec.aliases)
    return next((match.expand(replacement) for match, replacement in matches if match), name)


def in_memory(module: str, name: str, spec: Spec) -> str:
    """The name that transformers has for the parameter ``name`` of a module, which PEFT's patterns are about."""
    own = (f"{module}.{parameter}" for parameter in IN_MEMORY)
    return next((given for given in own if renamed(given, spec) == name), name)


def turns_experts(config: Mapping[str, Any]) -> bool:
    """Whether the version of PEFT that saved a configuration turns the adapters of experts ``[out, in]``.

    Versions before 0.18 do so too, and do not name themselves.
    """
    match = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or "0.0"))
    return match is not None and (int(match[1]), int(match[2])) < (0, 19)


def parameter_of(
    module: str, first: tuple[int, ...], second: tuple[int, ...], is_turned: bool, spec: Spec
) -> str | None:
    """The parameter that factors of these shapes are of; None if they fit none. For ``is_turned`` see the module."""
    if len(first) != 2 or len(second) != 2 or first[0] != second[1] or not first[0]:
        return None
    found = {name: fused for name, fused in fused_of(module, spec).items() if first[0] % len(fused.experts) == 0}
    wanted = second[0], first[1]

    def fits(name: str, turned: bool) -> bool:
        shape = _shape(found[name], spec.parameters)
        return (shape[::-1] if turned else shape) == wanted

    turns = {name: is_turned and not fused.transposed for name, fused in found.items()}
    likely = [name for name, turned in turns.items() if fits(name, turned)]
    return next(iter([*likely, *(name for name, turned in turns.items() if fits(name, not turned))]), None)


def expert_adapters(
    name: str, a: np.ndarray, b: np.ndarray, scale: float, is_turned: bool, spec: Spec
) -> Iterator[tuple[str, Adapter]]:
    """The adapters of the experts' matrices in the parameter ``name``, by the names of the matrices."""
    fused, (out, features) = spec.fused[name], _shape(spec.fused[name], spec.parameters)
    count = len(fused.experts)
    as_it_is, turned = (b.shape[0], a.shape[1]) == (out, features), (b.shape[0], a.shape[1]) == (features, out)
    turns = turned and (not as_it_is or (is_turned and not fused.transposed))
    for expert, names in enumerate(fused.experts):
        own_a = a.reshape(count, -1, a.shape[1])[expert]
        own_b = b.reshape(b.shape[0], -1, count)[:, :, expert]
        if turns:
            own_a, own_b = own_b.T, own_a.T
        rows = [own_b[i :: len(names)] for i in range(len(names))] if fused.interleaved else np.split(own_b, len(names))
        for matrix, part in zip(names, rows, strict=True):
            yield matrix, Adapter(np.ascontiguousarray(own_a), np.ascontiguousarray(part), scale)


def _place(module: str) -> tuple[str, str] | None:
    """The number of a module's layer, and the last part of its name."""
    match = re.search(r"\.(\d+)\.(?:.*\.)?([^.]+)$", module)
    return None if match is None else (match[1], match[2])


def rank_of(name: str, a: np.ndarray, spec: Spec) -> int:
    """The rank of one expert's adapter."""
    return int(a.shape[0]) // len(spec.fused[name].experts)


def _shape(fused: FusedExperts, parameters: Mapping[str, Parameter]) -> tuple[int, ...]:
    """One expert's ``(out, in)``, all its matrices together; of biases ``(out,)``."""
    shapes = [parameters[name].shape for name in fused.experts[0]]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
