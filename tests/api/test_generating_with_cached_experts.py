"""What a mixture generates does not depend on how many of its experts are on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from model_kit import make_model, prompt_of, request, run
from tiny_models import RandomWeights, goldens

from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.meta import MetaBackend
from bminf_lite.backend.values import ExpertSlots, Placement
from bminf_lite.bench.model import random_model
from bminf_lite.models import find

pytestmark = pytest.mark.gpu


@pytest.fixture
def ops() -> Iterator[Any]:
    """A backend of its own, which keeps experts in host memory."""
    from bminf_lite.backend.cuda.backend import CudaBackend

    made = CudaBackend(0)
    yield made
    made.close()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_few_experts_on_the_gpu_generate_the_same_tokens(ops: Backend, cuda_backend: Backend, family: str) -> None:
    """Together and one by one, in captured steps and others, behind prompts of more tokens than slots."""
    config = next(goldens(family)).config
    meta, architecture = MetaBackend(), find(config)
    architecture.Model(architecture.parse(config), RandomWeights(config, 7, True), meta)
    (size,) = {mixture.expert_bytes for mixture in meta.expert_bytes}
    layers = tuple(mixture.num_experts for mixture in meta.expert_bytes)
    ops.placement = Placement(experts=(ExpertSlots(size, max(*layers, 2 * len(layers)), layers),))

    def requests() -> list[Any]:
        return [request(i, prompt_of(length), max_new_tokens=7) for i, length in enumerate((30, 3, 17))]

    found = []
    for backend in (ops, cuda_backend):
        model = make_model(backend, quantized=True, **config)
        found.append([r.output_token_ids for r in run(model, requests())])
        found.append([run(model, [one])[0].output_token_ids for one in requests()])
    assert found[0] == found[1] == found[2] == found[3]
    assert ops.expert_cache()["misses"] > 0


WIDE = {
    "model_type": "mixtral", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_local_experts": 32,
    "num_experts_per_tok": 3,
}  # fmt: skip
"""Experts of 36 MiB."""


def test_a_limit_that_experts_exceed_keeps_the_chosen_ones() -> None:
    from bminf_lite.backend.cuda.backend import CudaBackend

    found = []
    for limit in ("88MiB", "1GiB"):
        ops = CudaBackend(0, limit)
        made = random_model("wide", WIDE, ops, max_num_batched_tokens=64)
        assert made.plan is not None and bool(made.plan.experts) == (limit == "88MiB") and not made.plan.streamed
        model = Model(made.network, made.engine_config)
        requests = [request(i, prompt_of(length), max_new_tokens=6) for i, length in enumerate((90, 5))]
        found.append([r.output_token_ids for r in run(model, requests)])
        counts = model.expert_cache()
        assert bool(counts) == bool(made.plan.experts) and ops.arena.peak_reserved <= ops.arena.limit
        if counts:
            assert counts["slots"] == made.plan.expert_slots < counts["experts"] == 192
            assert counts["hits"] > 0 and counts["misses"] * (3 * 512 * 128) == counts["copied_bytes"]
        model.close()
        ops.close()
    assert found[0] == found[1]
