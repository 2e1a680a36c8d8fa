"""Metadata of GGUF files mean what they mean in llama.cpp, and what is not read is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Golden, case_without_golden, goldens, mixers, random_tokens

import bminf_lite
from bminf_lite import models
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.errors import CheckpointError
from bminf_lite.gguf_files.architectures import TABLE
from bminf_lite.gguf_files.config import config_json, generation_config
from bminf_lite.gguf_files.converted import COMMON
from bminf_lite.gguf_files.encoders import ENCODERS
from bminf_lite.gguf_files.header import GgufHeader, GgufTensor

gguf = pytest.importorskip("gguf", reason="GGUF needs the package gguf")
import gguf_kit  # noqa: E402

HEAD_DIM, CONTEXT, HEADS = 16, 128, 4
EMBEDDING = {"token_embd.weight": GgufTensor(Path("x"), (97, HEADS * HEAD_DIM), "F32", 0, 0)}


def header(architecture: str = "llama", tensors: dict[str, GgufTensor] | None = None, **values: Any) -> GgufHeader:
    """A header of a small model; ``values`` are metadata of its architecture, with dots as ``__``."""
    common = {
        "embedding_length": HEADS * HEAD_DIM,
        "block_count": 2,
        "attention.head_count": HEADS,
        "context_length": CONTEXT,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": 96,
        "use_parallel_residual": True,
        "attention.sliding_window": 8,
    }
    if architecture not in ("cohere2", "gemma2", "gemma3", "phi3"):
        del common["attention.sliding_window"]
    given = {key.replace("__", "."): value for key, value in values.items()}
    metadata = {f"{architecture}.{key}": value for key, value in (common | given).items() if value is not None}
    return GgufHeader((Path("m.gguf"),), {"general.architecture": architecture} | metadata, EMBEDDING | (tensors or {}))


# -- rotations: llama.cpp's formula -----------------------------------------------------------------------------------


def angles(base: float, factor: float, yarn: bool, original: int, fast: float, slow: float) -> np.ndarray:
    """``rope_yarn`` and ``ggml_rope_yarn_corr_dims`` of ggml: the angle of each pair at position 1."""
    extrapolated = base ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    interpolated = extrapolated / factor
    if not yarn:
        return interpolated

    def dimension(rotations: float) -> float:
        return HEAD_DIM * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(dimension(fast))), min(HEAD_DIM - 1, math.ceil(dimension(slow)))
    ramp = 1 - np.clip((np.arange(HEAD_DIM // 2) - low) / max(0.001, high - low), 0, 1)
    return interpolated * (1 - ramp) + extrapolated * ramp


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from([None, "none", "linear", "yarn"]),
    factor=st.sampled_from([None, 0.0, 1.0, 2.0, 8.0]),
    old_key=st.booleans(),
    attention=st.sampled_from([None, 1.0, 0.5, 1.25]),
    base=st.sampled_from([None, 10000.0, 500000.0]),
    original=st.sampled_from([None, 32, 64]),
    betas=st.sampled_from([(None, None), (32.0, 1.0), (4.0, 2.0)]),
    extension=st.sampled_from([None, -1.0, 0.0, 1.0]),
    multiplier=st.sampled_from([None, 0.0, 1.0, 0.5]),
)
def test_any_scaling_gives_llama_cpp_s_angles(
    kind, factor, old_key, attention, base, original, betas, extension, multiplier
):
    found = header(
        rope__scaling__type=kind,
        rope__scaling__attn_factor=attention,
        rope__freq_base=base,
        rope__scaling__original_context_length=original,
        rope__scaling__yarn_beta_fast=betas[0],
        rope__scaling__yarn_beta_slow=betas[1],
        rope__scaling__yarn_ext_factor=extension,
        rope__scaling__yarn_log_multiplier=multiplier,
        **{"rope__scale_linear" if old_key else "rope__scaling__factor": factor},
    )
    yarn = kind == "yarn" and extension != 0 and (factor or 1) > 1
    config = config_json(found)
    rotary = mixers(models.find(config).parse(config))[0].rotary
    divisor = (factor or 1.0) if kind != "none" else 1.0
    expected = angles(base or 10000.0, divisor, yarn, original or CONTEXT, betas[0] or 32.0, betas[1] or 1.0)
    np.testing.assert_allclose(rotary.frequencies, expected, rtol=2e-6)
    scale = attention or 1.0
    if yarn:
        scale *= (1 + 0.1 * math.log(divisor)) / (1 + 0.1 * (multiplier or 0) * math.log(divisor))
    assert rotary.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("attention", [1.0, 0.5])
def test_divisors_of_frequencies_multiply_the_factor(tmp_path: Path, factor: float, attention: float) -> None:
    divisors = np.linspace(1, 8, HEAD_DIM // 2).astype("<f4")
    (tmp_path / "data").write_bytes(divisors.tobytes())
    tensor = GgufTensor(tmp_path / "data", divisors.shape, "F32", 0, divisors.nbytes)
    found = header(
        tensors={"rope_freqs.weight": tensor}, rope__scaling__factor=factor, rope__scaling__attn_factor=attention
    )
    config = config_json(found)
    rotary = mixers(models.find(config).parse(config))[0].rotary
    expected = angles(10000.0, factor, False, CONTEXT, 32, 1) / divisors
    np.testing.assert_allclose(rotary.frequencies, expected, rtol=2e-6)
    assert rotary.scale == attention
    with pytest.raises(CheckpointError, match=r"has YaRN .* and the tensor rope_freqs\.weight"):
        config_json(
            header(tensors={"rope_freqs.weight": tensor}, rope__scaling__type="yarn", rope__scaling__factor=2.0)
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope__scaling__type": "dynamic"}, "'dynamic', not one of none, linear, yarn, longrope"),
        ({"rope__scaling__factor": -2.0}, "factor is -2.0"),
        ({"rope__scaling__factor": math.inf}, "factor is inf"),
        ({"rope__scaling__factor": "x"}, "factor is 'x'"),
        ({"rope__scaling__factor": True}, "factor is True"),
        ({"rope__scaling__attn_factor": 0.0}, "attn_factor is 0.0"),
        ({"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_attn_factor": 0.5},
            "yarn_attn_factor is 0.5, and YaRN's formula gives 1.0693",
        ),
        ({"rope__dimension_count": 8, "attention__key_length": 16}, "rotates 8 of 16 elements"),
    ],
)
def test_scalings_without_a_meaning_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_json(header(**values))


def test_olmo_3_s_converter_writes_the_whole_factor() -> None:
    found = header("olmo2", rope__scaling__type="yarn", rope__scaling__factor=8.0, rope__scaling__attn_factor=1.25)
    assert config_json(found)["rope_scaling"]["attention_factor"] == 1.25


# -- keys that a file does not have -----------------------------------------------------------------------------------


SIZES_OF_STATES = {
    "falcon-h1": "ssm.inner_size",
    "granitehybrid": "ssm.state_size",
    "nemotron_h": "ssm.group_count",
    "nemotron_h_moe": "expert_feed_forward_length",
    "lfm2": "shortconv.l_cache",
    "lfm2moe": "expert_count",
    "qwen3next": "ssm.conv_kernel",
    "qwen3moe": "expert_feed_forward_length",
    "granitemoe": "expert_used_count",
    "qwen35": "ssm.inner_size",
    "qwen35moe": "expert_used_count",
    "gemma4": "attention.key_length_swa",
    "gpt-oss": "attention.sliding_window",
    "olmoe": "expert_count",
    "qwen2moe": "expert_used_count",
    "glm4moe": "expert_feed_forward_length",
    "dots1": "expert_count",
    "minimax-m2": "expert_used_count",
    "ernie4_5-moe": "leading_dense_block_count",
    "llama4": "interleave_moe_layer_step",
    "afmoe": "expert_shared_count",
    "exaone-moe": "expert_shared_count",
    "deepseek2": "attention.kv_lora_rank",
    "kimi-linear": "kda.head_dim",
    "minicpm3": "attention.kv_lora_rank",
    "hunyuan-moe": "expert_used_count",
}
"""A size that the layers with a state or experts of these architectures must have, or heads that differ by layer."""


@pytest.mark.parametrize(
    "architecture", sorted(set(TABLE) - {"mistral3", *SIZES_OF_STATES, *ENCODERS})
)  # which must say more
def test_absent_keys_have_llama_cpp_s_values(architecture: str) -> None:
    """The defaults: each head has keys and values, heads divide the embedding, and the base is 10,000."""
    config = config_json(header(architecture, attention__head_count_kv=1 if architecture == "falcon" else None))
    mixer = mixers(models.find(config).parse(config))[0]
    assert mixer.head_dim == HEAD_DIM
    if architecture not in ("falcon", "starcoder", "gpt2", "bloom"):
        assert mixer.kv_heads == HEADS
    if "rope.freq_base" in TABLE[architecture].keys:
        assert config.get("rope_theta", config.get("rotary_emb_base")) == 10000.0


@pytest.mark.parametrize(("architecture", "key"), SIZES_OF_STATES.items())
def test_sizes_of_states_and_experts_are_needed(architecture: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"lacks {architecture}.{key}"):
        config_json(header(architecture))


@pytest.mark.parametrize(("value", "scale"), [(None, HEAD_DIM**-0.5), (0.0, HEAD_DIM**-0.5), (0.5, 0.5)])
def test_granite_s_scales(value: float | None, scale: float) -> None:
    config = config_json(header("granite", attention__scale=value, logit_scale=value, embedding_scale=value))
    assert config["attention_multiplier"] == scale
    assert config["logits_scaling"] == config["embedding_multiplier"] == (value or 1.0)


@pytest.mark.parametrize("architecture", ["llama", "phi2", "cohere2", "gptneox"])
def test_keys_that_llama_cpp_needs_are_needed(architecture: str) -> None:
    missing = {
        "attention__layer_norm_rms_epsilon": None,
        "attention__layer_norm_epsilon": None,
        "use_parallel_residual": None,
        "attention__sliding_window": None,
    }
    with pytest.raises(CheckpointError, match=f"lacks {architecture}."):
        config_json(header(architecture, **missing))


# -- keys that are not read -------------------------------------------------------------------------------------------

REFUSED = {
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.scale": 0.3,
    "logit_scale": 2.0,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention.sliding_window": 16,
    "attention.value_length": 8,
    "attention.key_length_swa": 8,
    "attention.causal": False,
    "rope.freq_base_swa": 5000.0,
    "rope.dimension_sections": [4, 4, 0, 0],
    "nextn_predict_layers": 1,
    "attention.temperature_scale": 0.1,
    "attention.shared_kv_layers": 1,
    "full_attention_interval": 4,
    "swiglu_clamp_exp": [7.0],
    "hidden_activation": "relu",
    "attention.output_scale": 0.7,
    "a_key_of_tomorrow": 1,
    "rope.scaling.alpha": 1000.0,
    "leading_dense_block_count": 1,
    "activation_sparsity_scale": [0.5],
}
NEUTRAL = {
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 0.0,
    "final_logit_softcapping": 0.0,
    "attention.sliding_window": 0,
    "attention.value_length": HEAD_DIM,
    "attention.causal": True,
    "rope.dimension_sections": [0, 0, 0, 0],
    "nextn_predict_layers": 0,
    "vocab_size": 97,
    "rope.scaling.finetuned": True,
    "tensor_data_layout": "Meta AI original pth",
    "expert_used_count": 0,
    "rope.dimension_count": HEAD_DIM,
    "pooling_type": 3,
    "attention.layer_norm_epsilon": 0.5,
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_would_change_the_results_is_refused_by_name(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf: llama\.{key} is .*, which would change the results"):
        config_json(header(**{key.replace(".", "__"): REFUSED[key]}))


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_that_changes_nothing_is_not(key: str) -> None:
    assert config_json(header(**{key.replace(".", "__"): NEUTRAL[key]})) == config_json(header())


def test_all_of_them_are_listed() -> None:
    values = {key.replace(".", "__"): REFUSED[key] for key in ("attention.clamp_kqv", "logit_scale")}
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*clamp_kqv.*logit_scale.*migrate the model's"):
        config_json(header(**values))


def test_each_key_of_llama_cpp_is_read_refused_or_without_an_effect() -> None:
    """A value that says something, for every key that the package knows, in each architecture."""
    names = [
        value.removeprefix("{arch}.")
        for part in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM, gguf.Keys.WKV)
        for value in vars(part).values()
        if isinstance(value, str) and value.startswith("{arch}.") and "{" not in value[1:].partition("}")[2]
    ]
    assert len(names) > 80
    harmless = {
        "vocab_size",
        "feed_forward_length",
        "tensor_data_layout",
        "use_parallel_residual",
        "expert_used_count",
        "interleave_moe_layer_step",
        "pooling_type",
        "rope.scaling.finetuned",
        "attention.layer_norm_epsilon",
        "attention.group_norm_epsilon",
        "rope.scaling.original_context_length",
    }
    read = {*COMMON, "attention.layer_norm_rms_epsilon", "attention.key_length", "rope.dimension_count"}
    scaling = {
        "type",
        "factor",
        "attn_factor",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_log_multiplier",
        "yarn_beta_fast",
        "yarn_beta_slow",
    }
    read |= {f"rope.scaling.{name}" for name in scaling} | {"expert_count"}
    for name in names:
        try:
            config_json(header(**{name.replace(".", "__"): 3}))
            is_refused = False
        except CheckpointError as error:
            is_refused = True
            assert name in str(error) or "expert" in name or name in read, error
        assert is_refused or name in harmless | read, name


def test_factors_of_longrope_are_read_for_phi3_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = next(golden for golden in goldens("llama"))
    close = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: Any) -> None:
        writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32))
        close(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'rope_factors_long\.weight'"):
        open_model(gguf_kit.write(tmp_path / "model.gguf", golden))


# -- how texts end, and how tokens are drawn --------------------------------------------------------------------------


def text(
    model: str = "gpt2", tokens: list[str] | None = None, types: list[int] | None = None, **ids: int
) -> GgufHeader:
    tokens = tokens or ["a", "b", "</s>", "<|eot_id|>", "<|end|>", "c"]
    metadata: dict[str, Any] = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens}
    metadata |= {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    if types:
        metadata["tokenizer.ggml.token_type"] = types
    return GgufHeader((Path("m.gguf"),), metadata, {})


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({}, [3, 4]),
        ({"eos": 0}, [0, 3, 4]),
        ({"eos": 0, "eot": 1, "eom": 5}, [0, 1, 5, 3, 4]),
        ({"eos": 3, "eot": 3}, [3, 4]),
        ({"fim_pad": 0, "fim_rep": 1, "fim_sep": 5}, [0, 1, 5, 3, 4]),
    ],
)
def test_every_token_that_ends_a_turn_ends_a_completion(ids: dict[str, int], expected: list[int]) -> None:
    assert generation_config(text(**ids)) == {"eos_token_id": expected}


def test_ends_by_their_text() -> None:
    assert generation_config(text(types=[1, 1, 3, 1, 1, 1]))["eos_token_id"] == [2, 3, 4], "</s> is a control token"
    harmony = ["<|return|>", "<|call|>", "<|end|>"]
    assert generation_config(text(tokens=harmony))["eos_token_id"] == [0, 1], "<|end|> ends a message within a turn"
    assert generation_config(text(tokens=["a", "b"])) == {}
    assert generation_config(text("llama", tokens=["<unk>", "<s>", "x"]))["eos_token_id"] == [2], "SentencePiece's"


@pytest.mark.parametrize(("name", "index"), [("eos", 6), ("bos", -1), ("eot", 99), ("padding", True), ("unknown", 1.0)])
def test_an_id_outside_of_the_vocabulary_is_named(name: str, index: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{name}_token_id is {index}, but .* has 6 tokens"):
        generation_config(text(**{name: index}))


def test_recommendations_for_sampling_are_defaults() -> None:
    found = text(eos=0)
    for key, value in {"temp": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "penalty_repeat": 1.1}.items():
        found.metadata[f"general.sampling.{key}"] = value
    params = bminf_lite.SamplingParams.from_checkpoint(generation_config(found))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 20, 0.9, 0.1)
    assert params.repetition_penalty == 1.1
    found.metadata["general.sampling.temp"] = 0.0
    assert bminf_lite.SamplingParams.from_checkpoint(generation_config(found)).temperature == 0
    found.metadata.update({"general.sampling.temp": 0.7, "general.sampling.mirostat": 2})
    with pytest.raises(CheckpointError, match="mirostat is 2"):
        bminf_lite.SamplingParams.from_checkpoint(generation_config(found))


# -- right values: transformers ---------------------------------------------------------------------------------------

SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a factor without a type": ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.factor": 4.0}),
    "the old key": ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
    "type none": ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn with a factor of attention": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 0.8 * (1 + 0.1 * math.log(4)),
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 0.8,
        },
    ),
    "yarn whose scores have another weight": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.5,
        },
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", SCALINGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    parameters, metadata = SCALINGS[name]
    config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    golden = Golden("rope", config, 5, "", random_tokens(5, 100, 97), case_without_golden("cpm1").logits)
    path = gguf_kit.write(tmp_path / "model.gguf", golden, **metadata)
    made = transformers.LlamaConfig(**config, rope_parameters={"rope_theta": 10000.0, **parameters})
    model = transformers.LlamaForCausalLM(made).eval()
    from tiny_models import RandomWeights

    weights = RandomWeights(config, 5).tensors
    model.load_state_dict({key: torch.from_numpy(np.array(value)) for key, value in weights.items()})
    with torch.no_grad():
        expected = model(torch.tensor([list(golden.tokens)])).logits[0].numpy()
    with bminf_lite.load(path, device="cpu") as loaded:
        error = np.abs(loaded.logits(golden.tokens) - expected).max()
    assert error < 1e-4 * np.abs(expected).max()  # fp32 sums in another order
