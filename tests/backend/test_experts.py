"""Products with experts: against products of single matrices, and that no row depends on another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from expert_layer import ExpertLayer, experts_forward
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.expert_values import ExpertActivation, RouterSpec, Score
from bminf_lite.backend.experts import (
    ExpertWeights,
    activated,
    expert_linear,
    sort_by_expert,
    weighted_sum,
)
from bminf_lite.backend.mixture import Mixture, choose_experts
from bminf_lite.backend.quantization import Int8Weight, quantize_weight

RECIPES = ("float", "w8a16", "w8a8", "w8a8-rotate")
IN, FEATURES, OUT, EXPERTS, TOP_K = 96, 40, 24, 6, 3


def weights_of(recipe: str, out: int, features: int, bias: bool = True, seed: int = 0) -> ExpertWeights:
    random = np.random.default_rng(seed)
    values = (random.normal(size=(EXPERTS, out, features)) / np.sqrt(features)).astype(np.float32)
    biases = random.normal(size=(EXPERTS, out)).astype(np.float32) if bias else None
    if recipe == "float":  # numbers that every activation type holds
        return ExpertWeights(values.astype(np.float16).astype(np.float32), bias=biases)
    stored = [quantize_weight(matrix) for matrix in values]
    codes, scale = np.stack([w.codes for w in stored]), np.stack([w.scale.astype(np.float32) for w in stored])
    return ExpertWeights(codes, scale, biases, recipe.startswith("w8a8"), 8 if recipe.endswith("rotate") else 1)


def layer_of(recipe: str, activation: ExpertActivation | None = None, scales_input: bool = False) -> ExpertLayer:
    activation = activation or ExpertActivation()
    width = FEATURES * (2 if activation.gated else 1)
    return ExpertLayer(
        weights_of(recipe, width, IN), weights_of(recipe, OUT, FEATURES, seed=1), activation, scales_input
    )


def tokens(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((count, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    x = random.normal(size=(count, IN)).astype(np.float32)
    return x, ids, random.uniform(0, 1, ids.shape).astype(np.float32)


def single(ops: Backend, weights: ExpertWeights, expert: int) -> Any:
    """The matrix of one expert as a weight of the backend's own operations."""
    values = weights.values[expert]
    if weights.scale is not None:
        values = Int8Weight(values, weights.scale[expert], weights.dynamic, rotation=weights.rotation)
    return ops.weight([values], [] if weights.bias is None else [weights.bias[expert]])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_is_that_of_the_expert_s_matrix(recipe: str, dtype: type) -> None:
    ops, weights = Backend(dtype), weights_of(recipe, OUT, IN)
    x, ids, _ = tokens(20)
    x = x.astype(dtype)
    experts = ids[:, 0]
    found = expert_linear(x, experts, weights, activation_dtype=dtype)
    for row, expert, y in zip(x, experts, found, strict=True):
        expected = ops.linear(row[None], single(ops, weights, expert), fp32=True)[0]
        if weights.dynamic:
            np.testing.assert_array_equal(y, expected)
        else:
            terms = np.abs(row.astype(np.float64)).sum() + 1
            assert_close(y, expected, "linear, float sum", np.float32, terms)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("function", ["silu", "relu_squared"])
def test_a_layer_is_that_of_its_operations(function: str, dtype: type) -> None:
    """To the bit with w8a8, whose sums are exact."""
    ops = Backend(dtype)
    for gated in (True, False):
        layer = layer_of("w8a8", ExpertActivation(function, gated))
        x, ids, weights = tokens(7)
        found = experts_forward(x.astype(dtype), ids, weights, layer, dtype)
        for t in range(7):
            total = np.zeros(OUT, np.float32)
            for j in range(TOP_K):
                first, second = (single(ops, part, ids[t, j]) for part in (layer.hidden, layer.down))
                product = ops.gated_linear if gated else ops.activated_linear
                hidden = product(x[t : t + 1].astype(dtype), first, function)
                each = weights[t, j] * ops.linear(hidden, second)[0].astype(np.float32)
                total = each if j == 0 else total + each
            np.testing.assert_array_equal(found[t], total)


