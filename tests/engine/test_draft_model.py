"""A draft model beside a LLaMA: its layers in the same cache, a step of its own, and the same tokens as without it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_kit import CONFIG, RowwiseBackend, request, run
from safetensors.numpy import save_file
from tiny_models import Golden, RandomWeights, goldens

import bminf_lite
from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.engine.draft_model import DraftedNetwork
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.errors import UsageError
from bminf_lite.placement import cache_groups, checkpoint_requirements, make_engine_config, with_draft_model

LLAMA = CONFIG | {"model_type": "llama", "max_position_embeddings": 512}
ONE_LAYER = LLAMA | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of another number: layers of two kinds share tables."""
WINDOWED = {"model_type": "mistral", **{k: v for k, v in ONE_LAYER.items() if k != "model_type"}, "sliding_window": 40}


@contextmanager
def served(draft: dict[str, Any] | None, num_blocks: int = 40, **limits: Any) -> Iterator[Model]:
    """A w8a8 LLaMA, whose products are exact, with a draft model of the configuration ``draft``."""
    ops = RowwiseBackend()

    def network(config: dict[str, Any], seed: int) -> Any:
        architecture = models.find(config)
        return architecture.Model(architecture.parse(config), RandomWeights(config, seed, quantized=True), ops)

    model = network(LLAMA, 7)
    parsed = model.config
    layout = parsed.cache_layout
    both: Any = model
    if draft is not None:
        second = network(draft, 7 if draft is LLAMA else 8)
        layout = layout.beside(second.config.cache_layout)
        both = DraftedNetwork(model, parsed.num_layers, second)
        limits = {"num_draft_tokens": 4, "speculative": SpeculativeConfig(model="it", adaptive=False)} | limits
    config = make_engine_config(parsed, layout, None, 16)
    config = replace(config, num_blocks=(num_blocks,) * len(layout.groups), **limits)
    served_model = Model(both, config, eos_ids=frozenset())
    try:
        yield served_model
    finally:
        served_model._engine.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 1]).integers(0, LLAMA["vocab_size"], count).tolist()


