"""A model one layer at a time over whole sequences, so that only one of its layers is in memory.

All groups of sequences go through a layer before the next one is made. Of an encoder-decoder the encoder's layers come
first, and the decoder's first layer starts from what they made of the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, Step
from ..layers.cache import CacheShape, KVCache, SourceCache


@dataclass(frozen=True)
class Group:
    """Sequences that run together from their start, int32 token ids ``[n]`` each.

    ``sources`` are what an encoder reads for each of them.
    """

    sequences: tuple[np.ndarray, ...]
    sources: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class State:
    """What a model has made of a group: the residual stream fp32 ``[T, features]``, and the encoder's output.

    The residual stream is that of the sources while the encoder is at work.
    """

    residual: Array
    encoded: Array | None = None


Stage = Callable[[State, Group], State]


class Stages:
    """The layers of a model that consists of ``pieces``, run on ``ops``. ``names`` says what each is."""

    def __init__(self, pieces: Any, config: Any, ops: Backend):
        self.pieces = pieces
        self.ops = ops
        self.output: Callable[[], Callable[[Array], Array]] = pieces.output
        self._limit: int = config.context_length
        shape = config.cache_shape
        self._shape = CacheShape(1, shape.kv_heads, shape.head_dim)
        self._encoders: int = getattr(config, "encoder_layers", 0)
        kind = "decoder layer" if self._encoders else "layer"
        self.names = [f"encoder layer {i}" for i in range(self._encoders)]
        self.names += [f"{kind} {i}" for i in range(config.layers)]

    def start(self, groups: Sequence[Group]) -> list[State]:
        """Each group before the first layer."""
        embed = self.pieces.embed()
        return [State(embed(self._step(group.sources or group.sequences))) for group in groups]

    def build(self, index: int) -> Stage:
        """The layer of that number; using its state up, as its operations do."""
        if index < self._encoders:
            encode = self.pieces.encoder_block(index)
            return lambda state, group: State(encode(state.residual, self._step(group.sources)))
        layer = index - self._encoders
        block = self.pieces.block(layer)
        if not self._encoders:
            return lambda state, group: State(self._decode(block, state.residual, group))
        return self._second(block) if layer else self._first(block)

    def _first(self, block: Any) -> Stage:
        """The decoder's first layer."""
        norm, embed, rest = self.pieces.encoder_norm(), self.pieces.embed(), self._second(block)

        def run(state: State, group: Group) -> State:
            return rest(State(embed(self._step(group.sequences)), norm(state.residual)), group)

        return run

    def _second(self, block: Any) -> Stage:
        """A layer of a decoder that reads an encoder's output."""

        def run(state: State, group: Group) -> State:
            longest = max(map(len, group.sources))
            with closing(SourceCache(self.ops, self._shape, len(group.sources), longest, longest)) as source:
                source.set_lengths({slot: len(tokens) for slot, tokens in enumerate(group.sources)})
                block.cross_attention.read(state.encoded, source.layers[0], self._step(group.sources))
                return State(self._decode(block, state.residual, group, source.layers[0], source), state.encoded)

        return run

    def _decode(self, block: Any, residual: Array, group: Group, *source: Any) -> Array:
        longest = max(map(len, group.sequences))
        with closing(KVCache(self.ops, self._shape, len(group.sequences), longest, self._limit)) as cache:
            return block(residual, cache.layers[0], *source, self._step(group.sequences))

    def _step(self, sequences: Sequence[np.ndarray]) -> Step:
        """All sequences from their start, packed."""
        return Step.packed(self.ops.array, sequences)
