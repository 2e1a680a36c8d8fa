"""The scheduler on a stub device: what a step holds, order, preemption, and exact results in any history."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from stub_runner import STATE, VOCAB, Driver, adapter_named, make_config, make_request, parts_of

from bminf_lite.engine import block_manager
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.errors import BminfError


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * i) % 47 for i in range(length)]


# -- what a step holds ------------------------------------------------------------------------------------------------


def shapes(driver: Driver) -> list[tuple[int, ...]]:
    """The numbers of tokens of the parts of each step."""
    return [tuple(p.num_tokens for p in parts_of(s)) for s in driver.runner.steps]


def test_a_step_holds_decoding_sequences_first_and_pieces_of_prompts_in_its_budget():
    driver = Driver(make_config(40))
    driver.add(make_request(prompt(3), 6))
    driver.step()
    driver.add(make_request(prompt(13, 20), 2))
    driver.run()
    assert shapes(driver) == [(3,), (1, 7), (1, 6), (1, 1), (1,), (1,)]
    assert [s.num_decodes for s in driver.runner.steps] == [0, 1, 1, 2, 1, 1]
    driver.check_results()


def test_beside_a_stream_a_step_has_fewer_prompt_tokens():
    driver = Driver(make_config(40, max_num_mixed_tokens=5))
    driver.add(make_request(prompt(3), 6, is_streamed=True))
    driver.step()
    driver.add(make_request(prompt(13, 20), 2))
    driver.run()
    assert shapes(driver) == [(3,), (1, 5), (1, 5), (1, 3), (1, 1), (1,)]
    driver.check_results()


def test_prompts_that_outnumber_the_streams_get_more_tokens_of_a_step():
    driver = Driver(make_config(60, max_num_batched_tokens=40, max_num_mixed_tokens=5))
    driver.add(make_request(prompt(3), 6, is_streamed=True))
    driver.step()
    for i in range(3):
        driver.add(make_request(prompt(6, 20 * (i + 1)), 3, is_streamed=True))
    driver.run()
    assert shapes(driver)[:3] == [(3,), (1, 6, 6, 3), (1, 1, 1, 3)]
    driver.check_results()


def test_several_short_prompts_share_a_step():
    driver = Driver(make_config(40))
    for i in range(3):
        driver.add(make_request(prompt(3, 10 * i), 1))
    driver.run()
    assert shapes(driver) == [(3, 3, 2), (1,)]
    driver.check_results()


def test_more_sequences_than_the_budget_decode_together_and_prompts_still_advance():
    driver = Driver(make_config(60, max_num_seqs=8, max_num_batched_tokens=2, max_num_mixed_tokens=2))
    for i in range(6):
        driver.add(make_request(prompt(2, 7 * i), 8))
    driver.run()
    assert max(len(s) for s in shapes(driver)) == 6
    driver.check_results()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_request_alone_takes_no_step_in_vain(ahead):
    driver = Driver(make_config(40), ahead)
    driver.add(make_request(prompt(5), 4))
    driver.run()
    assert shapes(driver) == [(5,), (1,), (1,), (1,)]


def test_the_host_is_ahead_of_the_device():
    driver = Driver(make_config(40), 2)
    request = driver.add(make_request(prompt(5), 9))
    for _ in range(3):
        driver.launch()
    assert (request.num_pending_tokens, request.output_token_ids) == (3, [])
    driver.run()
    driver.check_results()


# -- order ------------------------------------------------------------------------------------------------------------


def finish_order(driver: Driver) -> list[int]:
    order: list[int] = []
    while driver.scheduler.has_requests or driver.in_flight:
        driver.step()
        order += [i for i, r in enumerate(driver.requests) if r.finish_reason and i not in order]
    return order


def test_first_come_first_served_and_priority_before():
    driver = Driver(make_config(40, max_num_seqs=1))
    for priority in (0, 0, 5, 0):
        driver.add(make_request(prompt(3, priority), 2, priority=priority))
    assert finish_order(driver) == [2, 0, 1, 3]


def test_a_large_request_at_the_head_is_not_passed():
    driver = Driver(make_config(9, max_num_seqs=4))
    driver.add(make_request(prompt(12), 6))
    driver.step()
    large = driver.add(make_request(prompt(24, 1), 2))
    small = [driver.add(make_request(prompt(2, i), 3)) for i in range(2, 5)]
    while large.row == 0:
        assert all(r.row == 0 for r in small)
        driver.step()
    driver.run()
    driver.check_results()


def test_a_request_ends_at_its_deadline_wherever_it_is():
    driver = Driver(make_config(12, max_num_seqs=1), 1)
    running = driver.add(make_request(prompt(3), 20, deadline=10.0))
    waiting = driver.add(make_request(prompt(3, 9), 20, deadline=5.0))
    other = driver.add(make_request(prompt(3, 5), 2))
    for _ in range(4):
        driver.step()
    assert driver.scheduler.end_overdue(4.9) == []
    assert driver.scheduler.end_overdue(5.0) == [waiting] and driver.scheduler.end_overdue(20.0) == [running]
    assert {running.finish_reason, waiting.finish_reason} == {"deadline"} and len(running.output_token_ids) >= 3
    driver.run()
    assert other.finish_reason == "length"
    driver.check_results()


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_share_its_blocks_while_they_run():
    """Those behind the first wait until it has computed the prompt, and then compute one token each."""
    driver = Driver(make_config(14))
    many = [driver.add(make_request(prompt(17), 3)) for _ in range(4)]
    other = driver.add(make_request(prompt(2, 40), 1))
    for _ in range(4):
        driver.step()
    assert [r.num_cached_tokens for r in many] == [0, 16, 16, 16]
    assert len({tuple(r.blocks.tables[0][:4]) for r in many if r.row}) == 1
    driver.run()
    assert sum(map(sum, shapes(driver))) == 17 + 3 + 4 * 2 + 2 and other.finish_reason == "length"
    driver.check_results()


def test_a_second_turn_reuses_the_first_with_its_answer():
    driver = Driver(make_config(20))
    first = driver.add(make_request(prompt(9), 8))
    driver.run()
    history = prompt(9) + first.output_token_ids
    second = driver.add(make_request([*history, 5, 6, 7], 2))
    driver.run()
    assert len(history) == 17 and second.num_cached_tokens == 16
    third = driver.add(make_request([*history, 5, 6, 8, 9], 2))
    driver.run()
    assert third.num_cached_tokens == 19, "the block of 17 to 20 differs at its last token"
    assert driver.scheduler.num_cached_tokens == 16 + 19 and driver.scheduler.num_prompt_tokens == 9 + 20 + 21
    driver.check_results()


@pytest.mark.parametrize("options", [{"cache_salt": "b"}, {"prompt_logprobs": True}, {"source_token_ids": (1, 2)}])
def test_what_is_not_reused(options):
    driver = Driver(make_config(20, source_blocks=8))
    for fields in ({}, options):
        request = driver.add(make_request(prompt(9), 2, **fields))
        driver.run()
        assert request.num_cached_tokens == 0
    driver.check_results()
    without = Driver(make_config(20, prefix_cache=False))
    for _ in range(2):
        request = without.add(make_request(prompt(9), 2))
        without.run()
        assert request.num_cached_tokens == 0


def test_a_source_is_encoded_once_for_all_who_read_it():
    driver = Driver(make_config(20, source_blocks=12), 1)
    for length in (9, 9, 3, 9):
        driver.add(make_request([1], 4, source_token_ids=tuple(prompt(length))))
    driver.run()
    assert driver.runner.encoded == 2
    driver.check_results()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_but_none_twice_before_the_others_once(monkeypatch):
    driver = Driver(make_config(12, prefix_cache=False))
    old, young = (driver.add(make_request(prompt(9, i), 20)) for i in (0, 1))
    third = driver.add(make_request(prompt(8, 2), 20))
    victims, preempt = [], driver.scheduler._preempt

    def watched(request):
        assert request.num_preemptions == min(r.num_preemptions for r in driver.scheduler.running)
        victims.append(request)
        preempt(request)

    monkeypatch.setattr(driver.scheduler, "_preempt", watched)
    driver.run()
    assert victims[:2] == [third, young] and old not in victims[:2]
    driver.check_results()


def test_a_preempted_request_finds_its_own_blocks_if_they_are_still_there():
    driver = Driver(make_config(10), 1)
    requests = [driver.add(make_request(prompt(9, i), 16)) for i in range(3)]
    driver.run()
    assert any(r.num_preemptions for r in requests)
    driver.check_results()


@pytest.mark.parametrize("eos_ids", [frozenset(), frozenset([VOCAB])], ids=["known", "unknown"])
def test_requests_of_known_length_start_when_they_can_run_to_their_end(eos_ids):
    driver = Driver(make_config(12, max_num_seqs=8))
    for i in range(6):
        driver.add(make_request(prompt(8, 9 * i), 6 + 3 * i, eos_ids=eos_ids))
    driver.run()
    assert (driver.scheduler.num_preemptions > 0) == bool(eos_ids)
    assert max(len(step.requests) for step in driver.runner.steps) >= 2
    driver.check_results()


def test_logits_that_are_not_numbers_end_one_request(monkeypatch):
    driver = Driver(make_config(20))
    bad, good = driver.add(make_request(prompt(3), 4)), driver.add(make_request(prompt(3, 9), 4))
    follows = driver.runner._follows
    monkeypatch.setattr(driver.runner, "_follows", lambda r, stop: -1 if r is bad and stop == 5 else follows(r, stop))
    driver.run()
    assert bad.finish_reason == "error" and isinstance(bad.error, BminfError) and "at position 5" in str(bad.error)
    assert good.finish_reason == "length"


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_a_request_without_a_token_has_computed_is_not_found_by_others(ahead, monkeypatch):
    driver = Driver(make_config(30, source_blocks=8), ahead)
    source = tuple(prompt(6, 3))
    good = driver.add(make_request(prompt(9), 2, source_token_ids=source))
    driver.run()
    bad = driver.add(make_request(prompt(9), 8, source_token_ids=source))
    follows = driver.runner._follows
    monkeypatch.setattr(driver.runner, "_follows", lambda r, stop: -1 if r is bad and stop == 13 else follows(r, stop))
    driver.run()
    assert good.finish_reason == "length" and bad.finish_reason == "error" and bad.num_cached_tokens == 8
    assert not len(driver.blocks.source_pool.index)
    again = driver.add(make_request(prompt(9), 2, source_token_ids=source))
    driver.run()
    assert again.num_cached_tokens == 0 and again.output_token_ids == good.output_token_ids


def test_a_preempted_request_without_a_token_leaves_nothing_in_the_index(monkeypatch):
    driver = Driver(make_config(30), 1)
    bad = driver.add(make_request(prompt(9), 8))
    monkeypatch.setattr(driver.runner, "_follows", lambda r, stop: -1)
    driver.launch(), driver.launch()
    driver.scheduler._enter_launched()
    driver.scheduler._preempt(bad)
    assert len(driver.blocks.pools[0].index) == 3
    driver.fetch(), driver.fetch()
    assert bad.finish_reason == "error" and len(driver.blocks.pools[0].index) == 0
    driver.run()


# -- histories --------------------------------------------------------------------------------------------------------

KINDS = {
    "full": {"windows": (None,)},
    "window": {"windows": (6,)},
    "both": {"windows": (None, 6, 3)},
    "source": {"windows": (None,), "source_blocks": 8},
    "no reuse": {"windows": (None,), "prefix_cache": False},
    "states": {"windows": (None, STATE), "slots": 6},
    "states alone": {"windows": (STATE,), "slots": 9},
    "few states": {"windows": (STATE, None, 6), "slots": 3},
    "states without reuse": {"windows": (None, STATE), "prefix_cache": False},
}


class Histories(RuleBasedStateMachine):
    """Random arrivals, cancellations, and steps launched and fetched in any interleaving, in a small cache."""

    arrivals = 0

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        blocks=st.integers(9, 14),
        seqs=st.integers(1, 5),
        ahead=st.integers(0, 3),
        drafts=st.integers(0, 4),
        adaptive=st.booleans(),
        slots=st.integers(0, 2),
    )
    def start(self, kind, blocks, seqs, ahead, drafts, adaptive, slots) -> None:
        speculative = SpeculativeConfig("ngram", adaptive=adaptive)
        limits = {"max_num_seqs": seqs, "num_draft_tokens": drafts, "speculative": speculative, **KINDS[kind]}
        limits["num_adapter_slots"] = slots
        self.adapters = [None, *map(adapter_named, "abc")] if slots else [None]
        self.driver = Driver(make_config(blocks, **limits), ahead)

    @rule(
        length=st.integers(1, 20),
        family=st.integers(0, 2),
        new=st.integers(1, 14),
        eos=st.booleans(),
        priority=st.sampled_from([0, 0, 1]),
        scored=st.sampled_from([False, False, False, True]),
        source=st.integers(1, 12),
        count=st.integers(1, 3),
        streamed=st.booleans(),
        adapter=st.integers(0, 3),
    )
    def arrive(self, length, family, new, priority, eos, scored, source, count, streamed, adapter) -> None:
        source_ids = tuple(prompt(source, family)) if self.driver.blocks.source_pool else ()
        for _ in range(count):
            type(self).arrivals += 1
            self.driver.add(
                make_request(
                    prompt(length, family),
                    new,
                    priority=priority,
                    eos_ids=frozenset(range(9) if eos else ()),
                    prompt_logprobs=scored,
                    source_token_ids=source_ids,
                    is_streamed=streamed,
                    adapter=self.adapters[adapter % len(self.adapters)],
                )
            )

    @precondition(lambda self: any(r.finish_reason is None for r in self.driver.requests))
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        live = [r for r in self.driver.requests if r.finish_reason is None]
        assert self.driver.scheduler.end(live[which % len(live)], "cancelled")
        self.driver.check()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: len(self.driver.in_flight) <= self.driver.max_steps_in_flight)
    @rule()
    def launch(self) -> None:
        self.driver.launch()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def fetch(self) -> None:
        self.driver.fetch()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check_results()
            assert all(r.finish_reason in ("stop", "length", "context", "cancelled") for r in self.driver.requests)


def test_any_history_gives_each_request_what_it_gets_alone(monkeypatch):
    monkeypatch.setattr(block_manager, "SNAPSHOT_TOKENS", 5)  # within prompts of up to 20 tokens too
    run_state_machine_as_test(Histories, settings=settings(max_examples=45, stateful_step_count=30, deadline=None))


@pytest.mark.slow
def test_ten_thousand_arrivals():
    Histories.arrivals = 0
    while Histories.arrivals < 10_000:
        run_state_machine_as_test(
            Histories, settings=settings(max_examples=200, stateful_step_count=60, deadline=None, derandomize=False)
        )


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_drafts_bring_several_tokens_a_step(ahead):
    driver = Driver(make_config(40, num_draft_tokens=3), ahead)
    driver.add(make_request(prompt(5), 24))
    driver.run()
    driver.check_results()
    scheduler = driver.scheduler
    assert len(driver.runner.steps) < 18
    assert 0 < scheduler.num_accepted_tokens < scheduler.num_draft_tokens


def test_the_rows_of_a_step_with_drafts_are_bounded():
    driver = Driver(make_config(60, num_draft_tokens=4, max_num_draft_rows=7))
    for i in range(4):
        driver.add(make_request(prompt(3, i), 20))
    driver.run()
    driver.check_results()
    rows = [len(step.decoding) for step in driver.runner.steps if step.drafts]
    assert max(rows) == 7
    assert all(not step.pieces for step in driver.runner.steps if step.drafts)


def test_a_request_that_has_ended_is_not_kept_until_its_deadline():
    driver = Driver(make_config())
    for deadline in (1e12, 2e12):
        driver.add(make_request([1, 2], 3, deadline=deadline))
    driver.run()
    assert not driver.scheduler._with_deadline


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_long_completion_is_not_read_again_at_each_step(prefix_cache, monkeypatch):
    """Each accepted token is read at most twice: when it is computed, and for the key of its block."""
    read = []
    token_ids = Request.token_ids
    monkeypatch.setattr(Request, "token_ids", lambda *of: read.extend(token_ids(*of)) or token_ids(*of))
    driver = Driver(make_config(prefix_cache=prefix_cache))
    driver.add(make_request([1, 2], 30))
    driver.run()
    assert len(read) <= 2 * 32
