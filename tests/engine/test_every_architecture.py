"""Every architecture gives a request the same bits however it is served: those that it gets alone.

A scenario has a few requests: one is greedy, the others sample with a seed. Alone, a request has the engine to itself,
its prompt is computed in one step, and nothing comes from the cache. Then one engine serves them together, in two
rounds:

- They run in one batch. In the second round they come in the opposite order.
- A step has 48 tokens at most, so prompts are cut in pieces. Each prompt is longer than a sliding window.
- Some prompts begin alike. They share full blocks, and get copies of blocks that are equal in part. One prompt of the
  second round begins with an output of the first: tokens that were decoded are now part of a prompt.
- The cache has one block less than the running requests need, so one is preempted: in the first round one that samples,
  in the second the greedy one.
- Two neighbours are cancelled: one while its prompt is computed, one while it decodes. Their blocks are reused.
- An encoder-decoder reads three sources, and the cache has room for two: requests wait for each other's sources, and
  evicted sources are encoded again.

On a CPU the model is a float one whose rows are computed one by one, on a GPU it is w8a8. Tokens and log-probabilities
are compared with ``==``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from model_kit import WatchedBackend, make_model, run
from tiny_models import CPM, ENCODERS, EVERY, RENAMED, Golden, case_without_golden, goldens

from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import BLOCK_SIZE
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams

PROMPT, EQUAL, NEW = 110, 90, 28
"""Tokens of a prompt, of the equal beginnings of two prompts, and of an output: three blocks in all."""
WINDOW = 66
"""A token at position 128 still sees the last token of the first block."""
LENGTHS = {"max_position_embeddings": 256, "n_positions": 256, "sliding_window": WINDOW, "window_size": WINDOW}
NUM_BLOCKS = 8
"""Block 0, 5 for three prompts, of which two share one, and one to spare for each request that runs already."""
SOURCES, NUM_SOURCE_BLOCKS = (70, 20, 40), 4
"""Tokens of the sources, which fill 4 blocks. There are block 0 and 3 others."""


def config_of(golden: Golden) -> dict[str, Any]:
    """Its configuration with other lengths, and without tied embeddings: random ones make a model repeat its input."""
    lengths = {key: length for key, length in LENGTHS.items() if key in golden.config}
    return {**golden.config, **lengths, "tie_word_embeddings": False}


def kinds_of_layers(golden: Golden) -> tuple[bool, int]:
    """Whether a golden has sliding windows, and how many groups of layers."""
    groups = models.find(golden.config).parse(golden.config).cache_layout.groups
    return "sliding_window" in golden.config, len(groups)


CONFIGS = {
    **{family: config_of(max(goldens(family), key=kinds_of_layers)) for family in EVERY},
    **{model_type: case_without_golden(model_type).config for model_type in CPM},
}
CONFIGS |= {name: {**CONFIGS[other], "model_type": name} for name, other in RENAMED.items()}
IN_EVERY_RUN = ("llama", "mistral", "gemma2", "bloom", "mt5", "deepseek_v3")
"""Full attention, a window, both; biases for positions; an encoder-decoder; latent attention."""
FIRST, SAMPLED, LAST, DECODING, READING, NEXT_TURN = range(6)
ROUNDS = ((DECODING, READING, FIRST, SAMPLED, LAST), (NEXT_TURN, DECODING, LAST, SAMPLED, FIRST))
"""The order in which requests come. The last of a round is the youngest, so it is preempted."""


class Scenario:
    """Requests of random tokens.

    Their end-of-sequence token never comes. The engine cannot know that, and so starts requests that it may preempt.
    """

    def __init__(self, vocab_size: int, has_sources: bool):
        self.rng = np.random.default_rng(1)
        self.vocab_size = vocab_size
        first, last = self.tokens(PROMPT), self.tokens(PROMPT)
        long, short, medium = (self.tokens(n) if has_sources else [] for n in SOURCES)
        self.requests = [
            self.request(FIRST, first, long),
            self.request(SAMPLED, self.like(first), long, temperature=2.0, top_k=40),
            self.request(LAST, last, short, temperature=1.2, top_p=0.9, repetition_penalty=1.5),
            self.request(DECODING, self.like(first), medium),
            self.request(READING, self.like(last), short),
        ]

    def tokens(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.vocab_size, count).tolist()
        return tokens

    def like(self, prompt: list[int]) -> list[int]:
        """A prompt that begins like another."""
        return prompt[:EQUAL] + self.tokens(PROMPT - EQUAL)

    def request(self, index: int, prompt: list[int], source: Sequence[int], new: int = NEW, **sampler: Any) -> Request:
        params = SamplingParams(max_new_tokens=new, seed=7, **sampler)
        return Request(index, prompt, params, frozenset([self.vocab_size]), source)

    def next_turn(self, ended: Request) -> Request:
        """A request that goes on behind the output of another."""
        prompt = [*ended.prompt_token_ids, *ended.output_token_ids, *self.tokens(50)]
        return self.request(NEXT_TURN, prompt, ended.source_token_ids, new=4, temperature=1.0)


def anew(request: Request) -> Request:
    """The same request before it is served."""
    return Request(request.index, request.prompt_token_ids, request.params, request.eos_ids, request.source_token_ids)


def serve(model: Model, requests: Sequence[Request]) -> None:
    """Serve requests together, and cancel the neighbours midway."""
    engine = model._engine

    def cancel() -> None:
        for request in requests:
            is_reading = request.index == READING and request.num_computed_tokens > 0
            is_decoding = request.index == DECODING and len(request.output_tokens) == 3
            if is_reading or is_decoding:
                engine.cancel([request])

    engine.after_steps(cancel)
    run(model, [*requests])


def check(alone_ops: Backend, ops: Backend, config: dict[str, Any], *, quantized: bool, int8_cache: bool) -> None:
    """Serve a scenario on ``ops``, and compare its results with those of each request alone on ``alone_ops``."""
    parsed = models.find(config).parse(config)
    shape = parsed.cache_layout.with_int8(int8_cache)
    has_states = any(kept.per_sequence for kept in shape.groups)
    scenario = Scenario(parsed.vocab_size, parsed.is_encoder_decoder)
    requests = scenario.requests
    limits = {"cache_layout": shape, "prefix_cache": False}
    model = make_model(alone_ops, quantized=quantized, limits=limits, **config)
    with closing(model._engine):  # model.close() would close the backend, which other tests use
        alone = {i: run(model, [anew(requests[i])])[0] for i in (FIRST, SAMPLED, LAST)}
        requests.append(scenario.next_turn(alone[FIRST]))
        alone[NEXT_TURN] = run(model, [anew(requests[NEXT_TURN])])[0]
    assert all(len(set(r.logprobs)) > 0.9 * len(r.logprobs) for r in alone.values()), "repetition would hide errors"

    cached: list[int] = []
    limits = {"cache_layout": shape, "num_source_blocks": NUM_SOURCE_BLOCKS * parsed.is_encoder_decoder}
    model = make_model(ops, quantized=quantized, max_batch=3, num_blocks=NUM_BLOCKS, chunk=48, limits=limits, **config)
    with closing(model._engine):
        for order in ROUNDS:
            found = {i: anew(requests[i]) for i in order}
            serve(model, list(found.values()))
            for i in alone.keys() & found.keys():
                assert found[i].output_token_ids == alone[i].output_token_ids, i
                assert found[i].logprobs == alone[i].logprobs, i
            cached += (request.num_cached_tokens for request in found.values())
            assert found[order[-1]].num_preemptions > 0 or has_states
            assert found[DECODING].finish_reason == "cancelled" and len(found[DECODING].output_tokens) < NEW
            if READING in found:
                assert found[READING].finish_reason == "cancelled"
                assert 0 < found[READING].num_computed_tokens < PROMPT
    if has_states:
        return  # tests/models/test_states_of_models.py has room for snapshots
    assert any(count >= BLOCK_SIZE for count in cached), "full blocks are shared"
    assert any(count % BLOCK_SIZE for count in cached), "blocks that are equal in part are copied"
    assert found[NEXT_TURN].num_cached_tokens > PROMPT, "blocks are shared that were decoded"


each_architecture = pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in CONFIGS]
)
each_cache = pytest.mark.parametrize(
    "int8_cache", [pytest.param(False, id="float cache"), pytest.param(True, marks=pytest.mark.slow, id="int8 cache")]
)


def test_no_architecture_is_forgotten() -> None:
    assert sorted([*CONFIGS, *ENCODERS]) == sorted(models.names())


@each_cache
@each_architecture
def test_served_is_alone(architecture: str, int8_cache: bool) -> None:
    """Alone, steps are launched one at a time and at their own sizes; together, ahead of the host and padded."""
    ops = WatchedBackend(1, decode_sizes=(1, 4), prompt_sizes=(40,), source_sizes=(24,))
    check(WatchedBackend(), ops, CONFIGS[architecture], quantized=False, int8_cache=int8_cache)
    assert ops.captures > 0 and ops.memory_is_free


@pytest.mark.gpu
@each_cache
@each_architecture
def test_served_is_alone_on_a_gpu(
    cuda_backend: Backend, architecture: str, int8_cache: bool, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--fake-gpu"):
        pytest.skip("BLAS has its own order for each number of rows")
    check(cuda_backend, cuda_backend, CONFIGS[architecture], quantized=True, int8_cache=int8_cache)
