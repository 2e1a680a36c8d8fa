"""Every architecture beside transformers: configurations, names of tensors, logits, checkpoints and generation."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from parity_kit import greedy, relative_error
from random_configs import random_decoder_config
from tiny_models import (
    DECODERS,
    ENCODER_DECODERS,
    EVERY,
    FAMILIES,
    GPTS,
    MIXTURES,
    STATES,
    Golden,
    RandomWeights,
    TinyEncoderDecoder,
    TinyModel,
    goldens,
    random_tokens,
)
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.layers.alibi import alibi_slopes
from bminf_lite.layers.relative_bias import relative_position_bucket
from bminf_lite.models.parts.attention import AttentionPart
from bminf_lite.models.parts.latent_attention import LatentAttentionPart

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes  # noqa: E402
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CASES = {family: list(goldens(family)) for family in EVERY}
SAVED = ("plain", "untied", "norm after, projections", "parallel", "tied", "untied, gated", "gated", "few buckets",
         "multi-head, tied", "multipliers", "layer types", "longrope", "half of heads", "multi-query", "soft-caps",
         "four heads", "alibi, multi-head, sequential, biases", "two of eight", "plain weights",
         "two kinds")  # fmt: skip


def cases(*families: str, every: int = 1) -> list[Golden]:
    return [golden for family in families for golden in CASES[family]][::every]


def assert_same(mine: np.ndarray, theirs: np.ndarray, operation: str = "logits") -> None:
    assert_close(mine, theirs, operation, np.float32, np.abs(theirs).max())


def check_logits(config: dict[str, Any], weights: RandomWeights, hf: Any, seed: int, operation: str = "logits") -> None:
    """A prompt at once, and ten more tokens one by one; of an encoder-decoder, the encoder's output too.

    ``operation`` is the name of the tolerance.
    """
    tokens, source = (random_tokens(seed + i, n, hf.config.vocab_size) for i, n in ((0, 40), (1, 47)))
    if hf.config.is_encoder_decoder:
        encoded, expected = make_goldens.encoded_and_logits(hf, source, tokens)
        model: TinyModel = TinyEncoderDecoder(CpuBackend(), config, weights)
        assert_same(model.encode(source), encoded, operation)
        model.read(source)
    else:
        model, expected = TinyModel(CpuBackend(), config, weights), make_goldens.logits_of(hf, tokens)
    found = np.concatenate([model.run(tokens[:30]), *(model.run(tokens[t : t + 1]) for t in range(30, 40))])
    assert_same(found, expected, operation)


def spellings(config: dict[str, Any], hf_config: Any) -> dict[str, dict[str, Any]]:
    """The given ``config.json``, the one that transformers saves, and for LLaMA's kin the one before version 5."""
    new = hf_config.to_dict()
    found = {"as given": config, "new": new}
    if config["model_type"] in FAMILIES:
        old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
        old |= make_goldens.old_spelling(new["rope_parameters"])
        if old["rope_scaling"] == {"rope_type": "default"}:
            old["rope_scaling"] = None
        found["old"] = old | {"torch_dtype": "float32"}
    return found


