"""Sampling options: every value out of range is reported, and a checkpoint's defaults mean what they say."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from bminf_lite.backend.sampling import PROMPT_FLAG
from bminf_lite.engine.sampling_params import SamplingOptions, SamplingParams, sampler_state
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
    "logprobs": [0, None],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_value_is_reported(name):
    for value in WRONG[name]:
        with pytest.raises(UsageError, match=name) as error:
            SamplingParams(**{name: value})
        assert f"{name} is {value!r}" in str(error.value) or name == "stop"


def test_all_invalid_values_are_reported_at_once():
    with pytest.raises(UsageError) as error:
        SamplingParams(**{name: values[0] for name, values in WRONG.items()})
    assert all(name in str(error.value) for name in WRONG)


def test_every_field_has_a_check_and_is_a_keyword_of_generate():
    names = {f.name for f in fields(SamplingParams)}
    assert set(WRONG) == names == set(SamplingOptions.__annotations__)


def test_bounds_are_allowed():
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
    params = SamplingParams.from_checkpoint(config | ignored | {"max_new_tokens": 77}, top_k=3, seed=None, stop=["x"])
    assert params == SamplingParams(77, 1.0, top_k=3, top_p=0.8, repetition_penalty=1.05, stop=("x",))


def test_nonsense_in_the_file_is_reported_unless_replaced():
    config = {"do_sample": "yes", "top_p": 7, "top_k": True, "temperature": "hot"}
    with pytest.raises(CheckpointError) as error:
        SamplingParams.from_checkpoint(config)
    for word in ("generation_config.json", "do_sample", "top_p", "7", "top_k", "temperature"):
        assert word in str(error.value)
    assert SamplingParams.from_checkpoint({"top_p": 7}, top_p=0.5).top_p == 0.5


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
    state = sampler_state(params, [[0, 2, 2], []], 4, [0, 5])
    np.testing.assert_array_equal(state.counts, [[PROMPT_FLAG, 0, PROMPT_FLAG, 0], [0, 0, 0, 0]])
    assert state.seed[0] == 2**64 - 1
    np.testing.assert_array_equal(state.temperature, [0.5, 0])
    np.testing.assert_array_equal(state.top_k, [0, 4])
    np.testing.assert_array_equal(state.frequency_penalty, [0, 0.25])
    np.testing.assert_array_equal(state.sequence, [0, 5])


def test_a_greedy_state_without_penalties_counts_nothing():
    def state(*params):
        return sampler_state([p.with_seed() for p in params], [[1]] * len(params), 4, range(len(params)))

    greedy = state(SamplingParams(), SamplingParams(top_k=3, seed=1))
    assert greedy.greedy and greedy.counts is None
    assert not state(SamplingParams(), SamplingParams(temperature=1e-9)).greedy
    assert not state(SamplingParams(), SamplingParams(presence_penalty=0.1)).greedy
