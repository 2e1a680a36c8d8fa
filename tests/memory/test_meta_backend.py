"""``MetaBackend`` counts what the GPU's loader allocates, for every architecture."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
from model_kit import CONFIG
from tiny_models import EVERY, RandomWeights, goldens, skip_what_no_gpu_computes

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.meta import MetaBackend
from bminf_lite.backend.values import Placement
from bminf_lite.checkpoint.migrate import recipe_rewrites
from bminf_lite.checkpoint.recipe import Recipe, Scheme
from bminf_lite.layers.loading import Weights
from bminf_lite.quantize.rewritten_weights import RewrittenWeights

pytestmark = pytest.mark.gpu
KINDS = {"float": (False, False), "w8a16": (True, False), "w8a8": (True, True)}
"""Arguments of ``RandomWeights``: quantized, dynamic."""


def build(config: Mapping[str, Any], weights: Weights, ops: Backend) -> Any:
    architecture = models.find(dict(config))
    return architecture.Model(architecture.parse(dict(config)), weights, ops)


def counted_and_allocated(config: Mapping[str, Any], weights: Weights, backend: Any) -> tuple[int, int]:
    meta = MetaBackend()
    build(config, weights, meta)
    gc.collect()  # what earlier tests left would otherwise be freed between the two readings
    before = backend.arena.used
    model = build(config, weights, backend)
    allocated = backend.arena.used - before
    assert model is not None
    return meta.non_layer_bytes + sum(map(sum, meta.layer_bytes)), allocated


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", EVERY)
def test_it_counts_what_loading_allocates(cuda_backend: Backend, family: str, kind: str) -> None:
    """Never less; a little more where sizes are no multiples of 32."""
    golden = next(goldens(family))
    weights = RandomWeights(golden.config, golden.seed, *KINDS[kind])
    skip_what_no_gpu_computes(family, weights)
    counted, allocated = counted_and_allocated(golden.config, weights, cuda_backend)
    assert allocated <= counted <= 1.5 * allocated


@pytest.mark.parametrize("kind", KINDS)
def test_it_counts_to_the_byte_what_needs_no_padding(cuda_backend: Backend, kind: str) -> None:
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
    counted, allocated = counted_and_allocated(config, RandomWeights(config, 1, *KINDS[kind]), cuda_backend)
    assert counted == allocated


def test_it_counts_scales_of_groups_to_the_byte(cuda_backend: Backend) -> None:
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
    architecture = models.find(dict(config))
    spec = architecture.spec(architecture.parse(dict(config)))
    recipe = Recipe("groups", Scheme.W8A16, Scheme.W8A16, group_size=32)
    weights = RewrittenWeights(RandomWeights(config, 1), spec, recipe, recipe_rewrites(spec, recipe))
    counted, allocated = counted_and_allocated(config, weights, cuda_backend)
    assert counted == allocated


@pytest.mark.parametrize("family", EVERY)
def test_every_layer_fits_a_slot_of_the_largest_one_s_size(family: str) -> None:
    """Loading raises ``OutOfMemory`` for a layer that does not fit its slot."""
    from bminf_lite.backend.cuda import CudaBackend

    golden, meta, backend = next(goldens(family)), MetaBackend(), CudaBackend()
    weights = RandomWeights(golden.config, golden.seed, quantized=True)
    skip_what_no_gpu_computes(family)
    build(golden.config, weights, meta)
    largest = max(map(max, meta.layer_bytes))
    backend.placement = Placement(tuple(range(sum(map(len, meta.layer_bytes)))), 2, largest)
    before = backend.arena.used
    model = build(golden.config, weights, backend)
    assert backend.arena.used - before <= meta.non_layer_bytes + 2 * largest * len(meta.layer_bytes)
    assert model is not None
    backend.close()
