"""Configurations: what they mean, and one error that lists every nonsensical value."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import ENCODER_DECODERS, FAMILIES, mixers, windows

from bminf_lite import models
from bminf_lite.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"
SPARSE = {"enable_moe_block": True, "top_k_experts": 1, "moe_intermediate_size": 8}
TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def parse(model_type: str = "llama", **changes: Any) -> Any:
    config = {"model_type": model_type, **(TINY if model_type in FAMILIES else {}), **changes}
    return models.find(config).parse(config)


def problems(model_type: str = "llama", **changes: Any) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        parse(model_type, **changes)
    title, *lines = str(caught.value).split("\n")
    if not lines:
        return [title.removeprefix("config.json: ")]
    assert title == f"config.json: {len(lines)} problems"
    return [line.removeprefix("  - ") for line in lines]


WITHOUT_DEFAULT = {"dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}}
"""The keys that a ``config.json`` must have."""


@pytest.mark.parametrize("name", models.names())
def test_every_architecture_says_whether_it_has_an_encoder(name):
    raw = {"model_type": name} | WITHOUT_DEFAULT.get(name, {})
    config = models.find(raw).parse(raw)
    assert config.is_encoder_decoder == (name in {*ENCODER_DECODERS, "cpm2", "eva"})
    assert bool(config.max_source_length) == bool(config.decoder_start_token_ids) == config.is_encoder_decoder


@pytest.mark.parametrize("model_type", ["gpt5", "", None, 3, "llama.py", "_config", "spec", "../llama", ["llama"]])
def test_an_unknown_architecture_is_named_with_the_known_ones(model_type):
    with pytest.raises(CheckpointError, match=r"model_type .* is not supported; .*this version runs: .*llama"):
        models.find({"model_type": model_type})
    with pytest.raises(CheckpointError, match="None"):
        models.find({})


BAD_VALUES: dict[str, list[Any]] = {
    "hidden_size": [0, -48, 48.0, "48", True, None, 2**25],
    "num_hidden_layers": [0, 5000],
    "num_attention_heads": [0],
    "num_key_value_heads": [3, 8],
    "head_dim": [7, 0, [16]],
    "intermediate_size": [{}],
    "vocab_size": [0],
    "max_position_embeddings": [0],
    "rms_norm_eps": [-1e-6, float("nan"), "1e-6"],
    "hidden_act": ["swiglu", ["silu"]],
    "tie_word_embeddings": ["false", 1],
    "rope_theta": [-1.0],
    "rope_scaling": [{"type": "mrope", "factor": 2.0}],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD_VALUES.items() for v in values], ids=repr)
def test_a_nonsensical_value_is_one_problem_that_names_it(family, key, value):
    found = problems(family, **{key: value})
    assert len(found) == 1
    assert key in found[0] or "rope_type" in found[0]


WINDOW = {"use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"attention_bias": "yes"}, "attention_bias"),
        ("llama", {"mlp_bias": 0}, "mlp_bias"),
        ("llama", {"num_hidden_layers": 5000}, "num_hidden_layers is 5000, not a whole number from 1 to 4096"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads (4) is not a multiple of num_key_value_heads (3)"),
        ("llama", {"head_dim": 7}, "head_dim (7) is odd, which rotary positions do not allow"),
        ("llama", {"rms_norm_eps": 2}, "rms_norm_eps is 2, not a number from 0.0 to 1.0"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
        ("qwen2", {"sliding_window": -1, **WINDOW}, "sliding_window"),
        ("qwen3", {"max_window_layers": -1, **WINDOW}, "max_window_layers"),
        ("qwen3", {"layer_types": [FULL], **WINDOW}, "layer_types"),
        ("qwen3", {"layer_types": [FULL, "linear_attention", "x"], **WINDOW}, "layer_types"),
        ("qwen3", {"layer_types": FULL, **WINDOW}, "layer_types"),
        ("granitemoehybrid", {"layer_types": [["mamba"]] * 3}, "layer_types is [['mamba'], "),
        ("nemotron_h", {"layers_block_type": [["mamba"]]}, "layers_block_type is [['mamba']], not a list of mamba"),
        ("qwen3", {"attention_bias": 2}, "attention_bias"),
        ("gpt2", {"n_head": 5}, "n_embd (768) is not a multiple of n_head (5)"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention of GPT-2 is not supported"),
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish', not one of gelu_new"),
        ("opt", {"ffn_dim": 0}, "ffn_dim is 0, not a whole number from 1"),
        ("gpt_neox", {"rotary_pct": 0.005}, "heads of 96 elements is not a number of pairs"),
        ("gpt_neox", {"rotary_pct": "all"}, "rotary_pct is 'all', not a number"),
        ("gpt_neox", {"rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral', not one of"),
        ("gpt_neox", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "of whole heads only"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj is 'gated-mish', not one of"),
        ("t5", {"relative_attention_num_buckets": 6}, "(6) is not a multiple of 4"),
        ("mt5", {"relative_attention_max_distance": 16}, "(16) is not larger than half of"),
        ("umt5", {"decoder_start_token_id": 250112}, "decoder_start_token_id is 250112"),
        ("gemma", {"use_bidirectional_attention": True}, "only causal models are run"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv is 8.0; clipped queries, keys and values are not supported"),
        ("dots1", {"n_shared_experts": 2, "num_experts_per_tok": 1}, "n_routed_experts is missing"),
        ("dots1", {**WITHOUT_DEFAULT["dots1"], "scoring_func": "softmax"}, "scoring_func is 'softmax'; this version"),
        ("bamba", {"attn_layer_indices": [32]}, "attn_layer_indices is [32], not a list of layers from 0 to 31"),
        ("mellum", {"rope_parameters": {"rope_theta": 1.0}}, "which lacks a mapping for full_attention"),
        ("exaone_moe", {"mlp_layer_types": ["dense"]}, "not 32 times one of dense, sparse"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; this version runs 'sigmoid' only"),
        ("hy_v3", {"num_experts_per_tok": 200}, "num_experts_per_tok (200) exceeds num_experts (192)"),
        ("hy_v3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid is False; this version runs True only"),
        ("hy_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3; this version runs 1 only"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm is True; this version runs False only"),
        ("afmoe", {"attention_bias": True}, "attention_bias is true; biases beside a matrix of gates"),
        ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax'; this version runs 'sigmoid' only"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0, not a number from 0.001"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1, not a number from 1e-06"),
        ("gemma2", {"use_bidirectional_attention": True}, "only causal models are run"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; Gemma 3 has none"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "is not null or vision: text is causal"),
        ("gemma4_text", {"global_head_dim": 513}, "heads of 513 elements"),
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "8 heads are not a multiple of 3"),
        ("gemma4_text", {"num_kv_shared_layers": 30}, "num_kv_shared_layers is 30: no earlier layer"),
        ("gemma4_text", {"per_layer_config": {"a": {"head_dim": 8}}}, "not a mapping of layers to numbers"),
        ("gemma4_text", {"per_layer_config": {"3": {"window": 8}}}, "not a mapping of layers to numbers"),
        ("gemma4_text", {"rope_parameters": {SLIDING: {"rope_theta": 1.0}}}, "not a mapping of types of layers"),
        ("gemma4_text", SPARSE, "num_experts is missing"),
        ("gemma3_text", {"rope_scaling": 8.0}, "rope_scaling is 8.0, not a mapping"),
        ("gemma3_text", {"rope_parameters": {FULL: [1]}}, "rope_parameters is [1], not a mapping"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "a residual stream of norms is not supported"),
        ("bloom", {"n_head": 5}, "hidden_size (64) is not a multiple of n_head (5)"),
        ("falcon", {"alibi": "yes"}, "alibi is 'yes', not true or false"),
        ("cpm1", {"n_embd": 2560}, "n_embd is not a key of this model_type"),
        ("cpm2", {"d_fff": 10240}, "d_fff is not a key of this model_type; the nearest is d_ff"),
        ("cpm2", {"attn_scale": True}, "attn_scale is not a key of this model_type"),
        ("eva", {"attn_scale": 8}, "attn_scale is 8, not true or false"),
    ],
    ids=str,
)
def test_a_problem_tells_the_value_and_its_bound(family, changes, expected):
    (found,) = problems(family, **changes)
    assert expected in found


def test_null_groups_of_experts_are_one_group():
    null = {"n_group": None, "topk_group": None, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"}
    assert parse("dots1", **WITHOUT_DEFAULT["dots1"], **null) == parse("dots1", **WITHOUT_DEFAULT["dots1"])


def test_all_problems_come_in_one_error():
    bad = {
        "hidden_size": "x",
        "num_hidden_layers": -1,
        "vocab_size": 0,
        "hidden_act": "?",
        "mlp_bias": 7,
        "rope_theta": 0,
    }
    found = problems(**bad, attention_bias=None)
    assert len(found) == len(bad) and all(sum(key in problem for problem in found) == 1 for key in bad)
    found = problems("cpm2", d_model=-1, num_heads="many", spans=3)
    assert len(found) == 3


# -- what keys mean ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *((family, "rope_interleave") for family in ("deepseek_v3", "mistral4", "youtu", "glm4_moe_lite")),
        ("deepseek_v3", "norm_topk_prob"),
        ("falcon", "parallel_attn"),
        ("falcon_h1", "mamba_conv_bias"),
    ],
)
def test_a_flag_that_is_null_is_false(model_type, name):
    """As it is to transformers, also where the class's default is true."""
    given = WITHOUT_DEFAULT.get(model_type, {})
    null = parse(model_type, **given | {name: None})
    assert null == parse(model_type, **given | {name: False}) != parse(model_type, **given | {name: True})


