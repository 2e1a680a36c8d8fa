"""Drafts of n-grams, and what they leave as it is on a CPU, where BLAS may sum in another order for other rows."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_kit import make_model, prompt_of, request, run

from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.engine.drafts import NgramDrafter
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.engine.speculative import SpeculativeConfig

ALWAYS = SpeculativeConfig("ngram", adaptive=False)
TIE = 1e-3
"""Log-probabilities whose tokens BLAS may exchange: fp32 sums of 64 terms in another order differ by less."""


def expected_draft(tokens: list[int], sizes: tuple[int, ...], count: int) -> list[int]:
    """The definition: what followed the last earlier occurrence of the longest end that occurred before."""
    for size in sizes:
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                longer = list(tokens)
                for place in range(count):
                    longer.append(longer[end + place])
                return longer[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=30), st.integers(1, 9)
)
def test_the_last_occurrence_of_the_longest_end(prompt, new, count):
    sizes, drafter = (3, 2), NgramDrafter((3, 2))
    seen = Request(0, prompt, SamplingParams(seed=1))
    for known in range(len(new) + 1):
        if known:
            seen.output_tokens = array("i", new[:known])
            seen.num_known_tokens += 1
        assert list(drafter.propose(seen, count)) == expected_draft(prompt + new[:known], sizes, count)
    drafter.forget(seen)
    assert not drafter._indices


def test_on_a_cpu_a_draft_changes_a_token_only_at_a_tie():
    """Products of codes are exact there, but attention and logits are sums of floats in an order that rows decide."""
    texts = [prompt_of(7, i) * 5 for i in range(6)]
    with make_model(CpuBackend(), quantized=True) as model:
        plain = run(model, [request(i, text, max_new_tokens=60) for i, text in enumerate(texts)])
    with make_model(CpuBackend(), quantized=True, limits={"num_draft_tokens": 5, "speculative": ALWAYS}) as model:
        drafted = run(model, [request(i, text, max_new_tokens=60, logprobs=5) for i, text in enumerate(texts)])
        assert model.stats().accepted_tokens > 50
    for one, other in zip(plain, drafted, strict=True):
        pairs = enumerate(zip(one.output_token_ids, other.output_token_ids, strict=True))
        place = next((i for i, (a, b) in pairs if a != b), None)
        end = len(one.logprobs) if place is None else place
        np.testing.assert_allclose(one.logprobs[:end], other.logprobs[:end], atol=TIE)
        if place is not None:
            (_, best), (_, second) = other.top_logprobs[place][:2]
            assert best - second < TIE


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "w8a8"])
def test_on_a_cpu_steps_of_up_to_four_rows_keep_the_bits(quantized):
    """The reference computes float products of up to four rows one by one."""
    prompts = [prompt_of(7, i) * 4 for i in range(4)]
    options = [{}, {"temperature": 0.8}, {"repetition_penalty": 1.2}, {"temperature": 1.2, "min_tokens": 9}]

    def asked(i):
        return request(i, prompts[i], max_new_tokens=30, **options[i])

    with make_model(CpuBackend(), quantized=quantized) as model:
        plain = [run(model, [asked(i)])[0] for i in range(4)]
    with make_model(CpuBackend(), quantized=quantized, limits={"num_draft_tokens": 3, "speculative": ALWAYS}) as model:
        drafted = [run(model, [asked(i)])[0] for i in range(4)]
        assert model.stats().accepted_tokens > 0
    for one, other in zip(plain, drafted, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert one.logprobs == other.logprobs


def test_a_request_with_drafts_ends_where_it_ends_without():
    text = prompt_of(6) * 6
    with make_model(CpuBackend(), quantized=True) as model:
        (plain,) = run(model, [request(0, text, max_new_tokens=40)])
    end = frozenset([plain.output_token_ids[25]])
    count = plain.output_token_ids.index(next(iter(end))) + 1
    with make_model(CpuBackend(), quantized=True, limits={"num_draft_tokens": 8, "speculative": ALWAYS}) as model:
        (found,) = run(model, [request(0, text, end, max_new_tokens=40)])
        assert (found.finish_reason, len(found.output_token_ids)) == ("stop", count)
        for new in range(1, 12):
            (short,) = run(model, [request(0, text, max_new_tokens=new)])
            assert (short.finish_reason, len(short.output_token_ids)) == ("length", new)
        assert model.stats().blocks_used == 0


def test_what_was_accepted_is_told_of_each_request_and_of_all():
    texts = [prompt_of(7, i) * 5 for i in range(3)]
    with make_model(CpuBackend(), quantized=True, limits={"num_draft_tokens": 5, "speculative": ALWAYS}) as model:
        results = model.generate(texts, max_new_tokens=40)
        stats = model.stats()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert getattr(stats, name) == sum(getattr(result, name) for result in results) > 0
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    assert stats.tokens_per_check == 1 + stats.accepted_tokens / stats.drafts
    found = results[0].to_dict()["speculative"]
    assert found["accepted_tokens"] == results[0].accepted_tokens
