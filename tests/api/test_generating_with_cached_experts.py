"""What a mixture generates does not depend on how many of its experts are on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from model_kit import make_model, prompt_of, request, run
from tiny_models import RandomWeights, goldens

from bminf_lite.backend.base import Backend
from bminf_lite.backend.meta import MetaBackend
from bminf_lite.backend.values import ExpertSlots, Placement
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