def test_absent_keys_mean_the_class_defaults_and_null_its_own():
    assert parse("llama").context_length == 2048
    assert windows(parse("mistral")) == (4096,) * 3
    assert windows(parse("mistral", sliding_window=None)) == (None,) * 3
    assert mixers(parse("qwen3"))[0].head_dim == 128
    without = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
    without |= {"num_attention_heads": 16, "hidden_size": 64}
    for family, heads in (("llama", 16), ("mistral", 8)):
        config = {"model_type": family, **without}
        assert mixers(models.find(config).parse(config))[0].kv_heads == heads
        assert mixers(models.find(config).parse(config | {"num_key_value_heads": None}))[0].kv_heads == 16


def test_what_every_checkpoint_may_say_is_no_unknown_key():
    assert parse("eva", architectures=["EVA"], eos_token_id=8, torch_dtype="float16", quantization_config={})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8}, (None, None, None)),
        (WINDOW, (None, None, None)),  # from layer 28 on
        (WINDOW | {"max_window_layers": 0}, (4096, 4096, 4096)),
        (WINDOW | {"sliding_window": 8, "max_window_layers": 2}, (None, None, 8)),
        (WINDOW | {"sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        (WINDOW | {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}, (8, None, 8)),
        ({"sliding_window": 8, "layer_types": [SLIDING, SLIDING, SLIDING]}, (None, None, None)),
    ],
)
def test_windows_of_qwen(family, changes, expected):
    assert windows(parse(family, **changes)) == expected


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize(
    ("changes", "multiplier"),
    [({}, 2304**0.5), ({"dtype": "float32"}, 2304**0.5), ({"dtype": "bfloat16", "hidden_size": 3584}, 59.75)],
)
def test_the_factor_of_gemma_s_embedding_has_the_model_s_type(model_type, changes, multiplier):
    assert parse(model_type, **changes).input.multiplier == multiplier
    old = {"torch_dtype" if key == "dtype" else key: value for key, value in changes.items()}
    assert parse(model_type, **old).input.multiplier == multiplier


def test_windows_and_rotary_bases_of_gemma():
    assert windows(parse("gemma2", num_hidden_layers=4)) == (4096, None, 4096, None)
    parsed = parse("gemma3_text", num_hidden_layers=7, sliding_window=8)
    assert windows(parsed) == (8, 8, 8, 8, 8, None, 8)
    found = [mixer.rotary.frequencies[1] for mixer in mixers(parsed)[4:6]]
    assert found == pytest.approx([10000.0 ** (-1 / 128), 1000000.0 ** (-1 / 128)])


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
    parsed = parse("t5", **config)
    assert parsed.tied_head == tied and parsed.logit_scale == (512**-0.5 if tied else 1.0)
