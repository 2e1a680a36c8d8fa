"""A device: its arrays, copies, captured work and memory. This one is the host, over NumPy.

:class:`.base.Backend` adds the operations of models. A faster backend overrides both, each apart from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from .cache_values import AnyCache, LatentCache, LayerCache, StateArray, StateCache
from .communicator import Communicator, OneRank
from .values import BLOCK_SIZE, Array, ForwardBatch, Placement

T = TypeVar("T")


class HostDevice:
    """The host's memory as a device. Activations have the type ``activation_dtype``."""

    name = "cpu"
    """The device's name, as in ``--device``."""
    max_steps_in_flight = 0
    """How many decode steps the host may launch before it reads the result of the first."""
    has_one_order = False
    """Whether a row gets the same bits whatever the other rows of a step are, and however many (docs/numerics.md)."""
    decode_sizes: tuple[int, ...] = ()
    """Numbers of sequences, ascending, to which decode steps are padded so that few are captured; none: no padding."""
    mixed_sizes: tuple[tuple[int, int], ...] = ()
    """The same for steps that process prompts: decoding sequences and prompt tokens. Larger steps are not captured."""
    source_sizes: tuple[int, ...] = ()
    """Numbers of tokens, ascending, to which the sources that an encoder reads are padded."""
    text_sizes: tuple[int, ...] = ()
    """The same of whole texts that become vectors. Larger batches are not captured."""

    max_text_tokens = 1024
    """Tokens of a batch of texts up to which the device gains by more of them. Ctrl-C waits for two batches at most."""

    def __init__(self, activation_dtype: type = np.float32):
        self.activation_dtype = np.dtype(activation_dtype)
        self.placement = Placement()
        """Where a model's weights live; set before the model is built."""
        self.communicator: Communicator = OneRank()
        """The other ranks of a divided model; set before the model is built, which then loads this rank's part."""

    def expect_weights(self, nbytes: int) -> None:
        """Prepare for weights of ``nbytes`` or more, which are about to be loaded and will stay; returns at once."""

    # -- arrays ---------------------------------------------------------------------------------------------------

    def array(self, values: np.ndarray) -> Array:
        """A copy of a host array on the device, of the same shape and dtype."""
        return np.array(values)

    def upload(self, values: np.ndarray) -> Array:
        """As :meth:`array`, for the integers of a step: without waiting for the work that was started before."""
        return self.array(values)

    def adopt(self, values: Any) -> Callable[[], Array]:
        """Another library's array on this device, of the same shape and dtype, without a copy.

        ``values`` supports DLPack, or on a GPU ``__cuda_array_interface__``. Call this in the thread that offers them,
        and the function that it returns, which gives the array, in the thread that owns the device. Operations on the
        array wait for the work on its library's current stream, or on the stream that the interface names.
        """
        array = np.from_dlpack(values)
        return lambda: array

    def assign(self, target: Array, values: np.ndarray) -> None:
        """Overwrite a device array with a host array of the same shape."""
        target[...] = values

    def write(self, target: Array, values: np.ndarray) -> None:
        """Overwrite a contiguous device array with a host array of its shape and dtype, without waiting for the device.

        Work that was started before sees the old values, later work the new ones. ``values`` may change afterwards.
        """
        target[...] = values

    def write_for_sampler(self, target: Array, values: np.ndarray) -> None:
        """As :meth:`write`, for what :meth:`sample` alone reads: a model that was started before does not delay it.

        What else was written to ``target`` must be complete.
        """
        self.write(target, values)

    def host(self, x: Array) -> np.ndarray:
        """A NumPy array of the values. Waits for the device.

        As :meth:`complete` and :meth:`fetch`, it raises ``DeviceError`` if a rank was given up, so that sums are wrong.
        """
        return np.asarray(x)

    def complete(self, x: Array) -> Array:
        """``x`` as an array that other libraries may read, with deferred values computed. Waits for the device."""
        return x

    def computed(self, x: Array) -> Array:
        """``x`` as an array, with deferred values computed, without waiting for the device."""
        return x

    def fetch(self, x: Array) -> Callable[[], np.ndarray]:
        """Start copying ``x`` to the host, beside later work. Calling the result waits for the copy.

        Nothing may change ``x`` until then, so ``x`` must not be the result of captured work that is run again before.
        """
        copy = np.array(x)
        return lambda: copy

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """``work``, which a backend with graphs captures once and replays at later calls.

        ``work`` must do the same operations on the same arrays at each call, and return the same arrays.
        """
        return work

    @contextmanager
    def step(self, batch: ForwardBatch) -> Iterator[None]:
        """The operations of one model on a batch; a backend that defers values forgets them at the end.

        Steps may be nested, as those of a second model are in the step of the first.
        """
        yield

    def make_current(self) -> None:
        """Let the calling thread use the device; each thread that does so calls this once."""

    def describe(self) -> str:
        """The device's name and properties, for display."""
        return "CPU (NumPy reference)"

    def expert_cache(self) -> dict[str, int]:
        """What a cache of experts on the device has done since loading; empty if there is no such cache.

        ``slots`` and ``experts`` count how many experts have room there and how many there are, in all layers. ``hits``
        and ``misses`` count the experts that a layer of a step needed, and ``copied_bytes`` are those of the misses.
        Waits for the device.
        """
        return {}

    def memory(self) -> dict[str, int]:
        """Device memory in bytes; empty for a backend in host memory.

        The keys are ``used``, ``peak_used``, ``reserved``, ``peak_reserved``, ``limit`` and ``available`` (still free).
        """
        return {}

    def close(self) -> None:
        """Free the device's memory. Arrays of this backend must not be used afterwards."""

    # -- caches ---------------------------------------------------------------------------------------------------

    def layer_cache(
        self, num_blocks: int, kv_heads: int, head_dim: int, *, int8: bool = False, max_blocks: int | None = None
    ) -> LayerCache:
        """A key-value cache of one layer of ``num_blocks`` blocks; see :class:`LayerCache`. Contents are undefined.

        The cache can :meth:`grow` to ``max_blocks`` blocks.
        """
        shape = (num_blocks, kv_heads, BLOCK_SIZE, head_dim)
        if int8:
            codes, scales = (np.zeros((2, *shape), np.int8), np.zeros((2, *shape[:3]), np.float16))
            return LayerCache(codes[0], codes[1], scales[0], scales[1])
        return LayerCache(np.zeros(shape, self.activation_dtype), np.zeros(shape, self.activation_dtype))

    def latent_cache(
        self, num_blocks: int, row_dim: int, *, int8: bool = False, max_blocks: int | None = None
    ) -> LatentCache:
        """The latent rows of one layer, each of ``row_dim`` elements; otherwise as :meth:`layer_cache`."""
        shape = (num_blocks, BLOCK_SIZE, row_dim)
        if int8:
            return LatentCache(np.zeros(shape, np.int8), np.zeros((*shape[:2], 2), np.float16))
        return LatentCache(np.zeros(shape, self.activation_dtype))

    def state_cache(self, num_slots: int, arrays: Sequence[StateArray], *, max_slots: int | None = None) -> StateCache:
        """The states of one layer in ``num_slots`` slots, which can :meth:`grow` to ``max_slots``; see ``StateCache``.

        Contents are undefined. ``arrays`` are those of this rank.
        """
        types = [self.activation_dtype if x.dtype is None else np.dtype(x.dtype) for x in arrays]
        return StateCache({x.name: np.zeros((num_slots, *x.slot_shape), t) for x, t in zip(arrays, types, strict=True)})

    def grow(self, cache: AnyCache, num_blocks: int) -> None:
        """Enlarge a layer's cache to ``num_blocks`` blocks or slots, at most its greatest number. Contents are kept.

        On a backend with graphs the cache's addresses stay the same.
        """

        def larger(array: Array) -> Array:
            grown = np.zeros((num_blocks, *array.shape[1:]), array.dtype)
            grown[: len(array)] = array
            return grown

        cache.set_arrays([larger(array) for array in cache.arrays])

    def copy_blocks(self, copies: Sequence[tuple[AnyCache, int, int]]) -> None:
        """Overwrite blocks or slots of layers' caches, after what was started before.

        Each of ``copies`` is a cache, the block to read, and the block to write, which no other copy reads or writes.
        """
        for cache, source, target in copies:
            for array in cache.arrays:
                array[target] = array[source]

    def free_layer_cache(self, cache: AnyCache) -> None:
        """Free a layer's cache, even if something still refers to it."""
        cache.clear()
