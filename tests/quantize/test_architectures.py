"""Every architecture goes through the calibrated recipes: fused matrices, biases, ReLU, encoder and decoder."""

from __future__ import annotations

from pathlib import Path

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
    random_tokens,
)

import bminf_lite
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.layers.loading import Weights
from bminf_lite.models.spec import Role
from bminf_lite.quantize.smoothing import fold_factors

CASES = [next(goldens(family)) for family in (*FAMILIES, *GPTS, *ENCODER_DECODERS)]
CASES += [case_without_golden(model_type) for model_type in CPM]


def write(folder: Path, golden: Golden) -> Path:
    """The model as a checkpoint, with two large channels in everything that smoothing can reach."""
    tensors, spec = RandomWeights(golden.config, golden.seed).tensors, golden.spec
    for fold in spec.foldable:
        factors = np.ones(width(spec, fold), np.float32)
        factors[[3, 5]] = 1 / 64
        for name, rewrite in fold_factors(spec, fold, factors).items():
            tensors[name] = multiplied(tensors[name], rewrite)
    return golden.save(folder, tensors)


def logits(golden: Golden, weights: Weights) -> np.ndarray:
    if golden.source is None:
        return TinyModel(CpuBackend(), golden.config, weights).run(golden.tokens)
    model = TinyEncoderDecoder(CpuBackend(), golden.config, weights)
    model.read(golden.source)
    return model.run(golden.tokens)


def migrated_error(golden: Golden, out: Path) -> float:
    """How far the logits of the checkpoint in ``out`` are from the float model's, relative to those."""
    with open_model(out) as model:
        got = logits(golden, model.weights())
    expected = logits(golden, RandomWeights(golden.config, golden.seed))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("golden", CASES, ids=lambda golden: golden.config["model_type"])
def test_calibrated_recipes(golden: Golden, tmp_path: Path) -> None:
    source = write(tmp_path / "source", golden)
    ids = random_tokens(7, 600, golden.config["vocab_size"])
    bminf_lite.migrate(source, tmp_path / "plain")
    error = {"plain": migrated_error(golden, tmp_path / "plain")}
    for recipe in ("w8a8-smooth", "auto"):
        report = bminf_lite.migrate(source, tmp_path / recipe, recipe, calibrate=ids, device="cpu")
        decided = [name for product in report.calibration["products"] for name in product["tensors"]]
        assert len(decided) == len(set(decided))
        matrices = {name for name, p in golden.spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD)}
        assert set(decided) == matrices
        assert 0 < report.cost["kl"] < 0.01
        error[recipe] = migrated_error(golden, tmp_path / recipe)
    assert error["w8a8-smooth"] < 0.5 * error["plain"] and error["w8a8-smooth"] < 0.05
    assert error["auto"] < 1.05 * error["w8a8-smooth"]


@pytest.mark.gpu
@pytest.mark.parametrize("golden", CASES, ids=lambda golden: golden.config["model_type"])
def test_a_gpu_calibrates_every_architecture(golden: Golden, tmp_path: Path) -> None:
    source = write(tmp_path / "source", golden)
    ids = random_tokens(7, 600, golden.config["vocab_size"])
    reports = [
        bminf_lite.migrate(source, tmp_path / device, "w8a8-smooth", calibrate=ids, device=device)
        for device in ("cpu", "cuda")
    ]
    decided = [report.calibration["products"] for report in reports]
    for one, other in zip(*decided, strict=True):
        assert one["tensors"] == other["tensors"] and one["error"] == pytest.approx(other["error"], rel=0.25)
    assert reports[1].cost["kl"] == pytest.approx(reports[0].cost["kl"], rel=0.3)
    assert migrated_error(golden, tmp_path / "cuda") < 0.05
