"""Layers with states beside attention: what a request gets never depends on company, cuts, snapshots or drafts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pytest
from hybrid_model import CHUNK, LAYOUTS, VOCAB, Hybrid, HybridModel
from model_kit import WatchedBackend, request, run

from bminf_lite.backend.cache_values import StateArray
from bminf_lite.backend.communicator import simulated_ranks
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.bench.session import Session
from bminf_lite.cli.plan import plan_to_dict
from bminf_lite.engine import block_manager
from bminf_lite.engine.core import Engine
from bminf_lite.engine.drafts import Drafter
from bminf_lite.engine.model_runner import ModelRunner
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.layers.cache import CacheLayout, KeyValues, KVCache, Layout, State
from bminf_lite.memory.planner import Machine, MemoryPlan, MemoryRequirements, plan_memory
from bminf_lite.memory.step_time import StepWork
from bminf_lite.placement import cache_groups

if TYPE_CHECKING:
    from bminf_lite.bench.model import BenchModel
    from bminf_lite.models._config import ModelConfig

ALWAYS = SpeculativeConfig("ngram", adaptive=False)
KINDS = ["arwc", "ccac", "r"]
"""Attention, a recurrence, a window and a short convolution; as in LFM2; and a model that keeps no tokens at all."""


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 1]).integers(0, VOCAB, count).tolist()


def results(requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, which are to be equal to the bit."""
    return [(r.output_token_ids, r.logprobs.tolist()) for r in requests]


def alone(prompts: Sequence[list[int]], new: int, kinds: str = "arwc") -> list[tuple[list[int], list[float]]]:
    """What each request gets without any other, and without a prefix from the cache; computed once."""
    return _alone(tuple(map(tuple, prompts)), new, kinds)


@functools.cache
def _alone(prompts: tuple[tuple[int, ...], ...], new: int, kinds: str) -> list[tuple[list[int], list[float]]]:
    with HybridModel(kinds, prefix_cache=False) as model:
        return [results(run(model, [request(i, list(ids), max_new_tokens=new)]))[0] for i, ids in enumerate(prompts)]


@pytest.mark.parametrize("kinds", KINDS)
def test_a_prompt_that_is_cut_anywhere_gives_the_same_bits(kinds: str) -> None:
    network, ids = Hybrid(kinds), np.array(tokens(3 * CHUNK + 5), np.int32)

    def logits(*cuts: int) -> np.ndarray:
        cache = KVCache.for_sequences(network.ops, network.cache_layout, 1, len(ids))
        found = [
            network(ForwardBatch.packed(np.array, [ids[a:b]], [a], cache.tables(1, len(ids))), cache, True)
            for a, b in zip((0, *cuts), (*cuts, len(ids)), strict=True)
        ]
        return np.concatenate(found)

    whole = logits()
    for cut in range(1, len(ids)):
        np.testing.assert_array_equal(logits(cut), whole)
    np.testing.assert_array_equal(logits(*range(1, len(ids))), whole)
    np.testing.assert_array_equal(logits(CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK), whole)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}], ids=["whole prompts", "pieces"])
def test_batched_equals_alone(kinds: str, options: dict[str, Any]) -> None:
    prompts = [tokens(length, length) for length in (1, 15, 16, 17, 40, 64, 65, 130)]
    with HybridModel(kinds, **options) as model:
        together = run(model, [request(i, ids, max_new_tokens=20) for i, ids in enumerate(prompts)])
    assert results(together) == alone(prompts, 20, kinds)


def test_captured_steps_with_padding_give_the_same() -> None:
    prompts = [tokens(length, length) for length in (3, 20, 33)]
    ops = WatchedBackend(1, decode_sizes=(4, 8), prompt_sizes=(64,))
    with HybridModel(ops=ops) as model:
        model._engine.warm_up()
        together = run(model, [request(i, ids, max_new_tokens=20) for i, ids in enumerate(prompts)])
    assert ops.captures and results(together) == alone(prompts, 20)


