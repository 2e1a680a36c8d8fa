"""Live against transformers: configurations parse to what its classes mean, and logits agree, in both spellings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import FAMILIES, RandomWeights, TinyModel, goldens, random_tokens
from tolerances import assert_close

from bminf_lite import models
from bminf_lite.backend.cpu import CpuBackend

pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)

pytestmark = pytest.mark.parity

CASES = [golden for family in FAMILIES for golden in goldens(family)]


def spellings(config: dict[str, Any], hf_config: Any) -> dict[str, dict[str, Any]]:
    """The ``config.json`` at hand, the one that transformers saves now, and the one that it saved before version 5."""
    new = hf_config.to_dict()
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    old |= make_goldens.old_spelling(new["rope_parameters"])
    if old["rope_scaling"] == {"rope_type": "default"}:
        old["rope_scaling"] = None
    return {"as given": config, "new": new, "old": old | {"torch_dtype": "float32"}}


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_logits_of_other_weights_and_tokens(golden):
    seed = golden.seed + 500
    hf = make_goldens.build(golden.config, seed)
    tokens = random_tokens(seed, 40, golden.config["vocab_size"])
    expected = make_goldens.logits_of(hf, tokens)
    for spelling, config in spellings(golden.config, hf.config).items():
        logits = TinyModel(CpuBackend(), config, RandomWeights(config, seed)).run(tokens)
        try:
            assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())
        except AssertionError as error:
            raise AssertionError(f"{spelling}: {error}") from None


@pytest.mark.parametrize("golden", CASES[::8], ids=str)
def test_committed_logits_are_what_transformers_computes(golden):
    """If this fails and nothing else, transformers changed: make the goldens again and look at what differs."""
    logits = make_goldens.logits_of(make_goldens.build(golden.config, golden.seed), golden.tokens)
    assert_close(golden.logits, logits, "logits", np.float32, np.abs(logits).max())


def random_config(rng: np.random.Generator, family: str) -> dict[str, Any]:
    """Any combination of what the family knows."""

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    heads = kv_heads * group
    config = {
        "hidden_size": heads * 2 * int(rng.integers(2, 9)),
        "intermediate_size": int(rng.integers(16, 120)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": int(rng.integers(20, 200)),
        "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": one_of(True, False),
        "hidden_act": one_of("silu", "silu", "gelu_pytorch_tanh", "relu"),
        "rope_parameters": one_of(
            {"rope_type": "default", "rope_theta": one_of(100.0, 10000.0, 1e6)},
            make_goldens.LINEAR,
            make_goldens.LLAMA3,
            make_goldens.YARN,
            make_goldens.YARN_TUNED,
            make_goldens.YARN_MSCALE,
        ),
        "max_position_embeddings": one_of(64, 128),
    }
    if family == "qwen3" or rng.random() < 0.5:
        config["head_dim"] = 2 * int(rng.integers(1, 20))
    if family == "llama":
        config |= {"attention_bias": one_of(True, False), "mlp_bias": one_of(True, False)}
    if family == "qwen3":
        config["attention_bias"] = one_of(True, False)
    if family == "mistral":
        config["sliding_window"] = one_of(None, 1, 2, 5, 31, 32, 33, 40, 4096)
    if family.startswith("qwen"):
        config["use_sliding_window"] = one_of(True, False)
        config |= {"sliding_window": int(rng.integers(1, 40)), "max_window_layers": int(rng.integers(0, 4))}
    return {"model_type": family} | config


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_random_configurations(family, seed):
    config = random_config(np.random.default_rng([seed, FAMILIES.index(family)]), family)
    hf = make_goldens.build(config, seed)
    tokens = random_tokens(seed, 40, config["vocab_size"])
    expected = make_goldens.logits_of(hf, tokens)
    logits = TinyModel(CpuBackend(), config, RandomWeights(config, seed)).run(tokens)
    assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_the_defaults_of_the_class(family):
    """A configuration with nothing but its ``model_type`` is the class's default one."""
    architecture = models.find({"model_type": family})
    hf_config = transformers.AutoConfig.for_model(family)
    parsed = architecture.parse({"model_type": family})
    for spelling, config in spellings({"model_type": family}, hf_config).items():
        assert architecture.parse(config) == parsed, spelling
    assert parsed.vocab_size == hf_config.vocab_size
    assert parsed.hidden_size == hf_config.hidden_size
    assert parsed.intermediate_size == hf_config.intermediate_size
    assert parsed.layers == hf_config.num_hidden_layers
    assert parsed.heads == hf_config.num_attention_heads
    assert parsed.kv_heads == hf_config.num_key_value_heads
    assert parsed.head_dim == getattr(hf_config, "head_dim", hf_config.hidden_size // hf_config.num_attention_heads)
    assert parsed.context_length == hf_config.max_position_embeddings
    assert parsed.norm_eps == hf_config.rms_norm_eps
    assert parsed.tied_head == hf_config.tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_each_absent_key_alone(family):
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


@pytest.mark.parametrize("golden", CASES[::3], ids=str)
def test_the_checkpoint_s_tensors_are_those_of_transformers(golden):
    """Names and shapes, a tied head counted where transformers saves it."""
    hf = make_goldens.build(golden.config, golden.seed)
    theirs = {name: tuple(p.shape) for name, p in hf.named_parameters()}
    assert {name: p.shape for name, p in golden.spec.parameters.items() if name not in golden.spec.tied} == theirs
