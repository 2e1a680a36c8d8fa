"""GGUF files of mixtures of experts and of latent attention give the tensors and logits of their folders."""

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
from bminf_lite.gguf_files.config import config_json
from bminf_lite.gguf_files.header import read_header

gguf = pytest.importorskip("gguf", reason="GGUF needs the package gguf")
import gguf_kit  # noqa: E402
import gguf_mixtures  # noqa: E402
from test_gguf import assert_any_number_is_read_or_refused  # noqa: E402

ALIKE = {"mscale": 0.9, "mscale_all_dim": 0.9}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", "plain weights", {}),
    "gpt_oss, yarn": ("gpt_oss", "yarn, plain attention, tied", {}),
    "olmoe": ("olmoe", "plain weights", {}),
    "olmoe, biases": ("olmoe", "biases", {}),
    "mixtral": ("mixtral", "two of eight", {}),
    "mixtral, all": ("mixtral", "all of two", {}),
    "qwen2_moe": ("qwen2_moe", "plain weights", {}),
    "glm4_moe": ("glm4_moe", "plain weights", {}),
    "glm4_moe, groups": ("glm4_moe", "groups, norms, biases", {}),
    "glm4_moe, two shared": ("glm4_moe", "two shared, not renormalised", {}),
    "dots1": ("dots1", "plain weights", {"sliding_window": None}),
    "minimax_m2": ("minimax_m2", "plain weights", {}),
    "minimax_m2, whole heads": ("minimax_m2", "whole heads, tied", {}),
    "ernie4_5_moe": ("ernie4_5_moe", "plain weights", {}),
    "ernie4_5_moe, every second layer": ("ernie4_5_moe", "biases, untied, every second layer", {"use_bias": False}),
    "llama4_text": ("llama4_text", "plain weights", {}),
    "afmoe": ("afmoe", "plain weights", {"mup_enabled": True}),
    "exaone_moe": ("exaone_moe", "plain weights", {}),
    "deepseek_v2": ("deepseek_v2", "plain weights", {}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        "groups, a dense layer, biases",
        {"attention_bias": False, "mlp_bias": False},
    ),
    "deepseek_v2, yarn": ("deepseek_v2", "whole queries, yarn rope, tied", {"rope_parameters": ALIKE}),
    "deepseek_v3": ("deepseek_v3", "groups, a dense layer", {}),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        "whole queries, yarn rope, biases",
        {"rope_parameters": ALIKE, "attention_bias": False},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", "plain weights", {}),
    "glm4_moe_lite, two shared": ("glm4_moe_lite", "whole queries, two shared", {}),
    "youtu": ("youtu", "plain weights", {}),
    "kimi_linear": ("kimi_linear", "two kinds", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "plain weights", {}),
    "hunyuan_v1_moe, biases": ("hunyuan_v1_moe", "biases", {}),
    "minicpm3": (
        "minicpm3",
        "plain weights, untied",
        {"v_head_dim": 12, "scale_emb": 12, "dim_model_base": 256},
    ),
}


def case(name: str) -> Golden:
    """A golden with other values of its configuration, and the logits that the CPU computes with these."""
    family, golden_name, changes = CASES[name]
    golden = next(golden for golden in goldens(family) if golden.name == golden_name)
    if not changes:
        return golden
    rope = (
        {"rope_parameters": golden.config["rope_parameters"] | changes["rope_parameters"]}
        if "rope_parameters" in changes
        else {}
    )
    changed = replace(golden, config=golden.config | changes | rope)
    return replace(changed, logits=changed.logits_with(RandomWeights(changed.config, golden.seed), changed.tokens))


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_logits_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    gguf_kit.check(case(name), tmp_path, computed=("A_log",))


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_matrices_of_heads_are_read_in_any_type(kind: str, tmp_path: Path) -> None:
    """Keys of a latent are quantized along a head's elements, and values along the latent."""
    golden = next(goldens("deepseek_v3"))
    golden = replace(golden, config=golden.config | {"qk_nope_head_dim": 32, "kv_lora_rank": 64, "hidden_size": 64})
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    expected = RandomWeights(golden.config, golden.seed).tensors[name].reshape(4, 48, 64)
    keys = gguf_kit.as_stored("k", expected[:, :32].swapaxes(1, 2), kind).swapaxes(1, 2)
    whole = np.concatenate([keys, gguf_kit.as_stored("v", expected[:, 32:], kind)], axis=1).reshape(192, 64)
    with open_model(gguf_kit.write(tmp_path / "model.gguf", golden, kind)) as model:
        np.testing.assert_array_equal(model.checkpoint.read(name).astype(np.float32), whole)
        np.testing.assert_array_equal(np.asarray(model.checkpoint.stored(name)[30:50]).astype(np.float32), whole[30:50])


def test_older_files_have_keys_and_values_of_a_latent_in_one_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = case("deepseek_v2")
    monkeypatch.setattr(gguf_mixtures, "divided", lambda name, values, config: iter(()))
    heads = {"attention.key_length": 20, "attention.value_length": 16, "attention.head_count_kv": 4}
    no_mla = {"attention.key_length_mla": 0, "attention.value_length_mla": 0}
    path = gguf_kit.write(tmp_path / "model.gguf", golden, **heads, **no_mla)
    assert "blk.0.attn_kv_b.weight" in read_header(path).tensors
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())


