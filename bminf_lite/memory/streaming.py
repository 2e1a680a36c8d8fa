"""Layers that pass through a few slots of device memory, copied from the host just before they are needed.

:class:`StreamedBlocks` is what a model iterates over. Each step takes the streamed layers in the same order, so what is
copied next is always known: as soon as a slot is free the next layer's copy is given to the link, also across the end
of a step. Copies run in the background, in order. Events hold them and compute apart: compute that uses a slot starts
after the copy into it has ended, and a copy starts after all compute that used its slot. Nothing waits on the host.

A step may end early, by an exception or by Ctrl-C at any point. What is in the slots is believed only if it was
recorded after everything that made it true; otherwise the next step starts over, with copies that wait for all compute.

Nothing here knows of a device: the tests run the same code on a simulated one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Link(Protocol):
    """Copies into slots, and their order with compute. Every method gives work to the device and returns."""

    def copy(self, layer: int, slot: int) -> None:
        """Copy the ``layer``-th streamed layer into ``slot``, after the copies before and after the slot's release."""

    def await_copy(self, slot: int) -> None:
        """Compute that is given from now on starts after the last copy into ``slot`` that was given."""

    def release(self, slot: int) -> None:
        """Copies into ``slot`` that are given from now on start after all compute that was given."""


class Prefetcher:
    """Keeps ``slots`` slots filled with what comes next of ``layers`` layers, which are needed in turn, for ever.

    Layer ``j`` always goes to slot ``j % slots``, so its arrays have one place.
    """

    def __init__(self, link: Link, layers: int, slots: int) -> None:
        self.link = link
        self.layers = layers
        self._holds: list[int | None] = [None] * slots  # by slot: the layer copied there that has not been used yet
        self._next = 0

    def slot_of(self, layer: int) -> int:
        """Where a streamed layer goes."""
        return layer % len(self._holds)

    def acquire(self, layer: int) -> None:
        """Compute that is given from now on, until :meth:`release`, may use the layer."""
        slot = self.slot_of(layer)
        if self._holds[slot] != layer:
            self._start_over(layer)
        self.link.await_copy(slot)

    def release(self, layer: int) -> None:
        """All compute that uses the layer was given; its slot goes to the next one."""
        slot = self.slot_of(layer)
        self.link.release(slot)
        self._holds[slot] = None
        self._fill()

    def _start_over(self, layer: int) -> None:
        for slot in range(len(self._holds)):
            self._holds[slot] = None
            self.link.release(slot)
        self._next = layer
        self._fill()

    def _fill(self) -> None:
        while self._holds[slot := self.slot_of(self._next)] is None:
            layer = self._next
            self.link.copy(layer, slot)
            self._next = (layer + 1) % self.layers
            self._holds[slot] = layer


class StreamedBlocks(Generic[T]):
    """The blocks of a stack, of which those whose numbers are in ``streamed`` pass through slots.

    A block may be used until the iteration goes on. One iteration at a time: a new one ends the one before.
    """

    def __init__(self, blocks: Sequence[T], streamed: Iterable[int], link: Link, slots: int) -> None:
        self._blocks = blocks
        self._layer_of_block = {index: layer for layer, index in enumerate(sorted(streamed))}
        self._prefetcher = Prefetcher(link, len(self._layer_of_block), slots)
        self._under_way: Generator[T, None, None] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[T]:
        if self._under_way is not None:  # left early, and kept alive by the traceback of what made it end
            self._under_way.close()
        self._under_way = self._run()
        return self._under_way

    def _run(self) -> Generator[T, None, None]:
        for index, block in enumerate(self._blocks):
            layer = self._layer_of_block.get(index)
            if layer is None:
                yield block
                continue
            self._prefetcher.acquire(layer)
            try:
                yield block
            finally:
                self._prefetcher.release(layer)
        self._under_way = None
