"""Streaming on a real GPU: equal logits, a limit that holds as the driver sees it, and copies as fast as the link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model_kit import CONFIG, make_model, prompt_of, request, run
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.survey import Survey
from bminf_lite.backend.values import Placement
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.cuda.driver import Device
from bminf_lite.engine.generation import Limits
from bminf_lite.engine.model import Model
from bminf_lite.engine.planning import demand, place
from bminf_lite.memory.device import measure_speeds
from bminf_lite.memory.planner import Plan, spread

pytestmark = pytest.mark.gpu

LAYERS = 7
WIDE = {
    "num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 1024,
}  # fmt: skip
"""Twelve layers of about 60 MiB."""


def open_backend(memory_limit: int | str | None = None) -> Any:
    from bminf_lite.backend.cuda import CudaBackend

    return CudaBackend(0, memory_limit)


@pytest.fixture
def streaming() -> Iterator[Backend]:
    """A backend of its own that streams five of seven layers."""
    backend = open_backend()
    backend.placement = Placement(spread(LAYERS, 5), 2, 1 << 20, True)
    yield backend
    backend.close()


@pytest.mark.parametrize("quantized", [False, True])
def test_streamed_and_resident_give_equal_results(streaming: Backend, cuda_backend: Backend, quantized: bool) -> None:
    resident = make_model(cuda_backend, num_hidden_layers=LAYERS, quantized=quantized)
    model = make_model(streaming, num_hidden_layers=LAYERS, quantized=quantized)
    for length in (1, 2, 33, 60):
        np.testing.assert_array_equal(model.logits(prompt_of(length)), resident.logits(prompt_of(length)))
    both = [run(m, [request(i, prompt_of(5 + i), max_new_tokens=20) for i in range(3)]) for m in (model, resident)]
    assert [r.tokens for r in both[0]] == [r.tokens for r in both[1]]


def test_the_survey_counts_what_the_arena_gives() -> None:
    backend, config = open_backend(), CONFIG | {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 320}
    before = backend.arena.used
    architecture = models.find(config)
    parsed, weights, survey = architecture.parse(config), RandomWeights(config, 1, True), Survey()
    architecture.Model(parsed, weights, survey)
    model = architecture.Model(parsed, weights, backend)
    assert backend.arena.used - before == sum(survey.stacks[0]) + survey.outside
    assert model is not None
    backend.close()


def wide_model(memory_limit: int) -> tuple[Model, Plan]:
    config = CONFIG | WIDE
    architecture = models.find(config)
    parsed = architecture.parse(config)
    backend = open_backend(memory_limit)
    plan = place(backend, lambda: demand(architecture, config, lambda name: Scheme.W8A8), 1024)
    assert plan is not None and plan.streamed
    network = architecture.Model(parsed, RandomWeights(config, 1, True), backend)
    limits = Limits(parsed.context_length, parsed.vocab_size, parsed.cache_shape, chunk=plan.chunk)
    return Model(network, limits), plan


def test_the_limit_holds_as_the_driver_sees_it() -> None:
    """Beside the context and the kernels' code, which are there from a first run of the same model."""
    device, limit = Device(0), 480 << 20
    for first in (True, False):
        before = device.memory()[0]
        model, plan = wide_model(limit)
        least = device.memory()[0]
        for piece in model.stream(prompt_of(1000), max_new_tokens=20, seed=1):
            least = min(least, device.memory()[0])
            assert piece.index == 0
        if not first:
            assert before - least <= limit
        assert model.ops.memory()["peak_reserved"] <= limit
        assert plan.total_bytes <= limit
        model.close()


def test_a_step_takes_what_the_link_allows() -> None:
    """85 % is the mark; the link is measured in the same run."""
    link = measure_speeds(Device(0)).link
    model, plan = wide_model(480 << 20)
    plan = replace(plan, machine=replace(plan.machine, link=link))
    run(model, [request(0, prompt_of(8), max_new_tokens=8, ignore_eos=True)])
    requests = [request(0, prompt_of(8), max_new_tokens=65, ignore_eos=True)]
    run(model, requests)
    seconds = (requests[0].last_token - requests[0].first_token) / 64
    model.close()
    assert plan.link_seconds is not None
    print(f"link {link / 1e9:.1f} GB/s, {plan.streamed_bytes / 2**20:.0f} MiB in {seconds * 1e3:.2f} ms")
    assert seconds <= plan.link_seconds / 0.85


def test_running_out_of_memory_leaves_the_model_usable() -> None:
    model, _ = wide_model(480 << 20)
    expected = model.generate(prompt_of(50), max_new_tokens=5, temperature=0).token_ids
    with pytest.raises(MemoryError):
        for _ in model.stream([prompt_of(900 + i) for i in range(64)], max_new_tokens=50):
            time.sleep(0)
    assert model.generate(prompt_of(50), max_new_tokens=5, temperature=0).token_ids == expected
    model.close()
