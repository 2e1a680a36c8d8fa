"""Training an EAGLE-3 head: each step computes what the engine's head does, and a head learns what can be learned."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import bminf_lite
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.checkpoint.draft_head import open_head
from bminf_lite.cli import main
from bminf_lite.draft_training import head_config, write_head
from bminf_lite.engine.draft_model import HeadedNetwork
from bminf_lite.errors import CheckpointError
from bminf_lite.layers.cache import KVCache
from bminf_lite.models import _eagle3 as eagle3
from bminf_lite.models._eagle3 import Eagle3Head
from bminf_lite.torch.draft_head import Head, TrainingOptions, TrainingText, draft_tokens, train

VOCAB, WIDTH, LAYERS = 50, 16, 3
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "draft_vocab_size": 30,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip


class KnownStreams:
    """A model whose embeddings and residual streams are given, by position."""

    def __init__(self, embedded: np.ndarray, streams: np.ndarray):
        self.ops, self.embedded, self.streams = CpuBackend(), embedded, streams

    def embed(self, batch: ForwardBatch) -> np.ndarray:
        start = int(batch.context_lens[0])
        return np.array(self.embedded[start : start + len(batch.tokens)])

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool, observe: Any, observes_end: bool) -> None:
        start = int(batch.context_lens[0])
        for layer, stream in enumerate(self.streams):
            observe(layer, np.array(stream[start : start + len(batch.tokens)]))


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_each_step_is_a_guess_of_the_engine(norm_before_residual: bool) -> None:
    """The logits of step ``j`` at a token are those of guess ``j + 1`` of a chain that ends there."""
    config = replace(eagle3.parse(CONFIG | {"norm_before_residual": norm_before_residual}), has_embedding=False)
    rng, tokens = np.random.default_rng(1), 12
    embedded = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    streams = rng.standard_normal((LAYERS, tokens, WIDTH)).astype(np.float32)
    trained = Head(config, 3)
    with torch.no_grad():
        steps = trained(torch.from_numpy(embedded)[None], torch.from_numpy(streams)[None], 4)
    model = KnownStreams(embedded, streams)
    head = Eagle3Head(config, Tensors(trained.tensors()), model.ops)
    head.attach(LAYERS, model.embed)
    network = HeadedNetwork(model, 0, head)
    for known in (1, 2, 7):
        cache = KVCache.for_sequences(model.ops, config.cache_layout.with_drafts(4), 1, 16)
        network(ForwardBatch.packed(np.array, [[0] * known], [0], cache.tables(1, 16)), cache)
        features = None
        for step in range(4):
            batch = ForwardBatch.packed(np.array, [[0]], [known + step], cache.tables(1, 16))
            with pytest.MonkeyPatch.context() as patch:
                logits: list[np.ndarray] = []
                patch.setattr(head.ops, "most_likely", lambda x, *_, logits=logits: logits.append(np.array(x)))
                features = head.guess(batch, cache, features, None)
            expected = steps[step][0, known + step].numpy()
            np.testing.assert_allclose(logits[0][0], expected, atol=1e-4)  # fp32 sums of at most 48 terms


class Tensors:
    """Tensors by name."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors

    def weight(self, name: str) -> np.ndarray:
        return self.tensors[name]

    vector = weight


def test_a_head_learns_a_rule() -> None:
    """The next token is the one behind the last, so that embeddings suffice: the loss falls to less than half."""
    table = np.random.default_rng(2).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    config = replace(eagle3.parse(CONFIG | {"draft_vocab_size": VOCAB}), has_embedding=False)

    def text(seed: int) -> TrainingText:
        tokens = (np.arange(20) + np.random.default_rng(seed).integers(VOCAB)) % VOCAB
        streams = np.repeat(table[tokens][None], LAYERS, axis=0).astype(np.float16)
        return TrainingText(table[tokens], streams, (tokens + 1) % VOCAB)

    def losses(texts: list[TrainingText], options: TrainingOptions) -> list[float]:
        found: list[float] = []
        tensors = train(texts, config, np.arange(VOCAB), options, report=lambda _, loss: found.append(loss))
        assert tensors.keys() == eagle3.spec(config).parameters.keys()
        return found

    texts = [text(i) for i in range(16)]
    found = losses(texts, TrainingOptions(epochs=8, batch=4, rate=1e-2, steps=2))
    assert found[-1] < found[0] / 2
    few = TrainingOptions(epochs=1, batch=2, steps=2)
    assert losses(texts[:4], few) == losses(texts[:4], few), "the seed decides everything"


def test_draft_tokens_are_the_most_frequent() -> None:
    assert draft_tokens([np.array([7, 7, 3]), np.array([9, 3, 1])], 2).tolist() == [3, 7]
    assert draft_tokens([np.array([7, 7, 3])], 4).tolist() == [0, 1, 3, 7]


def test_a_head_is_written_in_the_public_form(tmp_path: Path) -> None:
    tokens = np.arange(0, 2 * 30, 2) % VOCAB
    tokens = np.sort(np.unique(tokens))[:20]
    config = CONFIG | {"draft_vocab_size": len(tokens)}
    parsed = replace(eagle3.parse(config), has_embedding=False)
    write_head(tmp_path / "head", config, Head(parsed, 1).tensors(), tokens)
    with open_head(tmp_path / "head") as head:
        assert not head.config.has_embedding and head.config.has_token_map
        assert "midlayer.hidden_norm.weight" in head.checkpoint._name_in_file.values()
    with pytest.raises(CheckpointError, match="already exists"):
        write_head(tmp_path / "head", config, Head(parsed, 1).tensors(), tokens)
    write_head(tmp_path / "head", config, Head(parsed, 2).tensors(), tokens, force=True)
    (tmp_path / "head" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"would delete them: notes\.txt"):
        write_head(tmp_path / "head", config, Head(parsed, 1).tensors(), tokens, force=True)


def test_the_layers_of_a_new_head() -> None:
    demo = Path(bminf_lite.__file__).parent / "demo_model"
    assert head_config(demo, 64, None)["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert head_config(demo, 64, [0, 2])["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert head_config(demo, 10**6, None)["draft_vocab_size"] == 2048


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A head of a few texts, which guesses some tokens; the file that it was trained on names its line."""
    demo = Path(bminf_lite.__file__).parent / "demo_model"
    arguments = [
        "train-draft", str(demo), str(tmp_path / "head"), str(demo / "heldout.txt"), "--device", "cpu", "--json",
        "--pieces", "20", "--new-tokens", "16", "--epochs", "3", "--temperature", "0",
    ]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout.splitlines()[-1])
    assert found["kind"] == "heldout.txt" and found["accepted"] > 0
    assert found["tokens_per_check"] == 1 + found["accepted"] / found["checks"]


def test_without_torch_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "bminf_lite.torch.draft_head")
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, ["train-draft", "MODEL", str(tmp_path / "head"), "x.txt"])
    assert result.exit_code == 2 and "pip install 'bminf-lite[torch]'" in result.output
