"""Every architecture can be smoothed and calibrated: fused matrices, biases, ReLU, encoder and decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outliers import multiplied, width
from tiny_models import MIXTURES, Golden, RandomWeights, goldens, random_tokens, two_of_each_family
from tiny_models import one_of_each_architecture as each

import bminf_lite
from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.backend.rotation import MAX_ROTATION, rotation_of
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.models.spec import Fold, Role
from bminf_lite.quantize.smoothing import expand_channels, fold_factors, reduce_channels

ALL = [*two_of_each_family(), *(pytest.param(golden, id=str(golden)) for golden in each() if golden.weights == "")]
SECOND = (
    "down_proj.weight",
    ".w2.weight",
    "mlp.c_proj.weight",
    "fc2.weight",
    "dense_4h_to_h.weight",
    "DenseReluDense.wo.weight",
    "mlp.fc_out.weight",
    "ff.dense_relu_dense.wo.weight",
    "shared_mlp.output_linear.weight",
)
"""The names of these matrices in all architectures."""


CHOICES_WEIGH_MORE = (
    "ernie4_5_moe",
    "lfm2_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "llama4_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "phimoe",
)


def looseness(golden: Golden) -> float:
    """How much more a mixture's error may be: rounding changes some choices of experts.

    Where a bias chooses between experts of similar weights, a changed choice replaces more of the result; gpt-oss's
    experts take no factors, and their limits are no smooth functions; of Llama 4 a token chooses one expert, and of
    Phi-3.5-MoE two whose weights are near 1; states of Qwen3.5 carry the change on to the tokens behind it. States of
    OLMo Hybrid may change their sign.
    """
    family = golden.config["model_type"]
    return 5.0 if family in CHOICES_WEIGH_MORE else 2.0 if family in (*MIXTURES, "olmo_hybrid") else 1.0


def matrices(golden: Golden) -> set[str]:
    return {name for name, p in golden.spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD)}


@pytest.mark.parametrize("golden", ALL)
def test_powers_of_two_in_every_fold_change_nothing(golden: Golden) -> None:
    """Not a single bit of the float model's logits."""
    spec, random = golden.spec, np.random.default_rng(0)
    weights = RandomWeights(golden.config, golden.seed)
    expected = golden.logits_with(weights)
    consumers = [name for fold in spec.foldable for name in fold.consumers]
    assert len(consumers) == len(set(consumers)) and set(consumers) <= matrices(golden)
    for fold in spec.foldable:
        factors = np.exp2(random.integers(-6, 7, width(spec, fold))).astype(np.float32)
        for name, rewrite in fold_factors(spec, fold, factors).items():
            weights.tensors[name] = multiplied(weights.tensors[name], rewrite)
    np.testing.assert_array_equal(golden.logits_with(weights), expected)


def test_gathering_undoes_spreading() -> None:
    fold = Fold((), (), block=2, repeat=3)
    np.testing.assert_array_equal(expand_channels(np.arange(4), fold), [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3])
    np.testing.assert_array_equal(reduce_channels(np.array([0, 9, 5, 1, 0, 1, 2, 3, 2, 3, 2, 8]), fold), [5, 9, 2, 8])


def test_most_matrices_can_be_smoothed() -> None:
    """All of a LLaMA's but a tied head."""
    golden = next(goldens("llama"))
    assert (
        matrices(golden) - {name for fold in golden.spec.foldable for name in fold.consumers} <= golden.spec.tied.keys()
    )


KL_OF_ROUNDING = 1e-6
"""Nats per token. A GPU rounds activations to fp16, which moves logits of about 1 by up to 5e-4: a divergence of about
the square of that, 2.5e-7."""
NO_LOSS = 1e-8
"""Nats per token. The tiny Gemma has logits so small that int8 loses less; what a search expects there is coarse."""


def check_divergence(golden: Golden, found: float, expected: float) -> None:
    """What a GPU loses is what the CPU does; of a mixture only its size: most of it is changed choices of experts."""
    if golden.config["model_type"] in MIXTURES:
        assert found < 0.02 * looseness(golden)
    else:
        assert found == pytest.approx(expected, rel=0.3, abs=KL_OF_ROUNDING)


def write(folder: Path, golden: Golden) -> Path:
    """The model as a checkpoint, with two large channels in everything that smoothing can reach."""
    tensors, spec = RandomWeights(golden.config, golden.seed).tensors, golden.spec
    for fold in spec.foldable:
        factors = np.ones(width(spec, fold), np.float32)
        factors[[3, 5]] = 1 / 64
        for name, rewrite in fold_factors(spec, fold, factors).items():
            tensors[name] = multiplied(tensors[name], rewrite)
    return golden.save(folder, tensors)


