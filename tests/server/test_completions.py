"""``/v1/completions``: against an engine without a model, and with the bundled model."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from api_kit import NAME, TOKENIZER, VOCAB_SIZE, LiveServer, model_server
from hypothesis import given
from hypothesis import strategies as st

import bminf_lite
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.server.settings import ServerSettings

PATH = "/v1/completions"


def joined(events: list[Any]) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream make, as a response without a stream has them."""
    assert events[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for chunk in event["choices"]:
            choice = choices.setdefault(chunk["index"], {"index": chunk["index"], "text": "", "logprobs": None})
            assert "finish_reason" not in choice
            choice["text"] += chunk["text"]
            if chunk["logprobs"] is not None:
                whole = choice["logprobs"] or {name: [] for name in chunk["logprobs"]}
                choice["logprobs"] = {name: whole[name] + part for name, part in chunk["logprobs"].items()}
            if chunk["finish_reason"] is not None:
                choice |= {name: chunk[name] for name in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


prompts = st.one_of(
    st.text("ab é", min_size=1, max_size=8),
    st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=6),
    st.lists(st.sampled_from(["a", "Return the"]), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=3), min_size=1, max_size=3),
)
options = st.fixed_dictionaries(
    {"prompt": prompts, "max_tokens": st.integers(1, 12)},
    optional={
        "n": st.integers(1, 3),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 3),
        "stop": st.lists(st.sampled_from(["e", "th", " a", "x"]), max_size=2),
        "stream_options": st.just({"include_usage": True}),
    },
)


@given(body=options)
def test_a_stream_is_the_response_in_pieces(fake: LiveServer, body: dict[str, Any]):
    whole = fake.json(PATH, {k: v for k, v in body.items() if k != "stream_options"})
    events = fake.events(PATH, body)
    assert joined(events) == whole["choices"]
    assert {(e["id"], e["object"], e["model"]) for e in events[:-1]} == {(events[0]["id"], "text_completion", NAME)}
    if "stream_options" in body:
        assert events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events[:-2])
    for choice in whole["choices"]:
        if choice["logprobs"] is not None:
            scores = choice["logprobs"]
            assert "".join(scores["tokens"]) == choice["text"]
            assert scores["text_offset"] == [len("".join(scores["tokens"][:i])) for i in range(len(scores["tokens"]))]
            assert len({len(part) for part in scores.values()}) == 1


def test_the_usage_so_far(fake: LiveServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 6} | {"stream_options": options}
    events = fake.events(PATH, body)
    generated = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert generated == sorted(generated) and generated[-2:] == [6 * len(joined(events))] * 2
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {events[-2]["usage"]["prompt_tokens"]}


