"""Random int8 matrices with scales, and what docs/numerics.md makes of them, bit for bit."""

from __future__ import annotations

import numpy as np

from bminf_lite.cuda.kernels.constants import Epilogue

RELU = 2


CUPY_EPILOGUES = tuple(epilogue for epilogue in Epilogue if epilogue is not Epilogue.TO_BFLOAT16)
"""CuPy has no bf16: tests/pytorch covers that epilogue."""


class ScaledOperands:
    """``rows`` activations and ``channels`` weights of ``in_features`` codes; ``before`` is what is added to."""

    def __init__(self, rows: int, channels: int, in_features: int, bias: bool, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.rows, self.channels, self.in_features = rows, channels, in_features
        self.x, self.w = (random.integers(-128, 128, (n, in_features), np.int8) for n in (rows, channels))
        self.x_scale, self.w_scale = (random.uniform(1e-4, 1e-2, n).astype(np.float32) for n in (rows, channels))
        self.bias = random.normal(size=channels).astype(np.float32) if bias else None
        self.before = random.normal(size=(rows, channels)).astype(np.float32)

    def expected(self, epilogue: Epilogue) -> np.ndarray:
        """With ReLU where the epilogue has an activation."""
        acc = self.x.astype(np.float64) @ self.w.T.astype(np.float64)
        if epilogue is Epilogue.TO_INT32:
            return acc.astype(np.int32)
        y = self.x_scale[:, None] * (self.w_scale * acc.astype(np.float32))
        y = y if self.bias is None else y + self.bias
        if epilogue is Epilogue.TO_FLOAT:
            return y
        half = y.astype(np.float16)
        if epilogue is Epilogue.ADD:
            return self.before + half
        if epilogue is Epilogue.ACTIVATED:
            return np.maximum(half, 0)
        if epilogue is Epilogue.GATED:
            gate, up = np.split(half.astype(np.float32), 2, axis=1)
            return (np.maximum(gate, 0) * up).astype(np.float16)
        return half
