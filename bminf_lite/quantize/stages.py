"""A model run one layer at a time over whole sequences, so that only one of its layers is in memory.

All batches of sequences pass through a layer before the next one is built. An encoder-decoder runs its encoder's layers
first; the decoder's first layer then starts from the encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch, sequential_tables
from ..layers.cache import CacheLayout, KVCache, caches_of_layers
from ..models import fill_source


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences that run together from their start, int32 token ids ``[n]`` each.

    ``sources`` are the encoder's sequences, one for each of them.
    """

    sequences: tuple[np.ndarray, ...]
    sources: tuple[np.ndarray, ...] = ()


def split_for_encoder_decoder(
    tokens: np.ndarray, start: Sequence[int], least_source: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The decoder's tokens, from ``start`` on, and the encoder's: the first half of ``tokens``, rounded up.

    The encoder gets ``least_source`` tokens at least.
    """
    middle = max(-(-len(tokens) // 2), least_source)
    return np.concatenate([start, tokens[middle:]]).astype(np.int32), tokens[:middle]


@dataclass(frozen=True)
class HiddenState:
    """A batch between two layers: the residual stream fp32 ``[T, features]``, and the encoder's output.

    In the encoder, the residual stream is that of the sources. ``layer_inputs`` are those of ``ForwardBatch``, and
    ``stored`` has what layers keep that later layers read: the arrays of their caches, on the host.
    """

    residual: Array
    encoded: Array | None = None
    layer_inputs: Array | None = None
    stored: Mapping[int, list[np.ndarray]] = field(default_factory=dict)

    def on_host(self, ops: Backend) -> HiddenState:
        """The same on the host."""
        return self._moved(lambda x: np.array(ops.host(x)))

    def on_device(self, ops: Backend) -> HiddenState:
        """The same, which is on the host, on the device of ``ops``."""
        return self._moved(ops.array)

    def _moved(self, move: Callable[[Array], Array]) -> HiddenState:
        encoded, inputs = (None if x is None else move(x) for x in (self.encoded, self.layer_inputs))
        return HiddenState(move(self.residual), encoded, inputs, self.stored)


LayerFn = Callable[[HiddenState, SequenceBatch], HiddenState]


class LayerwiseModel:
    """The layers of a model, made by ``builder`` and run on ``ops``; ``names`` describes each of them.

    With ``int8_cache`` attention reads keys and values that were stored in int8.
    """

    def __init__(self, builder: Any, config: Any, ops: Backend, int8_cache: bool = False):
        self.builder = builder
        self.ops = ops
        self.output: Callable[[], Callable[[Array], Array]] = builder.output
        self._sources: dict[int, int] = config.source_layers
        self._layouts = [CacheLayout(layouts).with_int8(int8_cache) for layouts in config.layer_layouts]
        self._encoders: int = config.encoder_layers if config.is_encoder_decoder else 0
        kind = "decoder layer" if self._encoders else "layer"
        self.names = [f"encoder layer {i}" for i in range(self._encoders)]
        self.names += [f"{kind} {i}" for i in range(config.num_layers)]

    def start(self, batches: Sequence[SequenceBatch]) -> list[HiddenState]:
        """The state of each batch before the first layer."""
        embed, found = self.builder.embed(), []
        for batch in batches:
            step = self._step(batch.sources or batch.sequences)
            residual = embed(step)
            found.append(HiddenState(residual, layer_inputs=embed.with_layer_inputs(residual, step).layer_inputs))
        return found

    def build(self, index: int) -> LayerFn:
        """Layer ``index``, counted through encoder and decoder. It may overwrite the arrays of its state."""
        if index < self._encoders:
            encode = self.builder.encoder_block(index)
            return lambda state, batch: HiddenState(encode(state.residual, None, self._step(batch.sources)))
        layer = index - self._encoders
        block = self.builder.block(layer)
        if not self._encoders:
            return partial(self._run, block, layer)
        return self._with_source(block, layer) if layer else self._first_with_source(block)

    def _run(self, block: Any, layer: int, state: HiddenState, batch: SequenceBatch) -> HiddenState:
        step = replace(self._step(batch.sequences), layer_inputs=state.layer_inputs)
        stored = dict(state.stored)
        residual = self._decode(block, layer, state.residual, step, stored=stored)
        return replace(state, residual=residual, stored=stored)

    def _first_with_source(self, block: Any) -> LayerFn:
        norm, embed, rest = self.builder.encoder_norm(), self.builder.embed(), self._with_source(block, 0)

        def run(state: HiddenState, batch: SequenceBatch) -> HiddenState:
            return rest(HiddenState(embed(self._step(batch.sequences)), norm(state.residual)), batch)

        return run

    def _with_source(self, block: Any, layer: int) -> LayerFn:
        def run(state: HiddenState, batch: SequenceBatch) -> HiddenState:
            count, lengths = len(batch.sources), [len(tokens) for tokens in batch.sources]
            with closing(KVCache.for_sequences(self.ops, self._layouts[layer], count, max(lengths))) as source:
                sources = replace(self._step(batch.sources), source_tables=self._table(count, max(lengths)))
                fill_source(block, state.encoded, source.layers[0], sources)
                lens = self.ops.array(np.array(lengths, np.int32))
                step = replace(
                    self._step(batch.sequences),
                    source_tables=sources.source_tables,
                    source_lens=lens,
                    max_source_len=max(lengths),
                )
                return HiddenState(self._decode(block, layer, state.residual, step, source), state.encoded)

        return run

    def _decode(
        self,
        block: Any,
        layer: int,
        residual: Array,
        step: ForwardBatch,
        source: KVCache | None = None,
        stored: dict[int, list[np.ndarray]] | None = None,
    ) -> Array:
        """The residual stream after a layer, which reads or adds to what layers ``stored``."""
        storing = self._sources.get(layer, layer)
        if not self._layouts[storing].layers:
            found: Array = block(residual, None, step)
            return found
        count, longest = step.batch_size, step.max_query_len
        with closing(KVCache.for_sequences(self.ops, self._layouts[storing], count, longest)) as cache:
            if source is not None:
                cache.source = source
            tables = tuple(map(self.ops.array, cache.tables(count, longest)))
            (own,) = caches_of_layers([self._layouts[storing].layers], cache)
            if storing != layer and stored is not None:
                for array, values in zip(own.arrays, stored[storing], strict=True):
                    self.ops.assign(array, values)
            found = block(residual, own, replace(step, block_tables=tables))
            if layer in self._sources.values() and stored is not None:
                stored[layer] = [np.array(self.ops.host(array)) for array in own.arrays]
            return found

    def _table(self, sequences: int, tokens: int) -> Array:
        return self.ops.array(sequential_tables(sequences, tokens))

    def _step(self, sequences: Sequence[np.ndarray]) -> ForwardBatch:
        return ForwardBatch.packed(self.ops.array, sequences)
