"""Generation by real models: a request gets what it gets alone, whatever runs beside it and however it is cut."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit import CONFIG, WatchedBackend, make_model, prompt_of, request, run

from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.engine.request import Request
from bminf_lite.errors import BminfError, OutOfMemory, UsageError

EOS = frozenset([11, 23])
CONTEXT = 256
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"model_type": "mistral", "sliding_window": 40},
    "mixed": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
}
MIXED_FIRST = ["mixed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "window"))]
"""A mixed model has layers of both kinds."""


def tiny(kind: str = "full", ops: Backend | None = None, int8: bool = False, **options: Any) -> Model:
    """A float model, or a quantized one."""
    base = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    config = {"model_type": "llama"} | base | KINDS[kind]
    model = make_model(ops, **options, **config)
    shape = model.engine_config.cache_layout.with_int8(int8)
    return Model(model.network, replace(model.engine_config, cache_layout=shape), eos_ids=model.eos_ids)


ALONE = {(kind, int8): tiny(kind, int8=int8) for kind in KINDS for int8 in (False, True)}
CPU_ALONE = {
    (kind, int8): tiny(kind, CpuBackend(), int8, quantized=True, limits={"prefix_cache": False}, max_batch=1)
    for kind in KINDS
    for int8 in (False, True)
}
EXACT = make_model(quantized=True)
FLOAT = make_model()


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
        {"temperature": 0.7, "logit_bias": {5: 3.0}, "min_tokens": 1, "logprobs": 2},
    ]
)
LENGTHS = st.one_of(st.integers(1, 80), st.integers(1, 200))
REQUESTS = st.lists(
    st.tuples(LENGTHS, st.integers(0, 2), st.integers(1, 14), SAMPLERS, st.booleans()), min_size=1, max_size=5
)


def make_requests(drawn: list) -> list[Request]:
    """Prompts of few families, so that they share prefixes."""
    return [
        request(i, prompt_of(200, family)[:length], EOS, max_new_tokens=new, ignore_eos=ignore, **sampler)
        for i, (length, family, new, sampler, ignore) in enumerate(drawn)
    ]


def check_equal(found: Request, expected: Request) -> None:
    assert (found.output_token_ids, found.finish_reason) == (expected.output_token_ids, expected.finish_reason)
    assert found.logprobs == expected.logprobs


# -- equal to alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, True], ids=["fp32 cache", "int8 cache"])
@pytest.mark.parametrize("kind", MIXED_FIRST)
@settings(max_examples=6)
@given(
    drawn=REQUESTS,
    max_batch=st.integers(1, 5),
    ahead=st.integers(0, 3),
    chunk=st.sampled_from([7, 64, 300]),
    mixed=st.sampled_from([1, 9, 300]),
    blocks=st.sampled_from([6, 7, 20]),
    prefix_cache=st.booleans(),
    sizes=st.sampled_from([((), ()), ((2,), ()), ((1, 4, 8), (5, 40)), ((3,), (100,))]),
)
def test_together_or_alone_is_the_same(kind, int8, drawn, max_batch, ahead, chunk, mixed, blocks, prefix_cache, sizes):
    """In pieces, beside others, padded, behind cached prefixes (also in a second round), and preempted."""
    limits = {"max_num_mixed_tokens": mixed, "prefix_cache": prefix_cache}
    ops = WatchedBackend(ahead, *sizes)
    model = tiny(kind, ops, int8, max_batch=max_batch, chunk=chunk, num_blocks=blocks, limits=limits)
    expected = run(ALONE[kind, int8], make_requests(drawn))
    for _ in range(2):
        for found, alone in zip(run(model, make_requests(drawn)), expected, strict=True):
            check_equal(found, alone)
    model.close()
    assert ops.memory_is_free


@pytest.mark.parametrize("int8", [False, True], ids=["fp32 cache", "int8 cache"])
@pytest.mark.parametrize("kind", MIXED_FIRST)
@settings(max_examples=6)
@given(drawn=REQUESTS, chunk=st.sampled_from([7, 64, 300]), max_batch=st.integers(1, 4))
def test_w8a8_on_a_cpu_is_the_same_behind_cached_prefixes(kind, int8, drawn, chunk, max_batch):
    """Without what makes other models independent of a step here. Of up to four sequences, also their logits are."""
    expected = run(CPU_ALONE[kind, int8], make_requests(drawn))
    with tiny(kind, CpuBackend(), int8, quantized=True, max_batch=max_batch, chunk=chunk) as model:
        for _ in range(2):
            for found, alone in zip(run(model, make_requests(drawn)), expected, strict=True):
                check_equal(found, alone)
        prompt = prompt_of(200, 0)
        cached = model.logits(prompt, start=len(prompt) - 3)  # of up to four rows, which are computed by row
    with tiny(kind, CpuBackend(), int8, quantized=True) as fresh:
        np.testing.assert_array_equal(cached, fresh.logits(prompt, start=len(prompt) - 3))


@pytest.mark.parametrize("kind", MIXED_FIRST)
def test_preempted_requests_continue_as_if_nothing_had_happened(kind):
    drawn = [(60, i, 90, {"temperature": 0.9 * (i % 2)}, False) for i in range(3)]

    def endless() -> list[Request]:
        """Requests that might end early, for all that the engine knows."""
        return [replace(r, eos_ids=frozenset([CONFIG["vocab_size"]])) for r in make_requests(drawn)]

    with tiny(kind, WatchedBackend(1), num_blocks=6, chunk=32) as model:
        together = run(model, endless())
        assert model.stats().preemptions > 0 or kind == "window", "a window gives its blocks back"
        assert model.stats().blocks_used == 0
    for found, alone in zip(together, endless(), strict=True):
        check_equal(found, run(ALONE[kind, False], [alone])[0])


def test_captured_steps_serve_any_sequences(monkeypatch):
    """Two sizes and three lengths, and six with prompts: no more captures, whatever requests come."""
    monkeypatch.setattr("bminf_lite.engine.step_builder.CAPTURED_LENGTHS", (64, 96))
    ops, captures = WatchedBackend(1, (2, 6), (16, 150)), []
    drawn = [(1 + 17 * i % 90, i % 3, 3 + 11 * i % 60, {"temperature": 0.8 * (i % 2)}, True) for i in range(24)]
    with tiny(ops=ops, max_batch=5) as model:
        for _ in range(2):
            requests = make_requests(drawn)
            run(model, requests)
            captures.append(ops.captures)
    assert 5 <= captures[0] <= captures[1] <= 2 * 3 + 2 * 3 and ops.samples > 8 * captures[1]
    for found, alone in zip(requests, run(ALONE["full", False], make_requests(drawn)), strict=True):
        check_equal(found, alone)


@pytest.mark.slow
def test_a_thousand_ragged_requests_capture_nothing_after_a_warm_up(monkeypatch):
    monkeypatch.setattr("bminf_lite.engine.step_builder.CAPTURED_LENGTHS", (64,))
    ops = WatchedBackend(1, (2, 8, 16), (16, 64))
    with tiny(ops=ops, max_batch=16, chunk=128, num_blocks=60) as model:
        model.warm_up()
        captures, arrays = ops.captures, len(ops.arrays)
        requests = [
            request(i, prompt_of(1 + i * 37 % 90, i % 50), EOS, max_new_tokens=1 + i % 12, temperature=0.7 * (i % 2))
            for i in range(1000)
        ]
        run(model, requests)
        assert (ops.captures, len(ops.arrays)) == (captures, arrays) and model.stats().preemptions == 0
    for i in range(0, 1000, 83):
        r = requests[i]
        again = request(i, r.prompt_token_ids, EOS, max_new_tokens=1 + i % 12, temperature=0.7 * (i % 2))
        check_equal(r, run(ALONE["full", False], [again])[0])


T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "vocab_size": 61, "num_heads": 4, "num_layers": 1}


@pytest.mark.parametrize("config", [{}, T5], ids=["decoder", "encoder-decoder"])
def test_after_a_warm_up_nothing_is_captured_or_allocated(config, monkeypatch):
    monkeypatch.setattr("bminf_lite.engine.step_builder.CAPTURED_LENGTHS", (4, 24))
    monkeypatch.setattr("bminf_lite.engine.executor.FIRST_BLOCKS", 2)
    ops = WatchedBackend(1, (2, 6), (5,))
    model = make_model(ops, max_batch=6, chunk=9, **config)
    model.warm_up()
    captures, arrays = ops.captures, len(ops.arrays)
    assert captures == 2 * 3 + 2, (
        "for each length; 6 and 5 tokens exceed a step, and prompts have the last length alone"
    )
    options = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0.7, "seed": 1, "repetition_penalty": 1.2}
    found = model.generate([prompt_of(3 + 5 * i) for i in range(9)], **options)
    assert (ops.captures, len(ops.arrays)) == (captures, arrays)
    expected = make_model(**config).generate([prompt_of(3 + 5 * i) for i in range(9)], **options)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


def test_a_prefix_is_computed_once_and_the_results_say_so():
    with tiny(chunk=64) as model:
        prompt = prompt_of(200)
        first, second = (model.generate(prompt, max_new_tokens=8, ignore_eos=True) for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 192) and first.token_ids == second.token_ids
        turn = model.generate([*prompt, *second.token_ids, 5], max_new_tokens=4)
        assert turn.cached_tokens == 192 and second.to_dict()["cached_tokens"] == 192
        many = model.generate([prompt_of(140, 3)] * 4, max_new_tokens=4, temperature=1.0, seed=3)
        assert [r.cached_tokens for r in many] == [0, 128, 128, 128]
        assert model.generate(prompt, max_new_tokens=2, cache_salt="tenant").cached_tokens == 0
        assert model.stats().cached_tokens == 192 * 2 + 128 * 3
        expected = [
            r.token_ids
            for r in ALONE["full", False].generate([prompt_of(140, 3)] * 4, max_new_tokens=4, temperature=1.0, seed=3)
        ]
        assert [r.token_ids for r in many] == expected


@pytest.mark.parametrize("chunk", [7, 300])
@pytest.mark.parametrize("device", [False, True])
def test_logits_of_a_few_tokens_compute_only_what_is_not_in_the_cache(chunk, device):
    prompt, drafted = prompt_of(150), [5, 17, 3, 60]
    expected = ALONE["full", False].logits(prompt + drafted)[149:]
    with tiny(chunk=chunk) as model:
        model.generate(prompt, max_new_tokens=1)
        np.testing.assert_allclose(model.logits(prompt + drafted, device, start=149), expected, atol=1e-5)
        assert model.stats().cached_tokens == 149
        with pytest.raises(UsageError, match="start is 4, but must be the position of one of the 4 tokens"):
            model.logits(drafted, start=4)
        with pytest.raises(UsageError, match=r"start is 1\.5, but must be the position"):
            model.logits(drafted, start=1.5)


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
    first = [next(stream) for stream in streams]
    ends = [p.result for stream in streams for p in stream if p.result is not None]
    expected = [EXACT.generate(prompts[0], **options), *EXACT.generate(prompts[1], **options)]
    assert len(first) == 2 and sorted(r.token_ids for r in ends) == sorted(r.token_ids for r in expected)


def test_asyncio():
    async def together() -> tuple[Any, Any, list[int]]:
        streamed = []

        async def read() -> None:
            async for piece in EXACT.astream(prompt_of(9, 2), max_new_tokens=9):
                streamed.extend(piece.token_ids)

        one, several, _ = await asyncio.gather(
            EXACT.agenerate(prompt_of(5), max_new_tokens=7),
            EXACT.agenerate([prompt_of(4), prompt_of(6)], max_new_tokens=7, temperature=1.0, seed=2),
            read(),
        )
        return one, several, streamed

    one, several, streamed = asyncio.run(together())
    assert one.token_ids == EXACT.generate(prompt_of(5), max_new_tokens=7).token_ids
    expected = EXACT.generate([prompt_of(4), prompt_of(6)], max_new_tokens=7, temperature=1.0, seed=2)
    assert [r.token_ids for r in several] == [r.token_ids for r in expected]
    assert streamed == EXACT.generate(prompt_of(9, 2), max_new_tokens=9).token_ids


def test_seeds():
    """A seed repeats, no seed does not, and the prompts of one call draw differently."""
    options = {"max_new_tokens": 20, "temperature": 1.5}
    first, second = (EXACT.generate([prompt_of(5)] * 4, seed=8, **options) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert len({tuple(r.token_ids) for r in first}) == 4
    assert len({tuple(EXACT.generate(prompt_of(5), **options).token_ids) for _ in range(4)}) == 4


# -- logits and log-probabilities of prompts --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("kind", MIXED_FIRST)
def test_log_probabilities_of_a_prompt(kind, rows):
    """However many a step computes, and although the prompt is in the cache."""
    ops, computed = WatchedBackend(), []
    with tiny(kind, ops, limits={"max_logit_rows": rows}) as model:
        prompt = prompt_of(150)
        model.generate(prompt, max_new_tokens=1)
        linear = ops.linear
        ops.linear = lambda x, *rest, **kind: (computed.append(len(x)) if kind else None, linear(x, *rest, **kind))[1]
        result = model.generate(prompt, max_new_tokens=3, prompt_logprobs=True, logprobs=0)
        assert 0 < max(computed) <= rows + 1, "never the logits of the whole prompt: those to score, and the last"
        ops.linear = linear
        logits = model.logits(prompt).astype(np.float64)[:-1]
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = logprobs[np.arange(149), prompt[1:]]
        assert result.prompt_logprobs[0] is None and result.cached_tokens == 0
        np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=2e-5)
        assert result.token_ids == model.generate(prompt, max_new_tokens=3).token_ids
        assert result.to_dict()["prompt_logprobs"] == result.prompt_logprobs
        assert model.generate([3], max_new_tokens=1, prompt_logprobs=True).prompt_logprobs == [None]


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_the_most_likely_tokens_at_the_places_of_a_prompt(rows):
    """The number that a request wants, beside others that want fewer or none."""
    with tiny("full", limits={"max_logit_rows": rows}) as model:
        prompts = [prompt_of(40, i) for i in range(3)]
        plain, most, best = (request(i, prompt, max_new_tokens=2) for i, prompt in enumerate(prompts))
        most = replace(most, prompt_logprobs=True, num_prompt_top=4)
        best = replace(best, prompt_logprobs=True)
        run(model, [plain, most, best])
        assert plain.prompt_top_logprobs == []
        for found, count in ((most, 4), (best, 1)):
            logits = model.logits(found.prompt_token_ids).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            assert found.prompt_top_logprobs[0] is None
            for place, top in enumerate(found.prompt_top_logprobs[1:]):
                assert len(top) == count and len({token for token, _ in top}) == count
                np.testing.assert_allclose([v for _, v in top], np.sort(logprobs[place])[::-1][:count], atol=2e-5)
                np.testing.assert_allclose([v for _, v in top], logprobs[place, [t for t, _ in top]], atol=2e-5)


def test_logits_while_others_generate():
    prompts = [prompt_of(90, i) for i in range(4)]
    expected = [ALONE["full", False].logits(p) for p in prompts]
    with tiny(ops=WatchedBackend(1), num_blocks=7, chunk=32, max_batch=3) as model:
        stream = model.stream([prompt_of(60, 8), prompt_of(60, 9)], max_new_tokens=100, ignore_eos=True)
        next(stream)
        for prompt, logits in zip(prompts, expected, strict=True):
            np.testing.assert_allclose(model.logits(prompt), logits, atol=1e-5)
            np.testing.assert_allclose(model.logits(prompt, device=True), logits, atol=1e-5)
            start = len(prompt) * 2 // 3
            np.testing.assert_allclose(model.logits(prompt, start=start), logits[start:], atol=1e-5)
        assert all(len(p.token_ids) == 1 for p in stream)


# -- how a request ends -----------------------------------------------------------------------------------------------


def test_what_ends_a_request():
    context = FLOAT.engine_config.context_length
    tokens = greedy_by_hand(FLOAT, prompt_of(5), 20)
    eos = frozenset([tokens[7]])
    (r,) = run(FLOAT, [request(0, prompt_of(5), eos, max_new_tokens=20)])
    assert r.output_token_ids == tokens[: tokens.index(tokens[7]) + 1]
    assert (r.finish_reason, r.ended_by_eos) == ("stop", True)
    (r,) = run(FLOAT, [request(0, prompt_of(5), eos, max_new_tokens=20, ignore_eos=True)])
    assert (r.output_token_ids, r.finish_reason, r.ended_by_eos) == (tokens, "length", False)
    for length in (context - 1, context - 5):
        (r,) = run(FLOAT, [request(0, prompt_of(length), max_new_tokens=1000)])
        assert (len(r.output_token_ids), r.finish_reason) == (context - length, "context")
    (r,) = run(FLOAT, [request(0, prompt_of(context - 5), max_new_tokens=5)])
    assert (len(r.output_token_ids), r.finish_reason) == (5, "length"), "both bounds at once: what was asked for"


@pytest.mark.parametrize("max_steps_in_flight", [0, 1, 3])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_no_step_is_wasted_on_a_request_that_is_alone(max_steps_in_flight, new):
    ops = WatchedBackend(max_steps_in_flight)
    result = make_model(ops).generate(prompt_of(4), max_new_tokens=new)
    assert (len(result.token_ids), result.finish_reason, ops.samples) == (new, "length", new)


def test_a_piece_that_completes_no_prompt_chooses_no_token():
    ops = WatchedBackend()
    run(make_model(ops, chunk=8), [request(0, prompt_of(40), max_new_tokens=1)])
    assert ops.samples == 1


def test_a_deadline():
    ops = WatchedBackend()
    ops.interrupt = lambda: time.sleep(0.01)
    with make_model(ops) as model:
        pieces = list(model.stream(prompt_of(5), max_new_tokens=90, deadline=0.15))
        assert pieces[-1].result.finish_reason == "deadline"
        assert [t for p in pieces for t in p.token_ids] == pieces[-1].result.token_ids and len(pieces) < 60


def test_a_request_that_waits_starts_when_another_ends():
    with make_model(WatchedBackend(1), max_batch=2) as model:
        requests = [request(i, prompt_of(5, i), max_new_tokens=n) for i, n in enumerate([30, 3, 4, 4])]
        run(model, requests)
    assert all(r.last_token_time < requests[0].last_token_time for r in requests[1:])
    assert requests[3].start_time >= requests[2].start_time >= requests[1].last_token_time


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 1.5}, "priority is 1.5, but must be a whole number"),
        ({"deadline": 0}, "deadline is 0, but must be seconds, more than 0"),
        ({"cache_salt": 3}, "cache_salt is 3, but must be a text"),
        ({"add_special_tokens": 1}, "add_special_tokens is 1, but must be True or False"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is 1, but must be True or False"),
        ({"max_new_tokens": 96}, "can never run: 96 tokens need 2 blocks of 64 tokens .* which has 1"),
    ],
)
def test_invalid_options(options, words):
    with make_model(num_blocks=2) as model, pytest.raises(UsageError, match=words):
        model.generate(prompt_of(5), **options)


def test_numbers_of_numpy_mean_what_python_s_do(monkeypatch):
    """An unsigned priority would wrap when it is negated, and a narrow deadline would round the time of day."""
    seen: list[Request] = []
    with make_model() as model:
        submit = model.engine.submit
        monkeypatch.setattr(model.engine, "submit", lambda requests: (seen.extend(requests), submit(requests)))
        before = time.perf_counter()
        model.generate(prompt_of(3), max_new_tokens=1, priority=np.uint8(3), deadline=np.float16(9))
    assert seen[0].order == (-3, 1)
    assert type(seen[0].deadline) is float and seen[0].deadline - before >= 9


class FullBackend(WatchedBackend):
    """Has memory for the cache's first blocks and no more, until ``is_full`` is false."""

    is_full = True

    def grow(self, cache, num_blocks):
        if self.is_full:
            raise MemoryError("64 bytes asked for, none left")  # as NumPy's; a GPU's is OutOfMemory, which is one too
        super().grow(cache, num_blocks)


