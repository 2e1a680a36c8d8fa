"""Runs a model on the tokens of a step: device arrays, the key-value cache and its memory, the sampler's table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerState, SamplerVariant, SequenceSampling
from ..backend.values import NULL_BLOCK, Array, ForwardBatch
from ..errors import OutOfMemory
from ..layers.cache import KVCache, blocks_for
from .block_manager import BlockManager, BlockPool, SequenceBlocks
from .config import EngineConfig
from .decode_step import DecodeStep, StepInputs, StepSize
from .request import Request
from .sampler_table import SamplerTable
from .sampling_params import sequence_sampling
from .scheduler import Step, StepResult

FIRST_BLOCKS = 64
"""Blocks that a pool has at first, if it may have so many."""
CAPTURED_LENGTHS = (1024, 4096, 16384)
"""Bounds of the lengths of sequences for which decode steps are captured, beside the model's context; in tokens."""
RUNS_TO_CAPTURE = 3
"""Runs after which a backend with graphs has captured a step: it runs a step twice before it captures it."""
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
    num_sampled: int
    scores: Callable[[], np.ndarray] | None = None
    best: Callable[[], np.ndarray] | None = None

    def fetch(self) -> StepResult:
        """What the step chose and scored, without padding."""
        chosen = self.choice()[:, : self.num_sampled] if self.choice else np.zeros((2, 0), np.int32)
        best = self.best() if self.best else np.zeros((2, 0), np.int32)
        return StepResult(chosen, self.scores() if self.scores else np.zeros(0, np.float32), best)


class HostTables:
    """The block tables of a group by row, int32 ``[rows, width]`` on the host, kept up to date without a rebuild."""

    def __init__(self, rows: int, width: int):
        self.array = np.zeros((rows, width), np.int32)
        self._owners = [(-1, 0)] * rows
        self._lengths = [0] * rows
        self._firsts = [0] * rows

    def update(self, request: Request, table: Sequence[int]) -> None:
        """Copy what is new in the table of a request: blocks at its end, and those that its window has passed."""
        row, owner, length = request.row, (request.arrival, request.num_preemptions), len(table)
        if self._owners[row] != owner:
            self.array[row] = NULL_BLOCK
            self._owners[row], self._lengths[row], self._firsts[row] = owner, 0, 0
        if self._lengths[row] != length:
            self.array[row, self._lengths[row] : length] = table[self._lengths[row] :]
            self._lengths[row] = length
        while self._firsts[row] < length and table[self._firsts[row]] == NULL_BLOCK:
            self.array[row, self._firsts[row]] = NULL_BLOCK
            self._firsts[row] += 1