@given(st.integers(1, 12), st.integers(0, 100), st.sampled_from(RECIPES), st.booleans())
def test_a_token_does_not_depend_on_the_others(count: int, seed: int, recipe: str, scales_input: bool) -> None:
    layer = layer_of(recipe, scales_input=scales_input)
    x, ids, weights = tokens(count, seed)
    found = experts_forward(x, ids, weights, layer)
    alone = np.concatenate(
        [experts_forward(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], layer) for t in range(count)]
    )
    if recipe.startswith("w8a8"):
        np.testing.assert_array_equal(found, alone)
    else:
        np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)  # BLAS chooses an order by shape


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 100))
def test_pairs_are_sorted_by_expert_and_stay_in_order(count: int, experts: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, experts, (count, 2)).astype(np.int32)
    pairs, offsets = sort_by_expert(ids, experts)
    assert pairs.dtype == offsets.dtype == np.int32 and len(offsets) == experts + 1 and offsets[-1] == ids.size
    for expert in range(experts):
        assert pairs[offsets[expert] : offsets[expert + 1]].tolist() == np.flatnonzero(ids.ravel() == expert).tolist()


def test_results_are_added_by_rank() -> None:
    results = np.array([[[1.0], [2.0**-24], [2.0**-24]]], np.float32)
    ones = np.ones((1, 3), np.float32)
    assert weighted_sum(results, ones)[0, 0] == 1
    assert weighted_sum(results[:, ::-1], ones)[0, 0] == 1 + 2.0**-23


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mixture_is_the_layer_of_its_experts(recipe: str) -> None:
    """Also where weights multiply inputs; the bits are the same for int8 activations."""
    x, _, _ = tokens(30)
    router = np.random.default_rng(5).normal(size=(EXPERTS, IN)).astype(np.float32)
    for scales_input in (False, True):
        layer = layer_of(recipe, scales_input=scales_input)
        layer = replace(layer, hidden=replace(layer.hidden, bias=None), down=replace(layer.down, bias=None))
        ops, spec = Backend(), RouterSpec(EXPERTS, TOP_K, Score.SIGMOID, scales_input=scales_input)
        hidden, down = ([single(ops, weights, e) for e in range(EXPERTS)] for weights in (layer.hidden, layer.down))
        mixture = Mixture(spec, np.ascontiguousarray(router.T), hidden, down, layer.activation)
        found, expected = ops.experts(x, mixture), experts_forward(x, *choose_experts(x, mixture), layer)
        if recipe.startswith("w8a8"):
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)  # BLAS chooses an order by shape


def test_weights_of_inputs_multiply_the_scale_of_their_codes() -> None:
    layer = layer_of("w8a8", ExpertActivation("relu"), scales_input=True)
    x, ids, weights = tokens(5)
    found = experts_forward(x, ids, weights, layer)
    exact = experts_forward(x, ids, np.ones_like(weights), layer)
    half = experts_forward(x, ids, np.full_like(weights, 0.5), replace(layer, hidden=replace(layer.hidden, bias=None)))
    plain = experts_forward(x, ids, np.ones_like(weights), replace(layer, hidden=replace(layer.hidden, bias=None)))
    assert not np.array_equal(found, exact)
    # without biases behind the first product, ReLU times up is a quarter: codes stay, scales are exact quarters
    bias = layer.down.bias
    assert bias is not None
    rest = sum(bias[ids[:, j]] for j in range(TOP_K))
    np.testing.assert_allclose(4 * (half - rest), plain - rest, rtol=1e-4, atol=1e-5)


def test_gpt_oss_s_activation() -> None:
    """As in transformers, in float64."""
    x = np.random.default_rng(0).normal(size=(50, 2 * FEATURES)) * 8
    gate, up = np.split(x, 2, axis=1)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    expected = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    found = activated(x.astype(np.float32), ExpertActivation(limit=7.0))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(activated(np.full((1, 2), np.nan, np.float32), ExpertActivation(limit=7.0))).all()


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "float"])
def test_a_row_that_is_no_number_stays_in_its_token(recipe: str) -> None:
    x, ids, weights = tokens(6)
    x[2, 3] = np.nan
    found = experts_forward(x, ids, weights, layer_of(recipe))
    assert np.isnan(found[2]).all() and np.isfinite(np.delete(found, 2, 0)).all()
