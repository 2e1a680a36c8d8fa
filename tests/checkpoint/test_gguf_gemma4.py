"""Gemma 4 in GGUF files, written as llama.cpp's converter does it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_kit
import gguf_recurrent
import numpy as np
import pytest
from tiny_models import Golden, RandomWeights, goldens
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.errors import CheckpointError
from bminf_lite.gguf_files.gemma4 import TENSORS

CASES = {golden.name: golden for golden in goldens("gemma4_text") if not golden.config.get("attention_bias")}


def write(path: Path, golden: Golden, kind: str = "F32", **changes: Any) -> Path:
    """The golden's model, its matrices in the type ``kind``; ``changes`` replace or add keys of the architecture."""
    given, config = golden.config, models.find(golden.config).parse(golden.config)
    layers, shared = config.num_layers, given.get("num_kv_shared_layers", 0)
    types = given["layer_types"]
    heads = dict.fromkeys(set(types), given["num_key_value_heads"])
    if given.get("attention_k_eq_v") and given.get("num_global_key_value_heads"):
        heads["full_attention"] = given["num_global_key_value_heads"]
    widths = [given["intermediate_size"] * (1 + (i >= layers - shared > 0)) for i in range(layers)]
    metadata: dict[str, Any] = {
        "embedding_length": config.hidden_size,
        "block_count": layers,
        "context_length": config.context_length,
        "feed_forward_length": widths if given.get("use_double_wide_mlp") else widths[0],
        "attention.head_count": given["num_attention_heads"],
        "attention.head_count_kv": [heads[kind] for kind in types],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": given["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": given["hidden_size_per_layer_input"],
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
    }
    for suffix, size in (("", given["global_head_dim"]), ("_swa", given["head_dim"])):
        keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        metadata |= {f"{key}{suffix}": size for key in keys}
    if given.get("final_logit_softcapping"):
        metadata["final_logit_softcapping"] = given["final_logit_softcapping"]
    if given.get("enable_moe_block"):
        metadata |= {"expert_count": given["num_experts"], "expert_used_count": given["top_k_experts"]}
        metadata["expert_feed_forward_length"] = given["moe_intermediate_size"]
    writer = gguf.GGUFWriter(path, "gemma4")
    for key, value in (metadata | changes).items():
        if value is not None:
            gguf_kit.add(writer, f"gemma4.{key}", value)
    tensors, experts = gguf_recurrent.stacked(RandomWeights(given, golden.seed).tensors)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    for name, values in tensors.items():
        module, _, part = name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match and match[2] in TENSORS:
            gguf_kit.add_tensor(writer, f"blk.{match[1]}.{TENSORS[match[2]]}", values, kind)
        else:
            gguf_kit.add_tensor(writer, f"{names.get_name(module)}.{part}", values, kind)
    for name, values in gguf_recurrent.fused(experts).items():
        gguf_kit.add_tensor(writer, name, values, kind)
    pairs = given["global_head_dim"] // 2
    factors = np.where(np.arange(pairs) < pairs // 4, 1, 1e30).astype(np.float32)
    gguf_kit.add_tensor(writer, "rope_freqs.weight", factors, kind)
    if shared:  # which the converter copies from the folder
        gguf_kit.add_tensor(writer, f"blk.{layers - 1}.attn_k.weight", np.zeros((8, 8), np.float32), kind)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_logits_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    golden = CASES[name]
    config = {key: value for key, value in golden.config.items() if key != "hidden_activation"}
    changed = replace(golden, config=config)
    expected = RandomWeights(config, golden.seed)
    path = write(tmp_path / "model.gguf", changed)
    with open_model(path) as model:
        assert model.checkpoint.tensors.keys() == expected.tensors.keys()
        for tensor, values in expected.tensors.items():
            np.testing.assert_array_equal(model.checkpoint.read(tensor), values)
        assert model.config == models.find(config).parse(config)
    logits = changed.logits_with(expected)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), logits, "logits", np.float32, np.abs(logits).max())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention.sliding_window_pattern": None}, "sliding_window_pattern is not a list of 2 flags"),
        ({"attention.head_count_kv": [2]}, "head_count_kv is 2|head_count_kv is \\[2\\]"),
        ({"attention.key_length_swa": None}, "lacks gemma4.attention.key_length_swa"),
        ({"rope.dimension_count": 6}, "rope.dimension_count is 6, not the 24 elements of a head"),
        ({"expert_count": 4}, "expert_count is 4, but the tensors hold 5"),
    ],
)
def test_a_file_that_states_something_else_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    golden = CASES["experts beside a dense layer"]
    with pytest.raises(CheckpointError, match=problem):
        open_model(write(tmp_path / "model.gguf", golden, **changes))
