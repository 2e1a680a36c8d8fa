"""The engine on two simulated ranks: every rank runs the same plans, and requests get what an undivided model gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model_kit import CONFIG, RandomWeights, RowwiseBackend, make_model, prompt_of, request, run
from test_tensor_parallel import adding
from tiny_models import case_without_golden

from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.communicator import simulated_ranks
from bminf_lite.engine.core import Engine
from bminf_lite.engine.model_runner import ModelRunner
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.errors import BminfError

ALWAYS = SpeculativeConfig("ngram", adaptive=False)
TP_SIZE = 2
CPM2 = case_without_golden("cpm2", num_heads=4).config
LLAMA: dict[str, Any] = CONFIG | {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


class Divided:
    """An engine over two ranks, used as a model is by ``model_kit.run``."""

    def __init__(self, quantized: bool, model: dict[str, Any] = LLAMA, **limits: Any):
        parsed = models.find(model).parse(model)
        weights = RandomWeights(model, 7, quantized)
        self.backends: list[Backend] = []
        for rank in simulated_ranks(TP_SIZE):
            ops = RowwiseBackend()
            ops.communicator = rank
            self.backends.append(ops)
        networks = [models.find(model).Model(parsed, weights, ops) for ops in self.backends]
        with make_model(RowwiseBackend(), quantized=quantized, **model) as whole:
            config = replace(whole.engine_config, **limits)
        self._engine = Engine(config, lambda blocks: ModelRunner(networks, config, blocks))


@pytest.fixture
def divided() -> Iterator[Any]:
    made: list[Divided] = []

    def make(quantized: bool, **limits: Any) -> Divided:
        made.append(Divided(quantized, **limits))
        return made[-1]

    yield make
    for each in made:
        each._engine.close()


def requests() -> list[Request]:
    options = [{}, {"temperature": 0.8}, {"repetition_penalty": 1.3}, {"temperature": 1.2, "min_tokens": 5}]
    return [
        request(i, prompt_of(50 + i, i), frozenset([60]), max_new_tokens=30 + i, **options[i % 4]) for i in range(9)
    ]


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_requests_get_what_they_get_alone_on_the_same_ranks(divided, drafts):
    """Float and w8a8: together, in pieces, preempted, with drafts, the same bits as alone."""
    for quantized in (False, True):
        alone = divided(quantized)
        expected = [run(alone, [one])[0] for one in requests()]
        together = divided(
            quantized, num_blocks=(6,), max_num_batched_tokens=24, num_draft_tokens=drafts, speculative=ALWAYS
        )
        for found, one in zip(run(together, requests()), expected, strict=True):
            assert found.output_token_ids == one.output_token_ids
            np.testing.assert_array_equal(found.logprobs, one.logprobs)
        assert together._engine.stats().preemptions > 0


@pytest.mark.parametrize("config", [LLAMA, CPM2], ids=["llama", "cpm2"])
def test_w8a8_is_the_undivided_model_with_groups_of_columns(divided, config):
    """The definition of ranks, bit for bit, as the engine serves it: with a decoder, and with sources to encode."""
    source = prompt_of(9) if config is CPM2 else []
    with make_model(RowwiseBackend(), quantized=True, **config) as whole:
        for layer in adding(whole.network):
            layer.product.weight = replace(layer.product.weight, tp_size=TP_SIZE)
        pair = (whole, divided(True, model=config))
        both = [run(model, [with_source(one, source) for one in requests()]) for model in pair]
    for one, other in zip(*both, strict=True):
        assert one.output_token_ids == other.output_token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def with_source(one: Request, source: list[int]) -> Request:
    """The same request behind a source."""
    return Request(one.index, one.prompt_token_ids, one.params, one.eos_ids, source)


def test_float_tokens_are_those_of_the_undivided_model(divided):
    """Sums over the ranks have another order: log-probabilities agree within the rounding of fp32 sums."""
    with make_model(RowwiseBackend(), **LLAMA) as whole:
        expected = run(whole, requests())
    for found, one in zip(run(divided(False), requests()), expected, strict=True):
        assert found.output_token_ids == one.output_token_ids
        np.testing.assert_allclose(found.logprobs, one.logprobs, atol=1e-4)


def test_an_error_of_one_rank_ends_the_requests_and_the_next_ones_run(divided):
    model = divided(False)
    first = run(model, requests()[:1])[0]
    broken = model.backends[1]
    attention = broken.attention

    def failing(*arguments: Any) -> Any:
        raise BminfError("this rank's device is gone")

    broken.attention = failing  # type: ignore[method-assign]
    with pytest.raises(BminfError, match="device is gone"):
        run(model, requests()[:1])
    broken.attention = attention  # type: ignore[method-assign]
    assert run(model, requests()[:1])[0].output_token_ids == first.output_token_ids


def test_a_step_under_way_when_other_work_of_a_rank_fails_gives_no_tokens(divided):
    """As when ``warm_up`` finds too little memory: the ranks' sums were given up, so the step's may be wrong."""
    model = divided(False)
    first = run(model, requests()[:1])[0]
    runner = model._engine._runner
    launch = runner.launch

    def launched_beside_a_failure(step: Any) -> Any:
        launched = launch(step)
        with pytest.raises(MemoryError, match="no room"):
            runner._on_ranks(fail_on_rank_1)
        return launched

    def fail_on_rank_1(rank: int) -> None:
        if rank == 1:
            raise MemoryError("no room")

    runner.launch = launched_beside_a_failure
    for executor in runner.executors:
        executor.captured["a step of which one rank has a graph"] = None
    with pytest.raises(BminfError, match="failed beside this step"):
        run(model, requests()[:1])
    assert not any(executor.captured for executor in runner.executors)
    runner.launch = launch
    assert run(model, requests()[:1])[0].output_token_ids == first.output_token_ids


def test_a_model_of_one_rank_has_no_threads():
    with make_model(RowwiseBackend(), **LLAMA) as model:
        run(model, requests()[:1])
        assert isinstance(model, Model) and not model._engine._runner._ranks._threads  # type: ignore[union-attr]
