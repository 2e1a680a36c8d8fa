"""One builder makes the engine's requests, whether a call or a message of the server states what is wanted."""

from __future__ import annotations

import time
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="the extra [serve] is not installed")

from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import UsageError
from bminf_lite.grammar import Grammar
from bminf_lite.request_builder import GenerationRequest, RequestBuilder
from bminf_lite.server.protocol import FrameReader, Submit, ToEngine, frame
from bminf_lite.text.prompts import EncodedPrompt, PromptEncoder

DECODER = SimpleNamespace(vocab_size=61, context_length=32, is_encoder_decoder=False, max_source_length=0)
ENCODER_DECODER = SimpleNamespace(
    vocab_size=61, context_length=32, is_encoder_decoder=True, max_source_length=16, decoder_start_token_ids=(7, 8)
)


def builder(limits: SimpleNamespace, eos_ids: tuple[int, ...] = (2,)) -> RequestBuilder:
    return RequestBuilder(limits, eos_ids, lambda: PromptEncoder(None, limits).tokenizer)


def received(wanted: GenerationRequest) -> GenerationRequest:
    """What the engine's process receives of it."""
    (message,) = FrameReader(ToEngine).feed(frame(Submit(1, 0, wanted)))
    return message.request


EVERYTHING = GenerationRequest(
    PromptEncoder(None, DECODER).encode(EncodedPrompt([3, 1, 4], False, (), frozenset([9]))),
    SamplingParams(5, 0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, 2**64 - 1, ("a", "b"), True, 1, {4: -1.5}, 3),
    n=2,
    stop_token_ids=frozenset([11, 12]),
    priority=-4,
    deadline=2.5,
    cache_salt="é",
    prompt_logprobs=True,
    num_prompt_top=4,
    grammar=Grammar.regex("a+"),
    is_streamed=True,
)


def test_a_message_loses_nothing():
    found = received(EVERYTHING)
    for field in fields(GenerationRequest):
        if field.name != "prompt":
            assert getattr(found, field.name) == getattr(EVERYTHING, field.name), field.name
    assert list(found.prompt.token_ids) == list(EVERYTHING.prompt.token_ids)
    assert found.prompt.stop_ids == frozenset([9]) and not found.prompt.continues


def test_the_requests_of_a_message_are_those_of_a_call():
    times = {"arrival_time", "deadline"}
    for wanted in (EVERYTHING, GenerationRequest(EncodedPrompt([1]), SamplingParams(seed=3))):
        sent, called = (
            builder(DECODER).build(r, first_index=5, matchers=[None] * r.n) for r in (received(wanted), wanted)
        )
        for one, other in zip(sent, called, strict=True):
            for field in fields(Request):
                if field.name not in times:
                    same = getattr(one, field.name) == getattr(other, field.name)
                    assert same or field.name == "on_update", field.name


def test_what_is_built():
    now = time.perf_counter()
    first, second, third = builder(DECODER).build(
        EVERYTHING, GenerationRequest(EncodedPrompt([1]), SamplingParams()), first_index=3, matchers=[None, None]
    )[:3]
    assert (first.index, second.index, third.index) == (3, 4, 5)
    assert first.eos_ids == frozenset([2, 9, 11, 12]) and third.eos_ids == frozenset([2])
    assert first.deadline is not None and now + 2.5 <= first.deadline <= time.perf_counter() + 2.5
    assert third.params.seed is not None and third.deadline is None
    assert list(first.prompt_token_ids) == [3, 1, 4] and first.num_prompt_top == 4


def test_the_encoder_reads_the_prompt_and_the_decoder_its_target():
    prompt = EncodedPrompt([5, 6], False, (9,))
    (request,) = builder(ENCODER_DECODER).build(GenerationRequest(prompt, SamplingParams()))
    assert (list(request.source_token_ids), list(request.prompt_token_ids)) == ([5, 6], [7, 8, 9])
    with pytest.raises(UsageError, match="read by an encoder"):
        builder(ENCODER_DECODER).build(GenerationRequest(prompt, SamplingParams(), prompt_logprobs=True))


def test_what_does_not_fit_the_model():
    with pytest.raises(UsageError, match="0 to 60"):
        builder(DECODER).build(GenerationRequest(EncodedPrompt([1]), SamplingParams(logit_bias={61: 1.0})))
    with pytest.raises(UsageError, match="without a tokenizer"):
        builder(DECODER).build(GenerationRequest(EncodedPrompt([1]), SamplingParams(), grammar=Grammar.regex("a")))


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(UsageError) as error:
        GenerationRequest(EncodedPrompt([1]), SamplingParams(), 1, frozenset(), 0.5, float("nan"), 7, 1)  # type: ignore[arg-type]
    assert all(name in str(error.value) for name in ("priority", "deadline", "cache_salt", "prompt_logprobs"))
    assert type(GenerationRequest(EncodedPrompt([1]), SamplingParams(), priority=np.int8(5)).priority) is int