def test_out_of_memory_leaves_a_usable_model(monkeypatch):
    monkeypatch.setattr("bminf_lite.engine.executor.FIRST_BLOCKS", 3)
    ops = FullBackend(max_steps_in_flight=1)
    model = make_model(ops)
    with pytest.raises(OutOfMemory, match=r"no room for the key-value cache: 64 bytes.* max_batch"):
        model.generate([prompt_of(70, i) for i in range(2)], max_new_tokens=4)
    expected = FLOAT.generate(prompt_of(70), max_new_tokens=4).token_ids
    assert model.generate(prompt_of(70), max_new_tokens=4).token_ids == expected
    ops.is_full = False
    assert model.generate([prompt_of(70)] * 3, max_new_tokens=4)[2].token_ids == expected
    model.close()
    assert ops.memory_is_free


def test_out_of_memory_at_the_start_is_an_error_of_the_call():
    class NoMemory(WatchedBackend):
        def layer_cache(self, *shape, **kind):
            if len(self.arrays) == 2:
                raise MemoryError("none left")
            return super().layer_cache(*shape, **kind)

    ops = NoMemory()
    with pytest.raises(OutOfMemory, match="none left") as failure:
        make_model(ops).generate(prompt_of(5))
    assert failure and ops.memory_is_free


