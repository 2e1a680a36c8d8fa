"""Adapters that the rows of a step choose among: slots beside each weight, and what a row's adapter adds to a product.

An adapter (LoRA, https://arxiv.org/abs/2106.09685) lies in a *slot*, a number from 1 on, which is the ``lora_id`` of a
step's tokens; 0 means none. Each weight that adapters may change has a bank (:class:`AdapterBank` over NumPy) with room
for one adapter in each slot. It is a side product (:mod:`.side_products`): what it adds to a row depends on that row
and its adapter alone, and a row without an adapter keeps its bits.

A weight may be stacked from several matrices, its *sections*, each with an adapter of its own: for query, key and value
``a`` is ``[rank, in]`` of each, and ``b`` ``[rows of the section, rank]``.

The experts of a mixture have one bank for a layer (:class:`ExpertBank`), with an adapter of each matrix of each expert.
A pair of a token and one of its experts gets what the token's adapter has for that expert.

An adapter may also have a copy of the embedding's table or of the output head that replaces the model's for its rows
(:class:`SavedBank`), as PEFT's ``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from .functions import product_by_row
from .side_products import Adapter, Rounding
from .values import Array

MOST_SLOTS, MOST_RANK = 1024, 512
"""The most adapters that the requests of a step may have beside each other, and the largest rank of one."""


@dataclass(frozen=True)
class SavedMatrix:
    """A matrix ``[rows, columns]`` that replaces one of the model for the rows of an adapter."""

    values: np.ndarray


Part = Adapter | SavedMatrix
"""What an adapter has for a matrix."""
Sections = Sequence[Any]
"""What an adapter has for the sections of a site, of the site's kind; None where a section has nothing."""
Fit = Callable[[str, Any], Any]
"""Changes a part for the matrix with a name as the layer changed the matrix when it was read."""


class Bank(Protocol):
    """Where a weight keeps its adapters on the device."""

    def prepare(self, sections: Sections) -> Any:
        """The adapters of one slot in the form in which :meth:`put` copies them; it stays on the host."""

    def put(self, slot: int, prepared: Any) -> None:
        """Overwrite a slot, for the steps that start later; None empties it."""


@dataclass(frozen=True)
class AdapterSite:
    """A weight that adapters may change by parts of one ``kind``, stacked from the matrices ``names``.

    ``of_experts``: these are the matrices of all experts of a layer, which have a site if there is room for them.
    """

    names: tuple[str, ...]
    fit: Fit
    bank: Bank
    kind: type = Adapter
    of_experts: bool = False


@dataclass
class AdapterSlots:
    """Room for ``count`` adapters of up to ``max_rank`` on one device, and the sites of the model that is built on it.

    ``rows`` says which slot each row of the next product uses, int32 ``[T]`` on the device; None if no row has an
    adapter. A backend sets it when a step begins, and when a step goes on with its last tokens alone. Adapters may
    replace the matrices ``saved``, for which there is room in each slot. There is room for adapters of all experts of a
    layer if one of their matrices is in ``experts``; None is for those of all layers.
    """

    count: int
    max_rank: int
    saved: frozenset[str] = frozenset()
    experts: frozenset[str] | None = frozenset()
    sites: list[AdapterSite] = field(default_factory=list)
    rows: Array = None

    def empty(self) -> AdapterSlots:
        """The same room for a model that is built next."""
        return AdapterSlots(self.count, self.max_rank, self.saved, self.experts)

    def has_experts(self, names: Iterable[str]) -> bool:
        """Whether there is room for adapters of the experts of a layer, whose matrices have these names."""
        return self.experts is None or not self.experts.isdisjoint(names)

    def names(self, kind: type = Adapter) -> set[str]:
        """The matrices that adapters may change by a kind of parts."""
        return {name for site in self.sites if site.kind is kind for name in site.names}

    def prepare(self, parts: Mapping[str, Part]) -> list[Any]:
        """Parts by the names of matrices as each site takes them, for :meth:`put`; None where a site has none."""
        prepared: list[Any] = []
        for site in self.sites:
            own = [parts[name] if isinstance(parts.get(name), site.kind) else None for name in site.names]
            found = [part and site.fit(name, part) for name, part in zip(site.names, own, strict=True)]
            prepared.append(None if all(part is None for part in found) else site.bank.prepare(found))
        return prepared

    def put(self, slot: int, prepared: Sequence[Any]) -> None:
        """Overwrite a slot of every site, for the steps that start later."""
        for site, values in zip(self.sites, prepared, strict=True):
            site.bank.put(slot, values)


