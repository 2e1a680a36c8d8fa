"""What ``generate`` makes of biases, ``min_tokens`` and log-probabilities."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_checkpoint
from model_kit import make_model, prompt_of

import bminf_lite
from bminf_lite.errors import UsageError

MODEL = make_model()
VOCAB = MODEL.engine_config.vocab_size
PROMPT = prompt_of(9)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 1, "presence_penalty": 0.5}])
def test_the_most_likely_tokens_are_those_of_the_model(options):
    result = MODEL.generate(PROMPT, max_new_tokens=6, logprobs=4, **options)
    logits = MODEL.logits(PROMPT + result.token_ids)[len(PROMPT) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, token, logprob, top in zip(expected, result.token_ids, result.logprobs, result.top_logprobs, strict=True):
        assert [t for t, _ in top] == np.argsort(-row, kind="stable")[:4].tolist()
        np.testing.assert_allclose([p for _, p in top], np.sort(row)[::-1][:4], atol=1e-5)
        assert logprob == pytest.approx(row[token], abs=1e-5)
    value = json.loads(json.dumps(result.to_dict()))
    assert value["top_logprobs"] == [[list(pair) for pair in top] for top in result.top_logprobs]


@pytest.mark.parametrize(("logprobs", "own", "top"), [(None, False, False), (0, True, False), (20, True, True)])
def test_only_what_is_asked_for_is_reported(logprobs, own, top):
    result = MODEL.generate(PROMPT, max_new_tokens=3, logprobs=logprobs)
    assert (result.logprobs is not None, result.top_logprobs is not None) == (own, top)
    assert ("logprobs" in result.to_dict(), "top_logprobs" in result.to_dict()) == (own, top)
    assert not top or [len(pairs) for pairs in result.top_logprobs] == [20] * 3


def test_each_prompt_of_a_batch_has_its_own_most_likely_tokens():
    prompts = [prompt_of(length) for length in (3, 17, 8)]
    together = MODEL.generate(prompts, max_new_tokens=5, logprobs=3, logit_bias={5: 2.5})
    for prompt, result in zip(prompts, together, strict=True):
        alone = MODEL.generate(prompt, max_new_tokens=5, logprobs=3, logit_bias={5: 2.5})
        assert result.token_ids == alone.token_ids
        assert [[t for t, _ in top] for top in result.top_logprobs] == [
            [t for t, _ in top] for top in alone.top_logprobs
        ]


def test_a_bias_decides():
    assert MODEL.generate(PROMPT, max_new_tokens=3, logit_bias={6: 100}).token_ids == [6] * 3
    free = MODEL.generate(PROMPT, max_new_tokens=1).token_ids[0]
    assert MODEL.generate(PROMPT, max_new_tokens=1, logit_bias={free: -100}).token_ids != [free]


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_no_end_before_the_least_number_of_tokens(min_tokens):
    model = make_model(eos_ids=frozenset({6, 7}))
    options = {"max_new_tokens": 9, "logit_bias": {6: 100}, "min_tokens": min_tokens}
    result = model.generate(PROMPT, **options)
    assert result.finish_reason == "stop"
    assert len(result.token_ids) == min_tokens + 1 and result.token_ids[-1] == 6
    assert not {6, 7} & set(result.token_ids[:-1])
    assert model.generate(PROMPT, ignore_eos=True, **options).token_ids == [6] * 9


def test_a_bias_of_an_unknown_token_is_refused():
    with pytest.raises(
        UsageError, match=f"logit_bias has the token {VOCAB}, but the model's tokens are 0 to {VOCAB - 1}"
    ):
        MODEL.generate(PROMPT, logit_bias={VOCAB: 1.0})


def test_a_stop_text_may_be_a_special_token(tmp_path):
    """It has no text, and ends the completion, also within another text."""
    with bminf_lite.load(tiny_checkpoint.write(tmp_path / "m")) as model:
        special = model.tokenizer.bos_id
        options = {"max_new_tokens": 4, "logit_bias": {special: 100}}
        for stop in ("<s>", ["x", "<s>"], "<s><s>"):
            result = model.generate("ab", stop=stop, **options)
            assert (result.text, result.finish_reason) == ("", "stop")
            assert len(result.token_ids) == (2 if stop == "<s><s>" else 1)
        assert model.generate("ab", stop="<s>a", **options).finish_reason == "length"
        assert [piece.finish_reason for piece in model.stream("ab", stop="<s>", **options)] == ["stop"]
