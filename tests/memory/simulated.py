"""A device and a link that exist in simulated time, where every mistake in the order of copies and compute shows.

A copy destroys its slot as soon as its events allow it to start, and its data arrive only when compute waits for them.
So compute that reads too early finds poison, and a copy that starts too early poisons what compute still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from bminf_lite.backend.base import Backend
from bminf_lite.backend.operations.weights import NumpyWeight
from bminf_lite.backend.quantization import HostWeight
from bminf_lite.backend.values import Placement
from bminf_lite.memory.streaming import StreamedBlocks

T = TypeVar("T")
POISON = 0xFF
"""As fp32: NaN."""
SLOT_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """A copy of ``layer`` into ``slot``, or compute that uses it there, in simulated seconds."""

    what: str
    layer: int
    slot: int
    start: float
    end: float


@dataclass
class SimulatedLink:
    """Copies that take ``seconds`` each.

    With ``images`` and ``memory``, bytes really move. ``refuse_at`` is the number of the call that raises
    ``KeyboardInterrupt``.
    """

    slots: int
    seconds: float = 1e-3
    images: list[np.ndarray] = field(default_factory=list)
    memory: list[np.ndarray] = field(default_factory=list)
    refuse_at: int = 0

    def __post_init__(self) -> None:
        self.link_time = self.compute_time = 0.0
        self.free = [0.0] * self.slots
        self.ready = [0.0] * self.slots
        self.arriving: list[int | None] = [None] * self.slots
        self.spans: list[Span] = []
        self.calls = 0

    @property
    def copies(self) -> list[Span]:
        return [span for span in self.spans if span.what == "copy"]

    def copy(self, layer: int, slot: int) -> None:
        self._refuse()
        start = max(self.link_time, self.free[slot])
        self.link_time = self.ready[slot] = start + self.seconds
        self.spans.append(Span("copy", layer, slot, start, self.link_time))
        self.arriving[slot] = layer
        if self.memory:
            self.memory[slot][:] = POISON
        self._refuse()

    def await_copy(self, slot: int) -> None:
        self._refuse()
        self.compute_time = max(self.compute_time, self.ready[slot])
        layer = self.arriving[slot]
        if self.memory and layer is not None:
            self.memory[slot][: len(self.images[layer])] = self.images[layer]
        self._refuse()

    def release(self, slot: int) -> None:
        self._refuse()
        self.free[slot] = self.compute_time
        self._refuse()

    def compute(self, seconds: float, layer: int | None = None) -> None:
        """Compute for a while, with the ``layer``-th streamed layer if one is given."""
        start = self.compute_time
        self.compute_time += seconds
        if layer is not None:
            self.spans.append(Span("compute", layer, layer % self.slots, start, self.compute_time))

    def _refuse(self) -> None:
        self.calls += 1
        if self.calls == self.refuse_at:
            raise KeyboardInterrupt


class SimulatedDevice(Backend):
    """NumPy with ``memory_bytes``; weight matrices of the ``streamed`` layers lie in slots."""

    name = "simulated"

    def __init__(self, streamed: Sequence[int] = (), slots: int = 2, memory_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.placement = Placement(tuple(streamed), slots)
        self.memory_bytes = memory_bytes
        self.links: list[SimulatedLink] = []
        self._layers = 0
        self._slot: np.ndarray | None = None

    @property
    def link(self) -> SimulatedLink:
        """The link of the stack that decodes."""
        return self.links[-1]

    def memory(self) -> dict[str, int]:
        return {"available": self.memory_bytes, "used": 0}

    def blocks(self, build: Callable[[int], T], count: int) -> StreamedBlocks[T]:
        streamed = [index - self._layers for index in self.placement.streamed if 0 <= index - self._layers < count]
        self._layers += count
        slots = self.placement.slots
        link = SimulatedLink(slots, memory=[np.zeros(SLOT_BYTES, np.uint8) for _ in range(slots)])
        self.links.append(link)
        built = []
        for index in range(count):
            slot = link.memory[len(link.images) % slots]
            self._slot = slot if index in streamed else None
            built.append(build(index))
            if self._slot is not None:
                link.images.append(slot[: len(slot) - len(self._slot)].copy())
        self._slot = None
        for slot in link.memory:
            slot[:] = POISON
        return StreamedBlocks(built, streamed, link, slots)

    def weight(self, parts: Sequence[HostWeight], biases: Sequence[np.ndarray | None] = ()) -> NumpyWeight:
        weight = super().weight(parts, biases)
        if self._slot is None:
            return weight
        nbytes = weight.values.nbytes
        place = self._slot[:nbytes].view(np.float32).reshape(weight.values.shape)
        place[...] = weight.values
        self._slot = self._slot[nbytes:]
        return replace(weight, values=place)
