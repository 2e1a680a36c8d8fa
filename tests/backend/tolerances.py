"""How far a backend's floats may be from a float64 model of the same operation. One table; each bound has its reason.

Integers have no tolerance, and neither has a w8a8 product: its fp32 steps are prescribed one by one, so it is compared
with ``==``. What remains are sums whose order is free, functions that a device approximates its own way, and values
that a fused kernel does not round where the definition rounds.

Every bound has two parts. ``terms`` multiplies the sum of the magnitudes of what the operation adds up (for a dot
product ``sum |x_i w_i|``): errors of summation scale with that, not with a result that cancelled. ``result``
multiplies the magnitude of the result itself: the roundings of the finished value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FP32 = 2.0**-24
"""Half a unit in the last place of a number near 1: the relative error of one rounding to fp32."""
FP16 = 2.0**-11
"""The same for fp16."""
FP16_FLOOR = 2.0**-24
"""The spacing of subnormal fp16 numbers: below it no relative bound can hold."""


@dataclass(frozen=True)
class Tolerance:
    """``|actual - expected| <= terms * (sum of magnitudes) + result * |expected| + floor``."""

    terms: float
    result: float
    why: str
    floor: float = 1e-30


TOLERANCES: dict[tuple[str, type], Tolerance] = {
    ("linear, float sum", np.float32): Tolerance(
        64 * FP32,
        2 * FP32,
        "fp32 sums of up to 14336 products in any order: their errors average out to far below 64 roundings",
    ),
    ("linear, float sum", np.float16): Tolerance(
        64 * FP32,
        FP16 + 2 * FP32,
        "products of fp16 numbers are exact in fp32; sums as above; one rounding to fp16",
        FP16_FLOOR,
    ),
    ("xielu", np.float32): Tolerance(8 * FP32, 4 * FP32, "an expm1 within two places, and five roundings of its terms"),
    ("xielu", np.float16): Tolerance(8 * FP32, FP16 + 4 * FP32, "as in fp32; one rounding to fp16", FP16_FLOOR),
    ("adapter", np.float32): Tolerance(64 * FP32, 2 * FP32, "two sums as in linear, the first scaled; additions"),
    ("adapter", np.float16): Tolerance(
        FP16 + 64 * FP32,
        2 * FP32,
        "a last bit of fp32 may round an input of the second sum the other way to fp16; sums and additions as above",
        FP16_FLOOR,
    ),
    ("linear_add", np.float32): Tolerance(64 * FP32, 2 * FP32, "the product as in linear, and one addition"),
    ("linear_add", np.float16): Tolerance(
        64 * FP32,
        FP16 + 2 * FP32,
        "as in linear; the product is not rounded to fp16 where it is added in fp32",
        FP16_FLOOR,
    ),
    ("gated_linear", np.float32): Tolerance(
        96 * FP32, 8 * FP32, "gate and up as in linear; exp within two units; their quotient and product round"
    ),
    ("gated_linear", np.float16): Tolerance(
        3 * FP16,
        FP16,
        "gate and up are not rounded to fp16 where fused, and f has slope at most 1.13; the result is rounded",
        FP16_FLOOR,
    ),
    ("norm", np.float32): Tolerance(
        16 * FP32, 4 * FP32, "a mean of positive squares is well conditioned; rsqrt within two units; three products"
    ),
    ("norm", np.float16): Tolerance(16 * FP32, 4 * FP32, "norms stay in fp32 whatever the activation type is"),
    ("gated DeltaNet", np.float32): Tolerance(
        1e-5, 1e-5, "tens of fp32 sums, each of the last one's results, and heads divided by their lengths"
    ),
    ("gated DeltaNet", np.float16): Tolerance(1e-5, FP16 + 1e-5, "as in fp32; one rounding to fp16", FP16_FLOOR),
    ("Mamba 2", np.float32): Tolerance(
        1e-5, 1e-5, "tens of fp32 sums, each of the last one's results, and rows divided by their root mean squares"
    ),
    ("Mamba 2", np.float16): Tolerance(1e-5, FP16 + 1e-5, "as in fp32; one rounding to fp16", FP16_FLOOR),
    ("soft-cap", np.float32): Tolerance(0.0, 8 * FP32, "a quotient, tanh within two units, a product"),
    ("soft-cap", np.float16): Tolerance(0.0, 8 * FP32, "logits stay in fp32 whatever the activation type is"),
    ("softmax", np.float32): Tolerance(
        4 * FP32,
        32 * FP32,
        "a score's rounding is a relative error in its weight: terms are the weight times the magnitudes in its score; "
        "two exponentials of two units, their product and quotient, a sum of up to 2**17 of them",
    ),
    ("softmax", np.float16): Tolerance(
        4 * FP32, FP16 + 32 * FP32, "as in fp32, and the result is rounded to fp16", FP16_FLOOR
    ),
    ("norm, then w8a8", np.float32): Tolerance(
        2.0, 32 * FP32, "a norm's last bit moves a code next to a tie: two codes of a row, of a hundred thousand"
    ),
    ("attention", np.float32): Tolerance(
        64 * FP32, 4 * FP32, "scores are sums as in linear; an error in a score is a relative error in its weight"
    ),
    ("attention", np.float16): Tolerance(
        2 * FP16,
        FP16,
        "a last bit of fp32 may round a query or a key the other way to fp16; weights may be rounded to fp16 before "
        "they multiply the values; the result is rounded",
        FP16_FLOOR,
    ),
    ("cached", np.float32): Tolerance(
        16 * FP32, 4 * FP32, "a norm and a rotation: two products and a sum, cosines within two units"
    ),
    ("cached", np.float16): Tolerance(
        16 * FP32, 2 * FP16, "a last bit of fp32 may round a key the other way to fp16", FP16_FLOOR
    ),
    ("head scale", np.float32): Tolerance(0.0, 2 * FP16, "rounded up to fp16", FP16_FLOOR),
    ("head scale", np.float16): Tolerance(0.0, 4 * FP16, "a key's last bit, and rounded up to fp16", FP16_FLOOR),
    ("logprob", np.float32): Tolerance(
        16 * FP32, 4 * FP32, "the logarithm of a sum of at most 2**18 exponentials, each within two units"
    ),
    ("logits", np.float32): Tolerance(
        6e-6, 0.0, "a few fp32 layers with another order of summation; the largest logit is the magnitude"
    ),
    ("logits of random configurations", np.float32): Tolerance(
        1.2e-5, 0.0, "the same; of 1,000 configurations one or two have a row that rounding moves by 6 to 9e-6"
    ),
    ("logits", np.float16): Tolerance(
        5e-3, 0.0, "a few layers, every activation rounded to fp16, against fp32; the largest logit is the magnitude"
    ),
    ("logits, same rounding", np.float32): Tolerance(5e-6, 0.0, "as above"),
    ("logits, same rounding", np.float16): Tolerance(
        4e-3, 0.0, "both sides round to fp16, and may round a value either way"
    ),
    ("logits, w8a8", np.float32): Tolerance(
        3e-2, 0.0, "the last bit of fp32 decides a code next to a tie, and a tiny model has few terms to average it out"
    ),
    ("logits, w8a8", np.float16): Tolerance(3e-2, 0.0, "the last bit of fp16 decides some codes next to a tie"),
    ("logits, int8 cache", np.float16): Tolerance(
        3e-2, 0.0, "the last bit of fp16 decides some codes of keys and values next to a tie, and of activations"
    ),
}
"""By operation and the type that its result is rounded to."""


def assert_close(
    actual: np.ndarray,
    expected: np.ndarray,
    operation: str,
    activation: np.dtype | type,
    terms: np.ndarray | float = 0.0,
) -> None:
    """Compare within ``TOLERANCES[operation, activation]``; ``terms`` broadcasts against the result. NaN equals NaN."""
    tolerance = TOLERANCES[operation, np.dtype(activation).type]
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{operation}: shape {actual.shape}, expected {expected.shape}"
    bound = tolerance.terms * terms + tolerance.result * np.abs(expected) + tolerance.floor
    with np.errstate(invalid="ignore"):
        excess = np.where(actual == expected, 0, np.abs(actual - expected) / bound)
    excess = np.where(np.isnan(actual) & np.isnan(expected), 0, np.nan_to_num(excess, nan=np.inf))
    if (excess > 1).any():
        worst = tuple(map(int, np.unravel_index(excess.argmax(), excess.shape)))
        raise AssertionError(
            f"{operation}: {np.count_nonzero(excess > 1)} of {excess.size} values differ; worst at {worst}: "
            f"{actual[worst]!r}, expected {expected[worst]!r}; {excess[worst]:.3g} times the tolerance: {tolerance.why}"
        )
