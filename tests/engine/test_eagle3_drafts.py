"""Drafts of an EAGLE-3 head in the engine: the same bits as without, in any company; loading and planning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_kit import DRAFT_VOCAB, HEAD, OFFSETS, TARGET, VOCAB, FloatWeights, save_head, save_target
from model_kit import RowwiseBackend, WatchedBackend, request, run
from tiny_models import RandomWeights

import bminf_lite
from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.guesses import GuessPlace
from bminf_lite.engine.draft_model import HeadedNetwork
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.errors import UsageError
from bminf_lite.models import _eagle3 as eagle3
from bminf_lite.models._eagle3 import Eagle3Head
from bminf_lite.placement import make_engine_config, plan

SMALL = TARGET | {"num_hidden_layers": 3}
SMALL_HEAD = HEAD | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
ALWAYS = SpeculativeConfig("eagle3", model="it", adaptive=False)


@contextmanager
def served(
    with_head: bool = True, num_blocks: int = 40, num_slots: int = 17, ahead: bool = False, **limits: Any
) -> Iterator[Model]:
    """A w8a8 model, whose products are exact, with a head or alone. It may run ahead, with padded steps."""
    ops: Any = WatchedBackend(1, (1, 2, 4, 8), (16, 64)) if ahead else RowwiseBackend()
    architecture = models.find(SMALL)
    network: Any = architecture.Model(architecture.parse(SMALL), RandomWeights(SMALL, 7, quantized=True), ops)
    parsed, layout, blocks = network.config, network.config.cache_layout, (num_blocks,)
    if with_head:
        config = eagle3.parse(SMALL_HEAD)
        head = Eagle3Head(config, FloatWeights(SMALL_HEAD), ops)
        head.attach(3, network.embed, eagle3.token_ids(OFFSETS, config))
        network = HeadedNetwork(network, 3, head)
        layout, blocks = layout.beside(config.cache_layout), (num_blocks, num_slots)
        limits = {"num_draft_tokens": 4, "speculative": ALWAYS} | limits
    config = replace(make_engine_config(parsed, layout, None, 16), num_blocks=blocks, **limits)
    model = Model(network, config, eos_ids=frozenset())
    try:
        yield model
    finally:
        model._engine.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 1]).integers(0, VOCAB, count).tolist()


def asked(new: int = 12) -> list[Request]:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.8, "repetition_penalty": 1.3}]
    lengths = (1, 2, 17, 64, 100)
    return [request(i, tokens(n, n), max_new_tokens=new, **kinds[i % 3]) for i, n in enumerate(lengths)]


def results(requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    return [(r.output_token_ids, r.logprobs.tolist()) for r in requests]


def correct_some(monkeypatch: pytest.MonkeyPatch, requests: Sequence[Request]) -> None:
    """Let most guesses be right: random heads guess nothing. The head's cache and slots are used as they are."""
    guess = HeadedNetwork.guess
    behind = {}  # the tokens behind each generated one of the requests, which is found by its position too
    for one in requests:
        for known in range(1, len(one.output_tokens)):
            position = len(one.prompt_token_ids) + known - 1
            place = (known * 7) % 5  # the first draft that stays wrong
            behind[position, one.output_tokens[known - 1]] = one.output_token_ids[known:][:place]

    def corrected(self: HeadedNetwork, cache: Any, places: Sequence[GuessPlace]) -> None:
        guess(self, cache, places)
        batch = places[0].batch
        for column, newest in enumerate(zip(batch.context_lens.tolist(), batch.tokens.tolist(), strict=True)):
            right = behind.get(newest, [])[: len(places)]
            for place, token in zip(places, right, strict=False):
                place.guesses[column] = token

    monkeypatch.setattr(HeadedNetwork, "guess", corrected)


