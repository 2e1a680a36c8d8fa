"""Turns a planned step into a :class:`StepPlan`: plain arrays and numbers, all that an executor needs to run it.

The builder knows the requests and no device. It keeps block tables up to date, chooses the captured size that a step is
padded to, and collects what is written to the sampler's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerVariant, SequenceSampling
from ..backend.values import BLOCK_SIZE, NULL_BLOCK
from ..grammar.matcher import MaskRow, fill_masks
from ..layers.cache import blocks_for
from .adapters import AdapterSlotTable, AdapterWrite
from .block_manager import BlockManager, SequenceBlocks
from .config import EngineConfig
from .guess_arrays import GuessInputs, GuessSize, guess_sizes
from .request import Request
from .sampler_rows import MaskWrite, RowWrite, SamplerRows, TableSize
from .sampling_params import sequence_sampling
from .step import NO_TOKEN, Step
from .step_arrays import StepInputs, StepSize, captured_sizes

CAPTURED_LENGTHS = (1024, 4096, 16384)
"""Bounds of the lengths of sequences for which steps are captured, beside the model's context; in tokens."""
MAX_KEPT_BYTES = 64 << 10
"""Bytes of integers up to which a captured step keeps its arrays on the host from step to step."""


@dataclass(frozen=True)
class GuessPlan:
    """The guesses that an executor lets the draft model make. If they are ``is_captured``, the inputs are padded.

    Before them, the pools of each group of the cache get at least ``num_blocks`` blocks.
    """

    inputs: GuessInputs
    is_captured: bool
    num_blocks: Sequence[int]


@dataclass(eq=False)  # not frozen: a frozen one takes the host four times as long to make
class StepPlan:
    """What an executor runs, on every rank the same. Nothing changes it once it is made.

    - ``inputs``: the integers of the step. If it ``is_captured``, they are padded to the size of a captured step.
    - ``max_query_len``: the most new tokens of a sequence, if it is not captured.
    - ``samples``: whether any token is chosen. Then ``sampled`` are the rows of the step that sample, padding left out,
      and ``variant`` says how.
    - ``num_taken``: rows of logits, the last ones, that requests take.
    - ``wants_top``: whether the scored prompt tokens report the most likely tokens.
    - ``guesses``: those that are made before the step; draft ``-1 - i`` of the inputs is guess ``i`` of them.
    - ``moves``: whether the host does not know all positions, see :meth:`.Backend.insert_positions`.

    Before the step, the pools of each group of the cache get at least ``num_blocks`` blocks, and those of the sources
    ``num_source_blocks``. Then ``rows`` of the sampler and the slots of ``adapters`` are written, the ``sources`` are
    encoded with the adapters ``source_lora_ids`` into the blocks of ``source_tables``, and each of ``copies`` has a
    pair of blocks for each group, of which the second gets the contents of the first.
    """

    inputs: StepInputs
    is_captured: bool
    max_query_len: int
    samples: bool
    sampled: slice | np.ndarray
    variant: SamplerVariant
    num_taken: int = 0
    wants_top: bool = False
    guesses: GuessPlan | None = None
    moves: bool = False
    num_blocks: Sequence[int] = ()
    num_source_blocks: int = 0
    rows: Sequence[RowWrite] = ()
    sources: Sequence[Sequence[int]] = ()
    source_tables: Sequence[Sequence[int]] = ()
    source_lora_ids: Sequence[int] = ()
    adapters: Sequence[AdapterWrite] = ()
    copies: Sequence[Sequence[tuple[int, int]]] = ()


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


