"""Configurations of the GPTs and encoder-decoders: every nonsensical value is reported, and all of them at once."""

from __future__ import annotations

from typing import Any

import pytest

from bminf_lite import models
from bminf_lite.errors import CheckpointError


def message(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        models.find(config).parse(config)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_head": 5}, "n_embd (768) is not a multiple of n_head (5)"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention of GPT-2 is not supported"),
        ({"model_type": "gpt2", "activation_function": "mish"}, "activation_function is 'mish', not one of gelu_new"),
        ({"model_type": "opt", "ffn_dim": 0}, "ffn_dim is 0, not a whole number from 1"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.005}, "heads of 96 elements is not a number of pairs"),
        ({"model_type": "gpt_neox", "rotary_pct": "all"}, "rotary_pct is 'all', not a number"),
        ({"model_type": "gpt_neox", "rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral', not one of"),
        ({"model_type": "gpt_neox", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "of whole heads only"),
        ({"model_type": "t5", "feed_forward_proj": "gated-mish"}, "feed_forward_proj is 'gated-mish', not one of"),
        ({"model_type": "t5", "relative_attention_num_buckets": 6}, "(6) is not a multiple of 4"),
        ({"model_type": "mt5", "relative_attention_max_distance": 16}, "(16) is not larger than half of"),
        ({"model_type": "umt5", "decoder_start_token_id": 250112}, "decoder_start_token_id is 250112"),
        ({"model_type": "cpm1", "n_embd": 2560}, "n_embd is not a key of this model_type"),
        ({"model_type": "cpm2", "d_fff": 10240}, "d_fff is not a key of this model_type; the nearest is d_ff"),
        ({"model_type": "cpm2", "attn_scale": True}, "attn_scale is not a key of this model_type"),
        ({"model_type": "eva", "attn_scale": 8}, "attn_scale is 8, not true or false"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_nonsense_is_told(config, expected):
    assert expected in message(config)


def test_all_problems_are_told_at_once():
    text = message({"model_type": "cpm2", "d_model": -1, "num_heads": "many", "spans": 3})
    assert "3 problems" in text and all(key in text for key in ("d_model", "num_heads", "spans"))


def test_what_every_checkpoint_may_say_is_no_unknown_key():
    common = {"architectures": ["EVA"], "eos_token_id": 8, "torch_dtype": "float16", "quantization_config": {}}
    assert models.find({"model_type": "eva"}).parse({"model_type": "eva", **common})


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({}, True),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True),
    ],
)
def test_a_head_of_t5_is_tied_and_scaled_or_neither(config, tied):
    """transformers 5 writes ``tie_word_embeddings: true`` for every T5, and beside it whether outputs are scaled."""
    parsed = models.find({"model_type": "t5"}).parse({"model_type": "t5", **config})
    assert parsed.tied_head == tied and parsed.logit_scale == (512**-0.5 if tied else 1.0)
