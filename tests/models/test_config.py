"""Configurations: what they mean, and one error that lists every nonsensical value."""

from __future__ import annotations

import pytest
from tiny_models import ENCODER_DECODERS, FAMILIES

from bminf_lite import models
from bminf_lite.errors import CheckpointError
from bminf_lite.models.spec import Role

FULL, SLIDING = "full_attention", "sliding_attention"
TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def parse(model_type: str = "llama", **changes):
    config = {"model_type": model_type, **TINY, **changes}
    return models.find(config).parse(config)


def problems(model_type: str = "llama", **changes) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        parse(model_type, **changes)
    title, *lines = str(caught.value).split("\n")
    if not lines:
        return [title.removeprefix("config.json: ")]
    assert title == f"config.json: {len(lines)} problems"
    return [line.removeprefix("  - ") for line in lines]


@pytest.mark.parametrize("name", models.names())
def test_every_architecture_says_whether_it_has_an_encoder(name):
    config = models.find({"model_type": name}).parse({"model_type": name})
    assert config.is_encoder_decoder == (name in {*ENCODER_DECODERS, "cpm2", "eva"})
    assert bool(config.max_source_length) == bool(config.decoder_start_token_ids) == config.is_encoder_decoder


@pytest.mark.parametrize("model_type", ["gpt5", "", None, 3, "llama.py", "_config", "spec", "../llama", ["llama"]])
def test_an_unknown_architecture_is_named_with_the_known_ones(model_type):
    with pytest.raises(CheckpointError, match=r"model_type .* is not supported; this version runs: .*llama"):
        models.find({"model_type": model_type})
    with pytest.raises(CheckpointError, match="None"):
        models.find({})


BAD_VALUES = [
    ("hidden_size", 0),
    ("hidden_size", -48),
    ("hidden_size", 48.0),
    ("hidden_size", "48"),
    ("hidden_size", True),
    ("hidden_size", None),
    ("hidden_size", 2**25),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 5000),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 8),
    ("head_dim", 7),
    ("head_dim", 0),
    ("head_dim", [16]),
    ("intermediate_size", {}),
    ("vocab_size", 0),
    ("max_position_embeddings", 0),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", "1e-6"),
    ("hidden_act", "swiglu"),
    ("hidden_act", ["silu"]),
    ("tie_word_embeddings", "false"),
    ("tie_word_embeddings", 1),
    ("rope_theta", -1.0),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=repr)
def test_a_nonsensical_value_is_one_problem_that_names_it(family, key, value):
    found = problems(family, **{key: value})
    assert len(found) == 1
    assert key in found[0] or "rope_type" in found[0]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": "yes"}),
        ("llama", {"mlp_bias": 0}),
        ("mistral", {"sliding_window": 0}),
        ("mistral", {"sliding_window": "4096"}),
        ("qwen2", {"use_sliding_window": 1}),
        ("qwen2", {"sliding_window": -1, "use_sliding_window": True}),
        ("qwen3", {"max_window_layers": -1, "use_sliding_window": True}),
        ("qwen3", {"layer_types": ["full_attention"], "use_sliding_window": True}),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention", "x"], "use_sliding_window": True}),
        ("qwen3", {"layer_types": "full_attention", "use_sliding_window": True}),
        ("qwen3", {"attention_bias": 2}),
    ],
)
def test_nonsense_in_a_family_s_own_keys(family, changes):
    found = problems(family, **changes)
    assert len(found) == 1 and next(iter(changes)) in found[0]


def test_all_problems_come_in_one_error():
    found = problems(
        hidden_size="x", num_hidden_layers=-1, vocab_size=0, hidden_act="?", rms_norm_eps=2.0, attention_bias=None,
        mlp_bias=7, tie_word_embeddings="no", rope_theta=0, intermediate_size=1.5, max_position_embeddings=0,
    )  # fmt: skip
    for key in (
        "hidden_size", "num_hidden_layers", "vocab_size", "hidden_act", "rms_norm_eps", "mlp_bias",
        "tie_word_embeddings", "rope_theta", "intermediate_size", "max_position_embeddings",
    ):  # fmt: skip
        assert sum(key in p for p in found) == 1, key
    assert len(found) == 10


