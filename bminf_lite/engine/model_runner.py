"""Runs a model on the tokens of a step: device arrays, the key-value cache and its memory, the sampler's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, cast

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerVariant, SequenceSampling
from ..backend.values import BLOCK_SIZE, NULL_BLOCK, Array, ForwardBatch
from ..errors import OutOfMemory
from ..grammar.matcher import MaskRow, fill_masks
from ..layers.cache import KVCache, blocks_for
from .block_manager import BlockManager, BlockPool, SequenceBlocks
from .config import EngineConfig
from .request import Request
from .sampler_table import SamplerTable
from .sampling_params import sequence_sampling
from .scheduler import Step, StepResult
from .source_encoder import RUNS_TO_CAPTURE, EncoderDecoder, SourceEncoder
from .step_arrays import CapturedStep, StepArrays, StepInputs, StepSize, captured_sizes

FIRST_BLOCKS = 64
"""Blocks that a pool has at first, if it may have so many."""
CAPTURED_LENGTHS = (1024, 4096, 16384)
"""Bounds of the lengths of sequences for which steps are captured, beside the model's context; in tokens."""
NO_TOKEN = -1
"""Stands for a token that the host does not know: the newest of its sequence, which the sampler holds."""


class Network(Protocol):
    """A model as the runner calls it; see :mod:`bminf_lite.models`."""

    ops: Backend

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits fp32 ``[L, vocab]`` of the batch's ``logit_rows``, or of all tokens ``[T, vocab]``."""
        ...


