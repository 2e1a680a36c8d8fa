"""GPT-2, OPT, GPT-NeoX and CPM-1 live against transformers: configurations, logits, checkpoints and generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import GPTS, RandomWeights, TinyModel, goldens, random_tokens
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.backend.cpu import CpuBackend

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CASES = [golden for family in GPTS for golden in goldens(family)]
SOME = [golden for golden in CASES if golden.name in ("plain", "untied", "norm after, projections", "parallel")]


def random_config(rng: np.random.Generator, family: str) -> dict[str, Any]:
    """Any combination of what the family knows."""

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    heads = int(rng.integers(1, 5))
    size = heads * 8 * int(rng.integers(1, 5))
    vocab, layers, tied = int(rng.integers(20, 200)), int(rng.integers(1, 4)), one_of(True, False)
    activation = one_of("gelu", "gelu_new", "relu", "silu")
    if family == "gpt2":
        config = {"n_embd": size, "n_head": heads, "n_layer": layers, "n_inner": one_of(None, 40), "n_positions": 64}
        config |= {"scale_attn_by_inverse_layer_idx": one_of(True, False), "activation_function": activation}
    elif family == "opt":
        config = {"hidden_size": size, "num_attention_heads": heads, "num_hidden_layers": layers, "ffn_dim": 40}
        config |= {"do_layer_norm_before": one_of(True, False), "word_embed_proj_dim": one_of(size, 24)}
        config |= {"enable_bias": one_of(True, False), "layer_norm_elementwise_affine": one_of(True, False)}
        config |= {"max_position_embeddings": 64, "activation_function": activation}
    else:
        config = {"hidden_size": size, "num_attention_heads": heads, "num_hidden_layers": layers}
        config |= {"intermediate_size": 40, "rotary_pct": one_of(0.25, 0.5, 1.0), "rotary_emb_base": one_of(100, 10000)}
        config |= {"use_parallel_residual": one_of(True, False), "attention_bias": one_of(True, False)}
        config |= {"max_position_embeddings": 64, "hidden_act": activation}
    return {"model_type": family, "vocab_size": vocab, "tie_word_embeddings": tied} | config


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", GPTS)
def test_logits_of_random_configurations(family, seed):
    """At once, and the last of them token by token."""
    config = random_config(np.random.default_rng([seed, GPTS.index(family)]), family)
    hf = make_goldens.build(config, seed)
    tokens = random_tokens(seed, 40, config["vocab_size"])
    expected = make_goldens.logits_of(hf, tokens)
    for spelling in (config, hf.config.to_dict()):
        model = TinyModel(CpuBackend(), spelling, RandomWeights(spelling, seed))
        logits = np.concatenate([model.run(tokens[:30]), *(model.run(tokens[t : t + 1]) for t in range(30, 40))])
        assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())


@pytest.mark.parametrize("golden", CASES[::5], ids=str)
def test_committed_logits_are_what_transformers_computes(golden):
    logits = make_goldens.logits_of(make_goldens.build(golden.config, golden.seed), golden.tokens)
    assert_close(golden.logits, logits, "logits", np.float32, np.abs(logits).max())


@pytest.mark.parametrize("family", GPTS)
def test_absent_keys_mean_the_defaults_of_the_class(family):
    architecture = models.find({"model_type": family})
    hf_config = transformers.AutoConfig.for_model(family)
    parsed = architecture.parse({"model_type": family})
    assert parsed == architecture.parse(hf_config.to_dict())
    assert (parsed.vocab_size, parsed.hidden_size) == (hf_config.vocab_size, hf_config.hidden_size)
    assert (parsed.layers, parsed.heads) == (hf_config.num_hidden_layers, hf_config.num_attention_heads)
    assert parsed.context_length == hf_config.max_position_embeddings


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_the_checkpoint_s_tensors_are_those_of_transformers(golden):
    parameters = make_goldens.parameters_of(make_goldens.build(golden.config, golden.seed))
    theirs = {name: tuple(p.shape) for name, p in parameters.items()}
    assert {name: p.shape for name, p in golden.spec.parameters.items() if name not in golden.spec.tied} == theirs


@pytest.mark.parametrize("golden", SOME, ids=str)
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_a_saved_checkpoint_loads_generates_and_migrates(golden, recipe, tmp_path):
    hf = make_goldens.build(golden.config, golden.seed)
    hf.generation_config.eos_token_id = 7
    hf.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    prompt = golden.tokens[:9].tolist()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        expected = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    with bminf_lite.load(tmp_path / "source", device="cpu") as model:
        assert model.generate(prompt, max_new_tokens=24, temperature=0).token_ids == expected[0, 9:].tolist()
    bminf_lite.migrate(tmp_path / "source", tmp_path / "out", recipe=recipe)
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        logits = model.logits(golden.tokens)
    error = np.sqrt(((logits - golden.logits) ** 2).mean() / (golden.logits**2).mean())
    assert 1e-4 < error < 0.06


@pytest.mark.parametrize("seed", range(3))
def test_cpm1_is_gpt2_under_other_names(seed):
    """On the same weights: the matrices of GPT-2 are stored the other way round."""
    shape = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = shape | {"model_type": "cpm1", "hidden_size": 32, "max_position_embeddings": 64}
    hf = make_goldens.build(
        {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, seed
    )
    weights = RandomWeights(config, seed)
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
    tokens = random_tokens(seed, 40, 97)
    expected = make_goldens.logits_of(hf, tokens)
    model = TinyModel(CpuBackend(), config, weights)
    logits = np.concatenate([model.run(tokens[:20]), *(model.run(tokens[t : t + 1]) for t in range(20, 40))])
    assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())
