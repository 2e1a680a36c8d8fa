"""Requests with grammars in the engine: what they give, when a step waits, and what goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_kit import EOS, VOCAB_SIZE, make_compiler, text_of
from hypothesis import given
from hypothesis import strategies as st
from model_kit import WatchedBackend, make_model, prompt_of, run

from bminf_lite.api import Model
from bminf_lite.engine.model_runner import LaunchedStep, ModelRunner
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.engine.step_builder import StepBuilder
from bminf_lite.errors import UsageError
from bminf_lite.grammar import Grammar

COMPILER = make_compiler()
NUMBER = Grammar.regex("[a-e]{3,9}:?[0-9]{1,30}")


def make_request(grammar: Grammar | None, index: int = 0, prompt: list[int] | None = None, **options: Any) -> Request:
    params = SamplingParams(**{"seed": 3, "max_new_tokens": 60, **options})
    matcher = COMPILER.matcher(grammar, EOS) if grammar else None
    return Request(index, prompt or prompt_of(9, index), params, EOS, matcher=matcher)


@pytest.fixture(scope="module")
def model():
    with make_model(WatchedBackend(1, (1, 4, 16)), vocab_size=VOCAB_SIZE, max_position_embeddings=512) as model:
        yield model


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of values that end after a bounded number of characters."""
    key = st.text("abcdefgh", min_size=1, max_size=3)
    leaf = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
            st.integers(-200, 200),
            st.integers(-200, 200),
        ),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
        st.builds(lambda c: {"enum": c}, st.lists(st.one_of(st.integers(0, 99), key), min_size=1, max_size=4)),
        st.builds(lambda n: {"type": "string", "pattern": f"^[a-c]{{{n}}}[0-9]?$"}, st.integers(0, 4)),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(
                lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
                inner,
                st.integers(0, 2),
                st.integers(0, 2),
            ),
            st.builds(
                lambda members, required: {
                    "type": "object",
                    "properties": members,
                    "required": sorted(members)[:required],
                    "additionalProperties": False,
                },
                st.dictionaries(key, inner, max_size=3),
                st.integers(0, 3),
            ),
            st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=5,
    )


@pytest.mark.slow
@given(schema=schemas(), seed=st.integers(0, 99))
def test_random_schemas_are_followed(model, schema, seed):
    requests = [
        make_request(Grammar.json_schema(schema), i, temperature=t, seed=seed, max_new_tokens=400)
        for i, t in enumerate((0, 1, 5))
    ]
    for request in run(model, requests):
        text = text_of(request.output_token_ids)
        assert request.finish_reason == "stop", text
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.slow
@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(["[a-c]", "(ab|12|c)", "[0-9]", "(true|false)", ":", "(a[0-9]?)"]),
            st.sampled_from(["", "?", "{2,5}", "{0,3}", "{4}"]),
        ),
        min_size=1,
        max_size=5,
    ),
    temperature=st.sampled_from([0, 1, 5]),
)
def test_random_regexes_are_followed(model, parts, temperature):
    pattern = "".join(part + count for part, count in parts)
    (request,) = run(model, [make_request(Grammar.regex(pattern), temperature=temperature, max_new_tokens=100)])
    assert request.finish_reason == "stop"
    assert re.fullmatch(pattern, text_of(request.output_token_ids))
    assert request.output_token_ids[-1] in EOS


def test_a_step_waits_only_for_tokens_that_its_masks_need(model, monkeypatch):
    """Requests without grammars are one step ahead; with one, the model runs ahead and the sampler does not."""
    waits: list[bool] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, step: Any) -> LaunchedStep:
        launched = launch(self, step)
        waits.append(launched.waits_for_tokens)
        return launched

    monkeypatch.setattr(ModelRunner, "launch", watched)
    run(model, [make_request(None, i, max_new_tokens=20) for i in range(3)])
    assert len(waits) >= 20 and not any(waits)
    waits.clear()
    run(model, [make_request(NUMBER, ignore_eos=True), make_request(None, 1)])
    assert not waits[0] and sum(waits) > 10
    assert not any(waits[40:])  # the one with the grammar has ended


def test_the_end_is_held_back_while_anything_else_is_allowed(model):
    free, least, ignoring = run(
        model,
        [
            make_request(Grammar.regex("a{1,30}"), 0, temperature=1, **options)
            for options in ({}, {"min_tokens": 8}, {"ignore_eos": True})
        ],
    )
    assert len(free.output_token_ids) < 8 <= len(least.output_token_ids) - 1
    assert text_of(ignoring.output_token_ids) == "a" * 30
    assert {r.finish_reason for r in (free, least, ignoring)} == {"stop"}
    (short,) = run(model, [make_request(Grammar.regex("ab"), min_tokens=20)])
    assert text_of(short.output_token_ids) == "ab" and short.finish_reason == "stop"