class ModelRunner:
    """A model, its key-value cache and its sampler. It runs the steps of a scheduler that plans with ``blocks``.

    The pools of the cache begin small and grow with the blocks in use, up to those of ``config``. Raises
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
        self._lengths = [*(n for n in CAPTURED_LENGTHS if n < config.context_length), config.context_length]
        self._decode_steps: dict[StepSize, DecodeStep] = {}
        with _memory_for_the_cache():
            self.cache = self._pools(config.num_blocks)
            if config.num_source_blocks:
                try:
                    self.cache.source = self._pools((config.num_source_blocks,))
                except BaseException:
                    self.close()
                    raise

    def close(self) -> None:
        """Give the memory of the cache and of captured steps back; nothing can be run afterwards."""
        self._decode_steps.clear()
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
        inputs, sampled = self._inputs(step), [p.request.row for p in step.parts if p.samples]
        variant = self.table.variant(sampled)
        if len(sampled) == step.num_decodes == len(step.parts) and not any(p.num_scored for p in step.parts):
            longest = max(p.stop for p in step.parts)
            size = StepSize.of(len(sampled), longest, variant, self.ops.decode_sizes, self._lengths)
            if size is not None:
                return LaunchedStep(self.ops.fetch(self._decode_step(size).launch(inputs)), len(sampled))
        return self._launch_eagerly(step, inputs, self.table.state(self.ops.array(inputs.rows), variant))

    def _launch_eagerly(self, step: Step, inputs: StepInputs, sampler: SamplerState) -> LaunchedStep:
        """A step of any parts. The rows of the logits are: those to sample from, those to score, those taken."""
        parts, starts = step.parts, np.cumsum([0, *(p.num_tokens for p in step.parts)])
        pairs = list(zip(parts, starts.tolist(), strict=False))
        sampled = [start + p.num_tokens - 1 for p, start in pairs if p.samples]
        scored = [(p, range(start, start + p.num_scored)) for p, start in pairs if p.num_scored]
        taken = [(p, range(start, start + p.num_tokens)) for p, start in pairs if p.request.take_logits]
        rows = sampled + [row for _, part_rows in (*scored, *taken) for row in part_rows]
        batch = self._make_batch(step, inputs, starts, rows or [len(inputs.tokens) - 1])
        if (inputs.tokens == NO_TOKEN).any():
            self.ops.insert_last_tokens(batch.tokens, sampler)
        logits = self.network(batch, self.cache)
        choice = scores = best = None
        if sampled:
            choice = self.ops.fetch(self.ops.sample(logits[: len(sampled)], sampler))
        end = len(sampled)
        if scored:
            first, end = end, end + sum(len(part_rows) for _, part_rows in scored)
            targets = [p.request.prompt_token_ids[p.start + 1 : p.start + 1 + p.num_scored] for p, _ in scored]
            ids = self.ops.array(np.concatenate(targets).astype(np.int32))
            scores = self.ops.fetch(self.ops.token_logprobs(logits[first:end], ids))
            no_sequence = self.table.state(self.ops.array(np.zeros(end - first, np.int32)), SamplerVariant.GREEDY)
            best = self.ops.fetch(self.ops.sample(logits[first:end], no_sequence))
        for part, part_rows in taken:
            first, end = end, end + len(part_rows)
            assert part.request.take_logits is not None
            part.request.take_logits(part.start, logits[first:end])
        return LaunchedStep(choice, len(sampled), scores, best)

    def _make_batch(self, step: Step, inputs: StepInputs, starts: np.ndarray, logit_rows: list[int]) -> ForwardBatch:
        """The arguments of the model for a step whose parts begin at the tokens ``starts``."""
        array = self.ops.array
        return ForwardBatch(
            tokens=array(inputs.tokens),
            cu_seqlens=array(starts.astype(np.int32)),
            context_lens=array(inputs.context_lens),
            block_tables=tuple(array(table) for table in inputs.tables),
            batch_size=len(step.parts),
            max_query_len=max(p.num_tokens for p in step.parts),
            max_context_len=max(p.stop for p in step.parts),
            num_decodes=step.num_decodes,
            logit_rows=array(np.array(logit_rows, np.int32)),
            source_tables=None if inputs.source_table is None else array(inputs.source_table),
            source_lens=None if inputs.source_lens is None else array(inputs.source_lens),
            max_source_len=0 if inputs.source_lens is None else int(inputs.source_lens.max()),
        )

    def _decode_step(self, size: StepSize) -> DecodeStep:
        """The captured step of a size, which is made when it is first needed."""
        if size not in self._decode_steps:
            widths = [blocks_for(size.max_context_len)] * len(self._tables)
            has_source = self.cache.source is not None
            if has_source:
                widths.append(blocks_for(self.config.max_source_length))
            self._decode_steps[size] = DecodeStep(
                self.ops, size, widths, has_source, lambda rows: self.table.state(rows, size.variant), self._decode
            )
        return self._decode_steps[size]

    def _decode(self, batch: ForwardBatch, sampler: SamplerState) -> Array:
        """One step of one token per sequence: what is captured."""
        self.ops.insert_last_tokens(batch.tokens, sampler)
        return self.ops.sample(self.network(batch, self.cache), sampler)

    def _inputs(self, step: Step) -> StepInputs:
        """A step's integers. Its tokens lie one after another; its rows are those of the parts that sample."""
        parts = step.parts
        tokens: list[int] = []
        for part in parts:
            known = part.start < part.request.num_known_tokens
            tokens += part.request.token_ids(part.start, part.stop) if known else (NO_TOKEN,)
        requests = [p.request for p in parts]
        rows, tables = [r.row for r in requests], []
        for group, host in enumerate(self._tables):
            width = 0
            for request in requests:
                table = _blocks(request).tables[group]
                width = max(width, len(table))
                host.update(request, table)
            tables.append(host.array[rows, :width])
        source_table = source_lens = None
        if self.cache.source is not None:
            for request in requests:
                self._source_tables.update(request, _blocks(request).source_table)
            source_lens = np.array([len(r.source_token_ids) for r in requests], np.int32)
            source_table = self._source_tables.array[rows, : blocks_for(int(source_lens.max()))]
        context_lens, sampled = [p.start for p in parts], [p.request.row for p in parts if p.samples]
        return StepInputs(
            np.array(tokens, np.int32),
            np.array(context_lens, np.int32),
            np.array(sampled, np.int32),
            tables,
            source_table,
            source_lens,
        )

    def _encode(self, requests: Sequence[Request]) -> None:
        """Encode the sources of requests, all at once."""
        assert self.cache.source is not None
        sources = [r.source_token_ids for r in requests]
        table = np.zeros((len(requests), blocks_for(max(map(len, sources)))), np.int32)
        for row, request in zip(table, requests, strict=True):
            row[: len(_blocks(request).source_table)] = _blocks(request).source_table
        batch = ForwardBatch.packed(self.ops.array, sources, source_tables=table)
        cast(EncoderDecoder, self.network).encode_to_cache(batch, self.cache.source)

    def warm_up(self) -> None:
        """Take all memory of the cache, and capture the decode steps of every size."""
        with _memory_for_the_cache():
            for cache, max_blocks in self._caches_and_limits():
                for group, count in enumerate(max_blocks):
                    if cache.num_blocks[group] < count:
                        cache.grow(group, count)
        if self.ops.decode_sizes:
            self.table.allocate()
        nothing = StepInputs.of_no_sequence(len(self._tables), self.cache.source is not None)
        sizes = self.ops.decode_sizes[: bisect_left(self.ops.decode_sizes, self.config.max_num_seqs) + 1]
        for variant in SamplerVariant:
            for length in reversed(self._lengths):
                for count in reversed(sizes):  # the largest first: all share the memory of the largest
                    step = self._decode_step(StepSize(count, length, variant))
                    for _ in range(RUNS_TO_CAPTURE):
                        self.ops.fetch(step.launch(nothing))()

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

    def _caches_and_limits(self) -> Iterator[tuple[KVCache, Sequence[int]]]:
        """The caches, and how many blocks each group of them may have."""
        yield self.cache, self.config.num_blocks
        if self.cache.source is not None:
            yield self.cache.source, (self.config.num_source_blocks,)


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
