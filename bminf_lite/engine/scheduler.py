"""Decides which tokens of which requests a step computes. It runs nothing and holds no arrays.

Requests wait in order of priority and arrival until a row of the sampler and blocks of the cache are free for their
whole prompt. Then they run: their prompt is computed in pieces, and each step adds a token. A step holds the next token
of every sequence that decodes, and pieces of prompts up to a budget of tokens. If blocks run out, a running request is
preempted: it gives its blocks back, waits again, and recomputes its tokens. Of the running requests of the lowest
priority it is one that was preempted least often, and of those the newest.

A :class:`.Drafter` may guess tokens that follow a request's newest one. A step that computes no prompt checks them: it
samples a token behind each. :meth:`Scheduler.postprocess` accepts those that equal the choices, and
:meth:`Scheduler.commit` counts them as computed. :class:`.DraftPlanner` decides which drafts a step checks.

The host may be ahead of the device: a request's newest token is pending until the step that chooses it is fetched, and
the next step is planned without knowing it. Blocks are taken before a step is launched, so no step runs out of them. A
block that is given back may still be written by a launched step. This is harmless: the device runs steps in order, and
a block's next holder writes it in a later step.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from ..backend.sampling import Choice, TokenScores, num_accepted
from ..errors import BminfError, UsageError
from .block_manager import BlockManager, Prefix, UnderWay
from .budget import Budget, Growth
from .config import EngineConfig
from .draft_planner import DraftPlanner
from .drafts import Drafter
from .request import Request
from .step import NO_TOKEN, ScheduledTokens, Step, StepResult

ORDER = attrgetter("order")
Copies = list[tuple[Request, Sequence[tuple[int, int]]]]
MAX_PASSED = 32
"""Requests that others may pass at a time because they wait for a block that is being computed."""


class Refusal(NamedTuple):
    """The waiting request that found no room, and how many requests ran and how many blocks of each group were left."""

    arrival: int
    num_running: int
    num_available: Sequence[int]


class Rows(Protocol):
    """The rows of the sampler, from 1 on (see :class:`.SamplerRows`), and the slots of adapters."""

    def has_room(self, request: Request) -> bool:
        """Whether :meth:`add` finds a row."""
        ...

    def add(self, request: Request) -> None:
        """Give a request a row, with its parameters for the steps that are launched from now on, and a slot."""
        ...

    def remove(self, request: Request) -> None:
        """Free the row and the slot of a request."""
        ...

    def clear(self) -> None:
        """Free every row and every slot."""
        ...


class Scheduler:
    """Requests in two states: ``waiting`` and ``running``, both in order."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, rows: Rows, drafter: Drafter | None = None):
        self.config = config
        self.drafts = DraftPlanner(config, blocks, drafter)
        self.blocks = blocks
        self.rows = rows
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_position = [0] * config.num_draft_tokens
        self._launched: Sequence[Request] = ()
        self._encoded: Sequence[Request] = ()
        self._with_deadline: dict[Request, float] = {}
        self._refusal: Refusal | None = None
        self._arrivals = 0

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. By :meth:`.BlockManager.shortage`, it fits when it runs alone."""
        request.arrival = self._arrivals = self._arrivals + 1
        adapter = 0 if request.adapter is None else request.adapter.serial
        request.blocks = self.blocks.new_sequence(request.cache_salt, request.source_token_ids, adapter)
        insort(self.waiting, request, key=ORDER)
        if request.deadline is not None:
            self._with_deadline[request] = request.deadline

    def end(self, request: Request, reason: str, error: BaseException | None = None) -> bool:
        """End a request at any point of its life, with its blocks given back; returns False if it has ended before."""
        if request.finish_reason is not None:
            return False
        request.finish_reason, request.error = reason, error
        self._leave(request)
        return True

    def end_overdue(self, now: float) -> list[Request]:
        """End and return the requests whose deadline has passed."""
        overdue = [r for r, deadline in self._with_deadline.items() if deadline <= now]
        return [r for r in overdue if self.end(r, "deadline")]

    def reset(self) -> None:
        """Forget every request and the contents of the cache, after an error at any point of a step."""
        for request in self.running:
            request.row = request.lora_id = 0
            self.drafts.forget(request)
        self.running, self.waiting = [], []
        self.rows.clear()
        self.blocks.clear()
        self._launched = self._encoded = ()
        self._with_deadline.clear()

    # -- planning a step ----------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, whose blocks are taken; None if there is nothing to compute, or drafts are being checked.

        The caller must launch it.
        """
        self._enter_launched()
        if any(r.num_unchecked_drafts for r in self.running) and not self.drafts.may_run_ahead(
            self.running, self.waiting
        ):
            return None
        preemptions = self.num_preemptions
        plan: dict[Request, int] = {}
        prompts = []
        may_draft = self.drafts.may_draft(self.running)
        for request in list(self.running):
            count = request.num_uncomputed_tokens
            if count == 1 and request.row > 0:
                if not (may_draft and self.drafts.must_wait(request, self.running)):
                    self._plan(request, 1, plan)
            elif count > 1:
                prompts.append(request)
        config = self.config
        left = config.max_num_batched_tokens - len(plan)
        if streams := sum(request.is_streamed for request in plan):
            left = min(left, config.max_num_mixed_tokens * -(-(len(prompts) + len(self.waiting)) // streams))
        budget = Budget(max(left, 1), config.max_logit_rows)
        for request in prompts:
            if request.row > 0 and (count := budget.piece(request)) > 0:
                self._plan(request, count, plan)
                budget.spend(request, plan.get(request, 0))
        sources: list[Request] = []
        copies: Copies = []
        if self.waiting and self.num_preemptions == preemptions and not self._is_refused(self.waiting[0]):
            self._admit(plan, budget, sources, copies)
        if not plan:
            return None
        drafts = self.drafts.draft(plan, self.running) if may_draft else {}
        self.drafts.control.on_step()
        if self.blocks.has_snapshots:
            self._take_snapshots(plan, copies)
        return self._step(plan, drafts, sources, copies)

    def _step(
        self, plan: dict[Request, int], drafts: dict[Request, Sequence[int]], sources: list[Request], copies: Copies
    ) -> Step:
        """The step with the tokens of ``plan``, whose numbers count as computed from now on, and the ``drafts``."""
        decoding: list[Request] = []
        ahead: dict[Request, int] = {}
        positions: list[int] = []
        offsets: list[int] = []
        checked: list[int] = []
        singles: list[ScheduledTokens] = []
        pieces: list[ScheduledTokens] = []
        for request, count in plan.items():
            start, num_tokens = request.num_computed_tokens, request.num_tokens
            samples = start + count == num_tokens < request.max_length
            if count == 1 and samples:
                guesses = drafts.get(request, ())
                if request.num_unchecked_drafts:
                    ahead[request] = request.num_unchecked_drafts
                decoding += [request] * (1 + len(guesses))
                positions += range(start, start + 1 + len(guesses))
                if drafts:
                    offsets += range(1 + len(guesses))
                    checked += [0, *guesses]
                    request.draft_tokens = guesses
                    request.num_unchecked_drafts += len(guesses)
            else:
                (pieces if count > 1 else singles).append(ScheduledTokens(request, start, count, samples))
            request.num_computed_tokens = start + count
            request.num_pending_tokens += samples
        pieces.sort(key=lambda part: not part.samples)
        self._launched, self._encoded = list(plan), sources
        num_guesses = max(offsets) if NO_TOKEN in checked else 0
        return Step(decoding, positions, offsets, checked, num_guesses, ahead, singles, pieces, sources, copies)

    # -- blocks and admission -----------------------------------------------------------------------------------------

    def _plan(self, request: Request, count: int, plan: dict[Request, int]) -> None:
        """Plan ``count`` tokens of a running request. If blocks run out, others are preempted, or this one itself."""
        if request.num_pending_tokens and request.num_tokens >= request.max_length:
            return  # it ends when the pending token arrives
        assert request.blocks is not None
        computed, unchecked = request.num_computed_tokens, request.num_unchecked_drafts
        in_its_last_block = count == 1 and computed % self.blocks.block_size and not unchecked
        while not in_its_last_block and not self.blocks.extend(request.blocks, computed, computed + unchecked + count):
            victim = max(self.running, key=lambda r: (-r.priority, -r.num_preemptions, r.arrival))
            self._preempt(victim)
            plan.pop(victim, None)
            if victim is request:
                return
        plan[request] = count

    def _preempt(self, request: Request) -> None:
        """Let a running request wait again. Its tokens stay, pending ones included; their keys and values go."""
        self._stop_running(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=ORDER)

    def _admit(self, plan: dict[Request, int], budget: Budget, sources: list[Request], copies: Copies) -> None:
        """Start waiting requests in order while rows, blocks and the budget last; see :class:`Step` for the lists.

        A request whose length is known starts if it, and those that run, can go on to their ends; see :class:`Growth`.
        The first request that does not fit stops this, so that others do not pass it for ever. A request is passed only
        while a running one computes the block that it needs next: then it waits to share that block.
        """
        growth: Growth | None = None
        under_way = self.blocks.under_way(r.blocks for r in self.running if r.blocks)
        self._refusal, position = None, 0
        while position < min(len(self.waiting), MAX_PASSED) and budget.tokens > 0:
            request = self.waiting[position]
            blocks, num_tokens = request.blocks, request.num_tokens
            assert blocks is not None
            if request.num_pending_tokens:
                break  # a preempted request whose newest token is on its way
            if self.blocks.prefix_cache and len(blocks.keys) < num_tokens // self.blocks.block_size:
                self.blocks.compute_keys(blocks, request.token_ids(0, num_tokens))
            prefix = self.blocks.cached_prefix(blocks, request.max_cached_tokens, request.token_ids)
            if self._is_computed_for_another(request, prefix, sources, under_way):
                position += 1
                continue
            if not self.rows.has_room(request):
                self._refuse(request)
                break
            new_source = bool(request.source_token_ids) and self.blocks.cached_source(blocks) is None
            if new_source and sources and len(request.source_token_ids) > budget.tokens:
                break
            if request.prompt_logprobs and budget.logit_rows == 0:
                break
            piece = num_tokens if request.whole_prompt else budget.tokens
            if self.running:  # a request alone has room to its end, see add
                growth = growth or Growth(self.blocks.block_size, self.running)
                growth.add(request)
            admission = self.blocks.admit(
                blocks,
                num_tokens,
                piece,
                spare=len(self.running),
                growth=growth.blocks() if growth else 0,
                token_ids=request.token_ids,
                prefix=prefix,
            )
            if admission is None:
                self._refuse(request)
                break
            del self.waiting[position]
            insort(self.running, request, key=ORDER)
            self.rows.add(request)
            under_way.add(blocks)
            request.num_computed_tokens = admission.num_cached_tokens
            if not request.num_preemptions:
                request.start_time = time.perf_counter()
                request.num_cached_tokens = admission.num_cached_tokens
                self.num_cached_tokens += admission.num_cached_tokens
                self.num_prompt_tokens += num_tokens
            if not admission.source_is_cached and request.source_token_ids:
                sources.append(request)
                budget.tokens = max(budget.tokens - len(request.source_token_ids), 1)
            if admission.copies:
                copies.append((request, admission.copies))
            plan[request] = budget.piece(request)
            budget.spend(request, plan[request])

    def _refuse(self, request: Request) -> None:
        """Remember that a waiting request finds no row, or too few blocks."""
        self._refusal = Refusal(request.arrival, len(self.running), [pool.num_available for pool in self.blocks.pools])

    def _is_refused(self, request: Request) -> bool:
        """Whether a waiting request found no room, and no running one has left or given blocks back since.

        This spares the host the search for room in most steps.
        """
        refusal = self._refusal
        return (
            refusal is not None
            and (request.arrival, len(self.running)) == (refusal.arrival, refusal.num_running)
            and all(p.num_available <= n for p, n in zip(self.blocks.pools, refusal.num_available, strict=True))
        )

    def _is_computed_for_another(
        self, request: Request, prefix: Prefix, sources: Sequence[Request], under_way: UnderWay
    ) -> bool:
        """Whether a running request computes what the cache lacks first behind a ``prefix``, or an equal source."""
        blocks = request.blocks
        assert blocks is not None
        if not self.blocks.prefix_cache:
            return False
        if request.source_token_ids and any(r.blocks and r.blocks.root == blocks.root for r in sources):
            return True
        return self.blocks.is_under_way(blocks, prefix, request.max_cached_tokens, under_way, request.token_ids)

    def _take_snapshots(self, plan: dict[Request, int], copies: Copies) -> None:
        """Add the copies that make snapshots of states, which the requests of a step have before it."""
        for request in plan:
            assert request.blocks is not None
            made = self.blocks.snapshot(request.blocks, request.num_computed_tokens, request.token_ids)
            if made:
                copies.append((request, made))

    # -- after a step -------------------------------------------------------------------------------------------------

    def postprocess(self, step: Step, result: StepResult) -> list[Request]:
        """Record the result of a step.

        Drops what belongs to requests that have ended, and returns the others that have a new token or end now.
        """
        updated: list[Request] = []
        choice = Choice.unpack(result.chosen)
        tokens, logprobs = choice.tokens.tolist(), choice.logprobs.tolist()
        scores = _scores(result)
        prompt_top = None if result.prompt_top is None else Choice.unpack(result.prompt_top)
        place, checks = 0, []
        drafts = step.drafts if result.drafts is None else result.drafts.tolist()
        while place < len(step.decoding):
            request, first, last = step.decoding[place], place, place
            place += 1
            while place < len(step.offsets) and step.offsets[place]:
                place += 1
            if place > first + 1:
                accepted = num_accepted(tokens[first:place], drafts[first + 1 : place])
                last += accepted
                checks.append((request, place - first - 1, accepted))
                self.commit(request, place - first - 1, accepted)
            request.num_pending_tokens -= 1
            if request.finish_reason is None:
                updated.append(request)
            for row in range(first, last + 1):
                if request.finish_reason is None:
                    self._record(request, choice, row, tokens[row], logprobs[row])
        if checks:
            self.drafts.control.on_check(checks, step.offsets.count(0) + len(step.others))
            if text := self.drafts.control.take_warning():
                warnings.warn(text, UserWarning, stacklevel=1)
        for part in step.others:
            request = part.request
            if request.prompt_logprobs:
                for position in range(part.start + 1, part.start + 1 + part.num_scored):
                    scored, (logprob, best, best_logprob) = next(scores)
                    request.prompt_token_logprobs[position] = logprob
                    request.prompt_top_logprobs[position] = (
                        prompt_top.most_likely(scored, request.num_prompt_top)
                        if request.num_prompt_top > 1 and prompt_top is not None
                        else [(best, best_logprob)]
                    )
            row = place
            if part.samples:
                place += 1
                request.num_pending_tokens -= 1
            if request.finish_reason is not None:
                continue
            if part.samples:
                self._record(request, choice, row, tokens[row], logprobs[row])
            elif part.stop >= request.max_length:
                self.end(request, "length")
            else:
                continue
            updated.append(request)
        if not self.has_requests:
            self._launched = self._encoded = ()  # an idle engine keeps no request
        return updated

    def commit(self, request: Request, num_drafts: int, num_accepted_tokens: int) -> None:
        """Count the accepted drafts of a request as computed, and forget the others. The caller appends the tokens."""
        request.num_unchecked_drafts -= num_drafts
        request.draft_tokens = ()
        if request.row > 0:  # it was not preempted, and has not ended
            request.num_computed_tokens += num_accepted_tokens
        if request.finish_reason is not None:
            return
        for position in range(num_accepted_tokens):
            self.num_accepted_per_position[position] += 1
        for counter in (self, request):
            counter.num_drafts += 1
            counter.num_draft_tokens += num_drafts
            counter.num_accepted_tokens += num_accepted_tokens

    def _record(self, request: Request, choice: Choice, row: int, token: int, logprob: float) -> None:
        """Give a request the token that a step chose in ``row``; it may end the request."""
        if token < 0:
            self.end(request, "error", _no_token(request))
            assert request.blocks is not None
            self.blocks.discard(request.blocks)  # its keys and values may hold a NaN
            return
        top = choice.most_likely(row, request.params.logprobs) if request.params.logprobs else ()
        try:
            request.append_token(token, logprob, top)
        except UsageError as error:  # of the request's grammar
            self.end(request, "error", error)
        else:
            if request.finish_reason is not None:
                self._leave(request)

    def _enter_launched(self) -> None:
        """Make the blocks that the last step has filled with accepted tokens available to others."""
        for request in self._encoded:
            if request.finish_reason is None and request.blocks and request.blocks.source_table:
                self.blocks.enter_source(request.blocks)
        for request in self._launched:
            self._enter(request)
        self._launched = self._encoded = ()

    def _enter(self, request: Request, has_ended: bool = False) -> None:
        blocks, size = request.blocks, self.blocks.block_size
        accepted = min(request.num_computed_tokens, request.num_known_tokens)
        if not (self.blocks.prefix_cache and blocks and blocks.tables[0]):
            return
        if has_ended or accepted // size > blocks.num_indexed:
            start = blocks.num_indexed * size
            self.blocks.enter(blocks, request.token_ids(start, accepted), start, has_ended=has_ended)

    def _keep_state(self, request: Request) -> None:
        """Let the state of a request that leaves stand for its accepted tokens.

        The newest step computes its last token, drafts apart. The state serves to go on there and behind it, as far as
        tokens are accepted; see :class:`~bminf_lite.layers.cache.State`.
        """
        assert request.blocks is not None
        computed, known = request.num_computed_tokens, request.num_known_tokens
        positions = range(max(computed - 1, 1), min(computed, known) + 1)
        self.blocks.keep_state(request.blocks, positions, request.token_ids)

    def _leave(self, request: Request) -> None:
        """Remove a request from the state in which it is."""
        self._with_deadline.pop(request, None)
        self.drafts.forget(request)
        if request.row > 0:
            self._stop_running(request)
            return
        place = bisect_left(self.waiting, request.order, key=ORDER)
        if self.waiting[place : place + 1] == [request]:
            del self.waiting[place]

    def _stop_running(self, request: Request) -> None:
        """Take a request's row and blocks; its accepted tokens stay in the index."""
        assert request.blocks is not None
        self._enter(request, request.finish_reason != "error")
        if self.blocks.has_snapshots and request.finish_reason != "error":
            self._keep_state(request)
        self.blocks.release(request.blocks)
        self.running.remove(request)
        self.rows.remove(request)


def _scores(result: StepResult) -> Iterator[tuple[int, tuple[float, int, float]]]:
    """The scores of a step's prompt tokens with their rows; most steps have none, and do not unpack them."""
    yield from enumerate(zip(*(part.tolist() for part in TokenScores.unpack(result.prompt_scores)), strict=True))


def _no_token(request: Request) -> BminfError:
    return BminfError(
        f"prompt {request.index}: no token can be chosen at position {request.num_known_tokens}, because the model's "
        "logits there hold a NaN or an infinity; load(..., check=True) or generate --check finds the layer"
    )
