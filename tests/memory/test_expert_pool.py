"""The cache of experts: what a layer needs is there, tables agree, and the policy is near the best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bminf_lite.cuda.kernels.constants import EXPERT_CHOICE, EXPERT_HALF_LIFE
from bminf_lite.memory.expert_cache import ExpertPool, expected_hits, zipf_routing


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.integers(4, 20), min_size=1, max_size=4), st.integers(0, 30))
def test_what_a_layer_needs_is_in_slots_and_each_copy_is_needed(seed: int, experts: list[int], more: int) -> None:
    random, pool = np.random.default_rng(seed), ExpertPool(max(experts) + more, experts)
    held: dict[int, int] = {}  # the expert that each slot has got
    for step in range(12):
        for layer, own in enumerate(experts):
            ids = zipf_routing(random, int(random.integers(1, 9)), 1, own, 3)[:, 0]
            before = set(held.values())
            missing, slots = pool.fetch(layer, ids)
            first = pool.starts[layer]
            assert before.isdisjoint(first + missing) and list(missing) == sorted(set(missing))
            held.update(zip(slots.tolist(), (first + missing).tolist(), strict=True))
            assert set(held.values()).issuperset(first + np.unique(ids))
            assert len(set(held.values())) == len(held)
            found = {slot: int(owner) for slot, owner in enumerate(pool.owners) if owner >= 0}
            assert found == held and all(pool.slots[owner] == slot for slot, owner in held.items())
            assert np.count_nonzero(pool.slots >= 0) == len(held)
            assert len(held) == min(len(pool.owners), pool.misses) or step or layer


def test_counts_halve_and_the_least_chosen_goes_first() -> None:
    pool = ExpertPool(3, [3, 3])
    for expert, times in ((0, 3), (1, 1), (2, 2)):
        pool.fetch(0, np.full((times, 1), expert, np.int32))
    assert pool.counts[:3].tolist() == [3 * EXPERT_CHOICE, EXPERT_CHOICE, 2 * EXPERT_CHOICE]
    missing, slots = pool.fetch(1, np.array([[2]], np.int32))
    assert missing.tolist() == [2] and slots.tolist() == [1] and pool.slots.tolist() == [0, -1, 2, -1, -1, 1]
    pool.fetch(0, np.full((EXPERT_HALF_LIFE, 1), 2, np.int32))
    assert pool.counts[:3].tolist() == [
        3 * EXPERT_CHOICE // 2, EXPERT_CHOICE // 2, EXPERT_CHOICE + EXPERT_HALF_LIFE * EXPERT_CHOICE
    ]  # fmt: skip
    assert pool.counts[5] == EXPERT_CHOICE, "each layer has a clock of its own"


@pytest.mark.parametrize(("slots", "least"), [(10, 0.55), (40, 0.8), (64, 1.0)])
def test_more_slots_find_more(slots: int, least: float) -> None:
    found = expected_hits(4 * slots, 4, 64, 4, 1)
    assert found.needed == 4 and least <= found.rate <= 1
    assert found.rate < 1 or found.misses == 0
    assert expected_hits(4 * slots, 4, 64, 4, 16).rate <= found.rate
