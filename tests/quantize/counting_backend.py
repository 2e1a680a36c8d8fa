"""A backend that knows how much of a model is in memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from bminf_lite.backend.cpu import CpuBackend


class CountingBackend(CpuBackend):
    """Knows how many bytes of weights and tables live, and how many did at most."""

    def __init__(self) -> None:
        super().__init__()
        self.living: list[tuple[weakref.ref, int]] = []
        self.most = 0

    def _count(self, thing: Any, size: int) -> None:
        self.living = [(ref, n) for ref, n in self.living if ref() is not None] + [(weakref.ref(thing), size)]
        self.most = max(self.most, sum(n for _, n in self.living))

    def weight(self, *args: Any, **kwargs: Any) -> Any:
        weight = super().weight(*args, **kwargs)
        self._count(weight, weight.values.nbytes)
        return weight

    def table(self, values: np.ndarray) -> Any:
        table = np.array(super().table(values))
        self._count(table, table.nbytes)
        return table