class AdapterBank:
    """The slots of one weight over NumPy, whose sections have ``widths`` rows.

    A row with an adapter gets ``b @ cast(scale * a @ cast(x))`` of each section, sums in fp32. Rows are computed one by
    one, so no other row changes their bits.
    """

    def __init__(self, slots: AdapterSlots, widths: Sequence[int], rounded: Rounding):
        self.slots = slots
        self._rounded = rounded
        ends = np.cumsum([0, *widths]).tolist()
        self._sections = [slice(first, end) for first, end in pairwise(ends)]
        self._adapters: list[Sections] = [()] * (slots.count + 1)

    def prepare(self, sections: Sections) -> Sections:
        """Rounded to the activation type."""
        return [
            None if part is None else replace(part, a=self._fp32(part.a), b=self._fp32(part.b)) for part in sections
        ]

    def _fp32(self, values: np.ndarray) -> np.ndarray:
        return self._rounded(np.asarray(values).astype(np.float32)).astype(np.float32)

    def put(self, slot: int, prepared: Sections | None) -> None:
        self._adapters[slot] = prepared or ()

    def remaining(self, x: np.ndarray) -> np.ndarray:
        return x

    def within(self, columns: slice) -> AdapterBank:
        found = AdapterBank(self.slots, [s.stop - s.start for s in self._sections], self._rounded)
        found._adapters = [[part and part.within(columns) for part in sections] for sections in self._adapters]
        return found

    def product(self, x: np.ndarray, rounded: Rounding) -> np.ndarray:
        out = np.zeros((x.shape[0], self._sections[-1].stop), np.float32)
        if self.slots.rows is None:
            return out
        used = np.asarray(self.slots.rows)
        assert used.shape == x.shape[:1], "the rows of a product are not those of the step"
        for slot in np.unique(used[used > 0]).tolist():
            rows = np.flatnonzero(used == slot)
            for section, part in zip(self._sections, self._adapters[slot], strict=False):
                if part is not None:
                    out[rows, section] = product_by_row(part.inputs(x[rows], rounded).astype(np.float32), part.b.T)
        return out


class ExpertBank:
    """The slots of all experts of a layer, whose sections are the matrices of the first expert, and then the others'.

    ``hidden`` and ``down`` are the banks of each expert's two weights, with slots of their own, ``pairs``. While these
    weights are multiplied, :meth:`of_tokens` says which tokens of the step are their rows: ``take`` gives the slots of
    some rows.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        pairs: AdapterSlots,
        hidden: Sequence[Bank],
        down: Sequence[Bank],
        take: Callable[[Array, np.ndarray], Array],
    ):
        self.slots = slots
        self.hidden, self.down = hidden, down
        self._pairs = pairs
        self._take = take

    def prepare(self, sections: Sections) -> list[Any]:
        """Of each bank; None where none of its matrices has a part."""
        size = len(sections) // len(self.down)
        experts = [sections[first : first + size] for first in range(0, len(sections), size)]
        halves = [half for expert in experts for half in (expert[:-1], expert[-1:])]
        return [
            None if all(part is None for part in half) else bank.prepare(half)
            for bank, half in zip(self._banks(), halves, strict=True)
        ]

    def put(self, slot: int, prepared: Sequence[Any] | None) -> None:
        for place, bank in enumerate(self._banks()):
            bank.put(slot, None if prepared is None else prepared[place])

    def _banks(self) -> Iterator[Bank]:
        for pair in zip(self.hidden, self.down, strict=True):
            yield from pair

    @contextmanager
    def of_tokens(self, tokens: np.ndarray) -> Iterator[None]:
        """The rows of the products that follow are the tokens with these numbers."""
        used = self.slots.rows
        self._pairs.rows = None if used is None else self._take(used, tokens)
        try:
            yield
        finally:
            self._pairs.rows = None


class SavedBank:
    """Room over NumPy for a matrix ``[rows, columns]`` in each slot, which replaces one of the model."""

    def __init__(self, slots: AdapterSlots, rounded: Rounding):
        self.slots = slots
        self._rounded = rounded
        self._matrices: list[np.ndarray | None] = [None] * (slots.count + 1)

    def prepare(self, sections: Sections) -> np.ndarray:
        """Rounded to the activation type."""
        (matrix,) = sections
        return self._rounded(np.asarray(matrix.values).astype(np.float32)).astype(np.float32)

    def put(self, slot: int, prepared: np.ndarray | None) -> None:
        self._matrices[slot] = prepared

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each matrix that rows of the step have in place of the model's, and the numbers of these rows."""
        if self.slots.rows is not None:
            used = np.asarray(self.slots.rows)
            for slot in np.unique(used[used > 0]).tolist():
                matrix = self._matrices[slot]
                if matrix is not None:
                    yield matrix, np.flatnonzero(used == slot)
