"""What a comparison of two models found: values, and how they are written as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .divergence import Divergence
from .fidelity import ActivationStats, Fidelity


@dataclass(frozen=True)
class LinearReport:
    """One product: the matrices stacked in it, how they are quantized, its errors and its input.

    ``input`` is what the model multiplies, ``reference_input`` what the reference does; smoothing makes them differ.
    """

    tensors: tuple[str, ...]
    scheme: str
    own: Fidelity
    accumulated: Fidelity
    input: ActivationStats
    reference_input: ActivationStats

    @property
    def name(self) -> str:
        """The matrices' names in short: ``model.layers.0.self_attn.{q,k,v}_proj``."""
        return brace_join([tensor.removesuffix(".weight") for tensor in self.tensors])


@dataclass(frozen=True)
class BlockReport:
    """One layer of the model, by the residual stream behind it, and the products in it."""

    layer: int
    own: Fidelity
    accumulated: Fidelity
    linears: tuple[LinearReport, ...]


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found. Without layers, ``blocks`` and ``head`` are empty."""

    divergence: Divergence
    blocks: tuple[BlockReport, ...]
    head: tuple[LinearReport, ...]
    device: str

    @property
    def linears(self) -> list[LinearReport]:
        """All products, in the order in which the model computes them."""
        return [linear for block in self.blocks for linear in block.linears] + list(self.head)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; None where outputs are equal, so that their signal to noise is infinite."""
        blocks = [{"layer": b.layer, "own": asdict(b.own), "accumulated": asdict(b.accumulated)} for b in self.blocks]
        linears = [{"name": linear.name, **asdict(linear)} for linear in self.linears]
        found = {"device": self.device, **self.divergence.to_dict(), "blocks": blocks, "linears": linears}
        return nan_to_none(found)


def brace_join(names: Sequence[str], separators: str = "._") -> str:
    """Names that differ in places, as one: ``a.q_proj``, ``a.k_proj`` -> ``a.{q,k}_proj``."""
    if len(set(names)) == 1:
        return names[0]
    cut = [name.split(separators[0]) for name in names] if separators else []
    if len({len(parts) for parts in cut}) != 1:
        return f"{{{','.join(names)}}}"
    return separators[0].join(brace_join(parts, separators[1:]) for parts in zip(*cut, strict=True))


def nan_to_none(value: Any) -> Any:
    """``value`` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
