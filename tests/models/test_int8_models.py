"""int8 logits of whole models equal a float64 model of the same quantization; and are near the float logits."""

from __future__ import annotations

import numpy as np
import pytest
from float64_model import Float64Model
from tiny_models import (
    ENCODER_DECODERS,
    EVERY,
    FAMILIES,
    MIXTURES,
    Golden,
    RandomWeights,
    TinyModel,
    goldens,
    random_tokens,
    tiny_model,
)
from tolerances import assert_close

from bminf_lite.backend.cpu import CpuBackend

OWN_ROPE = {"rope_parameters", "rope_scaling"}
CASES = [
    golden
    for family in FAMILIES
    for golden in goldens(family)
    if not golden.config.keys() & (OWN_ROPE | {"layer_types", "hidden_act"}) and "absent" not in golden.name
]
FP32_REACH = 1e-4
"""How far fp32 arithmetic may move an activation on the scale of its codes: a few 1e-7 of 127."""


@pytest.mark.parametrize("golden", CASES, ids=str)
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", pytest.param("float", marks=pytest.mark.slow)])
def test_logits_equal_a_float64_model_of_the_same_quantization(golden: Golden, kind: str):
    for seed in range(golden.seed, golden.seed + 100):
        weights = RandomWeights(golden.config, seed, quantized=kind != "float", dynamic=kind == "w8a8")
        tokens = random_tokens(seed, 8, golden.config["vocab_size"])
        model = Float64Model(golden.config, weights.tensors, kind)
        expected = model(tokens)
        if model.margin > FP32_REACH:
            break
    else:
        pytest.fail("every seed has a code next to a tie")
    logits = TinyModel(CpuBackend(), golden.config, weights).run(tokens)
    assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_quantization_changes_logits_a_little(backend, family, dynamic):
    """A check of size, against the unquantized goldens; unscaled scores make a tiny random T5 sharp.

    NumPy computes w8a16, which is not dynamic, as float products.
    """
    errors = []
    for golden in goldens(family):
        weights = RandomWeights(golden.config, golden.seed, quantized=True, dynamic=dynamic)
        model = tiny_model(backend, golden.config, weights)
        if golden.source is not None:
            model.read(golden.source)
        logits = model.run(golden.tokens)
        errors.append(np.sqrt(((logits - golden.logits) ** 2).mean() / (golden.logits**2).mean()))
    assert 1e-4 < np.median(errors) < (0.12 if family in (*ENCODER_DECODERS, *MIXTURES) else 0.05)