def test_prompts_of_all_kinds(fake: LiveServer):
    ids = TOKENIZER.encode("Return the")
    one = fake.json(PATH, {"prompt": "Return the", "max_tokens": 5})["choices"][0]
    assert fake.json(PATH, {"prompt": ids, "max_tokens": 5})["choices"] == [one]
    answer = fake.json(PATH, {"prompt": ["Return the", "a"], "max_tokens": 5, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"][:2]] == [one["text"]] * 2
    assert answer["usage"]["prompt_tokens"] == len(ids) + len(TOKENIZER.encode("a"))
    assert answer["usage"]["completion_tokens"] == 20
    assert fake.json(PATH, {"prompt": [ids, ids], "max_tokens": 5})["choices"][1]["text"] == one["text"]


def test_the_default_is_sixteen_tokens(fake: LiveServer):
    assert fake.json(PATH, {"prompt": "a"})["usage"]["completion_tokens"] == 16


def test_echo_without_a_completion(scripted: LiveServer):
    scripted.says(" never seen")
    body = {"prompt": "Return the list", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = scripted.json(PATH, body)
    ids = TOKENIZER.encode("Return the list")
    (choice,) = answer["choices"]
    assert choice["text"] == "Return the list" and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 1000 for i in ids[1:])]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(max(top.values()) >= -0.25 for top in choice["logprobs"]["top_logprobs"][1:])
    assert joined(scripted.events(PATH, body)) == [choice]


def test_the_end_and_stop_texts(scripted: LiveServer):
    ids = scripted.says(" list of items. Return")
    (choice,) = scripted.json(PATH, {"prompt": "a", "max_tokens": 50, "logprobs": 0})["choices"]
    assert choice["text"] == " list of items. Return" and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 1 and choice["logprobs"]["tokens"][-1] == ""
    answer = scripted.json(PATH, {"prompt": "a", "max_tokens": 50, "stop": "items"})
    assert answer["choices"][0]["text"] == " list of " and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < len(ids)
    (choice,) = scripted.json(PATH, {"prompt": "a", "max_tokens": 2})["choices"]
    assert choice["finish_reason"] == "length"


def test_the_best_of_several(demo: LiveServer):
    body = {"prompt": "Return a", "max_tokens": 6, "temperature": 1.5, "seed": 5, "logprobs": 0}
    drawn = demo.json(PATH, {**body, "n": 4})
    best = demo.json(PATH, {**body, "n": 1, "best_of": 4})
    means = [np.mean(choice["logprobs"]["token_logprobs"]) for choice in drawn["choices"]]
    assert best["choices"][0]["text"] == drawn["choices"][int(np.argmax(means))]["text"]
    assert best["usage"] == drawn["usage"] and len({c["text"] for c in drawn["choices"]}) > 1


def test_the_engine_s_own_results(demo: LiveServer, demo_model: bminf_lite.Model):
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 11, "repetition_penalty": 1.1}
    expected = demo_model.generate("This module", max_new_tokens=12, logprobs=2, **options)
    body = {"prompt": "This module", "max_tokens": 12, "logprobs": 2, **options}
    (choice,) = demo.json(PATH, body)["choices"]
    assert choice["text"] == expected.text
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected.logprobs, atol=1e-4)
    assert joined(demo.events(PATH, body))[0]["text"] == expected.text


def test_the_log_probabilities_of_a_prompt_are_the_model_s(demo: LiveServer, demo_model: bminf_lite.Model):
    text = "Return the number of items in a list. Raise TypeError if the 𝄞 is not a number."
    ids = TOKENIZER.encode(text)
    body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    scores = demo.json(PATH, body)["choices"][0]["logprobs"]
    assert "".join(scores["tokens"][: len(ids)]) == text and len(scores["tokens"]) == len(ids) + 1
    logits = demo_model.logits(ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [logprobs[i, token] for i, token in enumerate(ids[1:])]
    np.testing.assert_allclose(scores["token_logprobs"][1:-1], expected, atol=1e-3)
    largest = [max(top.values()) for top in scores["top_logprobs"][1:-1]]
    np.testing.assert_allclose(largest, logprobs[:-1].max(axis=1), atol=1e-3)


def test_the_most_likely_tokens_at_the_places_of_a_prompt(demo: LiveServer, demo_model: bminf_lite.Model):
    text = "Return the number of items"
    ids = TOKENIZER.encode(text)
    body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 5, "temperature": 0}
    scores = demo.json(PATH, body)["choices"][0]["logprobs"]
    logits = demo_model.logits(ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for place, token in enumerate(ids[1:], start=1):
        top = scores["top_logprobs"][place]
        assert len(top) == 5 + (token not in np.argsort(-logprobs[place - 1])[:5])
        found = sorted((value for text, value in top.items() if text != scores["tokens"][place]), reverse=True)
        expected = np.sort(np.delete(logprobs[place - 1], token))[::-1][: len(found)]
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_biases_and_minimal_lengths(demo: LiveServer):
    comma = TOKENIZER.encode(",", add_special_tokens=False)[0]
    body = {"prompt": "Return a", "max_tokens": 4, "temperature": 0, "logit_bias": {str(comma): 100}}
    assert demo.json(PATH, body)["choices"][0]["text"] == ",,,,"
    body = {"prompt": "Return a", "max_tokens": 8, "temperature": 0, "logit_bias": {"0": 100}, "min_tokens": 3}
    answer = demo.json(PATH, body)
    assert answer["usage"]["completion_tokens"] == 4 and answer["choices"][0]["finish_reason"] == "stop"
    answer = demo.json(PATH, body | {"ignore_eos": True, "min_tokens": 0})
    assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["finish_reason"] == "length"


def test_tokens_and_times_that_end_a_completion(fake: LiveServer, demo: LiveServer):
    text = fake.json(PATH, {"prompt": [5], "max_tokens": 6})["choices"][0]["text"]
    answer = fake.json(PATH, {"prompt": [5], "max_tokens": 6, "stop_token_ids": [10], "logprobs": 0})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and text.startswith(choice["text"]) and choice["text"] != text
    assert choice["logprobs"]["tokens"][-1] == ""
    answer = demo.json(PATH, {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "deadline": 0.01})
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] < 900


