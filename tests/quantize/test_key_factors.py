"""Static factors of keys: scores stay the same, and an int8 cache costs less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outliers import multiplied
from tiny_models import EVERY, Golden, RandomWeights, goldens, random_tokens

import bminf_lite
from bminf_lite.backend.quantization import quantize_heads
from bminf_lite.models.spec import KeyHeads
from bminf_lite.quantize.key_factors import fold_key_factors, key_factors

ALL = [golden for family in EVERY for golden in goldens(family)]
SCALED = [golden for golden in ALL if golden.spec.key_heads]


def powers_of_two(heads: KeyHeads, features: int, exponents: np.ndarray) -> np.ndarray:
    """Factors ``[kv_heads, head_dim]``, equal for the elements of a pair."""
    kv_heads = features // len(heads.pairs)
    return np.exp2(np.resize(exponents, (kv_heads, max(heads.pairs) + 1))[:, list(heads.pairs)]).astype(np.float32)


@pytest.mark.parametrize("golden", SCALED, ids=str)
def test_powers_of_two_change_nothing(golden: Golden) -> None:
    """Not a single bit of the float model's logits."""
    spec, weights = golden.spec, RandomWeights(golden.config, golden.seed)
    expected, random = golden.logits_with(weights), np.random.default_rng(0)
    for heads in spec.key_heads:
        features = spec.parameters[heads.key[0]].shape[0]
        factors = powers_of_two(heads, features, random.integers(-4, 5, features))
        for name, rewrite in fold_key_factors(spec, heads, factors).items():
            tensor = weights.tensors[name]
            weights.tensors[name] = multiplied(tensor, rewrite)
    np.testing.assert_array_equal(golden.logits_with(weights), expected)


def test_which_keys_can_be_scaled() -> None:
    """Not those that a norm follows, nor those of fused matrices."""
    found = {golden.config["model_type"] for golden in SCALED}
    assert {"llama", "mistral", "qwen2", "opt"} <= found and not found & {"qwen3", "gpt2", "gpt_neox", "phi3", "olmo2"}


@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32), st.booleans())
def test_the_error_of_scores_never_grows(kv_heads: int, group: int, seed: int, rotary: bool) -> None:
    random, head_dim = np.random.default_rng(seed), 8
    pairs = tuple(i % 4 if rotary else i for i in range(head_dim))
    heads = KeyHeads((), (), pairs, group)
    k = random.standard_normal((40, kv_heads, head_dim)).astype(np.float32)
    k[:, :, 3] *= 64
    q = random.standard_normal((40, kv_heads * group * head_dim)).astype(np.float32)
    factors = key_factors(k.reshape(40, -1), q, heads)
    assert (np.log2(factors) % 1 == 0).all()
    if rotary:
        np.testing.assert_array_equal(factors[:, :4], factors[:, 4:])

    def error(by: np.ndarray) -> float:
        codes, scale = quantize_heads(k / by)
        noise = (scale.astype(np.float32)[..., None] * codes - k / by) * by
        scores = np.einsum("thd,uhgd->htgu", noise, q.reshape(40, kv_heads, group, head_dim))
        return float((scores**2).mean())

    assert error(factors) < 0.6 * error(np.ones_like(factors))


def test_keys_without_outliers_stay_as_they_are() -> None:
    random = np.random.default_rng(0)
    keys, queries = random.choice(np.array([-1, 1], np.float32), (2, 64, 16))
    assert (key_factors(keys, queries, KeyHeads((), (), tuple(range(16)))) == 1).all()
    assert (key_factors(0 * keys, queries, KeyHeads((), (), tuple(range(16)))) == 1).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_a_calibration_finds_large_keys(tmp_path: Path, family: str) -> None:
    """The int8 cache's share of the error, in a model whose keys have an element 64 times as large as the others."""
    golden = next(goldens(family))
    tensors, spec = RandomWeights(golden.config, golden.seed).tensors, golden.spec
    for heads in spec.key_heads:
        large = np.zeros(max(heads.pairs) + 1)
        large[1] = -6
        features = spec.parameters[heads.key[0]].shape[0]
        for name, rewrite in fold_key_factors(spec, heads, powers_of_two(heads, features, large)).items():
            tensors[name] = multiplied(tensors[name], rewrite)
    source, ids = golden.save(tmp_path / "source", tensors), random_tokens(7, 512, golden.config["vocab_size"])
    report = bminf_lite.migrate(source, tmp_path / "out", "w8a8-smooth", calibrate=ids, device="cpu")
    assert report.calibration["scaled_keys"] == [heads.key[0] for heads in spec.key_heads]
    shown, errors = ids[:24], []
    for folder in (source, tmp_path / "out"):
        found = []
        for kv_cache in ("fp16", "int8"):
            with bminf_lite.load(folder, "cpu", kv_cache=kv_cache) as model:
                found.append(model.logits(shown))
        errors.append(np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]))
    assert errors[1] < 0.5 * errors[0]