def test_every_problem_tells_value_and_bound():
    assert problems(num_hidden_layers=5000) == ["num_hidden_layers is 5000, not a whole number from 1 to 4096"]
    assert problems(num_key_value_heads=3) == ["num_attention_heads (4) is not a multiple of num_key_value_heads (3)"]
    assert problems(head_dim=7) == ["head_dim (7) is odd, which rotary positions do not allow"]
    assert problems(rms_norm_eps=2) == ["rms_norm_eps is 2, not a number from 0.0 to 1.0"]
    names = "gelu_new, gelu_pytorch_tanh, gelu, relu, silu, swish"
    assert problems(hidden_act="x") == [f"hidden_act is 'x', not one of {names}"]


# -- what keys mean ---------------------------------------------------------------------------------------------------


def test_absent_keys_mean_the_class_defaults_and_null_its_own():
    assert parse("llama").context_length == 2048
    assert parse("mistral").windows == (4096,) * 3
    assert parse("mistral", sliding_window=None).windows == (None,) * 3
    assert parse("qwen3").head_dim == 128
    without = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
    without |= {"num_attention_heads": 16, "hidden_size": 64}
    for family, heads in (("llama", 16), ("mistral", 8)):
        config = {"model_type": family, **without}
        assert models.find(config).parse(config).kv_heads == heads
        assert models.find(config).parse(config | {"num_key_value_heads": None}).kv_heads == 16


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8}, (None, None, None)),
        ({"use_sliding_window": True}, (None, None, None)),  # from layer 28 on
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096, 4096)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}, (8, None, 8)),
        ({"sliding_window": 8, "layer_types": [SLIDING, SLIDING, SLIDING]}, (None, None, None)),
    ],
)
def test_windows_of_qwen(family, changes, windows):
    assert parse(family, **changes).windows == windows


@pytest.mark.parametrize(
    ("family", "changes", "biases", "norms"),
    [
        ("llama", {}, set(), False),
        ("llama", {"attention_bias": True}, {"q", "k", "v", "o"}, False),
        ("llama", {"mlp_bias": True}, {"gate", "up", "down"}, False),
        ("mistral", {}, set(), False),
        ("qwen2", {}, {"q", "k", "v"}, False),
        ("qwen3", {}, set(), True),
        ("qwen3", {"attention_bias": True}, {"q", "k", "v", "o"}, True),
    ],
)
def test_which_biases_and_head_norms_a_checkpoint_has(family, changes, biases, norms):
    config = {"model_type": family, **TINY, "head_dim": 12, **changes}
    architecture = models.find(config)
    parameters = architecture.spec(architecture.parse(config)).parameters
    found = {name.split(".")[-2].removesuffix("_proj") for name in parameters if name.endswith(".bias")}
    assert found == biases
    assert ("model.layers.2.self_attn.q_norm.weight" in parameters) == norms


def test_shapes_and_roles_of_tensors():
    config = {"model_type": "qwen3", **TINY, "head_dim": 20, "tie_word_embeddings": True}
    architecture = models.find(config)
    spec = architecture.spec(architecture.parse(config))
    shapes = {name.removeprefix("model.layers.1."): p.shape for name, p in spec.parameters.items()}
    assert shapes["self_attn.q_proj.weight"] == (80, 48) and shapes["self_attn.k_proj.weight"] == (40, 48)
    assert shapes["self_attn.o_proj.weight"] == (48, 80) and shapes["self_attn.k_norm.weight"] == (20,)
    assert shapes["mlp.gate_proj.weight"] == (80, 48) and shapes["mlp.down_proj.weight"] == (48, 80)
    assert spec.parameters["lm_head.weight"].role is Role.HEAD
    assert spec.parameters["model.embed_tokens.weight"].role is Role.EMBEDDING
    assert spec.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    quantized = [name for name, p in spec.parameters.items() if p.role is Role.LINEAR]
    assert len(quantized) == 3 * 7 and all(name.endswith("_proj.weight") for name in quantized)