# -- reuse of prefixes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("length", [5, 15, 16, 17, 64, 65, 66, 128, 150])
def test_a_prompt_s_end_and_a_turn_s_end_are_reused_at_any_position(kinds: str, length: int) -> None:
    prompt = tokens(length, 3)
    with HybridModel(kinds) as model:
        (first,) = run(model, [request(0, prompt, max_new_tokens=9)])
        history = [*prompt, *first.output_token_ids]
        asked = {
            "the same again": (prompt, length - 1),
            "another end": ([*prompt, 1, 2, 3], length if first.output_token_ids[0] != 1 else None),
            "the next turn": ([*history, 7, 8], len(history) - 1),
            "a longer next turn": ([*history[:-1], *tokens(90, 8)], len(history) - 1),
        }
        again = {what: run(model, [request(0, ids, max_new_tokens=9)])[0] for what, (ids, _) in asked.items()}
    for what, (ids, cached) in asked.items():
        assert results([again[what]]) == alone([ids], 9, kinds), what
        assert cached is None or again[what].num_cached_tokens == cached, what


def test_snapshots_within_a_prompt_serve_prompts_that_go_on_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "SNAPSHOT_TOKENS", 70)
    prompt = tokens(300, 4)
    others = [[*prompt[:length], *tokens(30, length)] for length in (60, 100, 160, 299)]
    with HybridModel(max_num_batched_tokens=40) as model:
        run(model, [request(0, prompt, max_new_tokens=2)])
        found = [run(model, [request(0, ids, max_new_tokens=6)])[0] for ids in others]
    assert results(found) == alone(others, 6)
    assert [r.num_cached_tokens for r in found] == [0, 80, 160, 299]


def test_a_common_beginning_is_computed_twice_and_then_reused() -> None:
    """The second prompt that begins like an earlier one shows where they part, and leaves a snapshot there."""
    prompts = [[*tokens(150, 7), *tokens(20 + i, 20 + i)] for i in range(4)]
    with HybridModel() as model:
        found = [run(model, [request(0, ids, max_new_tokens=6)])[0] for ids in prompts]
    assert [r.num_cached_tokens for r in found] == [0, 0, 128, 128]
    assert results(found) == alone(prompts, 6)


def test_answers_to_one_prompt_compute_it_once() -> None:
    prompt = tokens(100, 6)
    many = [request(i, prompt, max_new_tokens=8, temperature=0.9) for i in range(5)]
    with HybridModel(max_num_batched_tokens=30) as model:
        run(model, many)
    assert [r.num_cached_tokens for r in many] == [0, 99, 99, 99, 99]
    with HybridModel(prefix_cache=False) as model:
        plain = run(model, [request(i, prompt, max_new_tokens=8, temperature=0.9) for i in range(5)])
    assert results(many) == results(plain)


def test_without_slots_for_snapshots_results_are_the_same() -> None:
    """There are three slots: snapshots make room for sequences, and no sequence waits for ever."""
    prompts = [tokens(length, length % 3) for length in (40, 41, 40, 90, 91, 90, 17, 18)]
    with HybridModel(slots=4, max_num_batched_tokens=50) as model:
        found = run(model, [request(i, ids, max_new_tokens=12) for i, ids in enumerate(prompts)])
        assert model._engine.blocks.pools[1].highest == 3
    assert results(found) == alone(prompts, 12)


@pytest.mark.parametrize("ahead", [0, 1])
def test_preempted_and_cancelled_requests(ahead: int) -> None:
    """Few blocks: requests are preempted, and go on from the slot that they left, if it is still there."""
    prompts = [tokens(50 + 3 * i, i) for i in range(6)]
    with HybridModel(blocks=9, slots=10, ops=WatchedBackend(ahead), max_num_batched_tokens=64) as model:
        requests = [request(i, ids, frozenset([VOCAB]), max_new_tokens=90) for i, ids in enumerate(prompts)]
        gone = [request(9, tokens(70, 90 + i), max_new_tokens=50) for i in range(2)]
        for victim in gone:
            victim.on_update = lambda r: model._engine.cancel([r]) if len(r.output_tokens) > 5 else None
        model._engine.submit(gone)
        run(model, requests)
        stats = model._engine.stats()
        assert stats.preemptions > 0 and any(r.num_preemptions for r in requests)
        model._engine.call(lambda: model._engine.blocks.check([]))
    assert results(requests) == alone(prompts, 90)
    assert all(r.finish_reason == "cancelled" for r in gone)


# -- drafts -----------------------------------------------------------------------------------------------------------