def random_config(rng: np.random.Generator, family: str) -> dict[str, Any]:
    """Any combination of what the family knows."""

    if family in (*DECODERS, *MIXTURES, *STATES):
        ropes = [make_goldens.LINEAR, make_goldens.LLAMA3, make_goldens.YARN, make_goldens.YARN_TUNED]
        return random_decoder_config(rng, family, ropes)

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    def up_to(high: int, low: int = 1) -> int:
        return int(rng.integers(low, high))

    if family in FAMILIES:
        kv_heads, group = up_to(4), up_to(4)
        config = {
            "hidden_size": kv_heads * group * 2 * up_to(9, 2), "intermediate_size": up_to(120, 16),
            "num_hidden_layers": up_to(4), "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads,
            "vocab_size": up_to(200, 20), "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
            "tie_word_embeddings": one_of(True, False), "max_position_embeddings": one_of(64, 128),
            "hidden_act": one_of("silu", "silu", "gelu_pytorch_tanh", "relu"),
            "rope_parameters": one_of(
                {"rope_type": "default", "rope_theta": one_of(100.0, 10000.0, 1e6)}, make_goldens.LINEAR,
                make_goldens.LLAMA3, make_goldens.YARN, make_goldens.YARN_TUNED, make_goldens.YARN_MSCALE,
            ),
        }  # fmt: skip
        if family == "qwen3" or rng.random() < 0.5:
            config["head_dim"] = 2 * up_to(20)
        if family == "llama":
            config |= {"attention_bias": one_of(True, False), "mlp_bias": one_of(True, False)}
        if family == "qwen3":
            config["attention_bias"] = one_of(True, False)
        if family == "mistral":
            config["sliding_window"] = one_of(None, 1, 2, 5, 31, 32, 33, 40, 4096)
        if family.startswith("qwen"):
            config["use_sliding_window"] = one_of(True, False)
            config |= {"sliding_window": up_to(40), "max_window_layers": up_to(4, 0)}
        return {"model_type": family} | config
    if family in ENCODER_DECODERS:
        config = {
            "d_model": 8 * up_to(6, 2), "d_kv": 2 * up_to(9, 2), "d_ff": up_to(80, 16), "num_layers": up_to(4),
            "num_decoder_layers": one_of(None, 1, 2, 3), "num_heads": up_to(5), "vocab_size": up_to(200, 20),
            "feed_forward_proj": one_of("relu", "gelu", "gated-gelu", "gated-silu", "gated-relu"),
            "relative_attention_num_buckets": one_of(8, 16, 32), "layer_norm_epsilon": one_of(1e-6, 1e-3),
            "relative_attention_max_distance": one_of(20, 40, 128), "decoder_start_token_id": 0,
        }  # fmt: skip
        if family == "t5":
            config["tie_word_embeddings"] = one_of(True, False)
        return {"model_type": family} | config
    heads = up_to(5)
    size, activation = heads * 8 * up_to(5), one_of("gelu", "gelu_new", "relu", "silu")
    config = {"vocab_size": up_to(200, 20), "tie_word_embeddings": one_of(True, False)}
    if family == "gpt2":
        config |= {"n_embd": size, "n_head": heads, "n_layer": up_to(4), "n_inner": one_of(None, 40)}
        config |= {"scale_attn_by_inverse_layer_idx": one_of(True, False), "activation_function": activation}
        return {"model_type": family, "n_positions": 64} | config
    config |= {"hidden_size": size, "num_attention_heads": heads, "num_hidden_layers": up_to(4)}
    if family == "opt":
        config |= {"do_layer_norm_before": one_of(True, False), "word_embed_proj_dim": one_of(size, 24)}
        config |= {"enable_bias": one_of(True, False), "layer_norm_elementwise_affine": one_of(True, False)}
        config |= {"ffn_dim": 40, "activation_function": activation}
    else:
        config |= {"rotary_pct": one_of(0.25, 0.5, 1.0), "rotary_emb_base": one_of(100, 10000)}
        config |= {"use_parallel_residual": one_of(True, False), "attention_bias": one_of(True, False)}
        config |= {"intermediate_size": 40, "hidden_act": activation}
    return {"model_type": family, "max_position_embeddings": 64} | config


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", EVERY)
def test_logits_of_random_configurations(family: str, seed: int) -> None:
    config = random_config(np.random.default_rng([seed, zlib.crc32(family.encode())]), family)
    hf = make_goldens.build(config, seed)
    for spelling in (config, hf.config.to_dict()):
        check_logits(spelling, RandomWeights(spelling, seed), hf, seed, "logits of random configurations")


@pytest.mark.parametrize("golden", cases(*FAMILIES), ids=str)
def test_logits_of_every_spelling(golden: Golden) -> None:
    """The goldens' configurations, with other weights and tokens."""
    seed = golden.seed + 500
    hf = make_goldens.build(golden.config, seed)
    for config in spellings(golden.config, hf.config).values():
        check_logits(config, RandomWeights(config, seed), hf, seed)


@pytest.mark.parametrize("golden", cases(*EVERY, every=6), ids=str)
def test_committed_logits_are_what_transformers_computes(golden: Golden) -> None:
    """If this fails and nothing else, transformers changed: make the goldens again and look at what differs."""
    hf = make_goldens.build(golden.config, golden.seed)
    if golden.source is None:
        assert_same(golden.logits, make_goldens.logits_of(hf, golden.tokens))
    else:
        encoded, logits = make_goldens.encoded_and_logits(hf, golden.source, golden.tokens)
        assert_same(golden.encoded, encoded)
        assert_same(golden.logits, logits)


def attention_of(layer: Any) -> Any:
    """The attention of a layer, also if it is beside another mixer; None without one."""
    parts = (part for sub in layer.sublayers for part in getattr(sub.part, "parts", (sub.part,)))
    return next((part for part in parts if isinstance(part, AttentionPart | LatentAttentionPart)), None)


NO_DEFAULTS = ("glm4_moe", "deepseek_v2", "dots1")
"""Classes whose default is no model: 96 heads do not divide 4,096, and a token chooses None experts."""