class StepBuilder:
    """Builds the steps of a scheduler that plans with ``blocks``, for a backend with the captured sizes of ``ops``."""

    def __init__(self, ops: Backend, config: EngineConfig, blocks: BlockManager):
        self.config = config
        self.blocks = blocks
        self.table_size = TableSize(config.max_num_seqs, config.vocab_size, config.num_draft_tokens)
        self.rows = SamplerRows(self.table_size)
        self.adapters = AdapterSlotTable(config.num_adapter_slots)
        rows = config.max_num_seqs + 1
        self._tables = [HostTables(rows, group.blocks_for(config.context_length)) for group in blocks.groups]
        self._source_tables = HostTables(rows, blocks_for(config.max_source_length))
        lengths = [*(n for n in CAPTURED_LENGTHS if n < config.context_length), config.context_length]
        self.sizes = captured_sizes(
            ops,
            lengths,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_num_draft_rows if config.num_draft_tokens else 0,
            has_adapters=config.num_adapter_slots > 0,
        )
        self._prompt_sizes = [size for size in self.sizes if size.prompts]
        # what a step without pieces can be padded to, by its rows and whether it has drafts and adapters
        self._sizes_of_rows: dict[tuple[int, bool, bool], list[StepSize]] = {}
        self._kept: dict[StepSize, StepInputs] = {}
        most = config.max_num_draft_rows // 2
        self.guess_sizes = guess_sizes(ops, lengths, min(most, config.max_num_seqs), config.num_draft_tokens)

    # -- rows of the sampler ------------------------------------------------------------------------------------------

    def has_room(self, request: Request) -> bool:
        """Whether the sampler has a free row and what else the request's parameters need, and its adapter a slot."""
        has_row = self.rows.has_room(request.params.penalizes, request.matcher is not None)
        return has_row and self.adapters.has_room(request.adapter)

    def add(self, request: Request) -> None:
        """Give a request a row of the sampler, and its adapter a slot."""
        request.row = self.rows.add(_sampling(request), request.matcher is not None)
        request.lora_id = self.adapters.acquire(request.adapter)

    def remove(self, request: Request) -> None:
        """Free the row and the slot of a request."""
        self.rows.remove(request.row)
        self.adapters.release(request.adapter)
        request.row = request.lora_id = 0

    def clear(self) -> None:
        """Free every row and every slot."""
        self.rows.clear()
        self.adapters.clear()

    def masks(self, requests: Sequence[Request]) -> MaskWrite | None:
        """The masks of requests with grammars for the next sampler, except for those that have ended meanwhile.

        A request whose drafts the step checks has a mask behind each of them too.
        """
        live = [r for r in dict.fromkeys(requests) if r.finish_reason is None]

        def fill(masks: np.ndarray, places: Sequence[int]) -> None:
            pairs = [(r, r.matcher, place) for r, place in zip(live, places, strict=True) if r.matcher]
            fill_masks(masks, [MaskRow(matcher, place, r.holds_back_end(0)) for r, matcher, place in pairs])
            for request, matcher, place in pairs:
                drafts = request.draft_tokens
                behind = masks[place + 1 : place + 1 + len(drafts)]
                matcher.fill_masks_behind(drafts, behind)
                for count, mask in enumerate(behind, start=1):
                    if request.holds_back_end(count):
                        matcher.hold_back_end(mask)

        return self.rows.fill_masks([r.row for r in live], fill)

    # -- steps --------------------------------------------------------------------------------------------------------

    def build(self, step: Step) -> StepPlan:
        """The plan of a step. The caller launches it before it builds the next one, which may use the same arrays."""
        for request, _ in step.copies:
            self._update_tables(request)  # it may begin with one token in the middle of a block
        others, size = step.others, self._captured_size(step)
        inputs = self._inputs(step) if size is None else self._captured_inputs(step, size)
        pool = self.blocks.source_pool
        return StepPlan(
            inputs,
            is_captured=size is not None,
            max_query_len=max((p.num_tokens for p in step.pieces), default=1),
            samples=bool(step.sampled),
            sampled=np.flatnonzero(inputs.rows) if others else slice(len(step.decoding)),
            variant=self.rows.variant({r.row: None for r in step.sampled}),  # a request with drafts has several rows
            num_taken=sum(p.num_taken for p in others),
            wants_top=any(p.num_scored and p.request.num_prompt_top > 1 for p in others),
            guesses=self._step_guesses(step, inputs) if step.num_guesses else None,
            moves=bool(step.ahead),
            num_blocks=[pool.highest + 1 for pool in self.blocks.pools],
            num_source_blocks=pool.highest + 1 if pool is not None else 0,
            rows=self.rows.take_writes(),
            adapters=self.adapters.take_writes(),
            sources=[r.source_token_ids for r in step.sources],
            source_tables=[_blocks(r).source_table for r in step.sources],
            source_lora_ids=[r.lora_id for r in step.sources],
            copies=[pairs for _, pairs in step.copies],
        )

    def _captured_size(self, step: Step) -> StepSize | None:
        """The first captured size that the step can be padded to; None if it needs more logits than such a step has."""
        if any(p.needs_more_logits for p in step.others):
            return None
        longest, has_adapters = _longest(step), self.config.num_adapter_slots > 0 and _has_adapters(step)
        if step.pieces:
            exact = StepSize(
                step.num_decodes, len(step.pieces), step.num_prompt_tokens, longest, bool(step.drafts), has_adapters
            )
            return next((size for size in self._prompt_sizes if exact.fits(size)), None)
        key = step.num_decodes, bool(step.drafts), has_adapters
        sizes = self._sizes_of_rows.get(key)
        if sizes is None:
            rows, has_drafts, has_adapters = key
            exact = StepSize(rows, 0, 0, 0, has_drafts, has_adapters)
            sizes = self._sizes_of_rows[key] = [size for size in self.sizes if exact.fits(size)]
        return next((size for size in sizes if longest <= size.max_context_len), None)

    def guesses(self, newest: Mapping[Request, int], count: int, ahead: Mapping[Request, int]) -> GuessPlan:
        """The plan of ``count`` guesses behind the newest token of each request, whose position is given.

        Those of ``ahead`` may be as much higher. The context has room for ``count`` more tokens of each, and the blocks
        of a request have room for those guesses that are checked.
        """
        requests = list(newest)
        for request in requests:
            self._update_tables(request)
        longest = max(position + ahead.get(r, 0) for r, position in newest.items()) + 1 + count
        exact = GuessSize(len(requests), count, longest)
        size = self._captured_guesses(exact)
        inputs = self.empty_guesses(size or exact)
        own = range(len(requests))
        inputs.tokens[own] = [_newest(*pair) for pair in newest.items()]
        inputs.rows[own] = rows = [r.row for r in requests]
        # the newest token of a sequence that was given n tokens lies at the position len(prompt) + n - 1
        firsts = [-len(r.prompt_token_ids) if r in ahead else position for r, position in newest.items()]
        steps = [-1 if r in ahead else 1 for r in requests]
        inputs.context_lens[:, own] = np.array(firsts) + np.outer(np.arange(count), steps)
        for table, host in zip(inputs.tables, self._tables, strict=True):
            table[own] = host.array[rows, : table.shape[1]]
        return GuessPlan(inputs, size is not None, [pool.highest + 1 for pool in self.blocks.pools])

    def empty_guesses(self, size: GuessSize) -> GuessInputs:
        """The integers of guesses of padding alone."""
        return GuessInputs(size, [group.blocks_for(size.max_context_len) for group in self.blocks.groups])

    def _captured_guesses(self, exact: GuessSize) -> GuessSize | None:
        """The size of captured guesses that ``exact`` can be padded to; the number of guesses stays."""
        for size in self.guess_sizes:
            if exact.sequences <= size.sequences and exact.max_context_len <= size.max_context_len:
                return replace(size, count=exact.count)
        return None

    def _step_guesses(self, step: Step, inputs: StepInputs) -> GuessPlan:
        """The guesses of a step, after its drafts were given the numbers of theirs."""
        places = [place for place, offset in enumerate(step.offsets) if offset]
        newest = {step.decoding[place]: step.positions[place] - step.offsets[place] for place in places}
        plan = self.guesses(newest, step.num_guesses, step.ahead)
        columns, pitch = {r: i for i, r in enumerate(newest)}, plan.inputs.pitch
        guesses = [(step.offsets[place] - 1) * pitch + columns[step.decoding[place]] for place in places]
        inputs.drafts[places] = -1 - np.array(guesses)
        return plan

    def empty_inputs(self, size: StepSize) -> StepInputs:
        """The integers of a captured step of padding alone."""
        return self._captured_inputs(Step(), size)

    def _captured_inputs(self, step: Step, size: StepSize) -> StepInputs:
        """The integers of a step that is padded to ``size``; tables are as wide as its longest sequences need.

        Those of at most :data:`MAX_KEPT_BYTES` are kept: it takes the host longer to make them than to fill them.
        """
        inputs = self._kept.get(size)
        if inputs is None:
            widths = [group.blocks_for(size.max_context_len) for group in self.blocks.groups]
            source_width = blocks_for(self.config.max_source_length) if self.blocks.source_pool is not None else 0
            only_last = size.prompts > 0
            inputs = StepInputs(size, widths, source_width, only_last * size.sequences, only_last=only_last)
            if inputs.packed.nbytes <= MAX_KEPT_BYTES:
                self._kept[size] = inputs
        else:
            inputs.packed.fill(0)
        self._fill(inputs, step)
        inputs.fill_logit_lora_ids()
        return inputs

    def _inputs(self, step: Step) -> StepInputs:
        """The integers of a step that is not padded. Its logits are those to sample from, to score, and to hand out.

        To sample, each sequence has a row of logits; a step of decoding sequences alone has no others. Each has a row
        too where no other logits are wanted, because the last layer computes the last tokens without the others.
        """
        requests, others = step.requests, step.others
        size = StepSize(
            step.num_decodes,
            len(step.pieces),
            step.num_prompt_tokens,
            _longest(step),
            has_drafts=bool(step.drafts),
            has_adapters=_has_adapters(step),
        )
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
        inputs.fill_logit_lora_ids()
        if len(inputs.targets):
            targets = [p.request.prompt_token_ids[p.start + 1 : p.start + 1 + p.num_scored] for p in others]
            inputs.targets[:] = np.concatenate(targets)
        return inputs

    def _fill(self, inputs: StepInputs, step: Step) -> None:
        """Write the integers of the rows and parts, over zeros."""
        size = inputs.size
        ends = [*accumulate((p.num_tokens for p in step.pieces), initial=size.decodes)]
        inputs.cu_seqlens[: size.decodes] = np.arange(size.decodes)
        inputs.cu_seqlens[size.decodes :] = ends[-1]
        if step.decoding:
            self._fill_decoding(inputs, step)
        if step.others:
            inputs.cu_seqlens[size.decodes : size.decodes + len(ends)] = ends
            self._fill_others(inputs, step)
        if len(inputs.logit_rows) >= size.sequences:
            inputs.logit_rows[: size.sequences] = np.maximum(inputs.cu_seqlens[1:] - 1, 0)

    def _fill_decoding(self, inputs: StepInputs, step: Step) -> None:
        """Write the rows that decode, which lie first."""
        decoding, positions, count = step.decoding, step.positions, len(step.decoding)
        contexts = positions
        if step.drafts:
            inputs.offsets[:count], inputs.drafts[:count] = step.offsets, step.drafts
            rows = zip(decoding, positions, step.offsets, step.drafts, strict=True)
            inputs.tokens[:count] = [max(d, 0) if offset else _newest(r, position) for r, position, offset, d in rows]
        else:
            inputs.tokens[:count] = [_newest(r, position) for r, position in zip(decoding, positions, strict=True)]
        if step.ahead:
            offsets, ahead = step.offsets or [0] * count, step.ahead
            contexts = [
                -len(r.prompt_token_ids) - offset if r in ahead else position
                for r, position, offset in zip(decoding, positions, offsets, strict=True)
            ]
        table_rows = [r.row for r in decoding]
        inputs.rows[:count], inputs.context_lens[:count] = table_rows, contexts
        if len(inputs.last_positions):
            inputs.last_positions[:count] = positions
        if inputs.size.has_adapters:
            inputs.lora_ids[:count] = [r.lora_id for r in decoding]
        for request, position in zip(decoding, positions, strict=True):
            if position % BLOCK_SIZE == 0:
                self._update_tables(request)
        for request in step.ahead:
            self._update_tables(request)
        self._copy_tables(inputs, slice(count), decoding, table_rows)

    def _fill_others(self, inputs: StepInputs, step: Step) -> None:
        """Write ``singles`` behind the rows that decode, and ``pieces`` behind the padding of both."""
        size, others, first, num_singles = inputs.size, step.others, len(step.decoding), len(step.singles)
        places = np.arange(first, first + len(others))
        places[num_singles:] += size.decodes - step.num_decodes
        requests, counts = [p.request for p in others], [p.num_tokens for p in others]
        inputs.tokens[first : first + num_singles] = [p.request.token_ids(p.start, p.stop)[0] for p in step.singles]
        end = size.decodes
        for part in step.pieces:
            begin, end = end, end + part.num_tokens
            inputs.tokens[begin:end] = part.request.token_ids(part.start, part.stop)
        if size.has_adapters:
            ids = np.repeat(np.array([r.lora_id for r in requests], np.int32), counts)
            inputs.lora_ids[first : first + num_singles] = ids[:num_singles]
            inputs.lora_ids[size.decodes : end] = ids[num_singles:]
        inputs.context_lens[places] = [p.start for p in others]
        inputs.rows[places] = [p.request.row if p.samples else 0 for p in others]
        if len(inputs.last_positions):
            inputs.last_positions[places] = [p.stop - 1 for p in others]
        for part in others:
            if part.num_tokens > 1 or part.start % BLOCK_SIZE == 0:  # what takes new blocks
                self._update_tables(part.request)
        self._copy_tables(inputs, places, requests, [r.row for r in requests])

    def _copy_tables(
        self, inputs: StepInputs, places: slice | np.ndarray, requests: Sequence[Request], rows: Sequence[int]
    ) -> None:
        """Copy the block tables of requests from their ``rows`` of the host's tables to the ``places`` of a step."""
        read = rows[0] if len(set(rows)) == 1 else rows  # reading one row for all takes a quarter of the time
        for host, table in zip(self._tables, inputs.tables, strict=True):
            table[places] = host.array[read, : table.shape[1]]
        if len(inputs.source_lens):
            inputs.source_lens[places] = [len(r.source_token_ids) for r in requests]
            inputs.source_table[places] = self._source_tables.array[read, : inputs.source_table.shape[1]]

    def _update_tables(self, request: Request) -> None:
        blocks = _blocks(request)
        for host, table in zip(self._tables, blocks.tables, strict=True):
            host.update(request, table)
        self._source_tables.update(request, blocks.source_table)


def _longest(step: Step) -> int:
    """The most tokens that a sequence may have in the cache when the step has run."""
    longest = max(step.positions, default=0) + 1 + max(step.ahead.values(), default=0)
    return max(longest, *(p.stop for p in step.others)) if step.others else longest


def _has_adapters(step: Step) -> bool:
    return any(r.lora_id for r in step.requests)


def _newest(request: Request, position: int) -> int:
    """The token at a position, if it is known."""
    return request.token_ids(position, position + 1)[0] if position < request.num_known_tokens else NO_TOKEN


def _sampling(request: Request) -> SequenceSampling:
    params = request.params
    if request.matcher is not None and params.min_tokens:
        params = replace(params, min_tokens=0)  # its mask holds the end back
    return sequence_sampling(params, request.index, request.prompt_token_ids, request.output_token_ids, request.eos_ids)


def _blocks(request: Request) -> SequenceBlocks:
    assert request.blocks is not None
    return request.blocks
