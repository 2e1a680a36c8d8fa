"""Runs the steps of a scheduler: builds each once, and lets the executor of every rank run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..backend.communicator import RankThreads
from ..errors import BminfError
from .block_manager import BlockManager
from .config import EngineConfig
from .draft_model import DraftedNetwork, ModelDrafter
from .drafts import Drafter, NgramDrafter
from .executor import ExecutedStep, Executor
from .network import Network
from .request import Request
from .step import Step, StepResult
from .step_builder import StepBuilder
from .suffix_drafts import SuffixDrafter

T = TypeVar("T")


@dataclass
class LaunchedStep:
    """A step that the devices compute; :meth:`fetch` waits for it.

    ``executed`` has the step of each rank. ``start_sampling`` starts the samplers, and is None once that was done, or
    if nothing samples. ``check`` raises an error if the ranks' sums may be wrong.
    """

    executed: Sequence[ExecutedStep]
    start_sampling: Callable[[], None] | None
    check: Callable[[], None]

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the sampler is not started, because a mask depends on tokens of the step before."""
        return self.start_sampling is not None

    def sample(self) -> None:
        """Start the sampler, unless that was done."""
        if self.start_sampling is not None:
            self.start_sampling()
            self.start_sampling = None

    def fetch(self) -> StepResult:
        """What the step chose and scored, without padding. All ranks have the same; this waits for the first."""
        found = self.executed[0].fetch()
        self.check()
        return found


class ModelRunner:
    """The builder of steps and the executors of all ranks, for a scheduler that plans with ``blocks``.

    ``networks`` has the model's part of each rank; a model on one device is the only one. Each rank but the first has a
    thread of its own, because ranks wait for each other within a step. An error of any rank is raised.

    Raises ``OutOfMemory`` where memory does not suffice. :meth:`close` gives the memory back even while a traceback
    refers to the runner.
    """

    def __init__(self, networks: Sequence[Network], config: EngineConfig, blocks: BlockManager):
        ops = networks[0].ops
        self.config = config
        self.networks = networks
        self.max_steps_in_flight = ops.max_steps_in_flight
        self.builder = StepBuilder(ops, config, blocks)
        self.executors: list[Executor] = []
        backends = [network.ops for network in networks]
        self._num_failures = 0  # how often a rank has failed, so that sums under way were given up
        self._ranks = RankThreads([ops.communicator for ops in backends], [ops.make_current for ops in backends])
        made: list[Executor | None] = [None] * len(networks)

        def make(rank: int) -> None:
            made[rank] = Executor(networks[rank], config, self.builder.table_size, reports=rank == 0)

        try:
            self._ranks.run(make)
        except BaseException:
            self.executors = [executor for executor in made if executor is not None]
            self.close()
            raise
        self.executors = [executor for executor in made if executor is not None]

    def close(self) -> None:
        """Give the memory of caches and captured steps back; nothing can be run afterwards."""
        if len(self.executors) == len(self.networks):
            self._on_ranks(lambda rank: self.executors[rank].close())
        else:
            for executor in self.executors:
                executor.close()
        self._ranks.close()

    # -- rows of the sampler ------------------------------------------------------------------------------------------

    def has_room(self, request: Request) -> bool:
        """Whether the sampler has a free row and what else the request's parameters need, and its adapter a slot."""
        return self.builder.has_room(request)

    def add(self, request: Request) -> None:
        """Give a request a row of the sampler, and its adapter a slot."""
        self.builder.add(request)

    def remove(self, request: Request) -> None:
        """Free the row and the slot of a request."""
        self.builder.remove(request)

    def clear(self) -> None:
        """Free every row and every slot."""
        self.builder.clear()

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> LaunchedStep:
        """Start a step without waiting for it, or for the steps before it.

        If a grammar's mask depends on a token that the host does not know yet, the caller starts the sampler
        (:meth:`LaunchedStep.sample`).
        """
        plan = self.builder.build(step)
        constrained = [r for r in step.sampled if r.matcher is not None]
        samples_at_once = plan.samples and not constrained

        def execute(rank: int) -> ExecutedStep:
            executed = self.executors[rank].execute(plan)
            if samples_at_once:
                self.executors[rank].sample(executed)
            return executed

        executed = self._on_ranks(execute)

        def sample() -> None:
            masks = self.builder.masks(constrained)
            self._on_ranks(lambda rank: self.executors[rank].sample(executed[rank], masks))

        failures = self._num_failures

        def check() -> None:
            if self._num_failures != failures:
                raise BminfError("a GPU of the model failed beside this step, whose sums were given up: ask again")
            self.executors[0].ops.communicator.check()

        launched = LaunchedStep(executed, sample if plan.samples and constrained else None, check)
        if all(r.num_pending_tokens == 1 for r in constrained):  # this step's
            launched.sample()
        first = 0
        for part in step.others:
            if part.num_taken and part.request.take_logits is not None:
                logits = executed[0].taken[first : first + part.num_taken]
                part.request.take_logits(part.stop - part.num_taken, logits)
                first += part.num_taken
        return launched

    def drafter(self) -> Drafter:
        """What makes the drafts that ``speculative`` of the configuration describes."""
        network, options = self.executors[0].network, self.config.speculative
        if isinstance(network, DraftedNetwork):
            return ModelDrafter(self.guess, network.draft_cost)
        if options.method == "suffix":
            return SuffixDrafter(options.suffixes)
        return NgramDrafter(options.ngram_sizes)

    def guess(self, requests: Sequence[Request], count: int) -> np.ndarray:
        """What the draft model expects behind the newest tokens of requests: int32 ``[B, count]``."""
        plan = self.builder.guesses({r: r.num_known_tokens - 1 for r in requests}, count, {})
        return self._on_ranks(lambda rank: self.executors[rank].guessed(plan))[0][: len(requests)]

    def warm_up(self) -> None:
        """Take all memory of the caches, load what steps may need, and capture steps and encodings of every size."""
        inputs = [self.builder.empty_inputs(size) for size in self.builder.sizes]
        drafted = isinstance(self.networks[0], DraftedNetwork)
        guesses = [self.builder.empty_guesses(size) for size in self.builder.guess_sizes if drafted]
        self._on_ranks(lambda rank: self.executors[rank].warm_up(inputs, guesses))

    def _on_ranks(self, work: Callable[[int], T]) -> list[T]:
        """``work`` of the number of every rank, all at once."""
        if len(self.executors) == 1:
            return [work(0)]
        try:
            return self._ranks.run(work)
        except BaseException:
            self._num_failures += 1
            for executor in self.executors:  # ranks may have come to different points of a capture
                executor.forget_captured()
            raise
