"""EAGLE-3 heads: what a head computes against the equations in fp64, and how its checkpoints are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_kit import (
    DRAFT_VOCAB,
    HEAD,
    LAYERS,
    OFFSETS,
    TARGET,
    VOCAB,
    WIDTH,
    FloatWeights,
    guesses_of,
    save_head,
    save_target,
)  # fmt: skip
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.checkpoint.draft_head import HeadWeights, head_scheme, head_token_ids, open_head, require_fit
from bminf_lite.checkpoint.offline_rotation import rotate_offline, stream_rotation
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.engine.draft_model import HeadedNetwork
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.layers.cache import KVCache
from bminf_lite.models import _eagle3 as eagle3
from bminf_lite.models._eagle3 import Eagle3Head


def headed(ops: Backend, config: dict[str, Any] = HEAD) -> tuple[HeadedNetwork, Any, FloatWeights]:
    """A model with a float head, the model alone, and the head's weights."""
    architecture = models.find(TARGET)
    target = architecture.Model(architecture.parse(TARGET), RandomWeights(TARGET, 2), ops)
    weights, parsed = FloatWeights(config), eagle3.parse(config)
    head = Eagle3Head(parsed, weights, ops)
    head.attach(LAYERS, target.embed, eagle3.token_ids(OFFSETS, parsed))
    return HeadedNetwork(target, LAYERS, head), target, weights


def layout_of(network: HeadedNetwork) -> Any:
    return network.network.config.cache_layout.beside(network.head.config.cache_layout).with_drafts(4)


# -- the definition ---------------------------------------------------------------------------------------------------


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions of heads ``[T, heads, size]``, which rotate the first half against the second."""
    tokens, _, size = x.shape
    angles = np.arange(tokens)[:, None] * theta ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Definition:
    """The equations of :mod:`bminf_lite.models._eagle3`, in fp64 and from the start for each token."""

    def __init__(self, weights: FloatWeights, config: dict[str, Any]):
        self.w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in weights.tensors.items()}
        self.config = eagle3.parse(config)

    def last(self, tokens: list[int], features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits and ``r`` of the last token, by the features ``f`` of all: ``[draft_vocab]`` and ``[features]``."""
        w, c = self.w, self.config
        normed = rms(features, w[eagle3.FEATURE_NORM])
        x = np.concatenate([rms(w["embed_tokens"][tokens], w[eagle3.INPUT_NORM]), normed], axis=1)
        q, k, v = (x @ w[name].T + w.get(f"{name}.bias", 0) for name in eagle3.QKV)
        q, k, v = (y.reshape(len(tokens), -1, c.head_dim) for y in (q, k, v))
        q, k = rotated(q, 1000.0), rotated(k, 1000.0)
        group = c.heads // c.kv_heads
        scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) / np.sqrt(c.head_dim)
        scores += np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", weights, np.repeat(v, group, axis=1)).reshape(len(tokens), -1)
        hidden = (normed if c.norm_before_residual else features) + mixed @ w[eagle3.OUT].T
        hidden = hidden + w.get(f"{eagle3.OUT}.bias", 0)
        y = rms(hidden, w[eagle3.MLP_NORM])
        gate, up, down = (w[f"layers.0.mlp.{name}_proj"] for name in ("gate", "up", "down"))
        gated = y @ gate.T
        r = hidden + (gated / (1 + np.exp(-gated)) * (y @ up.T)) @ down.T
        return rms(r[-1], w["norm"]) @ w["lm_head"].T, r[-1]

    def guesses(self, tokens: list[int], streams: np.ndarray, count: int) -> tuple[list[int], list[np.ndarray]]:
        """Tokens and logits behind ``tokens``, of which all but the last have ``streams`` ``[3, n - 1, features]``."""
        known = np.concatenate(list(streams), axis=1).astype(np.float64) @ self.w["fc"].T
        features, tokens = np.concatenate([np.zeros((1, WIDTH)), known]), list(tokens)
        found, logits = [], []
        for _ in range(count):
            last, r = self.last(tokens, features)
            found.append(int(np.argmax(last) + OFFSETS[np.argmax(last)]))
            logits.append(last)
            tokens.append(found[-1])
            features = np.concatenate([features, r[None]])
        return found, logits