@pytest.mark.parametrize("family", [family for family in EVERY if family not in NO_DEFAULTS])
def test_absent_keys_mean_the_defaults_of_the_class(family: str) -> None:
    """A configuration with nothing but its ``model_type`` is the class's default one."""
    architecture, hf_config = models.find({"model_type": family}), transformers.AutoConfig.for_model(family)
    parsed = architecture.parse({"model_type": family})
    for spelling, config in spellings({"model_type": family}, hf_config).items():
        assert architecture.parse(config) == parsed, spelling
    if family in ENCODER_DECODERS:
        return
    layer = next((layer for layer in parsed.layer_parts if attention_of(layer)), parsed.layer_parts[0])
    mixer, mlp = attention_of(layer), layer.sublayers[-1].part
    if family in MIXTURES and family != "gemma4_text":  # whose class has none by default
        parts = (layer.sublayers[-1].part for layer in reversed(parsed.layer_parts))  # the first may have no experts
        mlp = next(part for part in parts if hasattr(part, "router"))
        size = getattr(hf_config, "moe_intermediate_size", None) or hf_config.intermediate_size
        count = getattr(hf_config, "num_local_experts", None) or hf_config.num_experts
        assert (mlp.inner_size, mlp.router.num_experts, mlp.router.top_k) == (
            size,
            count,
            hf_config.num_experts_per_tok,
        )
    found = {
        "vocab_size": parsed.vocab_size, "hidden_size": parsed.hidden_size, "num_hidden_layers": parsed.num_layers,
        "max_position_embeddings": parsed.context_length, "tie_word_embeddings": parsed.tied_head,
    }  # fmt: skip
    if mixer is not None:
        found["num_attention_heads"] = mixer.heads
    if family in ("ministral3", "bloom", "llama4_text", "mamba2"):
        # Ministral 3's and Llama 4's end where the queries would grow; those of BLOOM and Mamba 2 have none
        del found["max_position_embeddings"]
    if family in FAMILIES and mixer is not None:
        eps = layer.norms[0].eps
        found |= {"intermediate_size": mlp.inner_size, "num_key_value_heads": mixer.kv_heads, "rms_norm_eps": eps}
        default = hf_config.hidden_size // hf_config.num_attention_heads
        assert mixer.head_dim == getattr(hf_config, "head_dim", default)
    assert found == {name: getattr(hf_config, name) for name in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_absent_key_alone(family: str) -> None:
    """Every key that the parser reads, left out of an unusual configuration, takes the class's value."""
    unusual = make_goldens.BASE | {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 4}
    unusual |= {"head_dim": 20, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "sliding_window": 9}
    if family.startswith("qwen"):
        unusual |= {"use_sliding_window": True, "max_window_layers": 1}
    architecture = models.find({"model_type": family})
    for key in unusual:
        config = {k: v for k, v in unusual.items() if k != key}
        hf_config = transformers.AutoConfig.for_model(family, **config)
        config["model_type"] = family
        assert architecture.parse(config) == architecture.parse(hf_config.to_dict()), key


@pytest.mark.parametrize("golden", cases(*FAMILIES, every=3) + cases(*GPTS, *ENCODER_DECODERS, *DECODERS), ids=str)
def test_the_checkpoint_s_tensors_are_those_of_transformers(golden: Golden) -> None:
    """Names and shapes, a tied head counted where transformers saves it."""
    parameters = make_goldens.parameters_of(make_goldens.build(golden.config, golden.seed))
    theirs = {name: tuple(p.shape) for name, p in parameters.items()}
    assert {name: p.shape for name, p in golden.spec.parameters.items() if name not in golden.spec.tied} == theirs


@pytest.mark.parametrize(
    "golden", [g for g in cases(*GPTS, *ENCODER_DECODERS, *DECODERS, *MIXTURES, *STATES) if g.name in SAVED], ids=str
)
def test_a_saved_checkpoint_loads_generates_and_migrates(golden: Golden, tmp_path) -> None:
    """A ragged batch of prompts, token for token; and the logits of the migrated checkpoint."""
    hf = make_goldens.build(golden.config, golden.seed)
    hf.generation_config.eos_token_id = 7
    if golden.source is not None:
        hf.generation_config.decoder_start_token_id = 0
    hf.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    read = golden.tokens if golden.source is None else golden.source
    prompts = [read[:9].tolist(), read[3:4].tolist(), read[5:].tolist()]
    with bminf_lite.load(tmp_path / "source", device="cpu") as model:
        results = model.generate(prompts, max_new_tokens=24, temperature=0)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(hf, prompt)
    for recipe in ("w8a8", "w8a16"):
        bminf_lite.migrate(tmp_path / "source", tmp_path / recipe, recipe=recipe)
        with bminf_lite.load(tmp_path / recipe, device="cpu") as model:
            logits = model.logits(golden.tokens, source=golden.source)
        is_loose = golden.source is not None or golden.config["model_type"] in MIXTURES  # rounding changes a choice
        assert 1e-4 < relative_error(logits, golden.logits) < (0.25 if is_loose else 0.06)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 17), (8, 20), (16, 64), (64, 1000), (4, 9)])
