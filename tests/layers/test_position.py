"""Rotary frequencies: the formulas against float64 ones, both spellings of the configuration, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bminf_lite.layers.position import MAX_POSITIONS, rope_frequencies, rope_parameters, usable_context

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


def plain(theta: float, head_dim: int) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    frequencies, scale = rope_frequencies(LLAMA3, 128, 131072)
    unscaled = plain(5e5, 128)
    waves = 8192 * unscaled / (2 * math.pi)  # turns within the original context
    np.testing.assert_allclose(frequencies[waves > 4], unscaled[waves > 4], rtol=1e-5)
    np.testing.assert_allclose(frequencies[waves < 1], unscaled[waves < 1] / 8, rtol=1e-5)
    blend = ((waves - 1) / 3)[(waves > 1) & (waves < 4)]
    between = unscaled[(waves > 1) & (waves < 4)]
    np.testing.assert_allclose(
        frequencies[(waves > 1) & (waves < 4)], between * blend + between / 8 * (1 - blend), rtol=1e-4
    )
    assert (np.diff(frequencies) < 0).all() and scale == 1


@pytest.mark.parametrize(
    ("more", "low", "high"),
    [
        ({}, 23, 40),  # 23.6 and 39.7, rounded outwards
        ({"truncate": False}, 23.597, 39.651),
        ({"beta_fast": 8, "beta_slow": 2}, 30, 37),
    ],
)
def test_yarn_blends_between_two_dimensions(more, low, high):
    """The dimension that turns ``beta`` times within the original context: equation 23 of the paper, head size 128."""
    frequencies, _ = rope_frequencies(YARN | more, 128, 131072)
    unscaled, ramp = plain(1e6, 128), np.clip((np.arange(64) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(frequencies, unscaled * (1 - ramp) + unscaled / 4 * ramp, rtol=2e-4)


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"factor": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"factor": None}, 0.1 * math.log(131072 / 32768) + 1),
    ],
)
def test_yarn_attention_factor(more, scale):
    assert rope_frequencies(YARN | more, 128, 131072)[1] == pytest.approx(scale)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
        (
            {"rope_parameters": {"factor": 2.0, "rope_type": "linear"}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        ({"partial_rotary_factor": 1.0}, {"rope_type": "default", "rope_theta": 1e4}),
    ],
)
def test_both_spellings(config, expected):
    assert rope_parameters(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": "linear"}, "one mapping"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "'mrope', not one of default, dynamic"),
        ({"rope_scaling": {"type": ["yarn"]}}, "not one of"),
        ({"rope_theta": 0}, "rope_theta is 0, not a positive number"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rope_theta": 1e-29}, "rope_theta"),
        ({"rope_scaling": {"type": "dynamic", "factor": "x"}}, "rope parameter factor is 'x', not a positive number"),
        ({"rope_scaling": {"type": "default", "attention_factor": [1]}}, r"attention_factor is \[1\], not a positive"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": -1}}, "mscale is -1"),
        ({"rope_parameters": YARN | {"truncate": "x"}}, "truncate is 'x', not true or false"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None, not a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "is smaller than low_freq_factor"),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "not larger than 1"),
        ({"rope_parameters": YARN | {"attention_factor": -1}}, "attention_factor"),
        ({"rope_parameters": LONG | {"original_max_position_embeddings": 1}}, "is 1, not larger than 1"),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(rope_parameters(config), 64, 2048)


@pytest.mark.parametrize("value", [None, 0])
def test_numbers_that_are_absent(value):
    """DeepSeek's YaRN gives 0 for the factors of attention that it has not."""
    config = {"rope_parameters": YARN | {"mscale": value, "mscale_all_dim": value, "beta_fast": None}}
    rope_frequencies(rope_parameters(config), 64, 2048)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 131072),
        ({"original_max_position_embeddings": None}, 32768),
        ({"factor": 0.5}, 32768),
        ({"factor": 1e20}, MAX_POSITIONS),
        ({"rope_type": "linear"}, 32768),  # files with it have the stretched context
    ],
)
def test_yarn_that_was_added_to_a_file_stretches_its_context(changes, context):
    """The way to long texts that Qwen2.5's readme gives: ``rope_scaling``, and all else as it is."""
    assert usable_context(YARN | changes, 32768) == context


def test_dynamic_scaling_changes_nothing_within_the_context():
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    frequencies, scale = rope_frequencies(parameters, 64, 4096)
    np.testing.assert_array_equal(frequencies, rope_frequencies(parameters | {"rope_type": "default"}, 64, 4096)[0])
    assert scale == 1