def test_stop_strings_within_the_first_tokens_end_nothing(demo: LiveServer):
    """As in vLLM: one that is complete with one of the first ``min_tokens`` tokens does not count."""
    body = {"prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logit_bias": {"13": 100}}
    text = demo.json(PATH, body)["choices"][0]["text"]
    assert len(text) == 8 and set(text) == {text[0]}
    for stop, min_tokens, tokens in ((text[0], 0, 1), (text[0], 5, 6), (text[:3], 5, 6), (text[0], 8, 8)):
        wanted = body | {"stop": stop, "min_tokens": min_tokens}
        answer = demo.json(PATH, wanted)
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == tokens
        assert choice["finish_reason"] == ("length" if tokens == 8 and min_tokens == 8 else "stop")
        assert choice["text"] == (text if choice["finish_reason"] == "length" else text[: tokens - len(stop)])


def test_what_ends_a_completion_with_ignore_eos(demo: LiveServer):
    """The request's own stop tokens, as in vLLM, from ``min_tokens`` on; not the end-of-sequence token, here 0."""
    for likely, stop, min_tokens, expected in (
        (5, [5], 0, ("stop", 1)),
        (5, [5], 3, ("stop", 4)),
        (0, [5], 0, ("length", 6)),
        (0, [0], 0, ("stop", 1)),
    ):
        body = {"prompt": "a", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "min_tokens": min_tokens}
        answer = demo.json(PATH, body | {"stop_token_ids": stop, "logit_bias": {str(likely): 100}})
        found = answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
        assert found == expected, (likely, stop, min_tokens)


def test_the_stop_reason_is_what_vllm_s_is(demo: LiveServer):
    """The stop string or the request's stop token that ended a completion, null for anything else; streamed too."""
    for likely, fields, expected in (
        (13, {}, ("length", None)),
        (13, {"stop": ["never", TOKENIZER.decode([13])]}, ("stop", TOKENIZER.decode([13]))),
        (5, {"stop_token_ids": [7, 5]}, ("stop", 5)),
        (5, {"stop_token_ids": [7, 5], "include_stop_str_in_output": True, "logprobs": 1}, ("stop", 5)),
        (0, {}, ("stop", None)),
        (0, {"stop_token_ids": [0]}, ("stop", None)),
        (0, {"stop_token_ids": [0], "ignore_eos": True}, ("stop", 0)),
    ):
        own = {"max_tokens": 6, "temperature": 0, "logit_bias": {str(likely): 100}, **fields}
        body = {"prompt": "a", **own}
        (choice,) = demo.json(PATH, body)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == expected, fields
        assert joined(demo.events(PATH, body)) == [choice]
        if "logprobs" not in own:
            body = {"messages": [{"role": "user", "content": "a"}], **own}
            (answer,) = demo.json("/v1/chat/completions", body)["choices"]
            assert (answer["finish_reason"], answer["stop_reason"]) == expected, fields
            last = demo.events("/v1/chat/completions", body)[-2]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == expected, fields


def test_the_same_seed_gives_the_same_text(demo: LiveServer):
    body = {"prompt": "Return a", "max_tokens": 8, "temperature": 1.2, "seed": -5, "n": 2}
    first, again = (demo.json(PATH, body)["choices"] for _ in range(2))
    assert first == again and first[0]["text"] != first[1]["text"]


