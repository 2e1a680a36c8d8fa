"""The operations once more: in float64, in plain loops, and written from docs/numerics.md rather than from the code.

Where docs/numerics.md prescribes single fp32 steps, these take them too. ``rounded`` stands for the activation type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bminf_lite.backend.values import AttentionSpec, LinearBias, Norm


def rounded(x: np.ndarray, activation: np.dtype | type) -> np.ndarray:
    """``x`` as the activation type holds it, in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(activation).astype(np.float64)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """QuantizedActivations and fp32 scales of finite rows ``[T, K]``, row by row as docs/numerics.md says it."""
    codes, scales = np.zeros(x.shape, np.int8), np.zeros(len(x), np.float32)
    for t, row in enumerate(x.astype(np.float32)):
        largest = np.float32(max((abs(float(v)) for v in row), default=0.0))
        if largest > 0:
            ratio = np.float32(127) / largest
            codes[t] = [max(-127, min(127, round(float(v * ratio)))) for v in row]  # round() is half to even
            scales[t] = largest / np.float32(127)
    return codes, scales


def int_product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """``x @ w.T`` in 64-bit integers."""
    return x.astype(np.int64) @ w.astype(np.int64).T


def w8a8_product(x: np.ndarray, codes: np.ndarray, scale: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The prescribed fp32 steps: ``s_x * (s_w * fp32(acc))``, then the bias."""
    x_codes, x_scale = quantize(x)
    acc = int_product(x_codes, codes).astype(np.float32)
    y = x_scale[:, None] * (scale.astype(np.float32)[None, :] * acc)
    return y if bias is None else y + bias.astype(np.float32)


def norm(x: np.ndarray, norm: Norm) -> np.ndarray:
    """RMSNorm or LayerNorm over the last axis."""
    x = np.asarray(x, np.float64)
    if norm.center:
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(norm.eps)) * np.asarray(norm.weight, np.float64)
    return y if norm.bias is None else y + np.asarray(norm.bias, np.float64)


def norm_terms(x: np.ndarray, norm: Norm) -> np.ndarray:
    """The magnitudes that a norm adds: the values, and with a mean that mean."""
    x = x.astype(np.float64)
    centred = x - x.mean(axis=1, keepdims=True) if norm.center else x
    inverse = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + norm.eps)
    sums = np.abs(x) + (np.abs(x).mean(axis=1, keepdims=True) if norm.center else 0)
    # the mean's rounding also enters the variance, relative to the variance
    amplified = 1 + (sums.max(axis=1, keepdims=True) * inverse if norm.center else 0)
    return sums * inverse * amplified * np.abs(norm.weight) + (0 if norm.bias is None else np.abs(norm.bias))


def softmax(
    x: np.ndarray, scale: float, bias: np.ndarray | None, visible: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of ``scale * x + bias`` over what is visible, and the magnitudes that each result is sensitive to."""
    product = x.astype(np.float64) * np.float32(scale)
    scores = product + (0 if bias is None else bias)
    sizes = np.abs(product) + (0 if bias is None else np.abs(bias))
    seen = np.broadcast_to(True if visible is None else visible, x.shape)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - np.max(scores, axis=1, keepdims=True, initial=-1e300))
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    return weights, weights * (sizes + np.max(sizes, axis=1, keepdims=True, where=seen, initial=0))


