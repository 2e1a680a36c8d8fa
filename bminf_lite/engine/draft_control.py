"""Decides how many drafts a step checks, by what earlier checks brought and by how many sequences share the step.

All amounts are in steps: a check costs a part of a plain step, and an accepted token of one of ``B`` sequences saves
``1 / B`` of one. An account bounds what drafts may cost. It begins with :data:`CREDIT` and gets :data:`RATE` with each
step; a check pays its cost from it and adds what it saved, and no check is made that the account cannot pay. So after
``n`` steps drafts have cost at most ``CREDIT + RATE * n`` steps more than they saved, whatever the text is, as far as
the assumed costs are right.

Times are not measured: decisions depend on tokens alone, so the same requests in the same order get the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .request import Request

STEP_COST = 0.25
"""What a check costs beside its rows, of a plain step: the host waits for its tokens before it plans the next step.
docs/dev/measurements.md, "Drafts": 40 checks among 168 steps made these 6 % longer on the average, on an H200."""
AHEAD_COST = 0.15
"""The same where drafts are made on the device, and the host does not wait: 5 guesses of a head and their check took
1.435 plain steps there, of which reading the head's weights is 0.23."""
ROW_COST = 0.01
"""What a draft's row costs: the same table, 8 drafts instead of 4."""
CREDIT, RATE, LIMIT = 1.0, 0.005, 2.0
"""The account at first, what a step adds to it, and its bound."""
AHEAD_LIMIT = 10.0
"""The bound where drafts are made on the device. These are about equally right everywhere in a text, but a check that
brings two tokens on the average often brings one: with a bound of 2 such a row empties the account, and then nothing is
checked for a hundred steps. Drafts of texts are right in some places and wrong in others, where what was saved before
is not to be spent."""
FORGETTING = 0.9
"""The weight of an earlier check relative to the next one."""
SURE = 0.8
"""A step is planned behind a check, as if all drafts of it were accepted, where that is at least as probable."""
CHECKS_BEFORE_WARNING = 50
"""Checks of a draft model before a warning may say that it costs more than it saves."""
PRIOR_ACCEPTED, PRIOR_REJECTED = 1.0, 1.0
"""Drafts that count as accepted and as rejected before the first check of a request."""


@dataclass
class Acceptance:
    """The recent drafts of a request that were accepted, and the checks that ended with a rejected one."""

    accepted: float = 0.0
    rejected: float = 0.0

    @property
    def rate(self) -> float:
        """The estimated probability that a draft is accepted if those before it are."""
        accepted = self.accepted + PRIOR_ACCEPTED
        return accepted / (accepted + self.rejected + PRIOR_REJECTED)

    def fade(self) -> None:
        """Give the past less weight."""
        self.accepted *= FORGETTING
        self.rejected *= FORGETTING

    def expected(self, num_drafts: int) -> float:
        """How many of some drafts are expected to be accepted."""
        return self.rate * (1 - self.rate**num_drafts) / (1 - self.rate)


class DraftControl:
    """The account of one engine, and the acceptance of each running request.

    To make a draft takes ``draft_cost`` steps; the drafts of all sequences of a step are made at once. A check costs
    ``step_cost`` beside its rows, and ``limit`` bounds the account. If it is not ``adaptive``, all drafts are checked.
    """

    def __init__(
        self, draft_cost: float = 0.0, adaptive: bool = True, step_cost: float = STEP_COST, limit: float = LIMIT
    ) -> None:
        self.draft_cost = draft_cost
        self.step_cost = step_cost
        self.limit = limit
        self.adaptive = adaptive
        self.account = CREDIT
        self.saved = 0.0
        self.spent = 0.0
        self.num_checks = 0
        self._has_warned = False
        self._acceptance: dict[Request, Acceptance] = {}

    @property
    def can_check(self) -> bool:
        """Whether the account can pay for the smallest check."""
        return not self.adaptive or self.account >= self.cost([1])

    def may_pay(self, num_sequences: int) -> bool:
        """Whether an accepted draft saves more than its row costs, in a step of ``num_sequences`` that decode."""
        return not self.adaptive or (ROW_COST + self.draft_cost) * num_sequences < 1

    def num_drafts(self, request: Request, most: int, num_sequences: int) -> int:
        """The drafts that are worth their rows for a request among ``num_sequences`` that decode, ``most`` at most."""
        if not self.may_pay(num_sequences):
            return 0
        rate = self._acceptance.setdefault(request, Acceptance()).rate
        if not self.adaptive:
            return most
        worth = (ROW_COST + self.draft_cost) * num_sequences
        return min(most, int(math.log(worth) / math.log(rate)))

    def expects_all(self, request: Request, num_drafts: int) -> bool:
        """Whether all of some drafts are expected to be accepted, and the token behind them to be known too."""
        acceptance = self._acceptance.get(request)
        return acceptance is not None and acceptance.rate ** (num_drafts + 1) >= SURE

    def skip(self, request: Request) -> None:
        """Note that a request gets no drafts because too few were accepted. It will be tried again some time."""
        self._acceptance.setdefault(request, Acceptance()).fade()

    def pays(self, counts: Mapping[Request, int], num_sequences: int) -> bool:
        """Whether to check these numbers of drafts in a step of ``num_sequences`` that decode.

        They pay if the expected tokens save more than the check costs. While the account has :data:`CREDIT`, they are
        tried even if not.
        """
        if not self.adaptive or not counts:
            return bool(counts)
        cost = self.cost(counts.values())
        if self.account < cost:
            return False
        saved = sum(self._acceptance[r].expected(n) for r, n in counts.items()) / num_sequences
        return saved >= cost or self.account >= CREDIT

    def cost(self, counts: Iterable[int]) -> float:
        """What a check of these numbers of drafts costs."""
        counts = list(counts)
        return self.step_cost + ROW_COST * sum(counts) + self.draft_cost * max(counts, default=0)

    def on_step(self) -> None:
        """Count a step, with or without drafts."""
        self.account = min(self.account + RATE, self.limit)

    def on_check(self, results: Sequence[tuple[Request, int, int]], num_sequences: int) -> None:
        """Count the check of a step: the requests with their numbers of drafts and of accepted drafts."""
        cost = self.cost(drafts for _, drafts, _ in results)
        saved = sum(accepted for *_, accepted in results) / num_sequences
        self.num_checks += 1
        self.spent += cost
        self.saved += saved
        self.account = min(self.account + saved - cost, self.limit)
        for request, drafts, accepted in results:
            acceptance = self._acceptance.get(request)
            if acceptance is not None:
                acceptance.fade()
                acceptance.accepted += accepted
                acceptance.rejected += accepted < drafts

    def take_warning(self) -> str:
        """What to tell of a draft model that does not pay: once, else an empty text."""
        if self._has_warned or not self.draft_cost or self.num_checks < CHECKS_BEFORE_WARNING:
            return ""
        if self.saved >= self.spent:
            return ""
        self._has_warned = True
        return (
            f"the draft model does not pay: {self.num_checks} checks of its drafts saved {self.saved:.1f} steps and "
            f"cost about {self.spent:.1f}. Load the model without it, or with one that is smaller or nearer to it"
        )

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        self._acceptance.pop(request, None)