def test_requests_without_a_seed(demo: LiveServer, demo_model):
    """The server's seed is theirs; without one each draws its own."""
    body = {"prompt": "Return a", "max_tokens": 12, "temperature": 1.2, "n": 2}
    first, again = (demo.json(PATH, body)["choices"] for _ in range(2))
    assert first == again == demo.json(PATH, body | {"seed": 0})["choices"] and first[0]["text"] != first[1]["text"]
    with closing(model_server(demo_model, ServerSettings((NAME,)))) as unseeded:
        texts = {unseeded.json(PATH, body)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_no_server_can_have(seed):
    with pytest.raises(UsageError, match="seed"):
        ServerSettings((NAME,), seed=seed)


@pytest.mark.slow  # a prompt of the whole context
def test_the_context_ends_a_completion(demo: LiveServer):
    answer = demo.json(PATH, {"prompt": [5] * 1020, "max_tokens": 100, "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"prompt": None}, "prompt", "prompt"),
        ({"prompt": []}, "prompt", "no list may be empty"),
        ({"prompt": ["a", 5]}, "prompt", "must be a text"),
        ({"prompt": [VOCAB_SIZE]}, "prompt", "from 0 to 2047"),
        ({"prompt": ["a", "b " * 3000]}, "prompt[1]", "the model's context is 1,024"),
        ({"max_tokens": 0}, "max_tokens", "unless echo"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer, but is '5'"),
        ({"temperature": -1}, "temperature", "from 0 to 3.4e+38"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "over 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "128"),
        ({"prompt": ["a"] * 9, "n": 128}, "n", "9 prompts with 128 completions each are 1,152, but a request may have"),
        ({"prompt": ["a"] * 600, "best_of": 2}, "best_of", "may have 1,024 completions"),
        ({"n": 2, "best_of": 1}, "best_of", "at least n"),
        ({"best_of": 2, "stream": True}, "best_of", "streamed"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "at most max_tokens (5)"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"2048": 1}}, "logit_bias", "0 to 2047"),
        ({"stop_token_ids": [2048]}, "stop_token_ids", "0 to 2047"),
        ({"deadline": 0}, "deadline", "greater than 0"),
        ({"suffix": "b"}, "suffix", "not supported"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "use logprobs"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "not supported"),
        ({"priority": 2**31}, "priority", "less than or equal"),
        ({"cache_salt": "x" * 300}, "cache_salt", "256"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "not supported"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "only one of them"),
    ],
)
def test_a_wrong_value_is_named(fake: LiveServer, wrong: dict[str, Any], param: str, words: str):
    response = fake.post(PATH, {"prompt": "a", "max_tokens": 3} | wrong)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"], error


def test_other_refusals(fake: LiveServer):
    response = fake.post(PATH, {"prompt": "a", "model": "gpt-9"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    for body in (b"", b"{", b"[]", b'"a"', b"\xff", b'{"prompt": "\\ud800"}', b'{"a": NaN}', b"[" * 5000):
        response = fake.http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"]
    nested = b'{"prompt": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}"
    response = fake.http.post(PATH, content=nested, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "128 deep" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"messages": [%s1]}' % (b"1," * 200_000)),
        ("/v1/chat/completions", b'{"messages": [%s{}]}' % (b"{}," * 200_000)),
        ("/v1/responses", b'{"input": [%s{}]}' % (b"{}," * 200_000)),
        ("/v1/completions", b'{"prompt": [%s[1]]}' % (b"[1]," * 200_000)),
        ("/v1/completions", b'{"prompt": "a", "unheard_of": [%s{}]}' % (b"{}," * 200_000)),
        (
            "/v1/completions",
            b'{"prompt": "a", "logit_bias": {%s}}' % b",".join(b'"%d": "x"' % i for i in range(200_000)),
        ),
    ],
    ids=["numbers", "messages", "items", "prompts", "unknown", "biases"],
)
def test_bodies_that_would_take_long_to_check(fake: LiveServer, path: str, body: bytes):
    response = fake.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "more than 131,072 values" in response.json()["error"]["message"]


def test_token_ids_and_texts_of_any_number_are_checked(fake: LiveServer):
    for path, body, words in (
        (PATH, b'{"prompt": [%s1]}' % (b"1," * 200_000), "prompt is too long"),
        (PATH, b'{"prompt": [%s"a"]}' % (b'"a",' * 200_000), "200,001 prompts"),
        ("/detokenize", b'{"tokens": [%s"a"]}' % (b'"a",' * 200_000), "tokens[0]"),
    ):
        response = fake.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400 and words in response.json()["error"]["message"]
        assert len(response.content) < 500


def test_unknown_fields_and_nulls_are_ignored(fake: LiveServer):
    body = {"prompt": "a", "max_tokens": 3}
    extra = {"user": "me", "unheard_of": {"a": [1]}, "stop": None, "n": None, "suffix": None, "logprobs": None}
    assert fake.json(PATH, body | extra)["choices"] == fake.json(PATH, body)["choices"]
    assert (
        fake.json(PATH, body | {"suffix": "", "thinking_token_budget": -1})["choices"]
        == fake.json(PATH, body)["choices"]
    )


def test_infinite_log_probabilities_are_numbers(fake: LiveServer):
    from bminf_lite.server.openai.chunks import finite

    assert finite(-math.inf) == -9999.0 and finite(-1.5) == -1.5


def test_a_model_whose_generation_config_cannot_be_obeyed_is_not_served(demo_model: bminf_lite.Model, monkeypatch):
    """It would refuse every request."""
    monkeypatch.setattr(demo_model, "generation_config", {"num_beams": 4})
    with pytest.raises(CheckpointError, match="num_beams is 4"):
        model_server(demo_model)


def test_stop_strings_of_the_generation_config_end_what_has_no_others(demo_model: bminf_lite.Model, monkeypatch):
    body = {"prompt": "Return the", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    monkeypatch.setattr(demo_model, "generation_config", {"stop_strings": ["e"]})
    with closing(model_server(demo_model)) as server:
        (choice,) = server.json(PATH, body)["choices"]
        assert choice["finish_reason"] == "stop" and "e" not in choice["text"]
        assert "e" in server.json(PATH, {**body, "stop": "zzzz"})["choices"][0]["text"]
        answer = server.json("/v1/chat/completions", messages)["choices"][0]
        assert answer["finish_reason"] == "stop" and "e" not in (answer["message"]["content"] or "")


def test_a_stop_text_may_be_a_special_token(demo_model: bminf_lite.Model):
    end = TOKENIZER.id_to_piece(0)
    body = {"prompt": "Return the", "max_tokens": 4, "ignore_eos": True, "logit_bias": {"0": 100}, "logprobs": 1}
    with closing(model_server(demo_model)) as server:
        (choice,) = server.json(PATH, {**body, "stop": [end]})["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        (choice,) = server.json(PATH, {**body, "stop": [end], "include_stop_str_in_output": True})["choices"]
        assert (choice["text"], choice["finish_reason"]) == (end, "stop")
        assert server.json(PATH, {**body, "stop": ["x"]})["choices"][0]["finish_reason"] == "length"


def test_what_the_generation_config_forbids_is_not_written(demo_model: bminf_lite.Model, monkeypatch):
    first = demo_model.generate("Return the", max_new_tokens=1, temperature=0).token_ids[0]
    monkeypatch.setattr(demo_model, "generation_config", {"suppress_tokens": [first]})
    body = {"prompt": "Return the", "max_tokens": 1, "temperature": 0, "logprobs": 1, "logit_bias": {str(first): 5}}
    with closing(model_server(demo_model)) as server:
        choice = server.json(PATH, body)["choices"][0]
    likeliest, written = choice["logprobs"]["top_logprobs"][0]
    assert choice["text"] == written != likeliest


def test_the_generation_config_s_minimal_length_holds_stop_strings_back(demo_model: bminf_lite.Model, monkeypatch):
    monkeypatch.setattr(demo_model, "generation_config", {"min_new_tokens": 5})
    fields = {"max_tokens": 8, "temperature": 0, "logit_bias": {"13": 100}, "stop": [TOKENIZER.decode([13])]}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    with closing(model_server(demo_model)) as server:
        for path, body in ((PATH, {"prompt": "a"} | fields), ("/v1/chat/completions", chat | fields)):
            assert server.json(path, body)["usage"]["completion_tokens"] == 6
            assert server.json(path, body | {"min_tokens": 0})["usage"]["completion_tokens"] == 1
