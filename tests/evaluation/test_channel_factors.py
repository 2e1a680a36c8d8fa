"""Factors between the weights of two models: found where they are, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import ml_dtypes
import numpy as np
import outliers
import pytest

import bminf_lite
from bminf_lite.backend import gptq
from bminf_lite.backend.quantization import Int8Weight, OutlierColumns, quantize_weight
from bminf_lite.backend.rotation import rotated
from bminf_lite.evaluation import compare as comparing
from bminf_lite.evaluation.channel_factors import NO_FACTORS, find_channel_factors
from bminf_lite.evaluation.corpus import read_texts, truncate_windows, windows_for
from bminf_lite.quantize.errors import relative_error

OUT, IN, TOKENS = 256, 384, 50
RNG = np.random.default_rng(0)
ONES = np.ones(IN), np.ones(OUT)
POWERS = 2.0 ** RNG.integers(-4, 5, IN), np.where(np.arange(OUT) < 100, 1, 2.0 ** RNG.integers(-3, 4, OUT))
ANY = RNG.lognormal(0, 0.5, IN), RNG.lognormal(0, 0.5, OUT)
CASES = {
    "powers of two": POWERS,
    "powers of two of inputs": (POWERS[0], ONES[1]),
    "powers of two of outputs": (ONES[0], POWERS[1]),
    "any factors": ANY,
    "any factors of inputs": (ANY[0], ONES[1]),
    "any small factors of inputs": (RNG.lognormal(0, 0.05, IN), ONES[1]),
    "one input": (np.where(np.arange(IN) == 7, 64.0, 1.0), ONES[1]),
    "all inputs alike": (4 * ONES[0], ONES[1]),
    "all outputs alike": (ONES[0], 4 * ONES[1]),
    "half of the outputs": (ONES[0], np.where(np.arange(OUT) % 2, 0.125, 1.0)),
}


def weights(kind: str) -> np.ndarray:
    """fp32 ``[OUT, IN]``: columns of one size, of different sizes, or with single large weights in each row."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((OUT, IN))
    if kind == "columns":
        w *= rng.lognormal(0, 1, IN)
    if kind == "heavy tails":
        w *= rng.lognormal(0, 1.5, (OUT, IN))
    return w.astype(np.float32)


def activations() -> np.ndarray:
    """fp32 ``[TOKENS, IN]``, one token a thousand times larger than the others."""
    x = np.random.default_rng(2).standard_normal((TOKENS, IN)).astype(np.float32)
    x[0] *= 1000
    return x


def snr(y: np.ndarray, expected: np.ndarray) -> float:
    return -10 * np.log10(relative_error(y.astype(np.float32), expected))


@pytest.mark.parametrize("rotation", [1, 64])
@pytest.mark.parametrize("kind", ["alike", "columns", "heavy tails"])
@pytest.mark.parametrize("case", CASES)
def test_the_error_is_that_without_factors(case: str, kind: str, rotation: int) -> None:
    """Measured with the factors that are found, it is the error that the known factors give."""
    (inputs, outputs), w, x = CASES[case], weights(kind), activations()
    int8 = quantize_weight(rotated((w * inputs * outputs[:, None]).astype(np.float32), rotation))
    model = replace(int8, rotation=rotation)
    found = find_channel_factors([model], [w], (x / inputs).astype(np.float32), x)
    dequantized, y = rotated(int8.dequantize(), rotation), x @ w.T
    expected = snr((x / inputs) @ dequantized.T / outputs, y)
    assert snr(found.to_reference(found.to_model(x) @ dequantized.T), y) == pytest.approx(expected, abs=0.5)
    for factors, true in ((found.inputs, inputs), (found.outputs, outputs)):
        assert (factors is None) == bool((true == 1).all())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_powers_of_two_in_a_float_model_are_exact(dtype: type) -> None:
    (inputs, outputs), w, x = POWERS, weights("alike").astype(dtype), activations()
    model = (w.astype(np.float32) * inputs * outputs[:, None]).astype(dtype)
    found = find_channel_factors([model[:100], model[100:]], [w], x / inputs.astype(np.float32), x)
    np.testing.assert_array_equal(found.inputs, inputs)
    np.testing.assert_array_equal(found.outputs, outputs)


def gptq_rounded(w: np.ndarray) -> Int8Weight:
    """Columns rounded one after another, later ones making up for the errors of earlier ones."""
    x = activations()[1:] @ np.random.default_rng(3).standard_normal((IN, IN)).astype(np.float32)
    plain = quantize_weight(w)
    root = gptq.inverse_root(gptq.hessian(x))
    return replace(plain, codes=gptq.gptq_codes(w, plain.scale.astype(np.float32), root))


def clipped(w: np.ndarray) -> Int8Weight:
    """Scales for a third of the largest weight of each row, as writers choose that minimize the mean error."""
    scale = np.abs(w).max(axis=1) / 127 / 3
    return Int8Weight(np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8), scale.astype(np.float32))


def with_outliers(w: np.ndarray) -> Int8Weight:
    index = np.array([3, 200], np.int32)
    rest = w.copy()
    rest[:, index] = 0
    return replace(quantize_weight(rest), outliers=OutlierColumns(index, w[:, index].astype(np.float16)))