def test_every_distance_has_the_bucket_of_transformers(buckets: int, longest: int, bidirectional: bool) -> None:
    distances = np.arange(-3 * longest, 3 * longest + 1)
    expected = T5Attention._relative_position_bucket(torch.from_numpy(distances), bidirectional, buckets, longest)
    clipped = np.clip(distances, -longest, longest)  # the table by distance ends there
    for given in (distances, clipped):
        found = relative_position_bucket(given, bidirectional, buckets, longest)
        np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("heads", [1, 5, 16, 32, 71, 112])
def test_alibi_slopes_are_those_of_transformers(heads: int) -> None:
    np.testing.assert_allclose(alibi_slopes(heads), _get_alibi_slopes(heads, torch.device("cpu")).numpy(), rtol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_cpm1_is_gpt2_under_other_names(seed: int) -> None:
    """On the same weights: the matrices of GPT-2 are stored the other way round."""
    shape = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = shape | {"model_type": "cpm1", "hidden_size": 32, "max_position_embeddings": 64}
    gpt2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    hf, weights = make_goldens.build(gpt2, seed), RandomWeights(config, seed)
    names = {
        "word_embeddings": "wte", "position_embeddings": "wpe", "transformer.final_layernorm": "ln_f",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "attention.query_key_value": "attn.c_attn",
        "attention.dense": "attn.c_proj", "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj",
        "transformer.layers": "h",
    }  # fmt: skip
    theirs = {name.removeprefix("transformer."): p for name, p in hf.named_parameters()}
    for name in weights.tensors:
        other = name
        for ours, name_there in names.items():
            other = other.replace(ours, name_there)
        values = theirs[other].detach().numpy()
        weights.tensors[name] = values.T if "c_" in other and values.ndim == 2 else values
    check_logits(config, weights, hf, seed)


@pytest.mark.parametrize("model_type", ["cpm2", "eva"])
@pytest.mark.parametrize("seed", range(3))
def test_cpm2_is_t5_under_other_names(model_type: str, seed: int) -> None:
    """On the same weights, head and embedding untied. EVA 2 divides its scores, as if T5's queries were smaller."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 2}
    shape["vocab_size"] = 97
    config = {"model_type": model_type, **shape} | ({"attn_scale": True} if model_type == "eva" else {})
    t5 = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **shape}
    hf, weights = make_goldens.build(t5, seed), RandomWeights(config, seed)
    theirs = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    factor = np.float32(8**0.5 if model_type == "eva" else 1)
    for name in weights.tensors:
        weights.tensors[name] = t5_tensor(name, theirs, factor)
    check_logits(config, weights, hf, seed)


def t5_tensor(name: str, theirs: dict[str, np.ndarray], factor: np.float32) -> np.ndarray:
    """T5's tensor, or several stacked, for a name of CPM-2's; queries multiplied by ``factor``."""
    plain = {"word_embeds.weight": "shared.weight", "lm_head.weight": "lm_head.weight"}
    if name in plain:
        return theirs[plain[name]]
    stack, _, rest = name.partition(".")
    if rest == "final_layernorm.weight":
        return theirs[f"{stack}.final_layer_norm.weight"]
    _, layer, *path = rest.split(".")
    block = f"{stack}.block.{layer}.layer"
    last = 2 if stack == "decoder" else 1
    where = {"self_attn": "0", "cross_attn": "1", "ff": str(last)}[path[0]]
    if path[1] == "layer_norm":
        return theirs[f"{block}.{where}.layer_norm.weight"]
    if path[0] == "ff":
        return theirs[f"{block}.{where}.DenseReluDense.{path[2]}.weight"]
    attention = f"{block}.{where}.{'SelfAttention' if path[0] == 'self_attn' else 'EncDecAttention'}"
    parts = {"project": "qkv", "project_q": "q", "project_kv": "kv", "dense": "o"}
    if path[2] not in parts:
        return theirs[f"{attention}.{path[2]}.weight"]
    return np.concatenate([theirs[f"{attention}.{p}.weight"] * (factor if p == "q" else 1) for p in parts[path[2]]])
