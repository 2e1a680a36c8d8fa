"""Layers of a checkpoint that guess tokens (MTP): what they compute, and how they are read, migrated and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_kit import guesses_of
from safetensors.numpy import save_file
from tiny_models import RandomWeights, goldens, random_tensors

import bminf_lite
from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.checkpoint.draft_layer import open_layer
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.engine.draft_model import HeadedNetwork
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.layers.cache import KVCache
from bminf_lite.models import _mtp as mtp
from bminf_lite.models.parts.part import LayerSource, SharedValues
from bminf_lite.placement import plan

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "glm4_moe_lite", "deepseek_v3")
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}


def configuration(family: str) -> dict[str, Any]:
    return next(goldens(family)).config


def save(folder: Path, family: str, drafting: bool = True, **others: np.ndarray) -> Path:
    """A float checkpoint with random tensors, those of the layer that guesses included."""
    config = configuration(family)
    parsed = models.find(config).parse(config)
    assert isinstance(parsed, models.DecoderConfig) and parsed.drafting is not None
    tensors = dict(RandomWeights(config, 2).tensors)
    if drafting:
        shapes = {name: p.shape for name, p in mtp.spec(parsed.drafting).parameters.items()}
        tensors |= random_tensors(3, shapes, config["model_type"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | others, folder / "model.safetensors")
    return folder


def tokens(count: int, seed: int = 0, vocab: int = 97) -> list[int]:
    return np.random.default_rng([seed, 1]).integers(0, vocab, count).tolist()


def rms(x: np.ndarray, norm: Any, weights: Any) -> np.ndarray:
    x = x.astype(np.float64)
    weight = weights.vector(f"{norm.name}.weight").astype(np.float64) + norm.offset
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps) * weight


@pytest.mark.parametrize("family", FAMILIES)
def test_a_guess_is_that_of_the_equations(tmp_path: Path, family: str) -> None:
    """However the tokens came into the cache. The layer itself is computed by its parts, over all tokens at once."""
    ids, ops = tokens(18), CpuBackend()
    with open_model(save(tmp_path / "it", family)) as model:
        network = model.architecture.Model(model.config, model.weights(), ops)
        weights, layer = model.weights(), open_layer(model)
        config = layer.config
        head = layer.architecture.Model(config, weights, ops)
        head.attach(network)
        streams: list[np.ndarray] = []
        own = KVCache.for_sequences(ops, model.config.cache_layout, 1, 32)
        batch = ForwardBatch.packed(np.array, [ids], [0], own.tables(1, 32))
        network(batch, own, True, lambda i, x: streams.append(np.array(x)), observes_end=True)
        h = rms(streams[-1], model.config.output.norm, weights)
        before = np.concatenate([np.zeros((1, h.shape[1])), rms(h[:-1], config.hidden_norm, weights)])
        inputs = np.concatenate([rms(np.array(network.embed(batch)), config.embedding_norm, weights), before], axis=1)
        x = (inputs @ np.asarray(weights.weight(f"{config.fc}.weight")).astype(np.float64).T).astype(np.float32)
        shared = SharedValues(ops, weights)
        for sub in config.layer.sublayers:
            sub.part.share(shared)
        alone = config.layer.build(LayerSource(ops, weights, config.layer_name, shared))
        cache = KVCache.for_sequences(ops, config.cache_layout, 1, 32)
        batch = ForwardBatch.packed(np.array, [ids], [0], cache.tables(1, 32))
        with ops.step(batch):
            r = np.array(alone(x, cache.layers[0], batch))
        expected = network.output.head.fp32(rms(r[-1:], config.norm, weights).astype(np.float32))
        both, found = HeadedNetwork(network, model.config.num_layers, head), []
        layout = model.config.cache_layout.beside(config.cache_layout).with_drafts(4)
        fp32 = network.output.head.fp32
        for cuts in ([17], [5, 11, 17], list(range(1, 18))):
            cache = KVCache.for_sequences(ops, layout, 1, 32)
            for start, stop in zip([0, *cuts], cuts, strict=False):
                both(ForwardBatch.packed(np.array, [ids[start:stop]], [start], cache.tables(1, 32)), cache)
            network.output.head.fp32 = lambda x: found.append(np.array(fp32(x))) or found[-1]
            guesses_of(both, cache, ids[-1:], [17], 3)
            network.output.head.fp32 = fp32
            assert np.abs(found[0] - expected).max() < 2e-3 * np.abs(expected).max()  # fp32 sums, here of two products
            found.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_the_layer(tmp_path: Path, family: str) -> None:
    """Float, and migrated by the default recipe, which keeps the layer in int8."""
    source = save(tmp_path / "it", family)
    bminf_lite.migrate(source, tmp_path / "migrated")
    for folder in (source, tmp_path / "migrated"):
        with bminf_lite.load(folder, device="cpu", speculative="none") as model:
            expected = [r.token_ids for r in model.generate([tokens(20), tokens(7, 1)], max_new_tokens=12, seed=1)]
        with bminf_lite.load(folder, device="cpu", speculative=SPECULATIVE) as model:
            found = [r.token_ids for r in model.generate([tokens(20), tokens(7, 1)], max_new_tokens=12, seed=1)]
            assert model.stats().draft_tokens > 0
        assert found == expected
    with open_model(tmp_path / "migrated") as migrated:
        assert migrated.left_out() == []
        assert migrated.weights().weight(f"{migrated.config.drafting.fc}.weight").codes.dtype == np.int8


def test_a_model_without_the_layer(tmp_path: Path) -> None:
    folder = save(tmp_path / "it", "glm4_moe", drafting=False)
    with pytest.raises(UsageError, match=r"needs a model with a layer that guesses tokens, and .*it has none"):
        bminf_lite.load(folder, device="cpu", speculative="mtp")
    with pytest.raises(UsageError, match="the method mtp has no model: leave one of them out"):
        bminf_lite.SpeculativeConfig("mtp", model="x")
    with bminf_lite.load(folder, device="cpu") as model:
        assert model.generate(tokens(5), max_new_tokens=2).token_ids


def test_a_layer_that_is_not_complete(tmp_path: Path) -> None:
    layer = f"model.layers.{configuration('glm4_moe')['num_hidden_layers']}"
    others = {f"{layer}.eh_proj.weight": np.zeros((1, 2), np.float32)}
    folder = save(tmp_path / "it", "glm4_moe", drafting=False, **others)
    with pytest.raises(CheckpointError, match=f"missing tensor '{layer}.enorm.weight'"):
        open_model(folder)


def test_a_migration_that_changes_what_the_layer_reads(tmp_path: Path) -> None:
    source = save(tmp_path / "it", "glm4_moe")
    bminf_lite.migrate(source, tmp_path / "migrated", "w8a8-rotate")
    with pytest.raises(UsageError, match="its residual stream is rotated: migrate it with a recipe"):
        bminf_lite.load(tmp_path / "migrated", device="cpu", speculative="mtp")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_counts_the_layer(tmp_path: Path, as_json: bool) -> None:
    folder = save(tmp_path / "it", "qwen3_next")
    path = folder / "config.json" if as_json else folder
    alone = plan(path, gpu_memory="8GiB", link=1e10, bandwidth=1e12)
    both = plan(path, gpu_memory="8GiB", link=1e10, bandwidth=1e12, speculative="mtp")
    assert both.requirements.fixed > alone.requirements.fixed
    assert both.requirements.cache_per_token > alone.requirements.cache_per_token


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_tokens_are_those_without_the_layer(tmp_path: Path, family: str, cuda_backend: Backend) -> None:
    """Captured steps of a w8a8 model, which gives the same bits with drafts."""
    bminf_lite.migrate(save(tmp_path / "it", family), tmp_path / "migrated")
    found = []
    for drafts in ("none", SPECULATIVE):
        with bminf_lite.load(tmp_path / "migrated", device="cuda", memory_limit="1GiB", speculative=drafts) as model:
            model.warm_up()
            prompts = [tokens(30), tokens(70, 1)]
            results = model.generate(prompts, max_new_tokens=16, temperature=0)
            found.append([r.token_ids for r in results])
            assert (model.stats().draft_tokens > 0) == (drafts != "none")
    assert found[0] == found[1]