def test_gpt_oss_in_mxfp4_is_that_of_its_folder(tmp_path: Path) -> None:
    """The values of MXFP4 blocks are the same to the bit, also the biases of experts."""
    golden = next(goldens("gpt_oss"))
    golden = replace(golden, config=golden.config | {"hidden_size": 64, "intermediate_size": 32})
    expected = RandomWeights(golden.config, golden.seed).tensors
    with open_model(gguf_kit.write(tmp_path / "model.gguf", golden, "MXFP4")) as model:
        assert model.checkpoint.tensors.keys() == expected.keys()
        for name in (name for name in expected if ".experts." in name):
            values = expected[name] if name.endswith("bias") else gguf_kit.as_stored(name, expected[name], "MXFP4")
            np.testing.assert_array_equal(model.checkpoint.read(name).astype(np.float32), values)


def test_factors_of_longrope_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = next(golden for golden in goldens("minicpm3") if golden.name == "longrope")
    rope = golden.config["rope_parameters"]
    golden = replace(golden, config=golden.config | {"scale_emb": 12, "dim_model_base": 256, "v_head_dim": 12})
    close = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: Any) -> None:
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
        close(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    metadata = {"rope.freq_base": 100.0, "rope.scaling.original_context_length": 64, "context_length": 256}
    path = gguf_kit.write(tmp_path / "model.gguf", golden, **metadata)
    tokens = golden.tokens[:20]
    expected = golden.logits_with(RandomWeights(golden.config, golden.seed), tokens)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(tokens), expected, "logits", np.float32, np.abs(expected).max())


def test_sizes_of_1_at_the_end_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that quantize a file drop them: ``A`` is ``[heads, 1]``, and a convolution has three dimensions."""
    golden, convert = case("kimi_linear"), gguf_mixtures.convert

    def shorter(*arguments: Any) -> Any:
        for name, values in convert(*arguments):
            yield name, values[0] if "conv1d" in name else values[0, 0] if name.endswith(".ssm_a") else values

    monkeypatch.setattr(gguf_mixtures, "convert", shorter)
    path = gguf_kit.write(tmp_path / "model.gguf", golden)
    assert read_header(path).tensors["blk.0.ssm_a"].shape == (4, 1)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())


@pytest.mark.parametrize("name", ["glm4_moe", "exaone_moe", "glm4_moe_lite"])
def test_layers_that_draft_are_left_out(name: str, tmp_path: Path) -> None:
    golden = case(name)
    tensors = RandomWeights(golden.config, golden.seed).tensors
    further = {x.replace(".2.", ".3.", 1): values for x, values in tensors.items() if ".layers.2." in x}
    further["model.layers.3.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    metadata = {"block_count": 4, "nextn_predict_layers": 1}
    if name == "exaone_moe":
        metadata["attention.sliding_window_pattern"] = [True, True, False, True]
    path = gguf_kit.write(tmp_path / "model.gguf", golden, tensors=tensors | further, **metadata)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())


@pytest.mark.parametrize(
    ("name", "metadata", "key", "value"),
    [
        ("deepseek_v3", {"expert_gating_func": 0}, "model_type", "deepseek_v3"),
        ("deepseek_v2", {"expert_gating_func": 0}, "model_type", "deepseek_v2"),
        ("deepseek_v3", {"expert_weights_scale": 0.0}, "routed_scaling_factor", 1.0),
        ("deepseek_v3", {"rope.scaling.yarn_log_multiplier": 0.1}, "rope_scaling", None),
        ("gpt_oss", {"attention.sliding_window_pattern": 1}, "layer_types", ["full_attention"] * 2),
        ("llama4_text", {"attention.sliding_window": 0}, "no_rope_layers", [1] * 4),
        ("qwen2_moe", {"expert_shared_feed_forward_length": 0}, "shared_expert_intermediate_size", 80),
        ("qwen2_moe", {"expert_feed_forward_length": 0}, "moe_intermediate_size", 40),
        ("mixtral", {"expert_used_count": 3}, "num_experts_per_tok", 3),
    ],
)
def test_what_a_key_means(name: str, metadata: dict[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", case(name), **metadata)
    assert config_json(read_header(path)).get(key) == value


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("glm4_moe", {"expert_gating_func": 1}, r"expert_gating_func is 1, not 2 \(sigmoid\)"),
        ("ernie4_5_moe", {"expert_gating_func": 2}, r"expert_gating_func is 2, not 1 \(softmax\)"),
        ("deepseek_v2", {"expert_weights_norm": True}, "norm"),
        ("deepseek_v3", {"attention.key_length_mla": 8}, "key_length_mla is 8"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "would change the results and is not read"),
        ("deepseek_v3", {"attention.head_count": 8}, "attn_k_b.weight .* are not of 8 heads"),
        ("deepseek_v3", {"nextn_predict_layers": 3}, "nextn_predict_layers is 3 of block_count layers"),
        ("afmoe", {"expert_weights_norm": False}, "expert_weights_norm is not set"),
        (
            "afmoe",
            {"attention.sliding_window_pattern": [True]},
            "sliding_window_pattern is not a period, nor a list of 3",
        ),
        ("llama4_text", {"attention.sliding_window_pattern": 2}, "pattern is not 4"),
        ("mixtral", {"expert_count": 3}, "expert_count is 3, but the tensors hold 8"),
        ("olmoe", {"attention.clamp_kqv": 8.0}, "clamp_kqv is 8.0, which would change the results"),
        ("gpt_oss", {"expert_feed_forward_length": 16}, "_exps.weight' has shape"),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = gguf_kit.write(tmp_path / "model.gguf", case(name), **metadata)
    with pytest.raises(CheckpointError, match=message):
        open_model(path)


@pytest.mark.parametrize("name", [name for name in CASES if "," not in name])
def test_any_number_in_the_metadata_is_read_or_refused_with_the_file_s_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_any_number_is_read_or_refused(gguf_kit.write(tmp_path / "model.gguf", case(name)), monkeypatch)