def migrated_error(golden: Golden, out: Path) -> float:
    """How far the logits of the checkpoint in ``out`` are from the float model's, relative to those."""
    with open_model(out) as model:
        got = golden.logits_with(model.weights())
    expected = golden.logits_with(RandomWeights(golden.config, golden.seed))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def check_trade(golden: Golden, trade: dict[str, Any]) -> None:
    """What a search expects, each product's own divergence times what an option saves of its error, is about right."""
    chosen, uniform, points = trade["assignment"], trade["uniform"].values(), trade["points"]
    assert chosen["measured"] <= min(point["measured"] for point in uniform)
    assert points[-1]["expected"] < points[0]["expected"]
    for point in (chosen, *uniform):
        least, most = point["expected"] / 5, 5 * point["expected"] * looseness(golden) + KL_OF_ROUNDING
        assert least < point["measured"] + NO_LOSS and point["measured"] < most, point


RECIPES = ("w8a8-smooth", pytest.param("auto", marks=pytest.mark.slow))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("golden", each(), ids=lambda golden: golden.config["model_type"])
def test_calibrated_recipes(golden: Golden, recipe: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", golden)
    ids = random_tokens(7, 512, golden.config["vocab_size"])
    bminf_lite.migrate(source, tmp_path / "plain")
    report = bminf_lite.migrate(source, tmp_path / "out", recipe, calibrate=ids, device="cpu")
    decided = [name for product in report.calibration["products"] for name in product["tensors"]]
    assert len(decided) == len(set(decided)) and set(decided) == matrices(golden)
    assert 0 < report.cost["kl"] < 0.01 * looseness(golden)
    if trade := report.cost.get("trade"):
        check_trade(golden, trade)
    assert migrated_error(golden, tmp_path / "out") < min(
        0.5 * migrated_error(golden, tmp_path / "plain"), 0.05 * looseness(golden)
    )


@pytest.mark.slow
@pytest.mark.parametrize("golden", each(), ids=str)
def test_inputs_of_the_second_matrix_of_a_feed_forward_layer_are_rotated(golden: Golden, tmp_path: Path) -> None:
    """In the file, or when a matrix that is stored ``[in, out]`` is loaded."""
    spec, source = golden.spec, golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    assert len(spec.rotatable) == sum(name.endswith(SECOND) for name in spec.parameters)
    report = bminf_lite.migrate(source, tmp_path / "out", "w8a8-rotate")
    with open_model(tmp_path / "out") as model:
        weights = model.weights()
        found = {
            name: weight.rotation for name in matrices(golden) if isinstance(weight := weights.weight(name), Int8Weight)
        }
    assert {name for name, block in found.items() if block > 1} == set(spec.rotatable)
    assert set(report.late_rotations) == set(report.late) & set(spec.rotatable)
    assert migrated_error(golden, tmp_path / "out") < 0.1 * looseness(golden)


@pytest.mark.slow
@pytest.mark.parametrize("golden", ALL)
def test_inputs_of_all_matrices_are_rotated(golden: Golden, tmp_path: Path) -> None:
    """Wherever an architecture has one: the float model's logits come out, for the rounding of int8."""
    source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    bminf_lite.migrate(source, tmp_path / "out", "w8a8-rotate-all")
    with open_model(tmp_path / "out") as model:
        weights = model.weights()
        for name in matrices(golden):
            weight = weights.weight(name)
            assert isinstance(weight, Int8Weight) and weight.rotation == rotation_of(weight.shape[1], MAX_ROTATION)
    assert migrated_error(golden, tmp_path / "out") < 0.1 * looseness(golden)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w8a8-rotate", "w8a8-rotate-all"])
@pytest.mark.parametrize("golden", each(), ids=lambda golden: golden.config["model_type"])
def test_a_gpu_runs_rotated_models(golden: Golden, recipe: str, tmp_path: Path) -> None:
    source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    ids = random_tokens(7, 600, golden.config["vocab_size"])
    costs = [
        bminf_lite.migrate(source, tmp_path / device, recipe, calibrate=ids, device=device).cost
        for device in ("cpu", "cuda")
    ]
    check_divergence(golden, costs[1]["kl"], costs[0]["kl"])


@pytest.mark.gpu
@pytest.mark.parametrize("golden", each(), ids=lambda golden: golden.config["model_type"])
def test_a_gpu_calibrates_every_architecture(golden: Golden, tmp_path: Path) -> None:
    source = write(tmp_path / "source", golden)
    ids = random_tokens(7, 600, golden.config["vocab_size"])
    reports = [
        bminf_lite.migrate(source, tmp_path / device, "w8a8-smooth", calibrate=ids, device=device)
        for device in ("cpu", "cuda")
    ]
    decided = [report.calibration["products"] for report in reports]
    for one, other in zip(*decided, strict=True):
        assert one["tensors"] == other["tensors"] and one["error"] == pytest.approx(other["error"], rel=0.25, abs=3e-5)
    check_divergence(golden, reports[1].cost["kl"], reports[0].cost["kl"])
    assert migrated_error(golden, tmp_path / "cuda") < 0.05 * looseness(golden)