def streams_of(target: Any, tokens: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """The residual stream before some layers, ``[layers, T, features]``."""
    found: dict[int, np.ndarray] = {}
    cache = KVCache.for_sequences(target.ops, target.config.cache_layout, 1, len(tokens))
    batch = ForwardBatch.packed(np.array, [tokens], [0], cache.tables(1, len(tokens)))
    target(batch, cache, True, lambda i, residual: found.update({i: np.array(residual)}))
    return np.stack([found[i] for i in layers])


@pytest.mark.parametrize(
    "options",
    [{}, {"norm_before_residual": True}, {"eagle_aux_hidden_state_layer_ids": [1, 7]}, {"attention_bias": True}],
    ids=["default", "norm before the residual", "two layers", "biases"],
)
def test_guesses_are_those_of_the_equations(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the tokens came into the cache: at once, in pieces, one by one, or as drafts that were rejected."""
    config = HEAD | options
    network, target, weights = headed(CpuBackend(), config)
    layers = network.head.config.layers_of(LAYERS)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 23).tolist()
    expected, expected_logits = Definition(weights, config).guesses(tokens, streams_of(target, tokens[:-1], layers), 4)
    ops = network.ops
    for cuts in ([22], [5, 15, 22], list(range(1, 23))):
        cache = KVCache.for_sequences(ops, layout_of(network), 1, 32)
        for start, stop in zip([0, *cuts], cuts, strict=False):
            network(ForwardBatch.packed(np.array, [tokens[start:stop]], [start], cache.tables(1, 32)), cache)
        logits = watched_logits(network.head, monkeypatch)
        for _ in range(2):  # a guess leaves nothing behind that the next one reads
            found = guesses_of(network, cache, tokens[-1:], [22], 4)
            assert found.tolist() == [expected]
        monkeypatch.undo()
        # fp32 sums of at most 96 terms, over some layers
        np.testing.assert_allclose(np.concatenate(logits)[:4], expected_logits, atol=2e-3)


def watched_logits(head: Any, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The logits of the guesses that a head makes from now on."""
    found: list[np.ndarray] = []
    fp32 = head.head.fp32

    def watched(x: Any) -> Any:
        logits = fp32(x)
        found.append(np.array(head.ops.host(logits)))
        return logits

    monkeypatch.setattr(head.head, "fp32", watched)
    return found


def test_several_sequences_guess_what_each_does_alone() -> None:
    network, _, _ = headed(CpuBackend())
    rows = [np.random.default_rng(i).integers(0, VOCAB, 9 + 2 * i).tolist() for i in range(3)]

    def guesses(rows: list[list[int]]) -> list[list[int]]:
        cache = KVCache.for_sequences(network.ops, layout_of(network), len(rows), 32)
        tables = cache.tables(len(rows), 32)
        network(ForwardBatch.packed(np.array, [row[:-1] for row in rows], None, tables), cache)
        return guesses_of(network, cache, [row[-1] for row in rows], [len(row) - 1 for row in rows], 3).tolist()

    assert guesses(rows) == [guesses([row])[0] for row in rows]


class QuantizedWeights(FloatWeights):
    """As a head's file is quantized when it is loaded."""

    def weight(self, name: str) -> Any:
        return quantize_weight(self.tensors[name], head_scheme(name) is Scheme.W8A8)


@pytest.mark.gpu
def test_a_gpu_guesses_what_the_reference_does(cuda_backend: Backend) -> None:
    """Prompts, steps of one token and of drafts, and guesses: the same tokens, and nearly the same logits."""
    rows = [np.random.default_rng(i).integers(0, VOCAB, 9 + 2 * i).tolist() for i in range(2)]
    found = {}
    for ops in (Backend(np.float16), cuda_backend):
        architecture = models.find(TARGET)
        target = architecture.Model(architecture.parse(TARGET), RandomWeights(TARGET, 2, quantized=True), ops)
        head = Eagle3Head(eagle3.parse(HEAD), QuantizedWeights(HEAD), ops)
        head.attach(LAYERS, target.embed, eagle3.token_ids(OFFSETS, head.config))
        network = HeadedNetwork(target, LAYERS, head)
        cache = KVCache.for_sequences(ops, layout_of(network), 2, 64)
        tables, lens = cache.tables(2, 64), [0, 0]
        logits: list[np.ndarray] = []
        with pytest.MonkeyPatch.context() as patch:
            watched = watched_logits(head, patch)
            for step in ([row[:-4] for row in rows], *([row[i : i + 1] for row in rows] for i in (-4, -3, -2))):
                network(ForwardBatch.packed(ops.array, step, lens, tables), cache)
                lens = [n + len(new) for n, new in zip(lens, step, strict=True)]
                newest = [row[n] for row, n in zip(rows, lens, strict=True)]
                guesses_of(network, cache, newest, lens, 1)
            guesses_of(network, cache, newest, lens, 3)
            logits += watched
        found[ops] = np.concatenate(logits)
        cache.close()
    reference, gpu = found.values()
    # fp16 activations between int8 products: a code that rounds the other way moves a logit by about a hundredth
    np.testing.assert_allclose(gpu, reference, atol=0.05)


# -- checkpoints ------------------------------------------------------------------------------------------------------

SPECULATORS = {
    "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True,
    "transformer_layer_config": {k: v for k, v in HEAD.items() if k not in ("draft_vocab_size", "architectures")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layer", "prefix"),
    [(HEAD, "midlayer", ""), (HEAD, "midlayer", "model."), (SPECULATORS, "layers.0", "")],
    ids=["EAGLE and SpecForge", "with a prefix", "speculators"],
)
def test_the_names_that_exist(tmp_path: Path, config: dict[str, Any], layer: str, prefix: str) -> None:
    with open_head(save_head(tmp_path / "head", config, layer, prefix)) as head:
        expected = FloatWeights(eagle3.head_config(config)).tensors
        assert {name: np.asarray(head.weights().vector(name)).tolist() for name in expected} == {
            name: values.tolist() for name, values in expected.items()
        }
        assert head.config.norm_before_residual == (config is SPECULATORS)
        found = head_token_ids(head)
        assert found is not None and found.tolist() == (OFFSETS + np.arange(DRAFT_VOCAB)).tolist()


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (2, 16, 29)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True}},
            (2, 16, 29),
        ),
        ({"eagle_aux_hidden_state_layer_ids": [3, 9]}, (3, 9)),
    ],
    ids=["default", "by input", "by output", "two"],
)
def test_how_layers_are_counted(options: dict[str, Any], layers: tuple[int, ...]) -> None:
    """vLLM counts layers by their input, SGLang by their output; both have the same default."""
    assert eagle3.parse(HEAD | options).layers_of(32) == layers


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, not a whole number from 1 to 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "the head is one of EAGLE 1 or 2"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "eagle_aux_hidden_state_layer_ids is 'all', not a list"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
    ],
)
def test_heads_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        eagle3.parse(HEAD | options)