def repetitive(count: int, seed: int) -> list[int]:
    """A prompt that repeats itself, so that n-grams are found."""
    return (tokens(7, seed) * (count // 7 + 1))[:count]


@pytest.mark.parametrize(
    ("kinds", "count"),
    [*((kinds, 1) for kinds in KINDS), ("arwc", 30), *(pytest.param(k, 30, marks=pytest.mark.slow) for k in KINDS[1:])],
)
def test_drafts_are_exact_also_where_a_check_crosses_the_end_of_a_chunk(
    kinds: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and among 30 ragged requests that arrive, share steps and reuse prefixes."""
    monkeypatch.setattr("bminf_lite.engine.model_runner.NgramDrafter", lambda sizes: AnyToken())
    prompts = [repetitive(20 + 5 * (i % 17), i % 11) for i in range(count)]
    expected = alone(prompts, 30, kinds)
    with HybridModel(
        kinds, blocks=200, ops=WatchedBackend(1), num_draft_tokens=5, max_num_seqs=24, speculative=ALWAYS
    ) as model:
        AnyToken.answers = {tuple(p): answer for p, (answer, _) in zip(prompts, expected, strict=True)}
        drafted = run(model, [request(i, ids, max_new_tokens=30) for i, ids in enumerate(prompts)])
        stats = model._engine.stats()
    assert results(drafted) == expected
    assert 0 < stats.accepted_tokens < stats.draft_tokens and stats.accepted_tokens > 10 * count


class AnyToken(Drafter):
    """Drafts that are right three times of four."""

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def propose(self, request: Request, count: int) -> Sequence[int]:
        known = len(request.output_tokens)
        right = self.answers[tuple(request.prompt_token_ids)][known : known + count]
        return [token if (known + i) % 4 or i == 0 else (token + 1) % VOCAB for i, token in enumerate(right)]

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def test_n_grams_give_what_plain_decoding_gives() -> None:
    prompts = [repetitive(40 + i, i) for i in range(6)]
    with HybridModel(num_draft_tokens=4, speculative=ALWAYS) as model:
        drafted = run(model, [request(i, ids, max_new_tokens=40) for i, ids in enumerate(prompts)])
        assert model._engine.stats().draft_tokens > 0
        again = run(model, [request(i, ids, max_new_tokens=40) for i, ids in enumerate(prompts)])
        assert all(r.num_cached_tokens == len(r.prompt_token_ids) - 1 for r in again)
    expected = alone(prompts, 40)
    assert results(drafted) == expected and results(again) == expected


# -- memory -----------------------------------------------------------------------------------------------------------

LARGE = CacheLayout(
    (
        KeyValues(8, 128),
        *(State((StateArray("state", (32, 128, 128)), StateArray("inputs", (6144,), None, ring=64))),) * 36,
        *(KeyValues(8, 128),) * 11,
    )
)
"""Layers whose states take about 100 MB a sequence, and attention of 12 layers."""
GB = 10**9


def large_plan(memory: int, batch: int = 1, context: int | None = 8192) -> MemoryPlan:
    groups = cache_groups(cast("ModelConfig", SimpleNamespace(is_encoder_decoder=False)), LARGE)
    needed = MemoryRequirements(
        (200_000_000,) * 48, 500_000_000, 300_000_000, StepWork(10 * GB, 300, 100, 10_000), groups, 100_000,
        4 * 150_000, 131_072,
    )  # fmt: skip
    return plan_memory(needed, Machine(memory, bandwidth=3e12), context, batch)


def test_a_plan_counts_states_by_sequence_and_says_how_many_snapshots_fit() -> None:
    state, token = LARGE.bytes_per_sequence(), LARGE.bytes_per_token()
    assert 100e6 < state < 110e6 and token == 12 * 2 * 8 * 128 * 2
    plan = large_plan(40 * GB)
    requirements = plan.requirements
    assert (requirements.cache_per_sequence, requirements.cache_per_token) == (state, token)
    blocks, slots = plan.num_blocks(plan.max_num_seqs)
    one = state + token * 8192
    assert 0 <= plan.cache_bytes - one - state - token * 64 < 48 * 2 * (2 << 20), "with null block and slot, and pages"
    sequences = plan.sequences_of(8192)
    assert plan.num_snapshots == slots - 1 - sequences >= sequences - 1
    taken = sum(g.nbytes(n) for g, n in zip(requirements.cache, (blocks, slots), strict=True))
    assert plan.cache_bytes <= taken <= plan.cache_bytes + plan.left
    assert "per sequence" in str(plan) and f"beside 8,192 tokens {plan.num_snapshots:,} snapshots" in str(plan)
    found = plan_to_dict(plan)
    assert found["cache_bytes_per_sequence"] == state and found["snapshots"] == plan.num_snapshots
    assert found["snapshot_bytes"] == plan.num_snapshots * state
    faster = plan.compute_seconds, replace(plan, batch=2).compute_seconds
    assert faster[0] and faster[1] and faster[1] - faster[0] > one / 3e12, "a step reads the state of each sequence"


def test_snapshots_give_way_to_sequences_where_memory_is_short() -> None:
    plan = large_plan(14 * GB, batch=4)
    assert plan.fits and plan.sequences_of(8192) >= 4
    least = replace(plan, machine=Machine(plan.total_bytes, bandwidth=3e12))
    assert least.num_blocks(4) == (1 + 4 * 128, 1 + 4) and least.num_snapshots == 0


def test_pools_take_what_the_plan_counts_and_begin_small() -> None:
    with HybridModel() as model:
        run(model, [request(0, tokens(40), max_new_tokens=3)])
        cache = model._engine._runner.executors[0].cache
        assert cache.num_blocks == [64, 3, 64], "the null slot, one for the sequence, and one for its snapshot"
        model._engine.warm_up()
        assert cache.num_blocks == list(model.config.num_blocks)


@pytest.mark.gpu
def test_pools_on_a_gpu_take_what_the_plan_counts(cuda_backend: Any) -> None:
    layout = CacheLayout((KeyValues(2, 64), *LARGE.layers[1:3], LAYOUTS["r"], LAYOUTS["c"]))
    groups = cache_groups(cast("ModelConfig", SimpleNamespace(is_encoder_decoder=False)), layout)
    before = cuda_backend.memory()["used"]
    cache = KVCache(cuda_backend, layout, [40, 2], [40, 7])
    cache.grow(1, 7)
    state = cache.layers[2]["state"]
    cuda_backend.assign(state[3], np.full(state.shape[1:], 5, np.float32))
    cache.copy_blocks([(0, 0), (3, 6)])
    assert (cuda_backend.host(state[6]) == 5).all() and not cuda_backend.host(state[0]).any()
    taken = cuda_backend.memory()["used"] - before
    assert taken == sum(group.nbytes(count) for group, count in zip(groups, (40, 7), strict=True))
    cache.close()
    assert cuda_backend.memory()["used"] == before


@pytest.mark.parametrize("kinds", ["rc", "arw"])
def test_two_ranks_hold_states_of_their_own(kinds: str) -> None:
    """Both ranks run the same plans: slots and copies are the same on each."""
    networks, config = [Hybrid(kinds) for _ in range(2)], HybridModel(kinds).config
    for network, communicator in zip(networks, simulated_ranks(2), strict=True):
        network.ops.communicator = communicator
    layout = CacheLayout(tuple(twice(layer) for layer in config.cache_layout.layers))
    config = replace(config, cache_layout=layout)
    engine = Engine(config, lambda blocks: ModelRunner(networks, config, blocks))
    model, prompts = SimpleNamespace(_engine=engine), [tokens(30, 1), tokens(70, 2)]
    try:
        run(cast(Any, model), [request(0, prompts[1], max_new_tokens=4)])
        found = run(cast(Any, model), [request(i, ids, max_new_tokens=12) for i, ids in enumerate(prompts)])
    finally:
        engine.close()
    assert found[1].num_cached_tokens == 69 and results(found) == alone(prompts, 12, kinds)


def test_a_bench_session_decodes_what_the_engine_decodes() -> None:
    """Also behind a cache of NaN, because a sequence at position 0 reads no state."""
    prompts = [tokens(21, i) for i in range(2)]
    with HybridModel() as model:
        bench_model = SimpleNamespace(ops=model.network.ops, network=model.network, engine_config=model.config)
        session = Session(cast("BenchModel", bench_model), 2, 64)
        session.poison(0)
        session.tokens = lambda shape: np.array(prompts, np.int32)  # type: ignore[method-assign]
        (chosen,) = session.prepare_prefill(21)()
        session.tokens = lambda shape: chosen[0]  # type: ignore[method-assign]
        session.poison(21)
        session.prepare_decode(21)
        decoded = [chosen, *session.decode(19)]
    expected = [ids for ids, _ in alone(prompts, 20)]
    assert [[int(r[0, i]) for r in decoded] for i in range(2)] == expected


def twice(layer: Layout) -> Layout:
    """Heads for two ranks, each of which computes them all in this test, because the model is not divided."""
    return replace(layer, kv_heads=2) if isinstance(layer, KeyValues) else layer
