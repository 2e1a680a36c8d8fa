"""Models whose layers keep states, served: prefixes from snapshots, preemption, company and drafts change no bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from model_kit import RowwiseBackend, make_model, request, run
from tiny_models import STATES, Golden, goldens

from bminf_lite.api import Model
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig

CASES = {str(golden): golden for family in (*STATES, "lfm2_moe") for golden in goldens(family)}
PLAIN = {str(golden) for family in STATES for golden in list(goldens(family))[:1]}
each_golden = pytest.mark.parametrize(
    "golden", [pytest.param(g, id=name, marks=() if name in PLAIN else pytest.mark.slow) for name, g in CASES.items()]
)
"""Every golden. All but the first of each family are marked ``slow``."""
Results = list[tuple[list[int], list[float]]]


@contextmanager
def served(
    golden: Golden, num_draft_tokens: int = 0, num_blocks: int = 40, piece: int = 512, **limits: Any
) -> Iterator[Model]:
    """A w8a8 model, whose products are exact, with blocks for ``num_blocks`` times 64 tokens."""
    config = golden.config | {"max_position_embeddings": 512}
    limits |= {"num_draft_tokens": num_draft_tokens, "speculative": SpeculativeConfig("ngram", adaptive=False)}
    model = make_model(RowwiseBackend(), quantized=True, num_blocks=num_blocks, chunk=piece, limits=limits, **config)
    try:
        yield model
    finally:
        model._engine.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 1]).integers(0, 97, count).tolist()


def results(requests: Sequence[Request]) -> Results:
    """Tokens and log-probabilities, which are to be equal to the bit."""
    return [(r.output_token_ids, r.logprobs.tolist()) for r in requests]


def alone(golden: Golden, prompts: Sequence[list[int]], new: int) -> Results:
    """What each prompt gives by itself, without a prefix from the cache; computed once."""
    return _alone(str(golden), tuple(map(tuple, prompts)), new)


@functools.cache
def _alone(case: str, prompts: tuple[tuple[int, ...], ...], new: int) -> Results:
    with served(CASES[case], prefix_cache=False) as model:
        return [results(run(model, [request(i, list(ids), max_new_tokens=new)]))[0] for i, ids in enumerate(prompts)]


@each_golden
@pytest.mark.parametrize("piece", [512, 24])
def test_batched_equals_alone(golden: Golden, piece: int) -> None:
    """Some answers cross the end of a chunk of 64 tokens."""
    prompts, new = [tokens(length, length) for length in (1, 2, 3, 60, 64, 65, 130)], 6
    with served(golden, piece=piece) as model:
        together = run(model, [request(i, ids, max_new_tokens=new) for i, ids in enumerate(prompts)])
    assert results(together) == alone(golden, prompts, new)


@each_golden
def test_turns_go_on_from_snapshots(golden: Golden) -> None:
    """The same prompt again, and a turn behind the answer: all but the last token come from the cache."""
    prompt, new = tokens(100, 3), 8
    with served(golden) as model:
        (first,) = run(model, [request(0, prompt, max_new_tokens=new)])
        turns = [prompt, [*prompt, *first.output_token_ids, 5, 6]]
        found = [run(model, [request(i, ids, max_new_tokens=new)])[0] for i, ids in enumerate(turns)]
    assert [r.num_cached_tokens for r in found] == [99, 107]
    assert results(found) == alone(golden, turns, new)


@each_golden
def test_preempted_requests_give_what_they_give_alone(golden: Golden) -> None:
    """Three sequences of up to 72 tokens in a cache of 5 blocks of 64. No length is known before a sequence ends."""
    prompts = [tokens(60, seed) for seed in range(3)]
    new = 12
    with served(golden, num_blocks=6) as model:
        found = run(model, [request(i, ids, frozenset([97]), max_new_tokens=new) for i, ids in enumerate(prompts)])
    keeps_tokens = golden.config["model_type"] != "mamba2"  # whose sequences never outgrow the cache
    assert (sum(r.num_preemptions for r in found) > 0) == keeps_tokens
    assert results(found) == alone(golden, prompts, new)


@each_golden
def test_drafts_change_nothing(golden: Golden) -> None:
    """Texts that repeat themselves, so that there are drafts, some of which are accepted."""
    prompts, new = [tokens(9, seed) * 6 for seed in range(3)], 40
    with served(golden, num_draft_tokens=4) as model:
        found = run(model, [request(i, ids, max_new_tokens=new) for i, ids in enumerate(prompts)])
        scheduler = model._engine._scheduler
        assert scheduler.num_draft_tokens > 0
    assert results(found) == alone(golden, prompts, new)