def with_inexact_scales(w: np.ndarray) -> Int8Weight:
    """Scales in bf16, codes of those in fp32: each row is wrong by up to 0.4 %."""
    int8 = quantize_weight(w)
    return replace(int8, scale=int8.scale.astype(ml_dtypes.bfloat16))


def of_another_model(w: np.ndarray) -> Int8Weight:
    return quantize_weight(np.random.default_rng(9).standard_normal(w.shape).astype(np.float32))


def fine_tuned(w: np.ndarray) -> Int8Weight:
    return quantize_weight(w + 0.2 * np.random.default_rng(9).standard_normal(w.shape).astype(np.float32))


def zero(w: np.ndarray) -> Int8Weight:
    return quantize_weight(np.zeros_like(w))


@pytest.mark.parametrize("kind", ["alike", "columns", "heavy tails"])
@pytest.mark.parametrize(
    "quantize",
    [quantize_weight, clipped, with_outliers, with_inexact_scales, of_another_model, fine_tuned, zero, gptq_rounded],
)
def test_no_channel_is_changed_without_evidence(quantize, kind: str) -> None:
    """Whatever rounding, clipping or another training did to the weights."""
    w, x = weights(kind), activations()
    found = find_channel_factors([quantize(w)], [w], x * np.float32(1.01), x)
    assert found.inputs is None and found.outputs is None


def test_what_is_not_finite_or_of_another_shape_has_no_factors() -> None:
    w, x = weights("alike"), activations()
    broken = w.copy()
    broken[3, 5] = np.nan
    broken[7] = np.inf
    for model, reference in (([broken], [w]), ([w], [broken]), ([w[1:]], [w]), ([w[:, 1:]], [w])):
        assert find_channel_factors(model, reference, x, x) == NO_FACTORS


DEMO = Path(str(resources.files("bminf_lite.demo_model")))


def own_errors(model: Path, reference: Path) -> dict[str, float]:
    text = [read_texts(DEMO / "heldout.txt")[0][:1000]]
    windows = truncate_windows(windows_for(DEMO, text, 64, 64), 128)
    found = comparing.compare(model, reference, windows, "cpu")
    return {linear.name: linear.own.snr_db for linear in found.linears}


@pytest.mark.parametrize("recipe", ["w8a16", "w8a8"])
def test_one_enormous_token_is_no_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """A token whose activations are 3,000, as the first of a text has in many models: nothing was smoothed.

    Nor are gated products scaled, which fp16 could not hold: these factors exist.
    """
    source = outliers.write(DEMO, tmp_path / "source", outliers.spike(int(text_token())))
    monkeypatch.setattr("bminf_lite.checkpoint.migrate.limit_gated_products", lambda *_: None)
    bminf_lite.migrate(source, tmp_path / "int8", recipe)
    found = own_errors(tmp_path / "int8", source)
    monkeypatch.setattr(comparing, "find_channel_factors", lambda *_: NO_FACTORS)
    assert found == own_errors(tmp_path / "int8", source)


def text_token() -> int:
    return windows_for(DEMO, [read_texts(DEMO / "heldout.txt")[0][:1000]], 64, 64)[0].tokens[5]


@pytest.mark.parametrize("put_in", [outliers.in_norms, outliers.in_neurons, outliers.in_values])
def test_a_model_that_others_smoothed_has_the_errors_of_its_float_original(tmp_path: Path, put_in) -> None:
    """The factors 10, 30 and 100 of some channels, in the products that read these channels."""
    smoothed = outliers.write(DEMO, tmp_path / "smoothed", put_in)
    bminf_lite.migrate(smoothed, tmp_path / "int8")
    expected, found = own_errors(tmp_path / "int8", smoothed), own_errors(tmp_path / "int8", DEMO)
    readers = {"in_norms": ("qkv", "gate,up"), "in_neurons": ("down_proj",), "in_values": ("o_proj",)}[put_in.__name__]
    for name, value in expected.items():
        if any(reader.replace("qkv", "q,k,v") in name for reader in readers):
            # Of a channel times 100, int8 keeps one or two codes, and its factor is known within some percent.
            assert found[name] == pytest.approx(value, abs=1)
        else:
            assert found[name] > value - 3  # outputs are weighted otherwise, because their factors are undone


@pytest.mark.slow
def test_a_calibration_s_own_factors_are_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its factors left in, the products that read smoothed channels would have errors like their outputs."""
    source = outliers.write(DEMO, tmp_path / "source", outliers.in_norms)
    text = DEMO / "heldout.txt"
    report = bminf_lite.migrate(source, tmp_path / "int8", "w8a8-smooth", calibrate=text, samples=2, device="cpu")
    assert any(product["exponent"] is not None for product in report.calibration["products"])
    assert min(own_errors(tmp_path / "int8", source).values()) > 20
    monkeypatch.setattr(comparing, "find_channel_factors", lambda *_: NO_FACTORS)
    assert min(own_errors(tmp_path / "int8", source).values()) < 5
