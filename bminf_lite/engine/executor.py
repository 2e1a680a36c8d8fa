"""Runs a model on the steps of a builder: one rank, with its part of the weights, its caches and its sampler's table.

An executor knows no requests. Everything that it needs of a step is in the :class:`.StepPlan`, which is the same for
every rank. All ranks choose the same tokens, because they have the same logits and the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from ..backend.sampling import SamplerState, SamplerVariant
from ..backend.values import Array
from ..errors import OutOfMemory
from ..layers.cache import KVCache
from .config import EngineConfig
from .draft_model import DraftedNetwork
from .guess_arrays import CapturedGuesses, GuessInputs, GuessSize
from .network import Network, SourceNetwork
from .sampler_rows import MaskWrite, TableSize
from .sampler_table import SamplerTable
from .source_encoder import RUNS_TO_CAPTURE, SourceEncoder
from .step import StepResult
from .step_arrays import CapturedStep, StepArrays, StepInputs, StepSize
from .step_builder import GuessPlan, StepPlan

FIRST_BLOCKS = 64
"""Blocks that a pool has at first, unless its bound is lower."""
FIRST_SLOTS = 2
"""The same of the states of sequences, of which one may take 100 MB: the null slot, and one for the first sequence."""


@dataclass
class ExecutedStep:
    """A step that the device computes.

    ``sampled`` are the rows of the step that sample, padding left out. ``logits`` fp32 are those of the ``sequences``
    first, then those that are scored. ``taken`` are rows of logits that requests take, None without any. The functions
    wait for what the device chose, scored and guessed, and return it.
    """

    logits: Array
    sampler: SamplerState
    sampled: slice | np.ndarray
    sequences: int
    taken: Array = None
    choice: Callable[[], np.ndarray] | None = None
    scores: Callable[[], np.ndarray] | None = None
    prompt_top: Callable[[], np.ndarray] | None = None
    drafts: Callable[[], np.ndarray] | None = None

    def fetch(self) -> StepResult:
        """What the step chose and scored, without padding."""
        chosen = self.choice()[:, self.sampled] if self.choice else np.zeros((2, 0), np.int32)
        scores = self.scores() if self.scores else np.zeros((3, 0), np.int32)
        drafts = self.drafts()[self.sampled] if self.drafts else None
        return StepResult(chosen, scores, self.prompt_top() if self.prompt_top else None, drafts)


class Executor:
    """A model, its key-value cache and its sampler on one device.

    The pools of the cache begin small and grow as plans ask for blocks, up to those of ``config``. Raises
    ``OutOfMemory`` where memory does not suffice. :meth:`close` gives the memory back even while a traceback refers to
    the executor. One of several ranks ``reports`` what was chosen; the others have chosen the same.
    """

    def __init__(self, network: Network, config: EngineConfig, table_size: TableSize, reports: bool = True):
        self.reports = reports
        self.network = network
        self.ops = network.ops
        self.config = config
        self.table = SamplerTable(self.ops, table_size)
        self.captured: dict[StepSize, CapturedStep] = {}
        self.guesses: dict[GuessSize, CapturedGuesses] = {}
        self._grown: tuple[int, ...] = ()  # the blocks that the last plan needed
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
                self.encoder = SourceEncoder(cast(SourceNetwork, network), source, config.max_num_batched_tokens)

    def close(self) -> None:
        """Give the memory of the cache and of captured steps back; nothing can be run afterwards."""
        self.forget_captured()
        self.cache.close()

    def forget_captured(self) -> None:
        """Give the memory of captured steps back; they are captured anew when they are needed."""
        self.captured.clear()
        self.guesses.clear()
        if self.encoder is not None:
            self.encoder.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> ExecutedStep:
        """Start a step up to its logits and scores, without waiting for it, or for the steps before it."""
        self._grow(plan)
        self.table.write(plan.rows)
        for slot, adapter in plan.adapters:
            assert self.ops.adapter_slots is not None
            self.ops.adapter_slots.put(slot, adapter.prepared[self.ops.communicator.tp_rank])
        if plan.sources:
            assert self.encoder is not None
            self.encoder.encode(plan.sources, plan.source_tables, plan.source_lora_ids)
        for pairs in plan.copies:
            self.cache.copy_blocks(pairs)
        guesses = None if plan.guesses is None else self.guess(plan.guesses)
        inputs = plan.inputs
        if plan.is_captured:
            captured = self._captured_step(inputs)
            arrays, forward = captured.arrays, captured.forward
        else:
            arrays = StepArrays(self.ops, self._packed_for(inputs), inputs, plan.max_query_len)
            forward = lambda: self.network(arrays.batch, self.cache)  # noqa: E731
        sampler = self.table.state_of(arrays, plan.variant)
        arrays.write_step(inputs, sampler)
        drafts = None if guesses is None else self.ops.insert_guesses(arrays.batch.tokens, arrays.drafts, guesses)
        if plan.moves:
            self.ops.insert_positions(arrays.batch.context_lens, sampler)
        logits = forward()
        step = ExecutedStep(logits, sampler, plan.sampled, inputs.size.sequences)
        if drafts is not None and self.reports:
            step.drafts = self.ops.fetch(drafts)
        end = step.sequences if plan.samples else 0
        if len(inputs.targets):
            first, end = end, end + len(inputs.targets)
            if self.reports:
                step.scores = self.ops.fetch(self.ops.token_logprobs(logits[first:end], arrays.targets))
            if self.reports and plan.wants_top:
                top = self.ops.sample(logits[first:end], self.table.reporting(end - first))
                step.prompt_top = self.ops.fetch(top)
        if plan.num_taken:
            step.taken = logits[end : end + plan.num_taken]
        return step

    def sample(self, step: ExecutedStep, masks: MaskWrite | None = None) -> None:
        """Start to choose the tokens of the step that was executed last, after writing its masks."""
        self.table.write_masks(masks)
        chosen = self.ops.sample(step.logits[: step.sequences], step.sampler)
        if self.reports:
            step.choice = self.ops.fetch(chosen)

    def guess(self, plan: GuessPlan) -> Array:
        """Start the draft model's guesses after what was started before: int32 ``[count, pitch]``."""
        self._grow_to(plan.num_blocks)
        inputs = plan.inputs
        guesses = self._captured_guesses(inputs) if plan.is_captured else self._guesses(inputs)
        guesses.arrays.write(inputs)
        guesses.run()
        return guesses.arrays.guesses

    def guessed(self, plan: GuessPlan) -> np.ndarray:
        """The same on the host, int32 ``[pitch, count]``."""
        return self.ops.host(self.guess(plan)).T

    def _guesses(self, inputs: GuessInputs) -> CapturedGuesses:
        network = self.network
        assert isinstance(network, DraftedNetwork)

        def state(rows: Array, offsets: Array) -> SamplerState:
            return self.table.state(rows, SamplerVariant.GREEDY, offsets)

        return CapturedGuesses(self.ops, inputs, state, partial(network.guess, self.cache))

    def _captured_guesses(self, inputs: GuessInputs) -> CapturedGuesses:
        """Captured guesses of the inputs' size, which are made when they are first needed."""
        found = self.guesses.get(inputs.size)
        if found is None:
            found = self.guesses[inputs.size] = self._guesses(inputs)
        return found

    def _packed_for(self, inputs: StepInputs) -> Array:
        """Memory for the integers of a step that is not captured."""
        count = len(inputs.packed)
        if len(self._packed) < count:
            self._packed = self.ops.array(np.zeros(1 << (count - 1).bit_length(), np.int32))
        return self._packed[:count]

    def _captured_step(self, inputs: StepInputs) -> CapturedStep:
        """The captured step of the inputs' size, which is made when it is first needed."""
        found = self.captured.get(inputs.size)
        if found is None:
            found = CapturedStep(self.ops, inputs, lambda batch: self.network(batch, self.cache))
            self.captured[inputs.size] = found
        return found

    def warm_up(self, sizes: Sequence[StepInputs], guesses: Sequence[GuessInputs] = ()) -> None:
        """Take all memory of the cache, load what steps may need, and capture steps, guesses and all encodings."""
        with _memory_for_the_cache():
            for cache, max_blocks in self._caches():
                for group, count in enumerate(max_blocks):
                    if cache.num_blocks[group] < count:
                        cache.grow(group, count)
        if sizes:
            self.table.allocate()
            self.table.write_null_row()
        inputs = sorted(sizes, key=lambda values: values.size.tokens, reverse=True)
        steps = [self._captured_step(values) for values in inputs]
        for run in range(RUNS_TO_CAPTURE):  # the last one captures, when it is known what the largest step needs
            for step, values in zip(steps, inputs, strict=True):
                arrays = step.arrays
                arrays.write_step(values, self.table.state(arrays.rows, SamplerVariant.GREEDY))  # loads its kernel
                logits = step.forward()
                for variant in SamplerVariant if run == 0 and step is steps[0] else ():
                    state = self.table.state_of(arrays, variant)
                    self.ops.fetch(self.ops.sample(logits, state))()
            for guessed in guesses:
                found = self._captured_guesses(guessed)
                found.arrays.write(guessed)
                found.run()
        self.cache.prepare_copies()  # what a prefix may need
        if self.encoder is not None:
            self.encoder.warm_up()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _pools(self, max_blocks: Sequence[int]) -> KVCache:
        layout = self.config.cache_layout.with_drafts(self.config.num_draft_tokens)
        first = [FIRST_SLOTS if kept.per_sequence else FIRST_BLOCKS for kept in layout.groups]
        return KVCache(self.ops, layout, [*map(min, first, max_blocks)], max_blocks)

    def _grow(self, plan: StepPlan) -> None:
        """Enlarge the caches if the plan needs a block beyond them."""
        needed = (*plan.num_blocks, plan.num_source_blocks)
        if needed != self._grown:
            self._grow_to(plan.num_blocks, (plan.num_source_blocks,))
            self._grown = needed

    def _grow_to(self, *needed: Sequence[int]) -> None:
        """Enlarge the caches, by half at least, if they have fewer blocks in a group than ``needed``."""
        for (cache, max_blocks), counts in zip(self._caches(), needed, strict=False):
            for group, (count, most) in enumerate(zip(counts, max_blocks, strict=True)):
                if count > cache.num_blocks[group]:
                    wanted = max(count, cache.num_blocks[group] * 3 // 2)
                    with _memory_for_the_cache():
                        cache.grow(group, min(wanted, most))

    def _caches(self) -> Iterator[tuple[KVCache, Sequence[int]]]:
        """The caches, and the most blocks of each of their groups."""
        yield self.cache, self.config.num_blocks
        if self.cache.source is not None:
            yield self.cache.source, (self.config.num_source_blocks,)


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
