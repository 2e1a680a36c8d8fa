"""The router's definition: what it chooses, what weights it gives, and that no row depends on another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bminf_lite.backend.expert_values import CHOSEN_BY_LOGITS, WEIGHT_TYPES, GroupScore, MaskedScore, RouterSpec, Score
from bminf_lite.backend.routing import (
    MAX_EXPONENT,
    portable_exp,
    route,
    sigmoid,
    softmax_over_experts,
    sum_over_experts,
)


def logits_of(rows: int, experts: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, experts)) * spread).astype(np.float32)


@st.composite
def routers(draw: st.DrawFn) -> tuple[RouterSpec, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """A router, logits of it with ties, and its two vectors."""
    groups, size = draw(st.sampled_from([(1, 7), (1, 40), (4, 8), (8, 33), (2, 2)]))
    top_groups = draw(st.integers(1, groups))
    experts = groups * size
    score = draw(st.sampled_from([Score.SOFTMAX, Score.SIGMOID] if top_groups < groups else list(Score)))
    spec = RouterSpec(
        experts,
        draw(st.integers(1, top_groups * size)),
        score,
        draw(st.booleans()),
        draw(st.sampled_from([0, 1e-6])),
        draw(st.sampled_from([0, 0.5])),
        draw(st.sampled_from([1.0, 2.5])),
        groups,
        top_groups,
        draw(st.sampled_from(list(GroupScore))),
        draw(st.sampled_from(list(MaskedScore))),
        draw(st.sampled_from(WEIGHT_TYPES)),
        closeness=draw(st.sampled_from([0.0, 0.02, 0.7])),
    )
    seed = draw(st.integers(0, 1000))
    random = np.random.default_rng(seed)
    logits = np.round(logits_of(9, experts, seed) * 2) / 2 if draw(st.booleans()) else logits_of(9, experts, seed)
    has_bias = score not in CHOSEN_BY_LOGITS and draw(st.booleans())
    bias = random.normal(size=experts).astype(np.float32) if has_bias else None
    scale = random.uniform(0.5, 2, experts).astype(np.float32) if draw(st.booleans()) else None
    return spec, logits.astype(np.float32), bias, scale


@given(routers())
def test_a_row_does_not_depend_on_the_others(case: Any) -> None:
    spec, logits, bias, scale = case
    together = route(logits, spec, bias, scale)
    alone = [route(logits[i : i + 1], spec, bias, scale) for i in range(len(logits))]
    for part in range(2):
        np.testing.assert_array_equal(together[part], np.concatenate([found[part] for found in alone]))


@given(routers())
def test_ids_are_different_experts_and_what_is_computed_is_in_float32(case: Any) -> None:
    spec, logits, bias, scale = case
    logits[3] = np.nan
    logits[4, 0] = np.nan
    ids, weights = route(logits, spec, bias, scale)
    assert ids.dtype == np.int32 and weights.dtype == np.float32 and ids.shape == weights.shape == (9, spec.top_k)
    assert (ids >= 0).all() and (ids < spec.num_experts).all()
    assert all(len(set(row)) == spec.top_k for row in ids.tolist())
    assert np.isnan(weights[3]).all()
    assert np.isfinite(np.delete(weights, [3, 4], 0)).all()


@given(routers())
def test_the_definition_in_float64(case: Any) -> None:
    """Written without vectors, from the ids that were chosen."""
    spec, logits, _, scale = case
    assume(spec.score is not Score.SPARSE_MIXER)  # which has a test of its own
    ids, weights = route(logits, spec, None, scale)
    for row, chosen, found in zip(logits.astype(np.float64), ids, weights, strict=True):
        powers = np.exp(row - row.max())
        scores = 1 / (1 + np.exp(-row)) if spec.score is Score.SIGMOID else powers / powers.sum()
        expected = scores[chosen]
        if spec.score is Score.SOFTMAX_OF_CHOSEN:
            expected = powers[chosen] / powers[chosen].sum()
        if spec.renormalise:
            expected = expected / max(expected.sum() + spec.epsilon, spec.min_sum)
        expected = expected * spec.scale * (1 if scale is None else scale[chosen])
        rounding = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[spec.weight_type]
        # exponentials within two units, a sum of up to 264, three quotients and two products
        np.testing.assert_allclose(
            found, expected, rtol=64 * 2.0**-24 + rounding, atol=2.0**-24 if rounding > 2e-4 else 0
        )


def test_equal_logits_are_ranked_by_number() -> None:
    ids, weights = route(np.zeros((1, 40), np.float32), RouterSpec(40, 5, renormalise=True))
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    np.testing.assert_array_equal(weights, np.full((1, 5), np.float32(0.2)))
    signed = np.array([[-0.0, 0.0, 1.0, -0.0]], np.float32)
    assert route(signed, RouterSpec(4, 4))[0].tolist() == [[2, 0, 1, 3]]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([-10, 0, 0, 10], np.float32)
    ids, weights = route(logits, RouterSpec(4, 2, Score.SIGMOID), bias)
    assert ids.tolist() == [[3, 1]]
    np.testing.assert_array_equal(weights, sigmoid(logits)[:, [3, 1]])


def test_logits_that_saturate_are_still_told_apart() -> None:
    """Their sigmoids round to 1, and their softmaxes to 0."""
    logits = np.array([[40.0, 41.0, 42.0], [-300.0, -200.0, 0.0]], np.float32)
    assert route(logits, RouterSpec(3, 2, Score.SIGMOID))[0].tolist() == [[2, 1], [2, 1]]
    assert route(logits, RouterSpec(3, 2))[0].tolist() == [[2, 1], [2, 1]]


def test_a_sparse_mixer_s_ranks_compete_with_those_close_to_them() -> None:
    """Written as a loop, in float64."""
    logits, spec = logits_of(4, 7), RouterSpec(7, 3, Score.SPARSE_MIXER, closeness=0.4)
    ids, weights = route(logits, spec)
    for row, chosen, found in zip(logits.astype(np.float64), ids, weights, strict=True):
        remaining = set(range(7))
        for expert, weight in zip(chosen.tolist(), found, strict=True):
            top = max(row[e] for e in remaining)
            assert row[expert] == top
            close = [e for e in remaining if (top - row[e]) / max(abs(row[e]), top) <= 0.4]
            np.testing.assert_allclose(weight, 1 / sum(np.exp(row[e] - top) for e in close), rtol=1e-6)
            remaining.remove(expert)
    alone = route(np.array([[5.0, 1.0, -5.0, 4.9]], np.float32), RouterSpec(4, 2, Score.SPARSE_MIXER, closeness=0.02))
    assert alone[0].tolist() == [[0, 3]]
    np.testing.assert_allclose(alone[1], [[1 / (1 + np.exp(-0.1)), 1]], rtol=1e-6)


def test_groups_are_ranked_by_two_scores_or_by_one() -> None:
    logits = np.log(np.array([[0.5, 0.01, 0.3, 0.3, 0.02, 0.03]], np.float32))  # groups of two
    groups = {"num_groups": 3, "top_groups": 1}
    two = RouterSpec(6, 2, **groups)
    assert route(logits, two)[0].tolist() == [[2, 3]]
    one = RouterSpec(6, 2, group_score=GroupScore.LARGEST, **groups)
    assert route(logits, one)[0].tolist() == [[0, 1]]


def test_scores_outside_the_groups_count_as_zero_or_less_than_everything() -> None:
    logits = np.full((1, 6), -1, np.float32)
    bias = np.array(
        [-0.5, 0, -0.5, -0.9, -0.9, -0.9], np.float32
    )  # scores of 0.27: those of expert 3 to 5 are negative
    spec = {"num_groups": 2, "top_groups": 1}
    assert route(logits, RouterSpec(6, 2, Score.SIGMOID, **spec), bias)[0].tolist() == [[1, 0]]
    zero = RouterSpec(6, 2, Score.SIGMOID, masked=MaskedScore.ZERO, **spec)
    assert route(logits, zero, bias)[0].tolist() == [[1, 3]]


def test_contradictions_are_listed_together() -> None:
    with pytest.raises(
        ValueError, match=r"9 experts a token .* 8; 8 experts cannot .* 3 groups; weights of type 'fp8'"
    ):
        RouterSpec(8, 9, num_groups=3, weight_type="fp8")
    with pytest.raises(ValueError, match="1 groups of 2 experts do not hold the 3"):
        RouterSpec(8, 3, num_groups=4)
    with pytest.raises(ValueError, match="2 groups a token must be between 1 and the number of groups, 1"):
        RouterSpec(8, 3, top_groups=2)
    with pytest.raises(ValueError, match="no two largest scores"):
        RouterSpec(4, 1, num_groups=4)
    with pytest.raises(ValueError, match="no scores to rank groups by"):
        RouterSpec(8, 2, Score.SOFTMAX_OF_CHOSEN, num_groups=4)


def test_the_exponential() -> None:
    x = np.linspace(-MAX_EXPONENT, MAX_EXPONENT, 200_001, dtype=np.float32)
    np.testing.assert_allclose(portable_exp(x), np.exp(x.astype(np.float64)), rtol=2e-7)
    assert portable_exp(np.float32([0, -0.0])).tolist() == [1, 1]
    limits = portable_exp(np.float32([np.inf, -np.inf, 1e30]))
    np.testing.assert_array_equal(limits, portable_exp(np.float32([MAX_EXPONENT, -MAX_EXPONENT, MAX_EXPONENT])))
    assert limits[1] >= np.finfo(np.float32).tiny
    assert np.isnan(portable_exp(np.float32([np.nan]))).all()


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 128, 384])
def test_sums_have_one_order(experts: int) -> None:
    """Written as a loop."""
    x = np.exp(logits_of(3, experts))
    for row, found in zip(x, sum_over_experts(x)[:, 0], strict=True):
        lanes = [np.float32(0)] * 32
        for expert, value in enumerate(row):
            lanes[expert % 32] = value if expert < 32 else lanes[expert % 32] + value
        for distance in (16, 8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + distance] for i in range(distance)]
        assert found == lanes[0]
    np.testing.assert_allclose(softmax_over_experts(np.log(x)).sum(1), 1, rtol=1e-6)
