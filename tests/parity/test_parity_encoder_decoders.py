"""T5, mT5, UMT5 and CPM-2 live against transformers: buckets, configurations, logits, checkpoints and generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import ENCODER_DECODERS, RandomWeights, TinyEncoderDecoder, goldens, random_tokens
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.layers.relative_bias import relative_position_bucket

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CASES = [golden for family in ENCODER_DECODERS for golden in goldens(family)]
SOME = [golden for golden in CASES if golden.name in ("tied", "untied, gated", "gated", "few buckets")]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 17), (8, 20), (16, 64), (64, 1000), (4, 9)])
def test_every_distance_has_the_bucket_of_transformers(buckets, longest, bidirectional):
    distances = np.arange(-3 * longest, 3 * longest + 1)
    expected = T5Attention._relative_position_bucket(torch.from_numpy(distances), bidirectional, buckets, longest)
    np.testing.assert_array_equal(
        relative_position_bucket(distances, bidirectional, buckets, longest), expected.numpy()
    )
    clipped = np.clip(distances, -longest, longest)  # the table by distance ends there
    np.testing.assert_array_equal(relative_position_bucket(clipped, bidirectional, buckets, longest), expected.numpy())


def random_config(rng: np.random.Generator, family: str) -> dict[str, Any]:
    """Any combination of what the family knows."""

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    config = {
        "d_model": 8 * int(rng.integers(2, 6)),
        "d_kv": 2 * int(rng.integers(2, 9)),
        "d_ff": int(rng.integers(16, 80)),
        "num_layers": int(rng.integers(1, 4)),
        "num_decoder_layers": one_of(None, 1, 2, 3),
        "num_heads": int(rng.integers(1, 5)),
        "vocab_size": int(rng.integers(20, 200)),
        "feed_forward_proj": one_of("relu", "gelu", "gated-gelu", "gated-silu", "gated-relu"),
        "relative_attention_num_buckets": one_of(8, 16, 32),
        "relative_attention_max_distance": one_of(20, 40, 128),
        "layer_norm_epsilon": one_of(1e-6, 1e-3),
        "decoder_start_token_id": 0,
    }
    if family == "t5":
        config["tie_word_embeddings"] = one_of(True, False)
    return {"model_type": family} | config


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_output_of_random_configurations(family, seed):
    """The encoder's, and the decoder's at once and token by token."""
    config = random_config(np.random.default_rng([seed, ENCODER_DECODERS.index(family)]), family)
    hf = make_goldens.build(config, seed)
    source, tokens = (random_tokens(s, n, config["vocab_size"]) for s, n in ((seed, 47), (seed + 1, 38)))
    encoded, expected = make_goldens.encoded_and_logits(hf, source, tokens)
    for spelling in (config, hf.config.to_dict()):
        model = TinyEncoderDecoder(CpuBackend(), spelling, RandomWeights(config, seed))
        assert_close(model.encode(source), encoded, "logits", np.float32, np.abs(encoded).max())
        model.read(source)
        logits = np.concatenate([model.run(tokens[:20]), *(model.run(tokens[t : t + 1]) for t in range(20, 38))])
        assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())


@pytest.mark.parametrize("golden", CASES[::4], ids=str)
def test_committed_output_is_what_transformers_computes(golden):
    hf = make_goldens.build(golden.config, golden.seed)
    encoded, logits = make_goldens.encoded_and_logits(hf, golden.source, golden.tokens)
    assert_close(golden.encoded, encoded, "logits", np.float32, np.abs(encoded).max())
    assert_close(golden.logits, logits, "logits", np.float32, np.abs(logits).max())


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_absent_keys_mean_the_defaults_of_the_class(family):
    architecture = models.find({"model_type": family})
    parsed = architecture.parse({"model_type": family})
    assert parsed == architecture.parse(transformers.AutoConfig.for_model(family).to_dict())


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_the_checkpoint_s_tensors_are_those_of_transformers(golden):
    hf = make_goldens.build(golden.config, golden.seed)
    theirs = {name: tuple(p.shape) for name, p in hf.named_parameters()}
    assert {name: p.shape for name, p in golden.spec.parameters.items() if name not in golden.spec.tied} == theirs


@pytest.mark.parametrize("golden", SOME, ids=str)
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_a_saved_checkpoint_loads_generates_and_migrates(golden, recipe, tmp_path):
    """A ragged batch of prompts, token for token; and what migration makes of the checkpoint."""
    hf = make_goldens.build(golden.config, golden.seed)
    hf.generation_config.eos_token_id = 7
    hf.generation_config.decoder_start_token_id = 0
    hf.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    prompts = [golden.source[:9].tolist(), golden.source[3:4].tolist(), golden.source.tolist()]
    with bminf_lite.load(tmp_path / "source", device="cpu") as model:
        results = model.generate(prompts, max_new_tokens=24, temperature=0)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            expected = hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)
        assert result.token_ids == expected[0, 1:].tolist()
    bminf_lite.migrate(tmp_path / "source", tmp_path / "out", recipe=recipe)
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        logits = model.logits(golden.tokens, source=golden.source)
    error = np.sqrt(((logits - golden.logits) ** 2).mean() / (golden.logits**2).mean())
    assert 1e-4 < error < 0.15


@pytest.mark.parametrize("model_type", ["cpm2", "eva"])
@pytest.mark.parametrize("seed", range(3))
def test_cpm2_is_t5_under_other_names(model_type, seed):
    """On the same weights, head and embedding untied. EVA 2 divides its scores, as if T5's queries were smaller."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 2}
    shape["vocab_size"] = 97
    config = {"model_type": model_type, **shape} | ({"attn_scale": True} if model_type == "eva" else {})
    t5 = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **shape}
    hf = make_goldens.build(t5, seed)
    theirs = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    weights = RandomWeights(config, seed)
    factor = np.float32(8**0.5 if model_type == "eva" else 1)
    for name in weights.tensors:
        weights.tensors[name] = t5_tensor(name, theirs, factor)
    source, tokens = random_tokens(seed, 47, 97), random_tokens(seed + 1, 38, 97)
    encoded, expected = make_goldens.encoded_and_logits(hf, source, tokens)
    model = TinyEncoderDecoder(CpuBackend(), config, weights)
    assert_close(model.encode(source), encoded, "logits", np.float32, np.abs(encoded).max())
    model.read(source)
    logits = np.concatenate([model.run(tokens[:20]), *(model.run(tokens[t : t + 1]) for t in range(20, 38))])
    assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())


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