def results(requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, which are to be equal to the bit."""
    return [(r.output_token_ids, r.logprobs.tolist()) for r in requests]


def requests(new: int = 30, **options: Any) -> list[Request]:
    """Greedy and seeded ones, with penalties and without."""
    lengths = (1, 2, 17, 63, 64, 65, 100)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.8, "repetition_penalty": 1.3}]
    return [
        request(i, tokens(length, length), max_new_tokens=new, **(kinds[i % 3] | options))
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def without_drafts() -> list[tuple[list[int], list[float]]]:
    """What :func:`requests` get without a draft model."""
    with served(None) as model:
        return results(run(model, requests()))


@pytest.mark.parametrize("draft", [LLAMA, ONE_LAYER, WINDOWED], ids=["itself", "one layer", "a window"])
@pytest.mark.parametrize("piece", [512, 24])
def test_tokens_are_those_without_a_draft_model(
    draft: dict[str, Any], piece: int, without_drafts: list[tuple[list[int], list[float]]]
) -> None:
    with served(draft, max_num_batched_tokens=piece) as model:
        found = run(model, requests())
        stats = model.stats()
    assert results(found) == without_drafts
    assert stats.draft_tokens > 0


def test_a_model_that_drafts_for_itself_is_right() -> None:
    """Every greedy draft is accepted, also behind a prefix from the cache: the draft model has read all tokens."""
    prompt = tokens(100, 3)
    with served(LLAMA) as model:
        (first,) = run(model, [request(0, prompt, max_new_tokens=40)])
        (turn,) = run(model, [request(1, [*prompt, *first.output_token_ids, 5], max_new_tokens=40)])
        stats = model.stats()
    assert turn.num_cached_tokens >= 128
    assert stats.accepted_tokens == stats.draft_tokens > 60


def test_preempted_and_cancelled_requests() -> None:
    """Three sequences of up to 140 tokens in a cache of 6 blocks."""
    prompts = [tokens(60, seed) for seed in range(3)]

    def asked() -> list[Request]:
        return [request(i, ids, frozenset([LLAMA["vocab_size"]]), max_new_tokens=80) for i, ids in enumerate(prompts)]

    with served(None) as model:
        expected = [results(run(model, [one]))[0] for one in asked()]
    with served(ONE_LAYER, num_blocks=7) as model:
        found = run(model, asked())
        assert sum(r.num_preemptions for r in found) > 0
        assert results(found) == expected
        assert model.stats().blocks_used == 0


def save(golden: Golden, folder: Path, seed: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden.config))
    save_file(RandomWeights(golden.config, seed).tensors, folder / "model.safetensors")
    return folder


def test_a_folder_is_loaded_with_a_draft_model(tmp_path: Path) -> None:
    golden = next(goldens("llama"))
    small = replace(golden, config=golden.config | {"num_hidden_layers": 1})
    target, draft = save(golden, tmp_path / "target", 1), save(small, tmp_path / "draft", 2)
    with bminf_lite.load(target, device="cpu") as model:
        expected = model.generate(golden.tokens.tolist(), max_new_tokens=20, temperature=0)
    with bminf_lite.load(target, device="cpu", speculative={"model": draft, "adaptive": False}) as model:
        assert model.engine_config.num_draft_tokens == 4
        assert len(model.engine_config.cache_layout.layers) == golden.config["num_hidden_layers"] + 1
        found = model.generate(golden.tokens.tolist(), max_new_tokens=20, temperature=0)
        assert model.stats().draft_tokens > 0
    assert found.token_ids == expected.token_ids


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    golden = next(goldens("llama"))
    other = replace(golden, config=golden.config | {"vocab_size": 90})
    target, draft = save(golden, tmp_path / "target", 1), save(other, tmp_path / "draft", 2)
    with pytest.raises(UsageError, match=r"draft has 90 tokens in its vocabulary, but the model has 97; give"):
        bminf_lite.load(target, device="cpu", speculative={"model": draft})


def test_both_models_are_in_one_plan(tmp_path: Path) -> None:
    """The groups of the cache have the layers of both, and the weights of the draft model stay on the device."""
    golden = next(goldens("llama"))
    small = replace(golden, config=golden.config | {"num_hidden_layers": 1})
    with (
        open_model(save(golden, tmp_path / "target", 1)) as target,
        open_model(save(small, tmp_path / "draft", 2)) as draft,
    ):
        own, other = checkpoint_requirements(target), checkpoint_requirements(draft)
        layout = target.config.cache_layout.beside(draft.config.cache_layout)
        both = with_draft_model(own, other, target.config, layout)
        assert both.layers == own.layers
        assert both.weights - own.weights == pytest.approx(other.weights, abs=64 << 20)
        (group,) = both.cache
        assert group == cache_groups(target.config, layout)[0]
        assert group.num_layers == golden.config["num_hidden_layers"] + 1
        assert both.cache_per_token == own.cache_per_token + other.cache_per_token


@pytest.mark.parametrize("draft", [LLAMA, ONE_LAYER], ids=["itself", "one layer"])
def test_a_text_that_ends_with_the_context_beside_one_that_goes_on(draft: dict[str, Any]) -> None:
    """The guesses of the other text, of which there are more, have no positions of the first one."""
    limit = LLAMA["max_position_embeddings"]

    def asked() -> list[Request]:
        sizes = (limit - 12, 12), (20, 40)
        return [request(i, tokens(count, count), max_new_tokens=new) for i, (count, new) in enumerate(sizes)]

    with served(None) as model:
        expected = results(run(model, asked()))
    with served(draft) as model:
        assert results(run(model, asked())) == expected
        assert model.stats().draft_tokens > 0


def test_a_model_that_drafts_for_itself_is_often_right_at_a_temperature() -> None:
    """A guess is drawn with the random number of the draw. The most likely token would be right for 17 %."""
    with served(LLAMA) as model:
        run(model, [request(i, tokens(20, i), max_new_tokens=40, temperature=0.7) for i in range(3)])
        stats = model.stats()
    assert stats.accepted_tokens > 0.25 * stats.draft_tokens
