"""The bundled demo model is small, and its files agree with each other."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from bminf_lite.checkpoint.opened_model import open_model

FOLDER = Path(str(resources.files("bminf_lite.demo_model")))
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def test_the_folder_is_complete_and_under_15_megabytes() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert files.keys() >= {"LICENSE.txt", "heldout.txt", "tokenizer_config.json"}
    assert sum(files.values()) < 15_000_000


def test_the_tensors_are_those_of_a_llama_in_finite_fp32() -> None:
    with open_model(FOLDER) as model:  # checks names and shapes
        config = model.checkpoint.config
    assert config["model_type"] == "llama" and config["num_key_value_heads"] < config["num_attention_heads"]
    weights = load_file(FOLDER / "model.safetensors")
    assert config["tie_word_embeddings"] and "lm_head.weight" not in weights
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in weights.values())


def test_the_vocabulary_and_the_special_tokens_are_those_of_the_configuration() -> None:
    config, generation, settings = map(read, ("config.json", "generation_config.json", "tokenizer_config.json"))
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(config["vocab_size"]))
    for name in ("bos_token", "eos_token"):
        assert TOKENIZER.token_to_id(settings[name]) == config[f"{name}_id"] == generation[f"{name}_id"]
    assert TOKENIZER.encode("Return").ids[0] == config["bos_token_id"]
    assert settings["model_max_length"] == config["max_position_embeddings"]


def test_the_heldout_text_is_long_enough() -> None:
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")
    assert 60_000 <= len(text.encode()) <= 100_000
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert len(ids) > 20 * read("config.json")["max_position_embeddings"] and TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", ["naïve café", "日本語 🐍", "\ttabs\n\n", "  two  spaces"])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text
