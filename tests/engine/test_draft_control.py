"""The account of drafts: they cost at most what it allows, whatever is accepted, and are made where they pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.engine.draft_control import (
    AHEAD_COST,
    AHEAD_LIMIT,
    CHECKS_BEFORE_WARNING,
    CREDIT,
    LIMIT,
    RATE,
    DraftControl,
)
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams


def requests(count: int) -> list[Request]:
    return [Request(i, [1], SamplingParams(seed=1)) for i in range(count)]


def step(control: DraftControl, wanted: list[Request], num_sequences: int, accept: float, most: int = 8) -> int:
    """One step, in which each request has drafts of which a share is accepted; returns the drafts that were checked."""
    control.on_step()
    counts = {r: n for r in wanted if (n := control.num_drafts(r, most, num_sequences)) > 0}
    for request in wanted:
        if request not in counts:
            control.skip(request)
    if not (control.can_check and control.pays(counts, num_sequences)):
        return 0
    control.on_check([(r, n, int(accept * n)) for r, n in counts.items()], num_sequences)
    return sum(counts.values())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.integers(1, 64), st.integers(0, 3), st.floats(0, 0.3))
def test_the_account_bounds_what_drafts_cost(
    shares: list[float], num_sequences: int, num_drafting: int, draft_cost: float
) -> None:
    control, wanted = DraftControl(draft_cost), requests(min(num_drafting, num_sequences))
    for count, share in enumerate(shares, 1):
        step(control, wanted, num_sequences, share)
        assert control.spent - control.saved <= CREDIT + RATE * count + 1e-9  # sums of up to 300 floats
        assert control.account <= LIMIT


def test_a_thousand_steps_of_wrong_drafts_cost_less_than_one_percent() -> None:
    control, (one,) = DraftControl(), requests(1)
    for _ in range(1000):
        step(control, [one], 1, 0.0)
    assert 0 < control.spent < 0.01 * 1000


@pytest.mark.parametrize(("num_sequences", "least"), [(1, 6), (4, 4), (16, 2), (32, 1)])
def test_more_sequences_get_fewer_drafts(num_sequences: int, least: int) -> None:
    """With the acceptance that is assumed at first, of one half."""
    counts = [DraftControl().num_drafts(r, 16, num_sequences) for r in requests(1)]
    assert counts == [least]


def test_no_drafts_in_a_large_batch() -> None:
    assert step(DraftControl(), requests(100), 100, 1.0) == 0
    assert not DraftControl().may_pay(100) and DraftControl().may_pay(99)
    assert DraftControl(adaptive=False).may_pay(100)


def test_right_drafts_are_always_checked_and_grow() -> None:
    control, (one,) = DraftControl(), requests(1)
    checked = [step(control, [one], 1, 1.0, most=16) for _ in range(40)]
    assert all(checked) and checked == sorted(checked) and checked[-1] == 16
    assert control.saved > 10 * control.spent


def test_drafts_come_back_when_the_text_begins_to_repeat() -> None:
    control, (one,) = DraftControl(), requests(1)
    for _ in range(500):
        step(control, [one], 1, 0.0)
    checks = [step(control, [one], 1, 1.0) > 0 for _ in range(200)]
    assert all(checks[100:])


def test_a_request_that_is_wrong_does_not_stop_one_that_is_right() -> None:
    control, (right, wrong) = DraftControl(), requests(2)
    for _ in range(50):
        control.on_step()
        counts = {r: n for r in (right, wrong) if (n := control.num_drafts(r, 8, 2)) > 0}
        assert control.pays(counts, 2)
        control.on_check([(r, n, n if r is right else 0) for r, n in counts.items()], 2)
    assert control.num_drafts(right, 8, 2) == 8
    assert control.num_drafts(wrong, 8, 2) <= 1


def test_a_draft_model_that_costs_as_much_as_the_model_is_not_used() -> None:
    assert step(DraftControl(1.0), requests(1), 1, 1.0) == 0


def test_without_control_all_drafts_are_checked() -> None:
    control, both = DraftControl(adaptive=False), requests(2)
    for _ in range(100):
        assert step(control, both, 64, 0.0) == 16


def test_a_draft_model_that_does_not_pay_is_told_of_once() -> None:
    for accept, draft_cost, times in ((0.0, 0.05, 1), (1.0, 0.05, 0), (0.0, 0.0, 0)):
        control, (one,), told = DraftControl(draft_cost, adaptive=False), requests(1), []
        for _ in range(2 * CHECKS_BEFORE_WARNING):
            step(control, [one], 1, accept)
            told += [text for text in [control.take_warning()] if text]
        assert len(told) == times
        assert all("50 checks of its drafts saved 0.0 steps and cost about 36.5" in text for text in told)


def test_what_has_ended_is_forgotten() -> None:
    control, (one,) = DraftControl(), requests(1)
    step(control, [one], 1, 0.0)
    control.forget(one)
    assert not control._acceptance
    control.on_check([(one, 4, 2)], 1)  # a step that was under way
    assert not control._acceptance


@pytest.mark.parametrize(("right", "least"), [(0.5, 1.1), (0.58, 1.2), (0.71, 1.45)])
def test_chance_does_not_stop_the_drafts_of_a_model(right: float, least: float) -> None:
    """Each guess of a head is right with the same probability. Tokens per plain step, with the costs that are assumed:
    two guesses in each step would give 1.14, 1.25 and 1.45 of them, four 1.01, 1.19 and 1.48."""
    control, random = DraftControl(0.18, step_cost=AHEAD_COST, limit=AHEAD_LIMIT), np.random.default_rng(0)
    steps = tokens = 0.0
    for one in requests(40):
        for _ in range(100):
            control.on_step()
            count = control.num_drafts(one, 4, 1)
            if not count:
                control.skip(one)
            checks = control.can_check and control.pays({one: count} if count else {}, 1)
            accepted = 0
            while checks and accepted < count and random.random() < right:
                accepted += 1
            if checks:
                control.on_check([(one, count, accepted)], 1)
            steps += 1 + (control.cost([count]) if checks else 0)
            tokens += 1 + accepted
        control.forget(one)
    assert tokens / steps > least
