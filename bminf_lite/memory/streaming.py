"""Layers that pass through a few slots of device memory, copied from the host just before they are needed.

A model iterates over :class:`StreamedBlocks`, and each layer is on the device when its kernels run. Every step takes
the streamed layers in the same order, so the next copy is always known: when a slot is free, the next layer's copy into
it is queued, also across the end of a step. Copies run in the background, in order. Events order copies and compute:
compute that uses a slot starts after the copy into it, and a copy starts after all compute that used its slot. The host
never waits.

A step may end early, by an exception or Ctrl-C at any point. A slot's contents are recorded only after the copy was
queued, so the next step finds a record missing and starts over, with copies that wait for all compute.

Nothing here depends on CUDA: a :class:`Link` does the copies, and the tests have a simulated one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Link(Protocol):
    """Copies into slots, and their order with compute. Every method queues work and returns."""

    def copy(self, layer: int, slot: int) -> None:
        """Copy the ``layer``-th streamed layer into ``slot``, after earlier copies and the slot's last release."""

    def await_copy(self, slot: int) -> None:
        """Compute that is queued from now on starts after the last queued copy into ``slot``."""

    def release(self, slot: int) -> None:
        """Copies into ``slot`` that are queued from now on start after all compute that is queued already."""


class Prefetcher:
    """Keeps ``slots`` slots filled with the next of ``layers`` layers, which are used in turn, again and again.

    Layer ``j`` always goes to slot ``j % slots``, so its arrays never move.
    """

    def __init__(self, link: Link, layers: int, slots: int) -> None:
        self.link = link
        self.layers = layers
        self._holds: list[int | None] = [None] * slots  # by slot: the layer copied there that has not been used yet
        self._next = 0

    def slot_of(self, layer: int) -> int:
        """The slot of a streamed layer."""
        return layer % len(self._holds)

    def acquire(self, layer: int) -> None:
        """Compute that is queued from now on, until :meth:`release`, may use the layer."""
        slot = self.slot_of(layer)
        if self._holds[slot] != layer:
            self._start_over(layer)
        self.link.await_copy(slot)

    def release(self, layer: int) -> None:
        """Let the next layer use the slot of this one, all of whose compute is queued."""
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
    """The blocks of a stack; those whose numbers are in ``streamed`` pass through slots.

    A block may be used until the next one is requested. A new iteration ends the one before.
    """

    def __init__(self, blocks: Sequence[T], streamed: Iterable[int], link: Link, slots: int) -> None:
        self._blocks = blocks
        self._layer_of_block = {index: layer for layer, index in enumerate(sorted(streamed))}
        self._prefetcher = Prefetcher(link, len(self._layer_of_block), slots)
        self._iteration: Generator[T, None, None] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[T]:
        if self._iteration is not None:  # the last iteration ended early, and a traceback may keep it alive
            self._iteration.close()
        self._iteration = self._run()
        return self._iteration

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
        self._iteration = None
