"""The decoding loop: a request gets the same tokens however requests are batched, chunked and run ahead."""

from __future__ import annotations

from contextlib import closing
from itertools import zip_longest

import numpy as np
import pytest
from bminf_lite.engine.generation import generate_tokens
from hypothesis import given
from hypothesis import strategies as st
from model_kit import WatchedBackend, make_model, prompt_of, request, run

from bminf_lite.api import Model
from bminf_lite.engine.request import Request
from bminf_lite.errors import BminfError, OutOfMemory

EOS = frozenset([11, 23])
EXACT = make_model(quantized=True)
FLOAT = make_model()
CONTEXT = EXACT.engine_config.context_length


def outcome(r: Request) -> tuple[list[int], str | None, list[float]]:
    return r.output_token_ids, r.finish_reason, r.logprobs


def greedy_by_hand(model: Model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


SAMPLERS = st.sampled_from(
    [
        {},
        {"temperature": 0.9},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8},
        {"repetition_penalty": 1.4},
        {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    ]
)
REQUESTS = st.lists(
    st.tuples(st.integers(1, CONTEXT - 1), st.integers(1, 14), SAMPLERS, st.booleans()), min_size=1, max_size=5
)


def make_requests(drawn: list) -> list[Request]:
    return [
        request(i, prompt_of(length, i), EOS, max_new_tokens=new, ignore_eos=ignore, **sampler)
        for i, (length, new, sampler, ignore) in enumerate(drawn)
    ]


# -- invariants -------------------------------------------------------------------------------------------------------


@given(REQUESTS, st.integers(1, 5), st.integers(0, 3))
def test_together_or_alone_is_the_same(drawn, max_batch, max_steps_in_flight):
    """Ragged prompts, more of them than slots, regrouping, growth, penalties, draws: bit for bit."""
    ops = WatchedBackend(max_steps_in_flight)
    together = run(make_model(ops, quantized=True, max_batch=max_batch), make_requests(drawn))
    alone = [run(EXACT, [r])[0] for r in make_requests(drawn)]
    assert [outcome(r) for r in together] == [outcome(r) for r in alone]
    assert ops.memory_is_free


@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 2))
def test_chunks_of_prompts_are_the_same_as_whole_prompts(lengths, chunk, max_steps_in_flight):
    def tokens(model: Model) -> list[list[int]]:
        requests = [request(i, prompt_of(n, i), max_new_tokens=6) for i, n in enumerate(lengths)]
        return [r.output_token_ids for r in run(model, requests)]

    assert tokens(make_model(WatchedBackend(max_steps_in_flight), chunk=chunk, max_batch=3)) == tokens(FLOAT)


def test_greedy_takes_the_largest_logit_each_time():
    for length in (1, 9, 40):
        prompt = prompt_of(length)
        result = FLOAT.generate(prompt, max_new_tokens=12, logprobs=0)
        assert result.token_ids == greedy_by_hand(FLOAT, prompt, 12)
        logits = FLOAT.logits(prompt + result.token_ids)[length - 1 : -1].astype(np.float64)
        expected = logits.max(axis=1) - np.log(np.exp(logits).sum(axis=1))
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)


def test_streams_interleave():
    model = make_model(WatchedBackend(1), quantized=True)
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5}
    prompts = [prompt_of(20, 1), [prompt_of(3, 2), prompt_of(50, 3)]]
    streams = [model.stream(p, **options) for p in prompts]
    ends = [p.result for pair in zip_longest(*streams) for p in pair if p is not None and p.result is not None]
    expected = [model.generate(prompts[0], **options), *model.generate(prompts[1], **options)]
    assert sorted(r.token_ids for r in ends) == sorted(r.token_ids for r in expected)


