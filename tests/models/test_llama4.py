"""Llama 4: which layers have experts and rotations, and the context that this version runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bminf_lite import models
from bminf_lite.errors import CheckpointError
from bminf_lite.layers.position import rope_frequencies
from bminf_lite.models.parts.experts import ExpertsPart

SMALL = {
    "model_type": "llama4_text", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "head_dim": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 1000,
    "num_local_experts": 4,
}  # fmt: skip


def parsed(**changes: Any) -> Any:
    config = SMALL | changes
    return models.find(config).parse(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1000),
        ({"attention_chunk_size": 100}, 100),
        ({"attention_chunk_size": None}, 1000),
        ({"floor_scale": 50}, 49),  # the query at position 49 is the first with another factor
        ({"floor_scale": 50, "attn_temperature_tuning": False}, 1000),
        ({"floor_scale": 50, "no_rope_layers": [1, 1, 1, 1]}, 1000),
        ({"attention_chunk_size": 100, "layer_types": ["full_attention"] * 4}, 1000),
        ({"attention_chunk_size": 100, "no_rope_layers": [0, 0, 0, 0]}, 1000),
    ],
)
def test_the_context_ends_with_the_first_chunk(changes: dict[str, Any], expected: int) -> None:
    assert parsed(**changes).context_length == expected


@pytest.mark.parametrize(
    ("changes", "sparse", "rotated"),
    [
        ({}, [1, 1, 1, 1], [1, 1, 1, 0]),
        ({"interleave_moe_layer_step": 2, "no_rope_layers": []}, [0, 1, 0, 1], [1, 1, 1, 0]),
        ({"moe_layers": [0, 3], "no_rope_layers": [0, 1, 0, 1]}, [1, 0, 0, 1], [0, 1, 0, 1]),
        ({"moe_layers": [], "no_rope_layer_interval": 2}, [0, 0, 0, 0], [1, 0, 1, 0]),
    ],
)
def test_layers_differ(changes: dict[str, Any], sparse: list[int], rotated: list[int]) -> None:
    layers = [[sub.part for sub in layer.sublayers] for layer in parsed(**changes).layer_parts]
    assert [isinstance(mlp, ExpertsPart) for _, mlp in layers] == [bool(flag) for flag in sparse]
    assert [mixer.rotary is not None for mixer, _ in layers] == [bool(flag) for flag in rotated]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"moe_layers": 3}, "moe_layers is 3, not a list"),
        ({"layer_types": ["chunked"] * 4}, "layer_types is"),
        ({"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers is"),
        ({"floor_scale": 1}, "floor_scale is 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok (5) exceeds num_local_experts (4)"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "a factor of 1.13863 on rotated queries"),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(**changes)
    assert expected in str(caught.value)


def test_its_rotation_stretches_all_long_waves_alike() -> None:
    """Published models have equal factors of high and low frequencies, between which nothing lies."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    found, scale = rope_frequencies(rope, 128, 131072)
    plain, _ = rope_frequencies({"rope_type": "default", "rope_theta": 500000.0}, 128, 131072)
    is_long = 2 * np.pi / plain.astype(np.float64) > 8192
    np.testing.assert_array_equal(found, np.where(is_long, plain / np.float32(16), plain))
    assert scale == 1 and is_long.any() and not is_long.all()