@pytest.mark.parametrize(("piece", "ahead"), [(512, False), (24, False), (512, True)])
def test_tokens_are_those_without_a_head(piece: int, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(with_head=False) as model:
        alone = run(model, asked())
        expected = results(alone)
    correct_some(monkeypatch, alone)
    with served(max_num_batched_tokens=piece, ahead=ahead) as model:
        assert results(run(model, asked())) == expected
        assert results(run(model, asked())) == expected  # with prefixes from the cache
        stats = model.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 30
    assert stats.cached_tokens > 64 and stats.blocks_used == 0


@pytest.mark.slow
def test_preempted_requests_and_a_prefix_that_ends_within_a_block() -> None:
    """Prefixes are reused as without a head, because nothing depends on the features that a slot holds."""
    prompts = [tokens(60, seed) for seed in range(3)]

    def requests() -> list[Request]:
        return [request(i, ids, frozenset([VOCAB]), max_new_tokens=70) for i, ids in enumerate(prompts)]

    with served(with_head=False) as model:
        expected = [results(run(model, [one]))[0] for one in requests()]
        (turn,) = run(model, [request(0, [*prompts[0], *expected[0][0][:40], 5], max_new_tokens=9)])
        cached, again = turn.num_cached_tokens, results([turn])
    with served(num_blocks=5) as model:
        found = run(model, requests())
        assert sum(r.num_preemptions for r in found) > 0
        assert results(found) == expected
    with served() as model:
        run(model, requests()[:1])
        (turn,) = run(model, [request(0, [*prompts[0], *expected[0][0][:40], 5], max_new_tokens=9)])
        assert (turn.num_cached_tokens, results([turn])) == (cached, again)


def test_each_running_request_has_a_slot() -> None:
    """Two slots let two requests run at once; the others wait."""
    with served(num_slots=3) as model:
        found = run(model, asked(5))
        assert all(r.finish_reason == "length" for r in found)


@pytest.mark.parametrize("embedding", [True, False], ids=["own embedding", "the model's"])
def test_a_folder_is_loaded_with_a_head(tmp_path: Path, embedding: bool) -> None:
    target, head = save_target(tmp_path / "target"), save_head(tmp_path / "head", embedding=embedding)
    with bminf_lite.load(target, device="cpu") as model:
        expected = model.generate(tokens(30), max_new_tokens=20, temperature=0)
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "adaptive": False}
    with bminf_lite.load(target, device="cpu", speculative=speculative) as model:
        assert model.engine_config.context_length == TARGET["max_position_embeddings"]
        found = model.generate(tokens(30), max_new_tokens=20, temperature=0)
        assert model.stats().draft_tokens > 0
    assert found.token_ids == expected.token_ids
    with bminf_lite.load(target, device="cpu", speculative=speculative, gpus=2) as model:
        found = model.generate(tokens(30), max_new_tokens=20, temperature=0)
        assert model.stats().draft_tokens > 0
    assert found.token_ids == expected.token_ids


@pytest.mark.slow
def test_a_head_of_a_migrated_and_rotated_model(tmp_path: Path) -> None:
    """The guesses are nearly those for the float model: both are quantized, and rounding may exchange two tokens."""
    target, head = save_target(tmp_path / "target"), save_head(tmp_path / "head", embedding=False)
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "adaptive": False}
    bminf_lite.migrate(target, tmp_path / "migrated", "w8a8-rotate-all")
    with bminf_lite.load(tmp_path / "migrated", device="cpu") as model:
        expected = model.generate(tokens(30), max_new_tokens=20, temperature=0)
    with bminf_lite.load(tmp_path / "migrated", device="cpu", speculative=speculative) as model:
        found = model.generate(tokens(30), max_new_tokens=20, temperature=0)
        assert model.stats().draft_tokens > 0
    assert found.token_ids == expected.token_ids


def test_the_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the method eagle3 needs a model: the folder of an EAGLE-3 head"):
        SpeculativeConfig("eagle3")
    assert SpeculativeConfig("eagle3", model="x").num_draft_tokens == 4
    assert len(OFFSETS) == DRAFT_VOCAB


def test_a_plan_counts_the_head(tmp_path: Path) -> None:
    """Its weights, its keys and values, and a slot for each sequence, but no snapshots."""
    target, head = save_target(tmp_path / "target"), tmp_path / "config.json"
    head.write_text(json.dumps(HEAD))
    alone = plan(target, gpu_memory="8GiB", link=1e10, bandwidth=1e12)
    both = plan(
        target, gpu_memory="8GiB", link=1e10, bandwidth=1e12, speculative={"method": "eagle3", "model": head},
    )  # fmt: skip
    own = sum(layer.bytes_per_token() for layer in eagle3.parse(HEAD).cache_layout.layers)
    assert both.requirements.cache_per_token == alone.requirements.cache_per_token + own
    assert both.requirements.fixed > alone.requirements.fixed
    assert both.requirements.cache_per_sequence > 0 and both.num_snapshots == 0
    assert "snapshots" not in str(both)


@pytest.mark.gpu
def test_on_a_gpu_tokens_are_those_without_a_head(tmp_path: Path, cuda_backend: Backend) -> None:
    """Captured steps of a w8a8 model, which gives the same bits with drafts."""
    target, head = save_target(tmp_path / "target"), save_head(tmp_path / "head", embedding=False)
    bminf_lite.migrate(target, tmp_path / "migrated", "w8a8-rotate-all")
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "adaptive": False}
    found = []
    for drafts in ("none", speculative):
        with bminf_lite.load(tmp_path / "migrated", device="cuda", memory_limit="1GiB", speculative=drafts) as model:
            model.warm_up()
            prompts = [tokens(30), tokens(70, 1)]
            found.append([r.token_ids for r in model.generate(prompts, max_new_tokens=16, temperature=0)])
            assert (model.stats().draft_tokens > 0) == (drafts != "none")
    assert found[0] == found[1]