def test_closing_a_stream_early_gives_its_blocks_back():
    model = make_model(WatchedBackend(max_steps_in_flight=2))
    unused = model.stream(prompt_of(5))
    unused.close()
    assert model.stats().steps == 0
    go_on = threading.Event()
    model.ops.interrupt = lambda: model.ops.samples < 20 or go_on.wait(300)
    stream = model.stream([prompt_of(5), prompt_of(9)], max_new_tokens=80)
    for _ in range(7):
        next(stream)
    assert model.stats().running == 2
    go_on.set()
    stream.close()
    model.generate([1], max_new_tokens=1)
    assert (model.stats().running, model.stats().blocks_used) == (0, 0)
    assert list(stream) == []
    model.close()
    assert model.ops.memory_is_free


def test_nan_logits_are_an_error_of_their_request_that_names_the_position():
    class Broken(WatchedBackend):
        def sample(self, logits, sampler):
            broken = logits.copy()
            broken[0] *= np.nan if self.samples == 3 else 1
            return super().sample(broken, sampler)

    model = make_model(Broken())
    bad, good = request(0, prompt_of(5), max_new_tokens=12), request(1, prompt_of(6), max_new_tokens=12)
    with pytest.raises(BminfError, match="prompt 0: no token can be chosen at position 8"):
        run(model, [bad, good])
    model.generate([1], max_new_tokens=20)
    check_equal(good, run(FLOAT, [request(1, prompt_of(6), max_new_tokens=12)])[0])
    assert len(bad.output_token_ids) == 3 and model.stats().blocks_used == 0