def test_penalties_biases_and_log_probabilities_work_beside_a_grammar(model):
    options = {"logit_bias": {8: 50.0}, "repetition_penalty": 1.2, "logprobs": 3, "temperature": 0.7}
    (request,) = run(model, [make_request(NUMBER, **options)])
    assert re.fullmatch(r"[a-e]{3,9}:?[0-9]{1,30}", text_of(request.output_token_ids))
    assert all(len(top) == 3 for top in request.top_logprobs) and not np.isnan(request.logprobs).any()


def test_a_dead_end_fails_that_request_alone(model):
    """The vocabulary has no m; the grammar allows one only after another character."""
    stuck, other = run_all(model, [make_request(Grammar.regex("[a-c]mm")), make_request(NUMBER, 1)])
    assert isinstance(stuck.error, UsageError) and "lacks a character" in str(stuck.error)
    assert len(stuck.output_token_ids) == 1
    assert other.finish_reason == "stop"
    with pytest.raises(UsageError, match="lacks a character"):
        make_request(Grammar.regex("m"))


def test_an_error_of_the_sampler_reaches_everyone(model, monkeypatch):
    """Also those whose last token came with the step before."""
    write = StepBuilder.masks
    calls = iter(range(100))

    def failing(self: StepBuilder, requests: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError("no room")
        return write(self, requests)

    monkeypatch.setattr(StepBuilder, "masks", failing)
    ends, fails = run_all(model, [make_request(None, 1, max_new_tokens=3), make_request(NUMBER)])
    assert ends.finish_reason == "length" and isinstance(fails.error, MemoryError)
    monkeypatch.undo()
    assert run(model, [make_request(NUMBER)])[0].finish_reason == "stop"


@pytest.mark.parametrize("after", range(5))
def test_a_cancelled_request_leaves_the_others_as_they_are(model, after):
    (alone,) = run(model, [make_request(NUMBER, 1, temperature=1)])
    gone, other = make_request(NUMBER, temperature=1), make_request(NUMBER, 1, temperature=1)

    def cancel(request: Request) -> None:
        if len(request.output_token_ids) == after + 1:
            model._engine.cancel([request])

    run_all(model, [gone, other], {gone: cancel})
    assert other.output_token_ids == alone.output_token_ids
    assert model.stats().running == model.stats().blocks_used == 0


def run_all(
    model: Any, requests: list[Request], more: dict[Request, Callable[[Request], None]] | None = None
) -> list[Request]:
    """Run requests to their ends, which may be errors; ``more`` is called at each update of a request."""
    from queue import SimpleQueue

    ended: SimpleQueue[Request] = SimpleQueue()

    def on_update(request: Request) -> None:
        if more and request in more:
            more[request](request)
        if request.finish_reason is not None:
            ended.put(request)

    for request in requests:
        request.on_update = on_update
    model._engine.submit(requests)
    for _ in requests:
        ended.get(timeout=300)
    return requests


@pytest.mark.gpu
def test_captured_and_eager_steps_give_the_same_bits(cuda_backend, monkeypatch):
    """On a GPU the model of a decode step is captured, and the sampler starts when the masks are there."""
    requests = [(NUMBER, {}), (None, {}), (Grammar.json_object(), {"temperature": 1.5}), (NUMBER, {"temperature": 1})]

    def serve(model: Any) -> list[tuple[list[int], bytes]]:
        made = [make_request(g, i, max_new_tokens=25, **options) for i, (g, options) in enumerate(requests)]
        found = run(model, made)
        for request in found:
            if request.matcher is not None and request.finish_reason == "stop":
                text = text_of(request.output_token_ids)
                assert (text[0] == "{" and json.loads(text) is not None) or re.fullmatch(NUMBER.text, text)
        return [(r.output_token_ids, np.array(r.logprobs, np.float32).tobytes()) for r in found]

    model = make_model(cuda_backend, quantized=True, vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=1)
    captured = [serve(model) for _ in range(2)]
    sizes = model._engine._runner.executors[0].captured
    assert any(step.forward.graph is not None for step in sizes.values())
    monkeypatch.setattr(cuda_backend, "decode_sizes", ())
    monkeypatch.setattr(cuda_backend, "mixed_sizes", ())
    model = Model(model.network, model.engine_config)
    eager = serve(model)
    assert not model._engine._runner.executors[0].captured
    alone = [
        run(model, [make_request(g, i, max_new_tokens=25, **options)])[0].output_token_ids
        for i, (g, options) in enumerate(requests)
    ]
    assert captured[0] == captured[1] == eager
    assert [tokens for tokens, _ in eager] == alone
