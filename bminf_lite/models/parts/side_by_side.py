"""Several parts that read the same input, whose outputs are added: attention beside a recurrence, for example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ...backend.values import Array, ForwardBatch
from ...layers.cache import Layout
from .._config import common_divisors
from .part import LayerSource, Part, PartLayer, PartTensors, SharedValues


@dataclass(frozen=True)
class SideBySidePart(Part):
    """The sum of ``parts``, which are mixers, of the same input."""

    parts: tuple[Part, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(layout for part in self.parts for layout in part.layouts)

    @property
    def num_readers(self) -> int:
        return sum(part.num_readers for part in self.parts)

    @property
    def divided(self) -> Mapping[str, int]:
        return common_divisors(part.divided for part in self.parts)

    @property
    def undivided(self) -> str | None:
        return next((part.undivided for part in self.parts if part.undivided is not None), None)

    def share(self, shared: SharedValues) -> None:
        for part in self.parts:
            part.share(shared)

    def stated(self, layer: str) -> PartTensors:
        return reduce(PartTensors.beside, (part.stated(layer) for part in self.parts))

    def build(self, source: LayerSource) -> SideBySide:
        return SideBySide(tuple(part.build(source) for part in self.parts))


@dataclass(frozen=True)
class SideBySide:
    """Computes :class:`SideBySidePart`."""

    parts: tuple[PartLayer, ...]

    def hidden(self, x: Array, cache: Any, batch: ForwardBatch, only_last: bool) -> tuple[Any, ...]:
        """What each part has; ``cache`` is that of each."""
        return tuple(part.hidden(x, own, batch, only_last) for part, own in zip(self.parts, cache, strict=True))

    def fp32(self, hidden: tuple[Any, ...]) -> Array:
        found = self.parts[0].fp32(hidden[0])
        for part, own in zip(self.parts[1:], hidden[1:], strict=True):
            found = part.add_to(found, own)
        return found

    def add_to(self, residual: Array, hidden: tuple[Any, ...]) -> Array:
        for part, own in zip(self.parts, hidden, strict=True):
            residual = part.add_to(residual, own)
        return residual
