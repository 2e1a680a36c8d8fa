"""GGUF files of models with states or experts give the configuration, tensors and logits of their folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Golden, RandomWeights, goldens
from tolerances import assert_close

import bminf_lite
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="GGUF needs the package gguf")
import gguf_kit  # noqa: E402
from test_gguf import assert_any_number_is_read_or_refused, split  # noqa: E402

WITHOUT_EXPERTS = {"hybrid_override_pattern": "M*-M", "vocab_size": 96}
BIASES = {
    "layers_block_type": ["mlp", "linear_attention", "full_attention"],
    "mlp_hidden_act": "relu2",
    "attention_bias": True,
}
PLAIN = {
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": None,
    "attention_in_multiplier": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", "a layer of each kind", WITHOUT_EXPERTS),
    "nemotron_h, biases": ("nemotron_h", "biases", BIASES),
    "falcon_h1": ("falcon_h1", "multipliers", {}),
    "falcon_h1, norm": ("falcon_h1", "norm behind the gate, expanded, no convolution bias", {}),
    "falcon_h1, biases": ("falcon_h1", "biases and multipliers", PLAIN),
    "granitemoehybrid": ("granitemoehybrid", "two kinds, multipliers, no rotation", {"num_local_experts": 0}),
    "granitemoehybrid, rotation": ("granitemoehybrid", "rotation, biases, tied, no experts", {}),
    "nemotron_h, experts": ("nemotron_h", "experts last, groups, latent width", {}),
    "granitemoehybrid, experts": ("granitemoehybrid", "two kinds, multipliers, no rotation", {}),
    "lfm2_moe": ("lfm2_moe", "two kinds", {}),
    "qwen3_5_text": ("qwen3_5_text", "two kinds", {}),
    "qwen3_5_text, one key head": ("qwen3_5_text", "tied, biases, one key head", {}),
    "qwen3_5_text, sections": ("qwen3_5_text", "sections of the rotation", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "two kinds", {}),
    "qwen3_next": ("qwen3_next", "two kinds", {"norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", "plain weights", {"norm_topk_prob": True}),
    "qwen3_moe, biases": ("qwen3_moe", "biases, tied", {}),
    "granitemoe": ("granitemoe", "plain weights", {}),
    "granitemoe, multipliers": ("granitemoe", "multipliers, biases, tied", {}),
    "granitemoeshared": ("granitemoeshared", "plain weights", {}),
    "lfm2": ("lfm2", "two kinds", {}),
    "lfm2, biases": ("lfm2", "untied, biases", {}),
    "lfm2, older keys": ("lfm2", "older keys", {}),
}


def case(name: str) -> Golden:
    """A golden with other values of its configuration, and the logits that the CPU computes with these."""
    family, golden_name, changes = CASES[name]
    golden = next(golden for golden in goldens(family) if golden.name == golden_name)
    changed = replace(golden, config=golden.config | changes)
    if not changes:
        return golden
    tokens = changed.tokens % changed.config["vocab_size"]
    return replace(
        changed, tokens=tokens, logits=changed.logits_with(RandomWeights(changed.config, golden.seed), tokens)
    )


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_logits_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    golden = case(name)
    is_multiplied = "multiplier" in str(golden.config) and golden.config["model_type"] == "falcon_h1"
    gguf_kit.check(golden, tmp_path, computed=("A_log", "norm.weight"), has_values=not is_multiplied)


def test_a_migrated_file_is_the_migrated_folder(tmp_path: Path) -> None:
    golden = case("granitemoehybrid")
    source = gguf_kit.write(tmp_path / "model.gguf", golden)
    folder = golden.save(tmp_path / "folder", RandomWeights(golden.config, golden.seed).tensors)
    logits = []
    for number, path in enumerate((source, folder)):
        bminf_lite.migrate(path, tmp_path / str(number))
        with bminf_lite.load(tmp_path / str(number), device="cpu") as model:
            logits.append(model.logits(golden.tokens))
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-4 * np.abs(logits[0]).max())


@pytest.mark.parametrize("fused_experts", [False, True])
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_experts_are_read_in_any_type(kind: str, fused_experts: bool, tmp_path: Path) -> None:
    golden = next(goldens("lfm2_moe"))
    golden = replace(golden, config=golden.config | {"hidden_size": 64, "moe_intermediate_size": 32})
    expected = RandomWeights(golden.config, golden.seed).tensors
    with open_model(gguf_kit.write(tmp_path / "model.gguf", golden, kind, fused_experts=fused_experts)) as model:
        assert model.checkpoint.tensors.keys() == expected.keys()
        for name in (name for name in expected if ".experts." in name):
            values = gguf_kit.as_stored(name, expected[name], kind)
            np.testing.assert_array_equal(model.checkpoint.read(name).astype(np.float32), values)
            np.testing.assert_array_equal(np.asarray(model.checkpoint.stored(name)[3:7]), values[3:7])


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_halves_of_a_matrix_are_read_in_any_type_and_in_any_part(kind: str, tmp_path: Path) -> None:
    """Gate and up lie in two tensors, of which a split file may have one in each part."""
    changes = {"num_local_experts": 0, "hidden_size": 64, "num_attention_heads": 4}
    golden = next(goldens("granitemoehybrid"))
    golden = replace(golden, config=golden.config | changes | {"mamba_n_heads": 8})
    path = gguf_kit.write(tmp_path / "model.gguf", golden, kind)
    expected = RandomWeights(golden.config, golden.seed).tensors
    (tmp_path / "parts").mkdir()
    split(path, tmp_path / "parts", "granitehybrid", "blk.1.ffn_up.weight")
    for opened in (path, tmp_path / "parts"):
        with open_model(opened) as model:
            for layer in range(3):
                name = f"model.layers.{layer}.shared_mlp.input_linear.weight"
                values = gguf_kit.as_stored(name, expected[name], kind)
                np.testing.assert_array_equal(model.checkpoint.read(name).astype(np.float32), values)
                part = np.asarray(model.checkpoint.stored(name)[50:60]).astype(np.float32)
                np.testing.assert_array_equal(part, values[50:60])


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("granitemoehybrid", {"expert_count": 4}, "expert_count is 4, but the tensors hold none"),
        ("falcon_h1", {"expert_count": 4}, "mixture of experts, which this version does not run for falcon-h1"),
        ("nemotron_h, experts", {"expert_count": 5}, "expert_count is 5, but the tensors hold 6"),
        ("nemotron_h, experts", {"expert_feed_forward_length": 20}, "ffn_up_exps.weight' has shape"),
        ("nemotron_h, experts", {"expert_shared_count": 2}, "expert_shared_count is 2"),
        ("nemotron_h, experts", {"nextn_predict_layers": 1}, "further layers"),
        ("nemotron_h, experts", {"expert_group_used_count": 0}, "3 groups of experts, and does not say how many"),
        ("lfm2_moe", {"expert_gating_func": 1}, "expert_gating_func is 1, not 2"),
        ("granitemoehybrid", {"attention.head_count_kv": [0, 2]}, "head_count_kv has 2 numbers for 3 layers"),
        ("granitemoehybrid", {"attention.head_count_kv": [1, 2, 0]}, "head_count_kv is 1, 2 in different layers"),
        ("granitemoehybrid", {"ssm.inner_size": 100}, "inner_size is 100, not a multiple of 48"),
        ("falcon_h1", {"ssm.time_step_rank": 5}, "falcon-h1.ssm.time_step_rank"),
        ("falcon_h1", {"ssm.state_size": 0}, "ssm.state_size is 0, but must be"),
        ("falcon_h1", {"ssm.dt_b_c_rms": True}, "dt_b_c_rms is True, which would change the results"),
        ("nemotron_h", {"feed_forward_length": [0, 80, 80, 0]}, "layer 1 has key-value heads and hidden units"),
        ("qwen3_5_text", {"nextn_predict_layers": 3}, "nextn_predict_layers is 3 of block_count layers"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "does not say which layers have attention"),
        ("qwen3_5_text", {"ssm.group_count": 3}, "qwen35.ssm.time_step_rank"),
        ("granitemoe", {"expert_shared_feed_forward_length": 40}, "shared_mlp"),
        ("qwen3_next", {"ssm.group_count": 2**24, "ssm.time_step_rank": 2**24, "ssm.inner_size": 2**24}, "problems"),
        (
            "qwen3_5_text",
            {"ssm.group_count": 2**24, "ssm.time_step_rank": 2**24, "ssm.inner_size": 2**24},
            "file is damaged",
        ),
        ("granitemoe", {"rope.scaling.finetuned": False}, "has no rotation"),
        ("lfm2", {"attention.causal": False}, "attention.causal is False, which would change the results"),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", case(name), **metadata)
    with pytest.raises(CheckpointError, match=message):
        open_model(path)


@pytest.mark.parametrize(
    "name",
    [
        "granitemoehybrid",
        "nemotron_h",
        "falcon_h1",
        "nemotron_h, experts",
        "lfm2_moe",
        "qwen3_5_moe_text",
        "qwen3_next",
    ],
)
def test_any_number_in_the_metadata_is_read_or_refused_with_the_file_s_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_any_number_is_read_or_refused(gguf_kit.write(tmp_path / "model.gguf", case(name)), monkeypatch)


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    golden = case("qwen3_5_text")
    tensors = RandomWeights(golden.config, golden.seed).tensors
    further = {name.replace(".2.", ".3."): values for name, values in tensors.items() if ".layers.2." in name}
    further["model.layers.3.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    metadata = {"block_count": 4, "nextn_predict_layers": 1}
    path = gguf_kit.write(tmp_path / "model.gguf", golden, tensors=tensors | further, **metadata)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())


def test_a_tied_falcon_h1_does_not_say_the_factor_of_its_head(tmp_path: Path) -> None:
    golden = next(golden for golden in goldens("falcon_h1") if golden.config.get("tie_word_embeddings"))
    with pytest.raises(CheckpointError, match=r"has no output\.weight, and does not say by what"):
        open_model(gguf_kit.write(tmp_path / "model.gguf", golden))
