"""Sampling options: every value out of range is reported, and a checkpoint's defaults mean what they say."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import fields

import numpy as np
import pytest

from bminf_lite.backend.sampling import PROMPT_FLAG, SamplerVariant
from bminf_lite.engine.sampling_params import (
    SamplingOptions,
    SamplingParams,
    field_problem,
    sampler_state,
    sequence_sampling,
)
from bminf_lite.errors import CheckpointError, UsageError

NAN, INF = float("nan"), float("inf")
WRONG = {
    "max_new_tokens": [0, -1, 1.0, None, True, "3", 2**31, NAN],
    "temperature": [-0.1, NAN, INF, True, None, "1", 1e39, 10**400],
    "top_k": [-1, 1.5, True, None, 2**31],
    "top_p": [0, 0.0, 1.01, -1, NAN, True, None, 1e-50],
    "min_p": [-0.1, 1.1, NAN, False, None],
    "repetition_penalty": [0, -1, NAN, INF, 1e-50, 1e-25, 1e25, None],
    "presence_penalty": [NAN, INF, -INF, 1e25, -1e25, "0", None],
    "frequency_penalty": [NAN, INF, -INF, 1e25, -1e25, None],
    "seed": [-1, 2**64, 1.0, True, "1"],
    "stop": ["", ("a", ""), (1,), None, 3, b"x"],
    "ignore_eos": [1, None, "no"],
    "min_tokens": [-1, 1.0, True, None, 2**31, 129],
    "logit_bias": [
        None,
        [(1, 2)],
        {-1: 1},
        {1.0: 1},
        {True: 1},
        {"1": 1},
        {1: 101},
        {1: INF},
        {1: NAN},
        {1: None},
        {1: True},
    ],
    "begin_suppress_tokens": [None, 3, "3", (-1,), (True,), (1.0,), (2**31,), tuple(range(16))],
    "logprobs": [-1, 21, True, False, 1.0, "5"],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_value_is_reported(name):
    for value in WRONG[name]:
        with pytest.raises(UsageError, match=name) as error:
            SamplingParams(**{name: value})
        assert f"{name} is {value!r}" in str(error.value) or name in ("stop", "logit_bias", "begin_suppress_tokens")


def test_the_bound_of_a_large_temperature_is_named():
    with pytest.raises(UsageError, match=r"temperature is 1e\+300, but must be from 0 to 3\.4e\+38"):
        SamplingParams(temperature=1e300)


def test_all_invalid_values_are_reported_at_once():
    with pytest.raises(UsageError) as error:
        SamplingParams(**{name: values[0] for name, values in WRONG.items()})
    assert "logit_bias is None, but must be a mapping" in str(error.value)
    assert all(name in str(error.value) for name in WRONG)


def test_every_field_has_a_check_and_is_a_keyword_of_generate():
    names = {f.name for f in fields(SamplingParams)}
    assert set(WRONG) == names == set(SamplingOptions.__annotations__)


def test_the_defaults_which_are_not_checked_each_time_are_valid():
    assert not any(field_problem(f.name, getattr(SamplingParams(), f.name)) for f in fields(SamplingParams))


def test_an_invalid_bias_is_named_with_its_bound():
    for bias, message in (
        ({3: -100.5}, "token 3 is -100.5, but must be a number from -100 to 100"),
        ({"a": 1}, "the token 'a', but token ids must be whole numbers"),
        (dict.fromkeys(range(301), 1), "has 301 entries, but may have 300: leave out"),
    ):
        with pytest.raises(UsageError, match=message):
            SamplingParams(logit_bias=bias)


def test_the_model_bounds_biased_tokens_and_end_tokens():
    SamplingParams(logit_bias={9: 1}, min_tokens=1).check_model(10, range(15))
    SamplingParams(min_tokens=1, ignore_eos=True).check_model(10, range(16))
    with pytest.raises(UsageError, match=r"token 10, but the model's tokens are 0 to 9: use ids"):
        SamplingParams(logit_bias={9: 1, 10: 1}).check_model(10, ())
    with pytest.raises(UsageError, match=r"min_tokens is 1, but the model has 16 .* hold back 15: set"):
        SamplingParams(min_tokens=1).check_model(100, range(16))


def test_more_tokens_than_the_most_cannot_be_asked_for():
    with pytest.raises(
        UsageError, match=r"min_tokens is 5, but must be at most max_new_tokens \(4\): lower it or raise"
    ):
        SamplingParams(max_new_tokens=4, min_tokens=5)


def test_parameters_can_be_hashed_copied_and_sent():
    params = SamplingParams(logit_bias={np.int64(7): 1, 3: np.float32(2)}, seed=1)
    assert params.logit_bias == {7: 1.0, 3: 2.0} and isinstance(hash(params), int)
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)


def test_bounds_are_allowed():
    SamplingParams(logit_bias={0: -100, 2: 100.0} | dict.fromkeys(range(3, 301), 1), logprobs=20, min_tokens=128)
    SamplingParams(max_new_tokens=1, temperature=0, top_k=0, top_p=1, min_p=1, seed=2**64 - 1, stop=["a", "b"])
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(seed=np.int64(3), temperature=np.float32(0.5)).seed == 3


# -- a checkpoint's defaults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "overrides", "temperature"),
    [
        ({}, {}, 0.0),
        ({"temperature": 0.6}, {}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, {}, 0.0),
        ({"do_sample": True}, {}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, {}, 0.6),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": None}, 0.6),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.0}, 0.0),
        ({"do_sample": False}, {"temperature": 0.9}, 0.9),
        ({"do_sample": None, "temperature": None}, {}, 0.0),
    ],
)
def test_the_temperature_follows_do_sample(config, overrides, temperature):
    assert SamplingParams.from_checkpoint(config, **overrides).temperature == temperature


def test_defaults_come_from_the_checkpoint_and_overrides_win():
    config = {"do_sample": True, "top_k": 20, "top_p": 0.8, "min_p": None, "repetition_penalty": 1.05}
    ignored = {"eos_token_id": [1, 2], "transformers_version": "4.0"}
    with pytest.raises(UsageError, match=r"^max_new_tokens is -1, but must be [^;]*$"):  # min_tokens is not blamed too
        SamplingParams.from_checkpoint(config, max_new_tokens=-1)
    params = SamplingParams.from_checkpoint(config | ignored | {"max_new_tokens": 77}, top_k=3, seed=None, stop=["x"])
    assert params == SamplingParams(77, 1.0, top_k=3, top_p=0.8, repetition_penalty=1.05, stop=("x",))


def test_nonsense_in_the_file_is_reported_unless_replaced():
    config = {"do_sample": "yes", "top_p": 7, "top_k": True, "temperature": "hot"}
    with pytest.raises(CheckpointError) as error:
        SamplingParams.from_checkpoint(config)
    for word in ("generation_config.json", "do_sample", "top_p", "7", "top_k", "temperature"):
        assert word in str(error.value)
    assert SamplingParams.from_checkpoint({"top_p": 7}, top_p=0.5).top_p == 0.5


def test_the_file_s_minimum_is_bounded_by_the_completion_s_length():
    config = {"min_new_tokens": 50}
    assert SamplingParams.from_checkpoint(config).min_tokens == 50
    assert SamplingParams.from_checkpoint(config, max_new_tokens=7).min_tokens == 7
    assert SamplingParams.from_checkpoint(config, min_tokens=3).min_tokens == 3
    with pytest.raises(UsageError, match="min_tokens is 9, but must be at most max_new_tokens"):
        SamplingParams.from_checkpoint(config, min_tokens=9, max_new_tokens=7)


def test_what_the_file_forbids_stays_forbidden():
    config = {"suppress_tokens": [1, 2], "bad_words_ids": [[3]], "sequence_bias": [[[4], 2.0], [[5], 3.0]]}
    assert SamplingParams.from_checkpoint(config).logit_bias == {1: -INF, 2: -INF, 3: -INF, 4: 2.0, 5: 3.0}
    given = SamplingParams.from_checkpoint(config, logit_bias={1: 9, 4: 1, 6: 1}).logit_bias
    assert given == {1: -INF, 2: -INF, 3: -INF, 4: 1.0, 5: 3.0, 6: 1.0}
    assert SamplingParams.from_checkpoint({"stop_strings": ["a", "b"]}).stop == ("a", "b")
    assert SamplingParams.from_checkpoint({"stop_strings": "a"}, stop="c").stop == ("c",)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"suppress_tokens": 3}, "suppress_tokens is 3, but must be a list of token ids"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens is"),
        ({"suppress_tokens": list(range(301))}, "suppress_tokens has 301 entries, but may have 300"),
        ({"bad_words_ids": [3]}, "bad_words_ids has 3, but must have lists"),
        ({"bad_words_ids": {}}, "bad_words_ids is {}, but must be a list"),
        ({"sequence_bias": [[[1], "a"]]}, r"sequence_bias has \[\[1\], 'a'\], but must have pairs"),
        ({"sequence_bias": [[[1], -1000.0]]}, "sequence_bias.* of token 1 is -1000.0, but must be a number from -100"),
        ({"begin_suppress_tokens": "x"}, "begin_suppress_tokens is 'x', but must be a list of token ids, 15 at most"),
        ({"begin_suppress_tokens": list(range(16))}, "begin_suppress_tokens is .* 15 at most"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1, but must be a whole number"),
        ({"stop_strings": [3]}, "stop_strings is"),
        ({"num_beams": "a"}, "num_beams is 'a' .there is no beam search."),
        ({"no_repeat_ngram_size": "a"}, "no_repeat_ngram_size is 'a'"),
    ],
)
def test_nonsense_about_forbidden_tokens_is_reported(config, words):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{words}"):
        SamplingParams.from_checkpoint(config)


def test_filters_that_do_not_exist_matter_only_where_tokens_are_drawn():
    config = {"typical_p": 0.5}
    assert SamplingParams.from_checkpoint(config).temperature == 0
    assert SamplingParams.from_checkpoint(config | {"do_sample": True}, temperature=0).temperature == 0
    for drawn in (config | {"do_sample": True}, config):
        with pytest.raises(CheckpointError, match=r"typical_p is 0\.5 .*SamplingParams"):
            SamplingParams.from_checkpoint(drawn, temperature=0.7)


def test_tokens_that_may_not_come_first_share_a_row_with_the_ends():
    def held(ends=(7,), **options):
        return sequence_sampling(SamplingParams(seed=0, **options), 0, eos_ids=ends).row[["min_tokens", "end_tokens"]]

    count, ids = held(begin_suppress_tokens=[3, 5])
    assert count == 1 and ids.tolist() == [3, 5, *[-1] * 13]
    count, ids = held(begin_suppress_tokens=[3, 5], min_tokens=1)
    assert count == 1 and ids.tolist() == [3, 5, 7, *[-1] * 12]
    count, ids = held(begin_suppress_tokens=[7], min_tokens=4)
    assert count == 4 and ids.tolist() == [7, *[-1] * 14]
    count, ids = held(begin_suppress_tokens=[3], min_tokens=4, ignore_eos=True)
    assert count == 1 and ids.tolist() == [3, *[-1] * 14]
    for options in (
        {"begin_suppress_tokens": [3], "min_tokens": 2},
        {"begin_suppress_tokens": list(range(15)), "min_tokens": 1},
    ):
        with pytest.raises(UsageError, match="begin_suppress_tokens has tokens that end no completion"):
            SamplingParams(**options).check_model(100, [70])
    with pytest.raises(UsageError, match="begin_suppress_tokens has the token 100, but the model's tokens are 0 to 99"):
        SamplingParams(begin_suppress_tokens=[100]).check_model(100, [70])


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UsageError, match=r"'temprature'.*'temperature'.*'maxnewtokens'.*'max_new_tokens'"):
        SamplingParams.from_checkpoint({}, temprature=1, maxnewtokens=None)


def test_options_of_other_libraries_get_a_hint_that_fits():
    with pytest.raises(UsageError, match=r"'do_sample'; a temperature over 0 draws"):
        SamplingParams.from_checkpoint({}, do_sample=True)
    with pytest.raises(UsageError, match=r"no sampling option 'xyz'; there are max_new_tokens, temperature, "):
        SamplingParams.from_checkpoint({}, xyz=1)


# -- the backend's form -----------------------------------------------------------------------------------------------


def test_the_state_has_a_row_for_each_sequence():
    params = [SamplingParams(temperature=0.5, seed=2**64 - 1), SamplingParams(top_k=4, frequency_penalty=0.25, seed=0)]
    state = sampler_state(params, [[0, 2, 2], [2, 2]], 4, [0, 5])
    rows = state.columns
    np.testing.assert_array_equal(state.rows, [1, 2])
    np.testing.assert_array_equal(state.counts, [[0, 0, PROMPT_FLAG, 0]])  # of the one that has penalties
    np.testing.assert_array_equal(rows["count_row"], [-1, -1, 0])
    assert rows["seed"][1] == 2**64 - 1
    np.testing.assert_array_equal(rows["temperature"][1:], [0.5, 0])
    np.testing.assert_array_equal(rows["top_k"][1:], [0, 4])
    np.testing.assert_array_equal(rows["frequency_penalty"][1:], [0, 0.25])
    np.testing.assert_array_equal(rows["sequence"][1:], [0, 5])


def test_a_sequence_goes_on_after_what_it_has_generated():
    params = SamplingParams(presence_penalty=1, seed=0, min_tokens=4, logit_bias={5: -1, 2: 1}, logprobs=3)
    sequence = sequence_sampling(params, 6, [0, 1], [3, 3], {9, 8})
    assert (sequence.row["step"], sequence.row["last_token"], sequence.row["num_logprobs"]) == (2, 3, 3)
    assert sequence.row["min_tokens"] == 4 and sequence.row["end_tokens"][:3].tolist() == [8, 9, -1]
    assert sequence.bias == [(2, 1.0), (5, -1.0)]
    np.testing.assert_array_equal(sequence.counted(5), [PROMPT_FLAG, PROMPT_FLAG, 0, 2, 0])
    assert sequence_sampling(dataclasses.replace(params, ignore_eos=True), 6, eos_ids={9}).row["min_tokens"] == 0


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        ({}, "GREEDY"),
        ({"top_k": 3, "logprobs": 0}, "GREEDY"),
        ({"temperature": 1e-9}, "DRAW"),
        ({"presence_penalty": 0.1}, "ADJUST"),
        ({"logit_bias": {1: 1}}, "ADJUST"),
        ({"min_tokens": 1}, "ADJUST"),
        ({"begin_suppress_tokens": [1]}, "ADJUST"),
        ({"begin_suppress_tokens": [1], "min_tokens": 1, "ignore_eos": True}, "ADJUST"),
        ({"min_tokens": 1, "ignore_eos": True}, "GREEDY"),
        ({"logprobs": 1}, "FULL"),
        ({"logprobs": 1, "logit_bias": {1: 1}}, "FULL"),
    ],
)
def test_the_variant_is_the_least_that_serves(options, variant):
    params = [SamplingParams(seed=0), SamplingParams(seed=1, **options)]
    state = sampler_state(params, [[1], [1]], 4, range(2))
    assert state.variant == SamplerVariant[variant]
    assert (state.counts is None) == ("presence_penalty" not in options)
