"""Factors may move wherever a specification says so: the float model does not change by a single bit."""

from __future__ import annotations

import numpy as np
import pytest
from outliers import multiplied, width
from tiny_models import (
    CPM,
    ENCODER_DECODERS,
    FAMILIES,
    GPTS,
    Golden,
    RandomWeights,
    TinyEncoderDecoder,
    TinyModel,
    case_without_golden,
    goldens,
)

from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.models.spec import Fold, Role
from bminf_lite.quantize.smoothing import expand_channels, fold_factors, reduce_channels

CASES = [golden for family in (*FAMILIES, *GPTS, *ENCODER_DECODERS) for golden in goldens(family)]
CASES += [case_without_golden(model_type) for model_type in CPM]


def logits(golden: Golden, weights: RandomWeights) -> np.ndarray:
    if golden.source is None:
        return TinyModel(CpuBackend(), golden.config, weights).run(golden.tokens)
    model = TinyEncoderDecoder(CpuBackend(), golden.config, weights)
    model.read(golden.source)
    return model.run(golden.tokens)


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_powers_of_two_in_every_fold_change_nothing(golden: Golden) -> None:
    spec, random = golden.spec, np.random.default_rng(0)
    weights = RandomWeights(golden.config, golden.seed)
    expected = logits(golden, weights)
    consumers = [name for fold in spec.foldable for name in fold.consumers]
    assert len(consumers) == len(set(consumers))
    assert all(spec.parameters[name].role in (Role.LINEAR, Role.HEAD) for name in consumers)
    for fold in spec.foldable:
        factors = np.exp2(random.integers(-6, 7, width(spec, fold))).astype(np.float32)
        for name, rewrite in fold_factors(spec, fold, factors).items():
            weights.tensors[name] = multiplied(weights.tensors[name], rewrite)
    np.testing.assert_array_equal(logits(golden, weights), expected)


def test_gathering_undoes_spreading() -> None:
    fold = Fold((), (), block=2, repeat=3)
    np.testing.assert_array_equal(expand_channels(np.arange(4), fold), [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3])
    np.testing.assert_array_equal(reduce_channels(np.array([0, 9, 5, 1, 0, 1, 2, 3, 2, 3, 2, 8]), fold), [5, 9, 2, 8])


def test_most_matrices_can_be_smoothed() -> None:
    """All of a LLaMA's but a tied head."""
    golden = next(goldens("llama"))
    spec = golden.spec
    consumers = {name for fold in spec.foldable for name in fold.consumers}
    matrices = {name for name, p in spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD)}
    assert matrices - consumers <= spec.tied.keys()
