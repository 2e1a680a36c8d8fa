"""The bundled demo model's files agree with each other and stay small."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

FOLDER = Path(str(resources.files("bminf_lite.demo_model")))


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return load_file(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_folder_is_complete_and_under_15_megabytes():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert files.keys() >= {
        "LICENSE.txt",
        "config.json",
        "generation_config.json",
        "heldout.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 15_000_000


def test_the_configuration_describes_the_tensors(config, weights):
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    assert config["model_type"] == "llama"
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    expected = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (config["intermediate_size"], hidden),
        "mlp.up_proj": (config["intermediate_size"], hidden),
        "mlp.down_proj": (hidden, config["intermediate_size"]),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in expected.items()
    }
    shapes |= {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    assert config["tie_word_embeddings"]
    assert {name: array.shape for name, array in weights.items()} == shapes


def test_the_weights_are_finite_fp32(weights):
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    assert all(np.isfinite(array).all() for array in weights.values())


def test_the_vocabulary_is_the_embedding(config, weights, tokenizer):
    assert tokenizer.get_vocab_size() == config["vocab_size"] == len(weights["model.embed_tokens.weight"])
    assert sorted(tokenizer.get_vocab().values()) == list(range(config["vocab_size"]))


def test_special_tokens_agree(config, tokenizer):
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    bos = tokenizer.token_to_id(settings["bos_token"])
    assert bos == config["bos_token_id"] == generation["bos_token_id"]
    assert tokenizer.token_to_id(settings["eos_token"]) == config["eos_token_id"] == generation["eos_token_id"]
    assert tokenizer.encode("Return").ids[0] == bos
    assert settings["model_max_length"] == config["max_position_embeddings"]


def test_the_heldout_text_is_long_enough_and_survives_the_tokenizer(config, tokenizer):
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert 60_000 <= len(text.encode()) <= 100_000
    assert len(ids) > 20 * config["max_position_embeddings"]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["naïve café", "日本語 🐍", "\ttabs\n\n", "  two  spaces"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
