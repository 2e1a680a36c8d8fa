"""Mixtures whose experts lie in host memory, with few of them on the GPU, give the bits of those that lie there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_models import SCALED_INPUTS, RandomWeights, TinyModel, goldens, random_tokens

from bminf_lite.backend.base import Backend
from bminf_lite.backend.meta import MetaBackend
from bminf_lite.backend.values import ExpertSlots, Placement
from bminf_lite.errors import OutOfMemory
from bminf_lite.models import find

pytestmark = pytest.mark.gpu

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "nemotron_h", "llama4_text", "deepseek_v3", "qwen2_moe")
KINDS = {"w8a8": (True, True, 1), "w8a8, rotated": (True, True, 256), "w8a16": (True, False, 1), "float": (False,)}
"""Arguments of ``RandomWeights``."""
CASES = [(family, "w8a8") for family in FAMILIES] + [("qwen3_moe", kind) for kind in list(KINDS)[1:]]
CASES += [("gpt_oss", "w8a16"), ("mixtral", "w8a8, rotated")]


def slots_for(config: dict[str, Any], weights: RandomWeights, each: int) -> tuple[ExpertSlots, ...]:
    """``each`` slots for each layer of experts, but one for each expert of a layer at least."""
    meta, architecture = MetaBackend(), find(config)
    architecture.Model(architecture.parse(config), weights, meta)
    layers: dict[tuple[int, int], list[int]] = {}
    for mixture in meta.expert_bytes:
        layers.setdefault(mixture.expert_bytes, []).append(mixture.num_experts)
    return tuple(ExpertSlots(size, max(*own, each * len(own)), tuple(own)) for size, own in layers.items())


def opened() -> Backend:
    from bminf_lite.backend.cuda.backend import CudaBackend

    return CudaBackend(0)


@pytest.fixture
def ops() -> Iterator[Backend]:
    """A backend of its own, which keeps experts in host memory."""
    made = opened()
    yield made
    made.close()


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_few_slots_give_the_bits_of_all(ops: Backend, cuda_backend: Backend, family: str, kind: str) -> None:
    """A prompt of more tokens than slots, two sequences, tokens one by one, and another prompt."""
    if family in SCALED_INPUTS and kind != "w8a8":
        pytest.skip("a GPU computes these in w8a8 alone")
    golden = next(goldens(family))
    weights = RandomWeights(golden.config, golden.seed, *KINDS[kind])
    ops.placement = Placement(experts=slots_for(golden.config, weights, 2))
    few, all_there = (TinyModel(b, golden.config, weights, slots=2) for b in (ops, cuda_backend))
    tokens = random_tokens(5, 60, golden.config["vocab_size"])
    prompts = tokens[:25], tokens[25:47]
    np.testing.assert_array_equal(few.run(*prompts), all_there.run(*prompts))
    for step in range(47, 53, 2):
        rows = tokens[step : step + 1], tokens[step + 1 : step + 2]
        np.testing.assert_array_equal(few.run(*rows), all_there.run(*rows))
    for step in range(53, 58):
        np.testing.assert_array_equal(few.run(tokens[step : step + 1]), all_there.run(tokens[step : step + 1]))
    np.testing.assert_array_equal(few.run(tokens[:9], slots=[1]), all_there.run(tokens[:9], slots=[1]))
    found = ops.expert_cache()
    assert found["slots"] <= found["experts"] and found["misses"] and cuda_backend.expert_cache() == {}
    bytes_of_expert = {sum(pool.expert_bytes) for pool in ops.placement.experts}
    assert len(bytes_of_expert) > 1 or found["copied_bytes"] == found["misses"] * bytes_of_expert.pop()


@pytest.mark.filterwarnings("ignore:the system does not pin")
def test_a_host_that_pins_nothing_is_an_error(ops: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from bminf_lite.backend.cuda import streamed_weights

    def refuse(*_: int) -> None:
        raise streamed_weights.runtime.CUDARuntimeError(2)

    golden = next(goldens("qwen3_moe"))
    weights = RandomWeights(golden.config, golden.seed, True)
    ops.placement = Placement(experts=slots_for(golden.config, weights, 2))
    monkeypatch.setattr(streamed_weights.runtime, "hostRegister", refuse)
    with pytest.raises(OutOfMemory, match=r"no pinned memory for .* of experts.*raise the memory limit"):
        TinyModel(ops, golden.config, weights)


def test_an_expert_that_is_there_is_not_copied_again(ops: Backend) -> None:
    """With slots for all experts each is copied once at most; the same token again only hits."""
    golden = next(goldens("qwen3_moe"))
    weights = RandomWeights(golden.config, golden.seed, True)
    ops.placement = Placement(experts=slots_for(golden.config, weights, 1 << 8))
    model = TinyModel(ops, golden.config, weights)
    for _ in range(3):
        model.run(golden.tokens)
        model.clear()
    found = ops.expert_cache()
    assert 0 < found["misses"] <= found["experts"] and found["hits"] >= 2 * found["misses"]
