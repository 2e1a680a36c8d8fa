"""A quantization in memory has the weights of the folder that a migration writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from outliers import in_neurons, in_norms
from outliers import write as write_with_outliers

from bminf_lite import backend
from bminf_lite.backend.quantization import HostWeight, Int8Weight
from bminf_lite.checkpoint.manifest import MANIFEST_FILE
from bminf_lite.checkpoint.migrate import migrate, narrowed_tables, recipe_rewrites
from bminf_lite.checkpoint.opened_model import OpenedModel, open_model
from bminf_lite.checkpoint.recipe import CalibrationSettings, Recipe, RotatedInputs, Scheme, load_recipe
from bminf_lite.checkpoint.weight_rewrite import CalibrationResult, WeightRewrite, unpacked_factors
from bminf_lite.models.spec import Role
from bminf_lite.quantize.calibration import run_calibration
from bminf_lite.quantize.decisions import QuantizationSearch
from bminf_lite.quantize.rewritten_weights import RewrittenWeights

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 260,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
CONFIGS = {
    "llama": tiny_checkpoint.CONFIG,
    "tied": {**tiny_checkpoint.CONFIG, "tie_word_embeddings": True},
    "gpt2": GPT2,
}
GROUPED = Recipe("grouped", Scheme.W8A16, Scheme.W8A16, group_size=16)
MIXED = Recipe("mixed", Scheme.W8A8, Scheme.FLOAT, rotation=16, rotated_inputs=RotatedInputs.ALL)

RECIPES = [*map(load_recipe, ("w8a8", "w8a8-rotate-all", "w8a16")), GROUPED, MIXED]


def assert_same(source: OpenedModel, recipe: Recipe, rewrites: Mapping[str, WeightRewrite], out: Path) -> None:
    """Every tensor of ``out`` is the one that is made in memory."""
    made = RewrittenWeights(source.weights(), source.spec, recipe, rewrites, narrowed_tables(source))
    with open_model(out) as model:
        stored = model.weights()
        for name, parameter in source.spec.parameters.items():
            if parameter.role in (Role.LINEAR, Role.HEAD):
                assert_same_matrix(made.weight(name), stored.weight(name), name)
            else:
                np.testing.assert_array_equal(made.vector(name), stored.vector(name), err_msg=name)


def assert_same_matrix(found: HostWeight, expected: HostWeight, name: str) -> None:
    if not isinstance(expected, Int8Weight):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), err_msg=name)
        return
    assert isinstance(found, Int8Weight) and (found.dynamic, found.rotation) == (expected.dynamic, expected.rotation)
    np.testing.assert_array_equal(found.codes, expected.codes, err_msg=name)
    np.testing.assert_array_equal(found.scale, expected.scale, err_msg=name)
    assert found.scale.dtype == expected.scale.dtype and (found.outliers is None) == (expected.outliers is None)
    if found.outliers is not None and expected.outliers is not None:
        np.testing.assert_array_equal(found.outliers.index, expected.outliers.index)
        np.testing.assert_array_equal(found.outliers.values, expected.outliers.values)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("config", CONFIGS)
def test_of_a_recipe_without_a_text(config: str, recipe: Recipe, tmp_path: Path) -> None:
    values = tiny_checkpoint.tensors(CONFIGS[config])
    for name in [name for name in values if "embed" in name or "wte" in name]:
        values[name] *= np.float32(1.1)  # no values of fp16, to which a migration rounds them
    source = tiny_checkpoint.save(tmp_path / "source", CONFIGS[config], values)
    migrate(source, tmp_path / "out", recipe)
    with open_model(source) as model:
        assert_same(model, recipe, recipe_rewrites(model.spec, recipe), tmp_path / "out")


def with_outliers(folder: Path) -> Path:
    """A model that is smoothed: before its norms' readers, and before its down projections."""

    def put_in(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        in_norms(tensors, config)
        in_neurons(tensors, config)

    return write_with_outliers(tiny_checkpoint.write(folder / "plain"), folder / "source", put_in)


@pytest.mark.parametrize("numbers", [0, 1, 2, 3, -1])
def test_of_each_option_of_a_calibration(numbers: int, tmp_path: Path) -> None:
    """Smoothed, rotated, rounded by GPTQ, with outlier columns."""
    settings = CalibrationSettings(outlier_columns=2, rounding="gptq", search=True)
    recipe = replace(load_recipe("auto"), rotation=16, calibration=settings)
    samples = [np.random.default_rng(seed).integers(0, 256, 120).astype(np.int32) for seed in range(5)]
    source = with_outliers(tmp_path)
    made: dict[str, WeightRewrite] = {}

    def decide(model: OpenedModel, recipe: Recipe) -> CalibrationResult:
        with closing(backend.create("cpu")) as ops:
            search = QuantizationSearch(model, recipe, ops, alternatives=True)
            run_calibration(model, samples, ops, search)
        result = search.result([min(numbers, len(options) - 1) % len(options) for options in search.options])
        made.update(result.rewrites)
        return result

    report = migrate(source, tmp_path / "out", recipe, calibrate=decide)
    products = report.calibration["products"]
    assert any(product["exponent"] is not None for product in products) == (numbers in (0, 1))
    with open_model(source) as model:
        assert_same(model, recipe, made, tmp_path / "out")
    folded = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text()).get("folded", {})
    assert (numbers in (0, 1)) <= any("norm" in name for name in folded)
    for name, rewrite in made.items():
        for axis, factors in (("rows", rewrite.row_factors), ("columns", rewrite.column_factors)):
            text = folded.get(name, {}).get(axis)
            if factors is not None:
                np.testing.assert_array_equal(1 if text is None else unpacked_factors(text), factors)
            assert factors is not None or text is None


def test_a_matrix_whose_codes_are_known_is_not_read(source: Path) -> None:
    """A search makes many models of the same codes, and a float matrix may take long to dequantize."""

    class Unread:
        def weight(self, name: str) -> HostWeight:
            raise AssertionError(name)

        def vector(self, name: str) -> np.ndarray:
            raise AssertionError(name)

    name = "model.layers.0.mlp.down_proj.weight"
    with open_model(source) as model:
        shape = model.spec.parameters[name].shape
        codes, scale = np.ones(shape, np.int8), np.full(shape[0], 0.5, np.float16)
        rewrite = WeightRewrite(Scheme.W8A16, codes=codes, scale=scale, row_factors=np.full(shape[0], 2, np.float32))
        found = RewrittenWeights(Unread(), model.spec, load_recipe("w8a8"), {name: rewrite}).weight(name)
    assert isinstance(found, Int8Weight) and not found.dynamic
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(found.scale, 1)