def test_a_head_that_is_not_of_the_model(tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", HEAD | {"vocab_size": 90, "target_hidden_size": 64})
    problems = "it has 90 tokens in its vocabulary, but the model has 97; it reads 64 features, but the model has 32"
    target, short = save_target(tmp_path / "target"), save_target(tmp_path / "short", num_hidden_layers=2)
    with open_model(target) as model, open_model(short) as other, open_head(folder) as head:
        with pytest.raises(UsageError, match=problems):
            require_fit(model.description, head.description, folder)
        with pytest.raises(CheckpointError, match="the layers 2, 1, -1, but the model has 2 layers"):
            require_fit(other.description, head.description, folder)


def test_a_map_of_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    with (
        open_head(save_head(tmp_path / "head", d2t=np.full(DRAFT_VOCAB, VOCAB, np.int64))) as head,
        pytest.raises(CheckpointError, match="tensor 'd2t' names 41 tokens from 97 to 137"),
    ):
        head_token_ids(head)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", HEAD | {"attention_bias": True}, other=np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match="unexpected tensor 'other'"):
        open_head(folder)


# -- rotated models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("embedding", [True, False], ids=["own embedding", "the model's"])
def test_a_head_of_a_rotated_model_guesses_the_same(
    tmp_path: Path, embedding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of the model is multiplied by an orthogonal matrix, and so is what reads it."""
    target, folder = save_target(tmp_path / "target"), save_head(tmp_path / "head", embedding=embedding)
    tokens = np.random.default_rng(4).integers(0, VOCAB, 20).tolist()
    found = []
    for rotated in (False, True):
        with open_model(target) as plain, open_head(folder) as head:
            model = rotate_offline(plain) if rotated else plain
            ops = CpuBackend()
            network = model.architecture.Model(model.config, model.weights(), ops)
            turned = FloatHead(head.weights(), head.config, rotated)
            built = Eagle3Head(head.config, turned, ops)
            built.attach(LAYERS, network.embed, head_token_ids(head))
            both = HeadedNetwork(network, LAYERS, built)
            cache = KVCache.for_sequences(ops, layout_of(both), 1, 32)
            both(ForwardBatch.packed(np.array, [tokens[:-1]], [0], cache.tables(1, 32)), cache)
            logits = watched_logits(built, monkeypatch)
            guesses_of(both, cache, tokens[-1:], [19], 3)
            found.append(np.concatenate(logits))
    assert not np.array_equal(stream_rotation(WIDTH)(np.eye(WIDTH, dtype=np.float32)), np.eye(WIDTH))
    np.testing.assert_allclose(found[1], found[0], atol=5e-3)  # fp32 sums in another basis, over ten layers


class FloatHead(HeadWeights):
    """The tensors of a head as :class:`HeadWeights` turns them, without quantization."""

    def weight(self, name: str) -> np.ndarray:
        values = np.asarray(self.weights.weight(name)).astype(np.float32)
        return self._turned(name, values) if self.is_rotated else values


def test_matrices_are_quantized_when_they_are_loaded(tmp_path: Path) -> None:
    """``fc`` reads the residual stream, so its activations stay float."""
    with open_model(save_target(tmp_path / "target")) as model, open_head(save_head(tmp_path / "head")) as head:
        weights = HeadWeights.of(head, model)
        fc, qkv = weights.weight("fc.weight"), weights.weight("layers.0.self_attn.q_proj.weight")
        assert not weights.is_rotated
        assert (fc.codes.dtype, fc.dynamic, qkv.dynamic) == (np.int8, False, True)