def test_seeds():
    """A seed repeats, no seed does not, and the prompts of one call draw differently."""
    options = {"max_new_tokens": 20, "temperature": 1.5}
    first, second = (EXACT.generate([prompt_of(5)] * 4, seed=8, **options) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert len({tuple(r.token_ids) for r in first}) == 4
    assert len({tuple(EXACT.generate(prompt_of(5), **options).token_ids) for _ in range(4)}) == 4


# -- how a request ends -----------------------------------------------------------------------------------------------


def test_what_ends_a_request():
    tokens = greedy_by_hand(FLOAT, prompt_of(5), 20)
    eos = frozenset([tokens[7]])
    (r,) = run(FLOAT, [request(0, prompt_of(5), eos, max_new_tokens=20)])
    assert r.output_token_ids == tokens[: tokens.index(tokens[7]) + 1]
    assert (r.finish_reason, r.ended_by_eos) == ("stop", True)
    (r,) = run(FLOAT, [request(0, prompt_of(5), eos, max_new_tokens=20, ignore_eos=True)])
    assert (r.output_token_ids, r.finish_reason, r.ended_by_eos) == (tokens, "length", False)
    for length in (CONTEXT - 1, CONTEXT - 5):
        (r,) = run(FLOAT, [request(0, prompt_of(length), max_new_tokens=1000)])
        assert (len(r.output_token_ids), r.finish_reason) == (CONTEXT - length, "length")


@pytest.mark.parametrize("max_steps_in_flight", [0, 1, 3])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_no_step_is_wasted_on_a_request_that_is_alone(max_steps_in_flight, new):
    ops = WatchedBackend(max_steps_in_flight)
    result = make_model(ops).generate(prompt_of(4), max_new_tokens=new)
    assert (len(result.token_ids), result.finish_reason, ops.samples) == (new, "length", new)


@pytest.mark.parametrize("max_steps_in_flight", [0, 2])
def test_a_row_at_the_end_of_the_context_does_not_overrun_it(max_steps_in_flight):
    """Seven rows continue long after the first has ended: the group is formed anew."""
    ops = WatchedBackend(max_steps_in_flight)
    drawn = [(n, 60, {}, True) for n in (CONTEXT - 2, *range(2, 9))]
    together = run(make_model(ops, quantized=True), make_requests(drawn))
    alone = [run(EXACT, [r])[0] for r in make_requests(drawn)]
    assert [outcome(r) for r in together] == [outcome(r) for r in alone]
    assert ops.largest == CONTEXT


@pytest.mark.parametrize("max_steps_in_flight", [0, 1])
def test_the_cache_does_not_grow_for_a_row_that_has_ended(max_steps_in_flight):
    ops = WatchedBackend(max_steps_in_flight)
    requests = [request(0, prompt_of(20), max_new_tokens=4)]
    requests += [request(i, prompt_of(2, i), max_new_tokens=20) for i in range(1, 8)]
    run(make_model(ops), requests)
    assert ops.grown == 0


def test_a_waiting_request_starts_when_a_slot_is_free(monkeypatch):
    for module in ("layers.cache", "engine.scheduler"):  # a cache that grows would end the group too
        monkeypatch.setattr(f"bminf_lite.{module}.CACHE_BLOCK", CONTEXT)
    lengths = [30, 30, 3, 30, 30, 30, 30, 30, 4, 4]
    requests = [request(i, prompt_of(5, i), max_new_tokens=n) for i, n in enumerate(lengths)]
    run(make_model(WatchedBackend(1), max_batch=8), requests)
    assert [r.slot for r in requests] == [*range(8), 2, 2]
    assert all(r.last_token_time < requests[0].last_token_time for r in requests[8:])


def test_ending_a_request_from_outside():
    requests = [request(i, prompt_of(6, i), max_new_tokens=30) for i in range(3)]
    with closing(generate_tokens(FLOAT.network, requests, FLOAT.engine_config)) as steps:
        for r in steps:
            if r.index == 1 and len(r.output_token_ids) == 4:
                r.finish_reason = "stop"
    assert [len(r.output_token_ids) for r in requests] == [30, 4, 30]


# -- what a backend relies on -----------------------------------------------------------------------------------------


class CapturingBackend(WatchedBackend):
    """Checks that a replayed step uses the same arrays as when it was captured."""

    def __init__(self) -> None:
        super().__init__(max_steps_in_flight=1)
        self.captures = 0
        self.touched: list[int] = []

    def attention(self, qkv, spec, cache, batch):
        self.touched += map(id, (cache.keys, cache.values, batch.tokens, batch.context_lens))
        self.touched += [cache.capacity, batch.max_context_len]
        return super().attention(qkv, spec, cache, batch)

    def capture(self, work):
        self.captures += 1
        first: list[list[int]] = []

        def checked():
            self.touched = []
            result = work()
            first.append(self.touched)
            assert self.touched == first[0]
            assert self.touched[-1] <= self.touched[-2]
            return result

        return checked


def test_a_captured_step_is_replayed_on_the_same_arrays():
    ops = CapturingBackend()
    run(make_model(ops), [request(i, prompt_of(3 + i, i), max_new_tokens=40) for i in range(3)])
    assert 1 < ops.captures <= 1 + ops.grown // 2 + 3


def test_a_chunk_that_completes_no_prompt_chooses_no_token():
    ops = WatchedBackend()
    run(make_model(ops, chunk=8), [request(0, prompt_of(40), max_new_tokens=1)])
    assert ops.samples == 1


# -- failures ---------------------------------------------------------------------------------------------------------


class FullBackend(WatchedBackend):
    """Lets the cache of one layer grow, and fails at the next."""

    def __init__(self, most: int):
        super().__init__(max_steps_in_flight=1)
        self.most = most

    def layer_cache(self, slots, kv_heads, capacity, head_dim, *, int8=False):
        if slots * capacity > self.most and len(self.arrays) % 4:
            raise MemoryError("64 bytes asked for, none left")  # as NumPy's; a GPU's is OutOfMemory, which is one too
        return super().layer_cache(slots, kv_heads, capacity, head_dim, int8=int8)


def test_out_of_memory_leaves_a_usable_model():
    """At the start, and while decoding. Memory is free although the failures' tracebacks are alive."""
    ops = FullBackend(40)
    model = make_model(ops)
    with pytest.raises(OutOfMemory, match="max_batch") as at_start:
        model.generate([prompt_of(20, i) for i in range(8)], max_new_tokens=4)
    assert ops.memory_is_free
    pieces = []
    with pytest.raises(OutOfMemory, match=r"no room for .* tokens of 1 sequences.*64 bytes") as while_decoding:
        pieces.extend(model.stream(prompt_of(8), max_new_tokens=80))
    assert 8 < len(pieces) < 80
    assert ops.memory_is_free
    assert at_start and while_decoding and len(model.generate(prompt_of(8), max_new_tokens=8).token_ids) == 8


@pytest.mark.parametrize("when", [1, 2, 7])
def test_an_interrupt_at_any_time_gives_memory_back(when):
    ops = WatchedBackend(max_steps_in_flight=1)
    model = make_model(ops)
    expected = model.generate(prompt_of(5), max_new_tokens=12).token_ids
    ops.samples = 0

    def interrupt() -> None:
        if ops.samples == when:
            raise KeyboardInterrupt

    ops.interrupt = interrupt
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt_of(5), max_new_tokens=12)
    assert ops.memory_is_free
    assert model.generate(prompt_of(5), max_new_tokens=12).token_ids == expected


def test_closing_a_stream_early_gives_memory_back():
    ops = WatchedBackend(max_steps_in_flight=2)
    model = make_model(ops)
    unused = model.stream(prompt_of(5))
    assert not ops.arrays
    unused.close()
    stream = model.stream([prompt_of(5), prompt_of(9)], max_new_tokens=12)
    for _ in range(7):
        next(stream)
    assert not ops.memory_is_free
    stream.close()
    assert ops.memory_is_free
    assert list(stream) == []
    assert len(model.generate(prompt_of(5), max_new_tokens=12).token_ids) == 12


def test_nan_logits_are_an_error_that_names_the_position():
    class Broken(WatchedBackend):
        def sample(self, logits, sampler, batch=None):
            return super().sample(logits if self.samples < 3 else logits * np.nan, sampler, batch)

    ops = Broken()
    with pytest.raises(BminfError, match="prompt 0: no token can be chosen at position 8"):
        make_model(ops).generate(prompt_of(5), max_new_tokens=12)
    assert ops.memory_is_free
