"""Calibrations of products that rotate their input: smoothing and GPTQ work on what is rounded."""

from __future__ import annotations

import dataclasses
from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import outliers
import pytest

import bminf_lite
from bminf_lite.backend.base import Backend
from bminf_lite.backend.gptq import hessian, transformed_hessian
from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.backend.rotation import rotated
from bminf_lite.checkpoint.recipe import Recipe, Scheme, load_recipe
from bminf_lite.quantize.errors import ErrorEvaluator, QuantizationCandidate
from bminf_lite.quantize.gptq import GPTQInputs, GPTQRounding

DEMO = Path(str(resources.files("bminf_lite.demo_model")))
DOWN = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(4)]


def test_a_rotated_hessian_is_that_of_rotated_inputs() -> None:
    x = np.random.default_rng(0).standard_normal((400, 64)).astype(np.float32)
    factors = np.exp2(np.arange(64) % 5 - 2).astype(np.float32)
    expected = hessian(rotated(x / factors, 16))
    np.testing.assert_allclose(transformed_hessian(hessian(x), factors, 16), expected, rtol=0, atol=1e-2)


def test_gptq_rounds_what_a_rotation_makes_of_a_weight() -> None:
    """The inputs depend on each other, which is what GPTQ makes use of."""
    random, ops = np.random.default_rng(0), Backend()
    x = (random.standard_normal((1200, 8)) @ random.standard_normal((8, 64))).astype(np.float32)
    x += 0.05 * random.standard_normal(x.shape).astype(np.float32)
    weight, inputs = random.standard_normal((48, 64)).astype(np.float32), GPTQInputs(ops)
    inputs.add(x)
    (better,) = GPTQRounding(ops, inputs, [weight]).quantize(QuantizationCandidate(Scheme.W8A8, rotation=16)) or [None]
    assert better is not None and better.rotation == 16
    plain = dataclasses.replace(quantize_weight(rotated(weight, 16)), rotation=16)
    assert not np.array_equal(better.codes, plain.codes)
    evaluator = ErrorEvaluator(ops, ops.array(x), [weight])
    assert evaluator.error(0, better, None) < 0.95 * evaluator.error(0, plain, None)


@pytest.fixture(scope="module")
def text() -> list[int]:
    with bminf_lite.load(DEMO, "cpu") as model:
        ids: list[int] = model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"))[:2048]
    return ids


def calibrated(recipe: str, rounding: str = "nearest", max_error: float = 0.0) -> Recipe:
    plain = load_recipe("auto")
    assert plain.calibration is not None
    calibration = dataclasses.replace(plain.calibration, max_error=max_error, rounding=rounding, search=False)
    return dataclasses.replace(load_recipe(recipe), calibration=calibration)


@pytest.mark.slow
def test_a_rotation_halves_what_down_projections_lose(text: list[int], tmp_path: Path) -> None:
    """On the bundled model; with outliers in the neurons a smoothing goes before it."""
    source = outliers.write(DEMO, tmp_path / "source", outliers.in_neurons)
    costs = []
    for recipe in ("w8a8", "w8a8-rotate"):
        report = bminf_lite.migrate(source, tmp_path / recipe, calibrated(recipe), calibrate=text, device="cpu")
        decided = {p["tensors"][0]: p for p in report.calibration["products"]}
        assert {decided[name]["rotation"] for name in DOWN} == {64 if recipe == "w8a8-rotate" else 1}
        assert all(p["rotation"] == 1 for name, p in decided.items() if name not in DOWN)
        costs.append([decided[name]["error"] for name in DOWN] + [report.cost["kl"]])
    assert all(with_it < 0.5 * without for without, with_it in zip(*costs, strict=True))


@pytest.mark.slow
def test_products_that_a_rotation_does_not_save_become_w8a16_without_one(text: list[int], tmp_path: Path) -> None:
    source = outliers.write(DEMO, tmp_path / "source", outliers.spike(Counter(text).most_common(1)[0][0]))
    recipe = calibrated("w8a8-rotate", "gptq", 0.001)
    report = bminf_lite.migrate(source, tmp_path / "out", recipe, calibrate=text, device="cpu")
    decided = {p["tensors"][0]: p for p in report.calibration["products"]}
    found = [(decided[name]["scheme"], decided[name]["rotation"]) for name in DOWN]
    assert set(found) == {("w8a16", 1), ("w8a8", 2)}  # the spike's neurons make them 642, which 2 divides
    assert report.cost["kl"] < 1.5e-3


@pytest.mark.slow
def test_inputs_stay_rotated_by_a_calibration_unless_they_lose_less_without(text: list[int], tmp_path: Path) -> None:
    """Also those of products that become w8a16 because their error is above the others' median."""
    plain = bminf_lite.migrate(DEMO, tmp_path / "plain", calibrated("w8a8-rotate-all"), calibrate=text, device="cpu")
    errors = [product["error"] for product in plain.calibration["products"]]
    recipe = calibrated("w8a8-rotate-all", "gptq", float(np.median(errors)))
    report = bminf_lite.migrate(DEMO, tmp_path / "out", recipe, calibrate=text, device="cpu")
    products = report.calibration["products"]
    assert {product["scheme"] for product in products} == {"w8a8", "w8a16"}
    for decided in products, plain.calibration["products"]:
        assert sum(product["rotation"] > 1 for product in decided) > len(decided) / 2
    assert any(product["scheme"] == "w8a16" and product["rotation"] > 1 for product in products)
    assert report.cost["kl"] < plain.cost["kl"]