@dataclass
class LaunchedStep:
    """A step that the device computes; :meth:`fetch` waits for it.

    ``sampled`` are the places in the step, padding included, of the sequences that sample. ``start_sampling`` starts
    the sampler, and is None once that was done. The other functions wait for an array and return it.
    """

    start_sampling: Callable[[], Callable[[], np.ndarray]] | None
    sampled: np.ndarray
    scores: Callable[[], np.ndarray] | None = None
    prompt_top: Callable[[], np.ndarray] | None = None
    choice: Callable[[], np.ndarray] | None = None

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the sampler is not started, because a mask depends on tokens of the step before."""
        return self.start_sampling is not None

    def sample(self) -> None:
        """Start the sampler, unless that was done."""
        if self.start_sampling is not None:
            self.choice, self.start_sampling = self.start_sampling(), None

    def fetch(self) -> StepResult:
        """What the step chose and scored, without padding."""
        chosen = self.choice()[:, self.sampled] if self.choice else np.zeros((2, 0), np.int32)
        scores = self.scores() if self.scores else np.zeros((3, 0), np.int32)
        return StepResult(chosen, scores, self.prompt_top() if self.prompt_top else None)


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
        lengths = [*(n for n in CAPTURED_LENGTHS if n < config.context_length), config.context_length]
        self._sizes = captured_sizes(self.ops, lengths, config.max_num_seqs, config.max_num_batched_tokens)
        self._prompt_sizes = [size for size in self._sizes if size.prompts]
        self._captured: dict[StepSize, CapturedStep] = {}
        self._packed = self.ops.array(np.zeros(0, np.int32))  # the integers of a step that is not captured
        self.encoder: SourceEncoder | None = None
        with _memory_for_the_cache():
            self.cache = self._pools(config.num_blocks)
            if config.num_source_blocks:
                try:
                    self.cache.source = source = self._pools((config.num_source_blocks,))
                except BaseException:
                    self.close()
                    raise
                self.encoder = SourceEncoder(cast(EncoderDecoder, network), source, config.max_num_batched_tokens)

    def close(self) -> None:
        """Give the memory of the cache and of captured steps back; nothing can be run afterwards."""
        self._captured.clear()
        if self.encoder is not None:
            self.encoder.close()
        self.cache.close()

    # -- rows of the sampler ------------------------------------------------------------------------------------------

    def has_room(self, request: Request) -> bool:
        """Whether the sampler has a free row, and what else the request's parameters need."""
        return self.table.has_room(request.params.penalizes, request.matcher is not None)

    def add(self, request: Request) -> int:
        """Give a request a row of the sampler."""
        return self.table.add(self._sampling(request), request.matcher is not None)

    def remove(self, row: int) -> None:
        """Free a row."""
        self.table.remove(row)

    def clear(self) -> None:
        """Free every row."""
        self.table.clear()

    def _sampling(self, request: Request) -> SequenceSampling:
        params = request.params
        if request.matcher is not None and params.min_tokens:
            params = replace(params, min_tokens=0)  # its mask holds the end back
        return sequence_sampling(
            params, request.index, request.prompt_token_ids, request.output_token_ids, request.eos_ids
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> LaunchedStep:
        """Start a step without waiting for it, or for the steps before it."""
        self._grow()
        if step.sources:
            assert self.encoder is not None
            requests = step.sources
            self.encoder.encode([r.source_token_ids for r in requests], [_blocks(r).source_table for r in requests])
        for request, pairs in step.copies:
            self.cache.copy_blocks(pairs)
            self._update_tables(request)  # it may begin with one token in the middle of a block
        longest = max(step.positions, default=0) + 1
        exact = StepSize(
            step.num_decodes,
            len(step.pieces),
            step.num_prompt_tokens,
            max(longest, *(p.stop for p in step.others)) if step.others else longest,
        )
        if not any(p.needs_more_logits for p in step.others):
            sizes = self._prompt_sizes if step.pieces else self._sizes
            size = next((size for size in sizes if exact.fits(size)), None)
            if size is not None:
                inputs = self._captured_inputs(step, size)
                captured = self._captured_step(inputs)
                captured.arrays.write(inputs)
                return self._run(step, inputs, captured.arrays, captured.forward)
        inputs = self._inputs(step, exact)
        count = len(inputs.packed)
        if len(self._packed) < count:
            self._packed = self.ops.array(np.zeros(1 << (count - 1).bit_length(), np.int32))
        max_query_len = max((p.num_tokens for p in step.pieces), default=1)
        arrays = StepArrays(self.ops, self._packed[:count], inputs, max_query_len)
        arrays.write(inputs)
        return self._run(step, inputs, arrays, lambda: self.network(arrays.batch, self.cache))

    def _run(self, step: Step, inputs: StepInputs, arrays: StepArrays, forward: Callable[[], Array]) -> LaunchedStep:
        """Run the model, sample, and start to fetch what a step chooses and scores.

        If a grammar's mask depends on a token that the host does not know yet, the caller starts the sampler
        (:meth:`LaunchedStep.sample`).
        """
        size, decodes = inputs.size, inputs.size.decodes
        others = step.others
        sampled = [*step.decoding, *(p.request for p in others if p.samples)]
        sampler = self.table.state(arrays.rows, self.table.variant([r.row for r in sampled]))
        if decodes and (inputs.tokens[:decodes] == NO_TOKEN).any():
            self.ops.insert_last_tokens(arrays.batch.tokens[:decodes], sampler)
        logits = forward()
        end = size.sequences if sampled else 0
        constrained = [r for r in sampled if r.matcher is not None]

        def sample() -> Callable[[], np.ndarray]:
            self._write_masks(constrained)
            return self.ops.fetch(self.ops.sample(logits[: size.sequences], sampler))

        launched = LaunchedStep(sample if sampled else None, np.flatnonzero(inputs.rows))
        if all(r.num_pending_tokens == 1 for r in constrained):  # this step's
            launched.sample()
        if len(inputs.targets):
            first, end = end, end + len(inputs.targets)
            launched.scores = self.ops.fetch(self.ops.token_logprobs(logits[first:end], arrays.targets))
            if any(part.num_scored and part.request.num_prompt_top > 1 for part in others):
                launched.prompt_top = self.ops.fetch(
                    self.ops.sample(logits[first:end], self.table.reporting(end - first))
                )
        for part in others:
            if part.num_taken and part.request.take_logits is not None:
                first, end = end, end + part.num_taken
                part.request.take_logits(part.stop - part.num_taken, logits[first:end])
        return launched

    def _write_masks(self, requests: Sequence[Request]) -> None:
        """Write the masks of requests with grammars for the sampler, except for those that have ended meanwhile."""
        live = [r for r in requests if r.finish_reason is None]

        def fill(masks: np.ndarray, places: Sequence[int]) -> None:
            pairs = zip(live, places, strict=True)
            fill_masks(masks, [MaskRow(r.matcher, place, r.holds_back_end) for r, place in pairs if r.matcher])

        self.table.write_masks([r.row for r in live], fill)

    def _captured_step(self, inputs: StepInputs) -> CapturedStep:
        """The captured step of the inputs' size, which is made when it is first needed."""
        found = self._captured.get(inputs.size)
        if found is None:
            found = CapturedStep(self.ops, inputs, lambda batch: self.network(batch, self.cache))
            self._captured[inputs.size] = found
        return found

    def _captured_inputs(self, step: Step, size: StepSize) -> StepInputs:
        """The integers of a step that is padded to ``size``; tables are as wide as its longest sequences need."""
        widths = [blocks_for(size.max_context_len)] * len(self._tables)
        source_width = blocks_for(self.config.max_source_length) if self.cache.source is not None else 0
        only_last = size.prompts > 0
        inputs = StepInputs(size, widths, source_width, only_last * size.sequences, only_last=only_last)
        self._fill(inputs, step)
        return inputs

    def _inputs(self, step: Step, size: StepSize) -> StepInputs:
        """The integers of a step of exactly ``size``. Its logits are those to sample from, to score, and to hand out.

        To sample, each sequence has a row of logits; a step of decoding sequences alone has no others. Each has a row
        too where no other logits are wanted, because the last layer computes the last tokens without the others.
        """
        requests, others = step.requests, step.others
        samples = bool(step.decoding) or any(p.samples for p in others)
        widths = [max(len(_blocks(r).tables[group]) for r in requests) for group in range(len(self._tables))]
        source_width = blocks_for(max(len(r.source_token_ids) for r in requests))
        starts = [*accumulate((p.num_tokens for p in others), initial=len(step.decoding))]
        scored = [range(start, start + p.num_scored) for p, start in zip(others, starts[:-1], strict=True)]
        taken = [range(end - p.num_taken, end) for p, end in zip(others, starts[1:], strict=True)]
        more = [row for rows in (*scored, *taken) for row in rows]
        own = size.sequences if samples or not more else 0
        only_last = size.prompts > 0 and not more
        num_logits = own + len(more) if size.prompts or more else 0
        inputs = StepInputs(size, widths, source_width, num_logits, sum(map(len, scored)), only_last)
        self._fill(inputs, step)
        if more:
            inputs.logit_rows[own:] = more
        if len(inputs.targets):
            targets = [p.request.prompt_token_ids[p.start + 1 : p.start + 1 + p.num_scored] for p in others]
            inputs.targets[:] = np.concatenate(targets)
        return inputs

    def _fill(self, inputs: StepInputs, step: Step) -> None:
        """Write the integers of the parts. Prompts lie behind the padding of the decoding sequences."""
        size, num_decodes = inputs.size, step.num_decodes
        requests, others, decoding = step.requests, step.others, len(step.decoding)
        places = np.arange(len(requests))
        places[num_decodes:] += size.decodes - num_decodes
        tokens = [
            request.token_ids(position, position + 1)[0] if position < request.num_known_tokens else NO_TOKEN
            for request, position in zip(step.decoding, step.positions, strict=True)
        ]
        for part in others:
            tokens += part.request.token_ids(part.start, part.stop)
        inputs.tokens[:num_decodes] = tokens[:num_decodes]
        inputs.tokens[size.decodes : size.decodes + len(tokens) - num_decodes] = tokens[num_decodes:]
        inputs.cu_seqlens[: size.decodes] = np.arange(size.decodes)
        begins = [*accumulate((p.num_tokens for p in step.pieces), initial=size.decodes)]
        inputs.cu_seqlens[size.decodes :] = begins[-1]
        inputs.cu_seqlens[size.decodes : size.decodes + len(begins)] = begins
        if len(inputs.logit_rows) >= size.sequences:
            inputs.logit_rows[: size.sequences] = np.maximum(inputs.cu_seqlens[1:] - 1, 0)
        if len(inputs.last_positions):
            inputs.last_positions[places] = [*step.positions, *(p.stop - 1 for p in others)]
        rows = [r.row for r in requests]
        inputs.context_lens[places] = [*step.positions, *(p.start for p in others)]
        inputs.rows[places] = [*rows[:decoding], *(p.request.row if p.samples else 0 for p in others)]
        changed = [p.request for p in others if p.num_tokens > 1 or p.start % BLOCK_SIZE == 0]  # what takes new blocks
        changed += [r for r, i in zip(step.decoding, step.positions, strict=True) if i % BLOCK_SIZE == 0]
        for request in changed:
            self._update_tables(request)
        for host, table in zip(self._tables, inputs.tables, strict=True):
            table[places] = host.array[rows, : table.shape[1]]
        if len(inputs.source_lens):
            inputs.source_lens[places] = [len(r.source_token_ids) for r in requests]
            inputs.source_table[places] = self._source_tables.array[rows, : inputs.source_table.shape[1]]

    def _update_tables(self, request: Request) -> None:
        blocks = _blocks(request)
        for host, table in zip(self._tables, blocks.tables, strict=True):
            host.update(request, table)
        self._source_tables.update(request, blocks.source_table)

    def warm_up(self) -> None:
        """Take all memory of the cache, load what steps may need, and capture them and encodings of every size."""
        with _memory_for_the_cache():
            for cache, pools in self._caches():
                for group, pool in enumerate(pools):
                    if cache.num_blocks[group] < pool.num_blocks:
                        cache.grow(group, pool.num_blocks)
        if self._sizes:
            self.table.allocate()
        sizes = sorted(self._sizes, key=lambda size: size.tokens, reverse=True)
        inputs = [self._captured_inputs(Step(), size) for size in sizes]
        steps = [self._captured_step(values) for values in inputs]
        for run in range(RUNS_TO_CAPTURE):  # the last one captures, when it is known what the largest step needs
            for step, values in zip(steps, inputs, strict=True):
                step.arrays.write(values)  # as every step does, by a kernel that is to be loaded
                logits = step.forward()
                for variant in SamplerVariant if run == 0 and step is steps[0] else ():
                    self.ops.fetch(self.ops.sample(logits, self.table.state(step.arrays.rows, variant)))()
        self.cache.copy_blocks([(NULL_BLOCK, NULL_BLOCK)] * len(self.blocks.pools))  # what a prefix may need
        if self.encoder is not None:
            self.encoder.warm_up()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _pools(self, max_blocks: Sequence[int]) -> KVCache:
        first = [min(n, FIRST_BLOCKS) for n in max_blocks]
        return KVCache(self.ops, self.config.cache_shape, first, max_blocks)

    def _grow(self) -> None:
        """Enlarge the caches, by half at least, if a block in use is beyond them."""
        for cache, pools in self._caches():
            for group, pool in enumerate(pools):
                if pool.highest >= cache.num_blocks[group]:
                    wanted = max(pool.highest + 1, cache.num_blocks[group] * 3 // 2)
                    with _memory_for_the_cache():
                        cache.grow(group, min(wanted, pool.num_blocks))

    def _caches(self) -> Iterator[tuple[KVCache, Sequence[BlockPool]]]:
        """The caches, and for each group the pool that counts its blocks."""
        yield self.cache, self.blocks.pools
        if self.cache.source is not None and self.blocks.source_pool is not None:
            yield self.cache.source, [self.blocks.source_pool]


def _blocks(request: Request) -> SequenceBlocks:
    assert request.blocks is not None
    return request.blocks


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
