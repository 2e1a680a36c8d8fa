"""The policies of a cache of experts, beside what may happen at all."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit import make_model
from tiny_models import goldens

from bminf_lite.memory.expert_cache import zipf_routing

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from expert_cache import LeastFrequent, LeastRecent, Prefetch, best_hits, policy_hits, uses_of
from measure_expert_cache import recorded_routing


def most_hits(uses: list[list[int]], capacity: int) -> int:
    """By trying every choice of what stays."""
    states = {frozenset[int](): 0}
    for own in uses:
        found: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            total, candidates = hits + len(held.intersection(own)), held.union(own)
            for size in range(min(capacity, len(candidates)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(candidates), size)):
                    found[kept] = max(found.get(kept, 0), total)
        states = found
    return max(states.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True), min_size=1, max_size=7),
    st.integers(1, 3),
)
def test_no_choice_of_what_stays_has_more_hits_than_the_best(uses: list[list[int]], capacity: int) -> None:
    best = best_hits(uses, capacity)
    assert best == most_hits(uses, capacity)
    for policy in (LeastRecent(), LeastFrequent(5.0)):
        hits, copies = policy_hits(uses, capacity, policy)
        assert hits <= best and hits + copies == sum(map(len, uses))


def test_drawn_routing_follows_its_ranks() -> None:
    routing = zipf_routing(np.random.default_rng(1), 4000, 3, 16, 2)
    assert routing.shape == (4000, 3, 2) and (routing[..., 0] != routing[..., 1]).all()
    first = zipf_routing(np.random.default_rng(2), 20000, 1, 16, 1)
    counts = np.sort(np.bincount(first.ravel(), minlength=16))[::-1] / 20000
    expected = np.arange(1, 17) ** -1.2
    np.testing.assert_allclose(counts, expected / expected.sum(), atol=0.015)
    with pytest.raises(AssertionError):  # layers have their own favourites
        assert len({int(np.bincount(routing[:, layer].ravel()).argmax()) for layer in range(3)}) == 1


def test_room_for_all_misses_each_expert_once() -> None:
    uses = uses_of(zipf_routing(np.random.default_rng(3), 200, 4, 8, 2), 8)
    used = len({expert for own in uses for expert in own})
    for hits in (
        best_hits(uses, 32),
        policy_hits(uses, 32, LeastRecent())[0],
        policy_hits(uses, 32, LeastFrequent(99))[0],
    ):
        assert hits == sum(map(len, uses)) - used


def test_frequent_experts_stay_where_recent_ones_pass_by() -> None:
    """Layers follow each other: what was needed last is needed a whole token later."""
    uses = uses_of(zipf_routing(np.random.default_rng(4), 600, 8, 16, 2), 16)
    best = best_hits(uses, 40)
    recent, frequent = (policy_hits(uses, 40, policy)[0] for policy in (LeastRecent(), LeastFrequent(5000.0)))
    assert recent < frequent < best and frequent > 0.8 * best


def test_right_predictions_are_hits() -> None:
    uses = uses_of(zipf_routing(np.random.default_rng(5), 100, 4, 8, 2), 8)
    total = sum(map(len, uses))
    assert policy_hits(uses, 8, LeastFrequent(500.0), Prefetch(1.0, 2), 8)[0] == total
    without, wrong = (policy_hits(uses, 8, LeastFrequent(500.0), x, 8) for x in (None, Prefetch(0.0, 2)))
    assert wrong[1] > without[1], "wrong predictions take the link"


def test_the_routing_of_a_model_is_recorded() -> None:
    """In whatever steps its tokens are computed."""
    config = next(goldens("qwen3_moe")).config
    tokens = np.arange(40) * 7 % config["vocab_size"]
    found = [recorded_routing(make_model(chunk=chunk, **config), tokens.tolist()) for chunk in (2048, 16)]
    layers, top_k = config["num_hidden_layers"], config["num_experts_per_tok"]
    assert found[0].shape[0] == 40 and found[0].shape[1] <= layers and found[0].shape[2] == top_k
    np.testing.assert_array_equal(*found)
