"""Blocks of a model that do not fit the device: their codes stay in pinned host memory and stream to it.

A block is an element of the model's ``ModuleList`` of layers. The codes of a streamed block lie in one pinned buffer.
Two buffers on the device hold the block in use and the one that is expected next: when a block is first used, the copy
of its neighbour starts on a stream of its own, in the direction in which the blocks have been used so far. So forward
prefetches the block behind, and backward the one before. A copy waits for the work that used its buffer before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .linear import Int8Linear

SLOTS = 2
ALIGNMENT = 256
"""Codes of a layer start at multiples of ``ALIGNMENT`` bytes within their block."""


@dataclass
class _Slot:
    """A buffer on the device, the block that it holds, and events: its copy arrived, its last use was enqueued."""

    buffer: Tensor
    block: int = -1
    arrived: Any = None
    used: Any = None


@dataclass(frozen=True)
class StreamedCodes:
    """One layer's codes: ``size`` bytes from ``offset`` on of the host buffer of ``block``."""

    stream: BlockStream
    block: int
    offset: int
    shape: torch.Size

    @property
    def device(self) -> torch.device:
        return self.stream.device

    def fetch(self) -> Tensor:
        """The codes on the device; work enqueued now on the current stream waits for their copy."""
        buffer = self.stream.fetch(self.block)
        return buffer[self.offset : self.offset + self.shape.numel()].view(self.shape)

    def store(self, codes: Tensor) -> Tensor:
        """Replace the codes; copies of their block on the device are dropped."""
        place = self.stream.blocks[self.block][self.offset : self.offset + self.shape.numel()].view(self.shape)
        if codes.data_ptr() != place.data_ptr():
            place.copy_(codes)
        self.stream.drop(self.block)
        return place

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a model with memory_limit cannot be copied or pickled: its codes are in pinned buffers. Save its "
            "state_dict or use save_pretrained, and wrap the loaded model"
        )


@dataclass
class BlockStream:
    """The streamed blocks of one model: their pinned buffers, in the order of the model, and two device buffers.

    ``copied_bytes`` counts what has been copied to the device so far.
    """

    device: torch.device
    blocks: list[Tensor] = field(default_factory=list)
    copied_bytes: int = 0
    _slots: list[_Slot] = field(default_factory=list)
    _current: int = -1
    _direction: int = 1
    _copies: Any = None

    def add(self, layers: list[Int8Linear]) -> None:
        """Move the codes of a block's layers into a pinned buffer."""
        offsets, size = [], 0
        for layer in layers:
            offsets.append(size)
            size += -(-layer.codes.numel() // ALIGNMENT) * ALIGNMENT
        buffer = torch.empty(size, dtype=torch.int8, pin_memory=self.device.type == "cuda")
        for layer, offset in zip(layers, offsets, strict=True):
            place = buffer[offset : offset + layer.codes.numel()].view(layer.codes.shape)
            layer.host_codes = StreamedCodes(self, len(self.blocks), offset, layer.codes.shape)
            layer.codes = place.copy_(layer.codes)
        self.blocks.append(buffer)

    def start(self) -> None:
        """Allocate the device's buffers, once all blocks are there."""
        size = max(len(block) for block in self.blocks)
        count = min(SLOTS, len(self.blocks))
        self._slots = [_Slot(torch.empty(size, dtype=torch.int8, device=self.device)) for _ in range(count)]
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)

    def fetch(self, block: int) -> Tensor:
        """The device buffer that holds ``block``; the copy of its neighbour starts."""
        if block != self._current:
            self._leave_current()
            if self._current >= 0:  # the first block follows the last
                self._direction = -1 if (block - self._current) % len(self.blocks) == len(self.blocks) - 1 else 1
            self._current = block
            held = self._load(block)
            if held.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(held.arrived)
            self._load((block + self._direction) % len(self.blocks), keep=block)
        return next(slot.buffer for slot in self._slots if slot.block == block)

    def drop(self, block: int) -> None:
        """Forget the device's copy of ``block``, whose codes on the host have changed."""
        self._leave_current()
        self._current = -1
        for slot in self._slots:
            if slot.block == block:
                slot.block = -1

    def _leave_current(self) -> None:
        """Note the last use of the current block's buffer, which is already enqueued."""
        for slot in self._slots:
            if slot.block == self._current and slot.block >= 0 and self._copies is not None:
                slot.used = torch.cuda.current_stream(self.device).record_event()

    def _load(self, block: int, keep: int | None = None) -> _Slot:
        """The slot that holds ``block``, into which its copy may just have started; that of ``keep`` stays."""
        for slot in self._slots:
            if slot.block == block:
                return slot
        slot = next(slot for slot in self._slots if slot.block != keep)
        source = self.blocks[block]
        slot.block = block
        self.copied_bytes += source.numel()
        if self._copies is None:
            slot.buffer[: len(source)].copy_(source)
            return slot
        with torch.cuda.stream(self._copies):
            if slot.used is not None:
                self._copies.wait_event(slot.used)
            slot.buffer[: len(source)].copy_(source, non_blocking=True)
            slot.arrived = self._copies.record_event()
        return slot