def activation(name: str, x: np.ndarray) -> np.ndarray:
    """The functions between ``gate`` and ``up``."""
    x = np.asarray(x, np.float64)
    if name == "silu":
        return x * np.exp(-np.logaddexp(0, -x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu":
        return x * np.vectorize(lambda z: math.erfc(-z / math.sqrt(2)) / 2)(x)
    if name == "relu_squared":
        return np.maximum(x, 0) ** 2
    assert name == "relu"
    return np.where(x > 0, x, 0)


def rotate(heads: np.ndarray, position: int, frequencies: np.ndarray, scale: float) -> np.ndarray:
    """Heads ``[n, head_dim]`` at one position, by complex multiplication. The angle itself is a fp32 product."""
    half = heads.shape[1] // 2
    angle = (np.float32(position) * frequencies.astype(np.float32)).astype(np.float64)
    turned = (heads[:, :half] + 1j * heads[:, half:]) * np.exp(1j * angle) * np.float32(scale)
    return np.concatenate([turned.real, turned.imag], axis=1)


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: AttentionSpec, position: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Every query ``[n, heads, head_dim]``, the first at ``position``, over every key that is less than the window
    away; and the magnitudes of the sums.

    A relative error of the terms of a score is an error of the weight: it moves the output by the magnitude of those
    terms, which the second result therefore contains.
    """
    out, magnitude = np.empty((2, *q.shape))
    for h in range(spec.heads):
        group = h // (spec.heads // spec.kv_heads)
        scores = q[:, h] @ k[:, group].T * spec.scale
        distances = np.arange(len(k)) - position - np.arange(len(q))[:, None]
        if spec.softcap is not None:
            scores = spec.softcap * np.tanh(scores / spec.softcap)
        if isinstance(spec.bias, LinearBias):
            scores = scores + float(spec.bias.slopes[h]) * distances
        elif spec.bias is not None:
            most = spec.bias.max_distance
            scores = scores + np.asarray(spec.bias.values, np.float64)[h, np.clip(distances, -most, most) + most]
        if spec.window is not None:
            scores = np.where(np.abs(distances) < spec.window, scores, -np.inf)
        if spec.sinks is not None:  # one more score, whose value is zero
            scores = np.pad(scores, ((0, 0), (0, 1)), constant_values=float(spec.sinks[h]))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, : len(k)]
        out[:, h] = weights @ v[:, group]
        spread = 1 + (np.abs(q[:, h]) @ np.abs(k[:, group]).T * abs(spec.scale)).max(axis=1)
        magnitude[:, h] = spread[:, None] * (weights @ np.abs(v[:, group]))
    return out, magnitude


class AttentionModel:
    """Attention of one sequence, a token at a time; it keeps every key and value it has seen.

    It attends to those that it keeps, or to ``held``, keys and values ``[tokens, kv_heads, head_dim]`` as a cache of
    less precision holds them. If that is ``int8``, queries and keys are transformed.
    """

    def __init__(
        self, spec: AttentionSpec, frequencies: np.ndarray | None, activation: np.dtype | type, int8: bool = False
    ):
        self.transform = rotation_of_heads(spec.head_dim) if int8 else np.eye(spec.head_dim)
        self.spec = spec
        self.frequencies = frequencies
        self.activation = activation
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.held: tuple[np.ndarray, np.ndarray] | None = None

    def __call__(self, qkv: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Append tokens ``[n, qkv_features]``; their outputs ``[n, heads * head_dim]`` and each output's magnitude."""
        outputs = [self._token(np.asarray(row, np.float64)) for row in qkv]
        return np.array([o for o, _ in outputs]), np.array([m for _, m in outputs])

    def _token(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        spec, position = self.spec, len(self.keys)
        heads = row.reshape(-1, spec.head_dim)
        queries = self._prepare(heads[: spec.heads], spec.q_norm, position)
        self.keys.append(self._prepare(heads[spec.heads :][: spec.kv_heads], spec.k_norm, position))
        values = heads[spec.heads + spec.kv_heads :]
        self.values.append(rounded(norm(values, spec.v_norm) if spec.v_norm else values, self.activation))
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        keys, values = (np.array(x[first : position + 1]) for x in self.held or (self.keys, self.values))
        out, magnitude = attended(queries[None], keys, values, spec, position - first)
        return out.reshape(-1), magnitude.reshape(-1)

    def _prepare(self, heads: np.ndarray, head_norm: Norm | None, position: int) -> np.ndarray:
        is_last = self.spec.norm_after_rope
        if head_norm is not None and not is_last:
            heads = norm(heads, head_norm)
        if self.frequencies is not None:
            heads = rotate(heads, position, self.frequencies, self.spec.rope.scale)  # type: ignore[union-attr]
        heads = norm(heads, head_norm) if head_norm is not None and is_last else heads
        return rounded(heads @ self.transform, self.activation)


def rotation_of_heads(head_dim: int) -> np.ndarray:
    """The orthogonal matrix ``[head_dim, head_dim]`` of queries and keys of an int8 cache, which is symmetric."""
    pairs = math.gcd(head_dim // 2, 128)
    hadamard = np.ones((1, 1))
    while len(hadamard) < 2 * pairs:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    matrix = np.zeros((head_dim, head_dim))
    for block in np.arange(head_dim).reshape(2, -1, pairs).swapaxes(0, 1).reshape(-1, 2 * pairs):
        matrix[np.ix_(block, block)] = hadamard / math.sqrt(2 * pairs)
    return matrix
