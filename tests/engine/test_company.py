"""A request gets the same whatever shares its steps: alone, together, shuffled, in pieces, from the cache, preempted.

The tokens and log-probabilities are the same bits: on a GPU those of a w8a8 model, on a CPU those of a float model
whose rows are computed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from grammar_kit import EOS, VOCAB_SIZE, make_compiler
from model_kit import WatchedBackend, make_model, run

from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.engine.drafts import Drafter
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.grammar import Grammar

CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3},
]


GRAMMARS = [None, None, Grammar.regex("[a-j]{5,40}(12|[0-9]{30,90})"), None, Grammar.json_object()]
COMPILER = make_compiler()


@dataclass(frozen=True)
class Task:
    """A request that can be served again and again."""

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None

    def request(self) -> Request:
        """A free one's end-of-sequence token never comes, but the engine cannot know that: so it may preempt."""
        if self.grammar is None:
            return Request(self.index, self.prompt, self.params, frozenset([VOCAB_SIZE]))
        return Request(self.index, self.prompt, self.params, EOS, matcher=COMPILER.matcher(self.grammar, EOS))


class Arena:
    """Tasks, a model on a device, and what each task gets alone."""

    def __init__(self, ops: Backend, count: int, quantized: bool, int8_cache: bool = False):
        self.model = make_model(ops, quantized=quantized, max_batch=16, **CONFIG)
        if int8_cache:
            self.model = self.with_limits(cache_layout=self.model.engine_config.cache_layout.with_int8(True))
        rng = np.random.default_rng(5)
        families = [rng.integers(0, 61, 400) for _ in range(4)]
        self.tasks = [
            Task(
                i,
                tuple(families[i % 4][: rng.integers(1, 200)].tolist()),
                SamplingParams(max_new_tokens=int(rng.integers(1, 100)), seed=i, **SAMPLERS[i % 4]),
                GRAMMARS[i % 5],
            )
            for i in range(count)
        ]
        alone = self.with_limits(prefix_cache=False)
        self.expected = {task: run(alone, [task.request()])[0] for task in self.tasks}

    def with_limits(self, **limits: Any) -> Model:
        return Model(self.model.network, replace(self.model.engine_config, **limits))

    def serve(self, model: Model, tasks: list[Task]) -> None:
        for task, found in zip(tasks, run(model, [task.request() for task in tasks]), strict=True):
            self.check(found, self.expected[task].output_token_ids, self.expected[task].logprobs)

    def check(self, found: Request, tokens: list[int], logprobs: list[float]) -> None:
        assert found.output_token_ids == tokens, found.index
        assert np.array(found.logprobs, np.float32).tobytes() == np.array(logprobs, np.float32).tobytes()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda, int8 cache", marks=pytest.mark.gpu),
    ],
)
def arena(request: pytest.FixtureRequest) -> Arena:
    if request.param.startswith("cuda"):
        int8_cache = request.param.endswith("int8 cache")
        return Arena(request.getfixturevalue("cuda_backend"), 100 if int8_cache else 200, True, int8_cache)
    return Arena(WatchedBackend(1, (1, 4, 16)), 12, quantized=False)


def test_together_and_shuffled(arena):
    model = arena.with_limits(prefix_cache=False)
    arena.serve(model, arena.tasks)
    shuffled = np.random.default_rng(1).permutation(len(arena.tasks))
    arena.serve(model, [arena.tasks[i] for i in shuffled])


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_in_pieces(arena, piece):
    model = arena.with_limits(max_num_batched_tokens=piece, max_num_mixed_tokens=max(piece // 2, 1))
    arena.serve(model, arena.tasks[: 4 if piece == 1 else None])


def test_behind_cached_prefixes(arena):
    model = arena.with_limits()
    for _ in range(2):
        arena.serve(model, arena.tasks)
    assert model.stats().cached_tokens > model.stats().prompt_tokens / 4


def test_preempted(arena):
    model = arena.with_limits(num_blocks=(9,), prefix_cache=False)
    arena.serve(model, arena.tasks)
    assert model.stats().preemptions > 0


class KnowingDrafter(Drafter):
    """Proposes what the tasks get alone, with a wrong token now and then."""

    def __init__(self, expected: dict[int, list[int]]):
        self.expected = expected

    def propose(self, request: Request, count: int) -> list[int]:
        known = len(request.output_tokens)
        right = self.expected[request.index][known : known + count]
        return [(token + (known + 3 * i) % 5 // 4) % VOCAB_SIZE for i, token in enumerate(right)]

    def forget(self, request: Request) -> None:
        pass


@pytest.mark.parametrize("drafter", ["n-gram", "knowing"])
@pytest.mark.parametrize("num_blocks", [None, 9], ids=["", "preempted"])
def test_with_drafts(arena, drafter, num_blocks, monkeypatch):
    """Greedy and drawn, with penalties and grammars, while others are cancelled."""
    if drafter == "knowing":
        expected = {task.index: arena.expected[task].output_token_ids for task in arena.tasks}
        monkeypatch.setattr("bminf_lite.engine.model_runner.NgramDrafter", lambda sizes: KnowingDrafter(expected))
    limits: dict[str, Any] = {"num_draft_tokens": 4, "max_num_draft_rows": 64, "prefix_cache": False}
    limits["speculative"] = SpeculativeConfig("ngram", adaptive=False)
    model = arena.with_limits(**limits, **({} if num_blocks is None else {"num_blocks": (num_blocks,)}))
    cancelled = [replace(task, index=1000 + task.index).request() for task in arena.tasks[::5]]
    for request in cancelled if drafter == "n-gram" else ():
        request.on_update = lambda r: model._engine.cancel([r]) if len(r.output_tokens) > 2 else None
    if drafter == "n-gram":
        model._engine.submit(cancelled)
    arena.serve(model, arena.tasks)
    for task in arena.tasks[:6]:
        arena.serve(model, [task])
    stats = model.stats()
    assert stats.draft_tokens > stats.accepted_tokens > (200 if drafter == "knowing" else 0)
    assert (stats.preemptions > 0) == (num_blocks is not None)


def test_a_prompt_that_is_the_output_of_another_request(arena):
    """A token that was decoded is now read as part of a prompt, in part from the cache that decoding has written."""
    model = arena.with_limits()
    free = [task for task in arena.tasks if task.grammar is None]
    greedy = [task for task in free if task.params == replace(task.params, temperature=0, repetition_penalty=1)]
    arena.serve(model, greedy)
    for task in greedy:
        whole = arena.expected[task]
        for cut in {1, len(whole.output_token_ids) // 2} - {0, len(whole.output_token_ids)}:
            prompt = (*task.prompt, *whole.output_token_ids[:cut])
            params = replace(task.params, max_new_tokens=task.params.max_new_tokens - cut)
            (found,) = run(model, [Request(task.index, prompt, params)])
            arena.check(found, whole.output_token_ids[cut:], whole.logprobs[cut:])
