"""Decides which drafts a step checks: those that the drafter proposes, that are worth their time, and that have room.

How many tokens a step with drafts brings is not known until it is fetched. If the device makes the drafts, the next
step is planned all the same, with blocks for all of them, and the device finds the positions. Otherwise planning waits
for that step's result, unless all its drafts are expected to be accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .block_manager import BlockManager
from .config import EngineConfig
from .draft_control import AHEAD_COST, AHEAD_LIMIT, LIMIT, STEP_COST, DraftControl
from .drafts import Drafter
from .request import Request
from .step import NO_TOKEN


class DraftPlanner:
    """Drafts of ``drafter`` for the steps of a scheduler; without one, no step has any.

    :class:`.DraftControl` decides how many are worth their time. ``running`` are the scheduler's running requests.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, drafter: Drafter | None = None):
        self.config = config
        self.blocks = blocks
        self.drafter = drafter
        self.control = DraftControl(adaptive=config.speculative.adaptive)
        if drafter is not None:
            costs = (AHEAD_COST, AHEAD_LIMIT) if drafter.guesses_on_device else (STEP_COST, LIMIT)
            self.control = DraftControl(drafter.draft_cost, config.speculative.adaptive, *costs)

    def may_draft(self, running: Sequence[Request]) -> bool:
        """Whether the next step may check drafts, as far as that is known before it is planned."""
        if self.drafter is None or not self.control.can_check:
            return False
        if not self.drafter.needs_newest_token:
            return True
        decoding = [r for r in running if r.num_uncomputed_tokens == 1]
        return self.control.pays(self._wanted(decoding, len(decoding)), len(decoding))

    def may_run_ahead(self, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        """Whether a step is planned behind one whose accepted drafts are not known.

        Not if a request could end in that step, if a prompt waits or is being computed, or if the model keeps
        snapshots. Drafts that the host makes follow those that are being checked, so it must expect that all of these
        are accepted.
        """
        return (
            self.drafter is not None
            and (
                self._guesses_on_device(running)
                or (
                    not self.drafter.needs_newest_token
                    and all(self.control.expects_all(r, n) for r in running if (n := r.num_unchecked_drafts))
                )
            )
            and all(request.matcher is None for request in running)
            and not waiting
            and not self.blocks.has_snapshots
            and all(
                r.num_uncomputed_tokens == 1 and r.num_tokens + r.num_unchecked_drafts < r.max_length for r in running
            )
        )

    def must_wait(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request waits for its pending token: a drafter needs it, or a grammar, to check drafts."""
        assert self.drafter is not None
        if not request.num_pending_tokens:
            return False
        if self.drafter.needs_newest_token:
            return not self._guesses_on_device(running)
        if request.matcher is None:
            return False
        return len(self.drafter.propose(request, 2)) > 1

    def draft(self, plan: dict[Request, int], running: Sequence[Request]) -> dict[Request, Sequence[int]]:
        """Drafts for the requests of a planned step, with room in the cache; none for a step that computes prompts.

        A step has at most ``max_num_draft_rows`` rows with them, and no request is preempted for one.
        """
        assert self.drafter is not None
        if not self.control.may_pay(len(plan)) or any(count > 1 for count in plan.values()):
            return {}
        rows = min(self.config.max_num_draft_rows, self.config.max_num_batched_tokens) - len(plan)
        counts = self._wanted(plan, len(plan))
        for request in plan.keys() - counts.keys():
            self.control.skip(request)
        if self._guesses_on_device(running):
            if not self.control.pays(counts, len(plan)):
                return {}
            return {
                r: (NO_TOKEN,) * count
                for r, count in self._with_room(counts, rows, len(running), is_known=False).items()
            }
        self.drafter.prepare(self._with_room(counts, rows, len(running)) if self.drafter.needs_newest_token else {})
        found: dict[Request, Sequence[int]] = {}
        for request, count in counts.items():
            most = min(count, rows)
            drafts = self._propose(request, most) if most > 0 else ()
            if drafts:
                found[request] = drafts
                rows -= len(drafts)
        if not self.control.pays({request: len(drafts) for request, drafts in found.items()}, len(plan)):
            return {}
        return {r: drafts for r, drafts in found.items() if self._has_room(r, len(drafts), len(running))}

    def forget(self, request: Request) -> None:
        """A request has no more drafts."""
        if self.drafter is not None:
            self.drafter.forget(request)
            self.control.forget(request)

    def _guesses_on_device(self, running: Sequence[Request]) -> bool:
        """Whether a step makes its drafts itself: no grammar has to know them."""
        return (
            self.drafter is not None
            and self.drafter.guesses_on_device
            and all(request.matcher is None for request in running)
        )

    def _wanted(self, requests: Iterable[Request], num_sequences: int) -> dict[Request, int]:
        """The drafts that some of ``num_sequences`` requests of a step may have, without those that get none."""
        found = {}
        for request in requests:
            left = request.max_length - request.num_tokens - request.num_unchecked_drafts
            most = min(self.config.num_draft_tokens, left - 1)
            if most > 0 and (count := self.control.num_drafts(request, most, num_sequences)) > 0:
                found[request] = count
        return found

    def _with_room(
        self, counts: dict[Request, int], rows: int, num_running: int, is_known: bool = True
    ) -> dict[Request, int]:
        """The requests whose drafts have ``rows`` and blocks in the cache, which are taken; with their numbers.

        With ``is_known``, the host has to know their newest tokens. All get as many guesses as the one that wants most,
        so a request has none where the context ends before these.
        """
        found, longest = {}, self.config.context_length - max(counts.values(), default=0)
        for request, count in counts.items():
            most = min(count, rows)
            waits = is_known and request.num_pending_tokens
            fits = request.num_tokens + request.num_unchecked_drafts <= longest
            if most > 0 and fits and not waits and self._has_room(request, most, num_running):
                found[request] = most
                rows -= most
        return found

    def _propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to ``most`` drafts behind the newest token of a request.

        If the newest token is pending, the drafter's first guess stands for it and is not checked. Behind drafts that
        are being checked, the first guesses stand for these and the token behind them.

        Drafts behind an end-of-sequence token, and those that a grammar forbids, are left out. A grammar that has not
        seen the newest token allows none.
        """
        assert self.drafter is not None
        if request.matcher is not None and request.num_pending_tokens:
            return ()
        skipped = request.num_pending_tokens + request.num_unchecked_drafts
        drafts = list(self.drafter.propose(request, skipped + most))[skipped:]
        ends = (i for i, token in enumerate(drafts) if token in request.eos_ids)
        drafts = drafts[: next(ends, len(drafts))]
        if request.matcher is not None and drafts:
            drafts = drafts[: request.matcher.num_allowed(drafts)]
        return drafts

    def _has_room(self, request: Request, count: int, num_running: int) -> bool:
        """Take blocks for drafts, unless the running requests may need them next."""
        assert request.blocks is not None
        computed, unchecked = request.num_computed_tokens, request.num_unchecked_drafts
        if not self.blocks.can_grow(num_running, unchecked + count):
            return False
        return self.blocks.extend(request.blocks, computed, computed + unchecked + 1 + count)
