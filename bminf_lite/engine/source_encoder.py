"""Encodes the sources of an encoder-decoder, each whole: at captured sizes, where a backend has such, or eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..backend.values import ForwardBatch
from ..layers.cache import KVCache, blocks_for
from .network import SourceNetwork
from .step_arrays import TOKENS_PER_PROMPT, CapturedStep, StepInputs, StepSize

Rows = Sequence[Sequence[int]] | np.ndarray
"""Integers of several sources: ragged rows, or an array ``[B, n]``."""
RUNS_TO_CAPTURE = 3
"""Runs after which a backend with graphs has captured a step: it runs a step twice before it captures it."""


class SourceEncoder:
    """Fills ``cache`` with keys and values of sources.

    Sources that have few tokens together are padded to one of the backend's ``source_sizes``, which is captured once.
    Sizes of more than ``max_num_tokens`` are not used, because memory is planned for that number. The device runs more
    tokens than the sizes have for longer than the host launches them.
    """

    def __init__(self, network: SourceNetwork, cache: KVCache, max_num_tokens: int):
        self.network = network
        self.cache = cache
        self.sizes = [
            StepSize(0, max(tokens // TOKENS_PER_PROMPT, 1), tokens, tokens, has_adapters=adapted)
            for adapted in (False, True)[: 1 + (network.ops.adapter_slots is not None)]
            for tokens in network.ops.source_sizes
            if tokens <= max_num_tokens
        ]
        self._captured: dict[StepSize, CapturedStep] = {}

    def encode(self, sources: Rows, tables: Rows, lora_ids: Sequence[int] = ()) -> None:
        """Encode ``sources``, which are token ids, all at once. ``tables`` are the blocks that each of them fills.

        ``lora_ids`` are the slots of their adapters, 0 for none.
        """
        lengths = list(map(len, sources))
        exact = StepSize(0, len(sources), sum(lengths), max(lengths), has_adapters=any(lora_ids))
        size = next((size for size in self.sizes if exact.fits(size)), None)
        if size is None:
            self.encode_eagerly(sources, tables, lora_ids)
            return
        inputs = StepInputs(size, (), blocks_for(size.max_context_len))
        inputs.tokens[: exact.tokens] = np.concatenate(sources)
        inputs.cu_seqlens[1:] = exact.tokens
        inputs.cu_seqlens[1 : 1 + exact.prompts] = np.cumsum(lengths)
        for row, table in zip(inputs.source_table, tables, strict=False):  # padding has no table
            row[: len(table)] = table
        if size.has_adapters:
            inputs.lora_ids[: exact.tokens] = np.repeat(np.array(lora_ids, np.int32), lengths)
        step = self._captured_step(inputs)
        step.arrays.write(inputs)
        step.forward()

    def encode_eagerly(self, sources: Rows, tables: Rows, lora_ids: Sequence[int] = ()) -> None:
        """:meth:`encode` without padding and capture."""
        packed = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(packed, tables, strict=True):
            row[: len(table)] = table
        batch = ForwardBatch.packed(self.network.ops.array, sources, source_tables=packed)
        if any(lora_ids):
            ids = np.repeat(np.array(lora_ids, np.int32), list(map(len, sources)))
            batch = replace(batch, lora_ids=self.network.ops.array(ids))
        self.network.encode_to_cache(batch, self.cache)

    def _captured_step(self, inputs: StepInputs) -> CapturedStep:
        """The captured encoding of the inputs' size, which is made when it is first needed."""
        found = self._captured.get(inputs.size)
        if found is None:
            network, cache = self.network, self.cache
            found = CapturedStep(network.ops, inputs, lambda batch: network.encode_to_cache(batch, cache))
            self._captured[inputs.size] = found
        return found

    def warm_up(self) -> None:
        """Capture the encoding of every size."""
        for size in reversed(self.sizes):  # all share the memory of the largest
            step = self._captured_step(StepInputs(size, (), blocks_for(size.max_context_len)))
            for _ in range(RUNS_TO_CAPTURE):
                step.forward()

    def close(self) -> None:
        """Give the memory of captured encodings back."""
        self._captured.clear()