def check_limit(device: torch.device | str | None, memory_limit: int | None) -> None:
    """Raise :class:`UsageError` for a limit that is no number of bytes, or without a device."""
    if memory_limit is None:
        return
    if device is None:
        raise UsageError("memory_limit needs device, where the memory is limited, such as device='cuda'")
    if not isinstance(memory_limit, int) or memory_limit < 1:
        raise UsageError(f"memory_limit is {memory_limit!r}; it must be a whole number of bytes, such as 6 << 30")


def move(model: nn.Module, device: torch.device | str | None, memory_limit: int | None) -> None:
    """Move ``model`` to ``device`` if one is given, and within ``memory_limit`` if that is given; see :func:`place`."""
    if device is None:
        return
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    if memory_limit is None:
        model.to(target)
    else:
        place(model, target, memory_limit)


def place(model: nn.Module, device: torch.device, memory_limit: int) -> int:
    """Move ``model`` to ``device`` with at most ``memory_limit`` bytes there; returns how many blocks are streamed.

    The bytes are those of parameters, buffers and streaming; activations come on top. As many blocks as possible are
    resident, spread evenly among the streamed ones, whose copies then overlap with more work. Raises
    :class:`UsageError` if the model does not fit even with every block streamed, or has no blocks.
    """
    blocks = _blocks(model)
    sizes = [sum(layer.codes.numel() for layer in layers) for layers in blocks]
    total = sum(t.numel() * t.element_size() for t in {id(t): t for t in _tensors(model)}.values())
    if total <= memory_limit:
        model.to(device)
        return 0
    if not blocks:
        raise UsageError(
            f"the model takes {total:,} bytes and memory_limit is {memory_limit:,}, but it has no ModuleList of layers "
            f"with int8 weights to stream; raise the limit"
        )
    slot = max(sizes) + ALIGNMENT * max(map(len, blocks))
    least = total - sum(sizes) + min(SLOTS, len(blocks)) * slot
    if least > memory_limit:
        raise UsageError(
            f"memory_limit is {memory_limit:,}, and the model needs {least:,} bytes with every block streamed: "
            f"{total - sum(sizes):,} for what is not streamed and the rest for two buffers of a block; raise the limit"
        )
    resident = min(len(blocks) - 1, (memory_limit - least) // max(max(sizes), 1))
    stays = {i * len(blocks) // resident for i in range(resident)} if resident else set()
    stream = BlockStream(device)
    for index, layers in enumerate(blocks):
        if index not in stays:
            stream.add(layers)
    model.to(device)
    stream.start()
    return len(stream.blocks)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _blocks(model: nn.Module) -> list[list[Int8Linear]]:
    """The int8 layers of each element of the outermost module lists that have some, in the model's order."""
    found: list[list[Int8Linear]] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            own = [[layer for layer in block.modules() if isinstance(layer, Int8Linear)] for block in child]
            found += [layers for layers in own if layers]
        else:
            found += _blocks(child)
    return found
