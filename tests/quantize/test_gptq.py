"""Error-compensating rounding: the algorithm against its definition, and what reaches the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import random_tokens

import bminf_lite
from bminf_lite.backend import gptq
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.gptq import gptq_codes, hessian, inverse_root
from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.quantize.errors import QuantizationCandidate
from bminf_lite.quantize.gptq import GPTQInputs, GPTQRounding


def correlated(random: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    """Inputs that a few directions explain, fp32 ``[rows, inputs]``."""
    few = random.standard_normal((rows, max(inputs // 4, 1))) @ random.standard_normal((max(inputs // 4, 1), inputs))
    return (few + 0.1 * random.standard_normal((rows, inputs))).astype(np.float32)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 5), st.integers(1, 16))
def test_blocks_give_what_one_column_after_another_gives(seed: int, inputs: int, outputs: int, block: int) -> None:
    """The definition: fix a column's code, then choose the real values of the others that are best for the product."""
    random = np.random.default_rng(seed)
    total = hessian(correlated(random, 3 * inputs, inputs))
    damped = total + np.eye(inputs) * gptq.DAMPING * np.diagonal(total).mean()
    weight = random.standard_normal((outputs, inputs)).astype(np.float32)
    scale = quantize_weight(weight).scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gptq, "BLOCK", block)
        root = inverse_root(total)
        codes = gptq_codes(weight, scale, root)[:, root.order]
    assert (np.diff(np.diagonal(total)[root.order]) <= 0).all() and sorted(root.order) == list(range(inputs))
    damped = damped[np.ix_(root.order, root.order)]
    rest = weight[:, root.order].astype(np.float64) / scale.astype(np.float64)[:, None]
    for column in range(inputs):
        inverse = np.linalg.inv(damped[column:, column:])
        rounded = np.clip(np.rint(rest[:, column]), -127, 127)
        tie = np.abs(np.abs(rest[:, column] - rounded) - 0.5) < 1e-3
        rounded = np.where(tie, codes[:, column], rounded)  # fp32 may see a tie on the other side
        np.testing.assert_array_equal(codes[:, column], rounded)
        error = (rest[:, column] - rounded) / inverse[0, 0]
        rest[:, column:] -= error[:, None] * inverse[0]


def shown(inputs: np.ndarray) -> GPTQInputs:
    """What is kept of inputs that came in two parts."""
    gptq_inputs = GPTQInputs(CpuBackend(), parts=2)
    for part in np.array_split(inputs, 2):
        gptq_inputs.add(part)
    return gptq_inputs


def quantized(inputs: np.ndarray, weight: np.ndarray, candidate: QuantizationCandidate) -> Int8Weight | None:
    found = GPTQRounding(CpuBackend(), shown(inputs), [weight]).quantize(candidate)
    return None if found is None else found[0]


def test_the_hessian_is_that_of_divided_inputs() -> None:
    random = np.random.default_rng(0)
    inputs, factors = correlated(random, 400, 12), np.exp2(random.integers(-5, 6, 12)).astype(np.float32)
    seen = np.concatenate([part[:150] for part in np.array_split(inputs, 2)])
    expected = (seen / factors).astype(np.float64).T @ (seen / factors)
    np.testing.assert_allclose(
        gptq.transformed_hessian(shown(inputs).hessian, factors),
        expected,
        rtol=1e-4,
        atol=1e-4 * np.abs(expected).max(),
    )
    np.testing.assert_array_equal(shown(inputs).held_out(), np.concatenate([inputs[150:200], inputs[350:]]))


def test_it_makes_the_product_s_error_smaller() -> None:
    random = np.random.default_rng(0)
    inputs, weight = correlated(random, 2000, 64), random.standard_normal((48, 64)).astype(np.float32)
    better = quantized(inputs, weight, QuantizationCandidate(Scheme.W8A16))
    assert better is not None
    plain, exact = quantize_weight(weight, dynamic=False), inputs @ weight.T
    errors = [np.linalg.norm(inputs @ w.dequantize().T - exact) for w in (plain, better)]
    assert errors[1] < 0.6 * errors[0]
    assert np.abs(better.codes.astype(int) - plain.codes).max() <= 127


def test_independent_inputs_leave_nothing_to_gain() -> None:
    random = np.random.default_rng(0)
    inputs, weight = (random.standard_normal(shape).astype(np.float32) for shape in ((4000, 32), (16, 32)))
    assert quantized(inputs, weight, QuantizationCandidate(Scheme.W8A16)) is None


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    inputs = correlated(np.random.default_rng(0), 100, 16)
    inputs[:, [3, 7]] = 0
    assert np.isfinite(inverse_root(hessian(inputs)).values).all()
    assert np.isfinite(inverse_root(hessian(np.zeros((9, 4), np.float32))).values).all()


def test_the_file_holds_those_codes(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "source")
    products: dict[str, Any] = {}
    weights: dict[str, dict[str, Any]] = {}
    codes: dict[str, dict[str, np.ndarray]] = {}
    for rounding in ("nearest", "gptq"):
        recipe, out = tmp_path / f"{rounding}.toml", tmp_path / rounding
        recipe.write_text(f'linear = "w8a16"\nhead = "w8a8"\n[calibration]\nrounding = "{rounding}"\n')
        report = bminf_lite.migrate(source, out, recipe, calibrate=random_tokens(0, 512, 250), device="cpu")
        products[rounding] = report.calibration["products"]
        with open_checkpoint(out) as checkpoint:
            names = [name for product in products[rounding] for name in product["tensors"]]
            weights[rounding] = {name: checkpoint.weight(name) for name in names}
            codes[rounding] = {name: np.asarray(weight.codes) for name, weight in weights[rounding].items()}
    assert all(a["error"] > b["error"] for a, b in zip(*products.values(), strict=True) if b["rounding"] == "gptq")
    assert sum(product["rounding"] == "gptq" for product in products["gptq"]) > 4
    for product in products["gptq"]:
        for name in product["tensors"]:
            np.testing.assert_array_equal(*(found[name].scale for found in weights.values()))
            changed = codes["nearest"][name] != codes["gptq"][name]
            assert 0 < changed.mean() < 0.9 if product["rounding"] == "gptq" else not changed.any()
