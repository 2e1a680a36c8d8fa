"""Runs a model on the tokens of a step: device arrays, the key-value cache and its memory, the sampler's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerVariant, SequenceSampling
from ..backend.values import BLOCK_SIZE, Array, ForwardBatch
from ..errors import OutOfMemory
from ..layers.cache import KVCache, blocks_for
from .block_manager import BlockManager, BlockPool, SequenceBlocks
from .config import EngineConfig
from .decode_steps import DecodeInputs, DecodeSteps
from .request import Request
from .sampler_table import SamplerTable
from .sampling_params import sequence_sampling
from .scheduler import ScheduledTokens, Step, StepResult

FIRST_BLOCKS = 64
"""Blocks that a pool has at first, if it may have so many."""
NO_TOKEN = -1
"""Stands for a token that the host does not know: the newest of its sequence, which the sampler holds."""


class Network(Protocol):
    """A model as the runner calls it; see :mod:`bminf_lite.models`."""

    ops: Backend

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits fp32 ``[L, vocab]`` of the batch's ``logit_rows``, or of all tokens ``[T, vocab]``."""
        ...


class EncoderDecoder(Network, Protocol):
    """A model that has an encoder."""

    def encode_to_cache(self, batch: ForwardBatch, source: KVCache) -> None:
        """Encode whole sources, and store the decoder's keys and values of them in ``source``."""
        ...


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device computes. :meth:`fetch` waits for it."""

    choice: Callable[[], np.ndarray] | None
    scores: Callable[[], np.ndarray] | None

    def fetch(self) -> StepResult:
        """What the step chose and scored."""
        chosen = self.choice() if self.choice else np.zeros((2, 0), np.int32)
        return StepResult(chosen, self.scores() if self.scores else np.zeros(0, np.float32))


class HostTables:
    """The block tables of a group by row, int32 ``[rows, width]`` on the host, kept up to date without a rebuild."""

    def __init__(self, rows: int, width: int):
        self.array = np.zeros((rows, width), np.int32)
        self._owners: list[tuple[Request, int] | None] = [None] * rows
        self._lengths = [0] * rows

    def update(self, request: Request, table: Sequence[int], has_window: bool) -> None:
        """Copy what is new in the table of a request: its end, and with a window also what was given back."""
        row, owner, length = request.row, (request, request.num_preemptions), len(table)
        first = self._lengths[row] if self._owners[row] == owner else 0
        if first != length:
            first = 0 if has_window else first
            self.array[row, first:length] = table[first:]
            self._owners[row], self._lengths[row] = owner, length


class ModelRunner:
    """A model, its key-value cache and its sampler. It runs the steps of a scheduler that plans with ``blocks``.

    The cache has the blocks that were ever needed at the same time, and grows up to those of ``config``. Raises
    ``OutOfMemory`` where memory does not suffice. :meth:`close` gives the memory back even while a traceback refers to
    the runner.
    """

    def __init__(self, network: Network, config: EngineConfig, blocks: BlockManager):
        self.network = network
        self.ops = network.ops
        self.config = config
        self.blocks = blocks
        self.max_steps_in_flight = self.ops.max_steps_in_flight
        self.table = SamplerTable(self.ops, config.max_num_seqs, config.vocab_size)
        width, rows = blocks_for(config.context_length), config.max_num_seqs + 1
        self._tables = [HostTables(rows, width) for _ in config.num_blocks]
        self._source_tables = HostTables(rows, blocks_for(config.max_source_length))
        with _memory_for_the_cache():
            self.cache = self._pools(config.num_blocks)
            if config.num_source_blocks:
                try:
                    self.cache.source = self._pools((config.num_source_blocks,))
                except BaseException:
                    self.close()
                    raise
        self._decode_steps: DecodeSteps | None = None
        if self.ops.has_graphs:
            longest_source = min(config.max_source_length, config.num_source_blocks * BLOCK_SIZE)
            self._decode_steps = DecodeSteps(
                self.ops, lambda batch: self.network(batch, self.cache), self.table.device_table,
                max_num_seqs=config.max_num_seqs, num_groups=len(config.num_blocks),
                context_length=config.context_length, max_source_length=longest_source,
            )  # fmt: skip

    def close(self) -> None:
        """Give the memory of the cache back; nothing can be run afterwards."""
        self.cache.close()

    # -- rows of the sampler ------------------------------------------------------------------------------------------

    def has_room(self, request: Request) -> bool:
        """Whether the sampler has a free row, and what else the request's parameters need."""
        return self.table.has_room(self._sampling(request))

    def add(self, request: Request) -> int:
        """Give a request a row of the sampler."""
        return self.table.add(self._sampling(request))

    def remove(self, row: int) -> None:
        """Free a row."""
        self.table.remove(row)

    def _sampling(self, request: Request) -> SequenceSampling:
        return sequence_sampling(
            request.params, request.index, request.prompt_token_ids, request.output_token_ids, request.eos_ids
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> LaunchedStep:
        """Start a step without waiting for it, or for the steps before it."""
        self._grow()
        if step.sources:
            self._encode(step.sources)
        sampled = [p.request.row for p in step.parts if p.samples]
        scored = [p for p in step.parts if p.num_scored]
        taken = [p for p in step.parts if p.request.take_logits]
        sampler = self.table.state(self.ops.array(np.array(sampled, np.int32)), self.table.variant(sampled))
        if self._decode_steps and step.num_decodes == len(sampled) == len(step.parts) and not taken:
            logits = self._decode_steps.run(self._decode_inputs(step.parts))
        else:
            batch = self._make_batch(step)
            if any(p.request.num_pending_tokens > p.samples for p in step.parts):
                rows = [p.request.row for p in step.parts[: step.num_decodes]]
                self.ops.insert_last_tokens(
                    batch.tokens, self.table.state(self.ops.array(np.array(rows, np.int32)), SamplerVariant.GREEDY)
                )
            logits = self.network(batch, self.cache)
        choice = scores = None
        if sampled:
            choice = self.ops.fetch(self.ops.sample(logits[: len(sampled)], sampler))
        end = len(sampled)
        if scored:
            targets = [p.request.prompt_token_ids[p.start + 1 : p.start + 1 + p.num_scored] for p in scored]
            first, end = end, end + sum(map(len, targets))
            ids = self.ops.array(np.concatenate(targets).astype(np.int32))
            scores = self.ops.fetch(self.ops.token_logprobs(logits[first:end], ids))
        for part in taken:
            first, end = end, end + part.num_tokens
            assert part.request.take_logits is not None
            part.request.take_logits(part.start, logits[first:end])
        return LaunchedStep(choice, scores)

    def warm_up(self) -> None:
        """Capture the decode steps of every size, so that no later step waits for that."""
        if self._decode_steps:
            self._decode_steps.warm_up()

    def _decode_inputs(self, parts: Sequence[ScheduledTokens]) -> DecodeInputs:
        """The inputs of a step that decodes all its sequences."""
        requests = [p.request for p in parts]
        known = [p.request.last_token if p.request.num_known_tokens > p.start else NO_TOKEN for p in parts]
        tables, source_tables, source_lens = self._host_tables(requests)
        return DecodeInputs(
            tokens=np.array(known, np.int32),
            rows=np.array([r.row for r in requests], np.int32),
            context_lens=np.array([p.start for p in parts], np.int32),
            tables=tables,
            source_tables=source_tables,
            source_lens=source_lens,
        )

    def _make_batch(self, step: Step) -> ForwardBatch:
        """The arguments of the model. The rows of ``logits`` are: those to sample from, those to score, those taken."""
        parts, array = step.parts, self.ops.array
        starts = np.cumsum([0, *(p.num_tokens for p in parts)])
        tokens = np.full(int(starts[-1]), NO_TOKEN, np.int32)
        for part, start in zip(parts, starts.tolist(), strict=False):
            if part.start < part.request.num_known_tokens:
                tokens[start : start + part.num_tokens] = part.request.token_ids(part.start, part.stop)
        ends = [int(end) - 1 for part, end in zip(parts, starts[1:], strict=True) if part.samples]
        pairs = list(zip(parts, starts.tolist(), strict=False))
        scored = [range(start, start + p.num_scored) for p, start in pairs if p.num_scored]
        taken = [range(start, start + p.num_tokens) for p, start in pairs if p.request.take_logits]
        rows = [*ends, *(row for group in (*scored, *taken) for row in group)] or [len(tokens) - 1]
        is_each_last = step.num_decodes == len(parts) and rows == list(range(len(parts)))
        tables, source_tables, source_lens = self._host_tables([p.request for p in parts])
        return ForwardBatch(
            tokens=array(tokens),
            cu_seqlens=array(starts.astype(np.int32)),
            context_lens=array(np.array([p.start for p in parts], np.int32)),
            block_tables=tuple(map(array, tables)),
            batch_size=len(parts),
            max_query_len=max(p.num_tokens for p in parts),
            max_context_len=max(p.stop for p in parts),
            num_decodes=step.num_decodes,
            logit_rows=None if is_each_last else array(np.array(rows, np.int32)),
            source_tables=None if source_tables is None else array(source_tables),
            source_lens=None if source_lens is None else array(source_lens),
            max_source_len=max(len(p.request.source_token_ids) for p in parts),
        )

    def _host_tables(
        self, requests: Sequence[Request]
    ) -> tuple[list[np.ndarray], np.ndarray | None, np.ndarray | None]:
        """The block tables of a step's sequences, the tables of their sources, and the sources' lengths."""
        rows, found = [r.row for r in requests], []
        for group, (tables, window) in enumerate(zip(self._tables, self.blocks.windows, strict=True)):
            width = 0
            for request in requests:
                table = _blocks(request).tables[group]
                width = max(width, len(table))
                tables.update(request, table, window is not None)
            found.append(tables.array[rows, :width])
        if self.cache.source is None:
            return found, None, None
        for request in requests:
            self._source_tables.update(request, _blocks(request).source_table, False)
        lens = np.array([len(r.source_token_ids) for r in requests], np.int32)
        width = blocks_for(int(lens.max()))
        return found, self._source_tables.array[rows, :width], lens

    def _encode(self, requests: Sequence[Request]) -> None:
        """Encode the sources of requests, all at once."""
        assert self.cache.source is not None
        sources = [r.source_token_ids for r in requests]
        table = np.zeros((len(requests), blocks_for(max(map(len, sources)))), np.int32)
        for row, request in zip(table, requests, strict=True):
            row[: len(_blocks(request).source_table)] = _blocks(request).source_table
        batch = ForwardBatch.packed(self.ops.array, sources, source_tables=table)
        cast(EncoderDecoder, self.network).encode_to_cache(batch, self.cache.source)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _pools(self, max_blocks: Sequence[int]) -> KVCache:
        first = [min(n, FIRST_BLOCKS) for n in max_blocks]
        return KVCache(self.ops, self.config.cache_shape, first, max_blocks)

    def _grow(self) -> None:
        """Let the pools hold the blocks that are in use."""
        with _memory_for_the_cache():
            _grow_pools(self.cache, self.blocks.pools)
            if self.cache.source is not None and self.blocks.source_pool is not None:
                _grow_pools(self.cache.source, [self.blocks.source_pool])


def _blocks(request: Request) -> SequenceBlocks:
    assert request.blocks is not None
    return request.blocks


def _grow_pools(cache: KVCache, pools: Sequence[BlockPool]) -> None:
    """Enlarge the pools of a cache by half at least where a block lies behind their end."""
    for group, pool in enumerate(pools):
        if pool.highest >= cache.num_blocks[group]:
            wanted = max(pool.highest + 1, cache.num_blocks[group] * 3 // 2)
            cache.grow(group, min(wanted, pool.num_blocks))


@contextmanager
def _memory_for_the_cache() -> Iterator[None]:
    """Turn a ``MemoryError`` into ``OutOfMemory`` with the purpose of the memory."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(
            f"no room for the key-value cache: {error}. Free memory on the device, or load the model with a lower "
            "max_batch or context"
        ) from error
