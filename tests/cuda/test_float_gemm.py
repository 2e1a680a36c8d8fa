"""Products with float activations: exact where every sum is, and equal bits of a row in every kernel and any batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from checked import repeats

from bminf_lite.backend.values import Norm

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.cuda.kernels.arrays import round_up  # noqa: E402
from bminf_lite.cuda.kernels.constants import Activation, Epilogue  # noqa: E402
from bminf_lite.cuda.kernels.gemm.float_gemm import FloatGemmSync, FloatProductKernels  # noqa: E402
from bminf_lite.cuda.kernels.gemm.float_gemm_hopper import COSTS, TILES, FloatGemmHopper  # noqa: E402
from bminf_lite.cuda.kernels.gemm.float_operands import EPILOGUES, has_scales_for_tma  # noqa: E402
from bminf_lite.cuda.kernels.gemm.skinny_float_gemm_hopper import SkinnyFloatGemmHopper  # noqa: E402
from bminf_lite.cuda.kernels.launcher import Launcher, StepContext  # noqa: E402
from bminf_lite.cuda.kernels.rowwise.rows import NO_ROWS, RowKernels, array_target  # noqa: E402

HALF_WEIGHT = -1
"""In place of the columns of a group: an fp16 weight."""
KINDS = (HALF_WEIGHT, 0, *repeats(32, 64), 128)
SHAPES = [  # rows, outputs, inputs
    (1, 48, 40),
    (3, 544, 1000),
    (16, 272, 512),
    (50, 130, 576),
    (65, 544, 1056),
    *repeats((1, 4096, 1024), (2, 30, 33), (9, 1000, 4096), (64, 1056, 96), (300, 700, 1056), (257, 520, 128)),
]
BATCHES = (1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 129, 193, 200)
SILU, RELU = int(Activation.SILU), int(Activation.RELU)


@dataclass
class Weight:
    """A weight as the kernels take it, with zeros behind its rows and columns."""

    matrix: cp.ndarray
    scale: cp.ndarray | None
    bias: cp.ndarray | None
    out_features: int
    in_features: int
    group_size: int
    nbytes: int = 0

    @property
    def pitch(self) -> int:
        return int(self.matrix.shape[1])


def padded(values: np.ndarray, extra: int = 0, fill: float = 0) -> cp.ndarray:
    """On the GPU, in rows of whole multiples of 32 elements, and as many rows more; the padding is ``fill``."""
    rows, columns = values.shape
    whole = cp.full((round_up(rows, 32), round_up(columns, 32) + extra), fill, values.dtype)
    whole[:rows, :columns] = cp.asarray(values)
    return whole


class Operands:
    """A weight ``[n, k]`` of some kind, and rows. ``exact``: of numbers whose products fp32 sums in any order."""

    def __init__(
        self, rows: int, n: int, k: int, kind: int, exact: bool, bias: bool = True, scale_type: Any = np.float16
    ) -> None:
        random = np.random.default_rng(n + k)
        self.rows, self.n, self.k, self.kind = rows, n, k, kind
        groups = -(-k // kind) if kind > 0 else 1
        if exact:
            self.x = random.integers(-4, 5, (rows, k)).astype(np.float16)
            self.w = random.integers(-127, 128, (n, k)).astype(np.int8)
            self.scale = 2.0 ** random.integers(-9, -6, (groups, n))
            self.bias = random.integers(-64, 64, n).astype(np.float32) if bias else None
        else:
            sizes = np.exp(random.standard_normal((rows, 1)))
            self.x = (random.standard_normal((rows, k)) * sizes).astype(np.float16)
            self.w = random.integers(-128, 128, (n, k)).astype(np.int8)
            self.scale = random.uniform(1e-3, 1e-2, (groups, n)).astype(np.float16)
            self.bias = random.standard_normal(n).astype(np.float32) if bias else None
        self.before = random.integers(-64, 64, (rows, n)).astype(np.float32)
        if kind == HALF_WEIGHT:
            self.w = (self.w * (2.0**-8 if exact else 0.0123)).astype(np.float16)
        self.scale_type = scale_type

    def weight(self) -> Weight:
        if self.kind == HALF_WEIGHT:
            scale = None
        elif self.kind == 0:
            scale = cp.asarray(self.scale[0].astype(np.float32))
        else:
            scale = padded(self.scale.astype(self.scale_type))
        bias = None if self.bias is None else cp.asarray(self.bias)
        return Weight(padded(self.w), scale, bias, self.n, self.k, max(self.kind, 0))

    def expected(self, epilogue: Epilogue) -> np.ndarray:
        """In fp64, rounded where the kernels round; with ReLU where the epilogue has an activation."""
        scales = np.ones((1, self.n)) if self.kind == HALF_WEIGHT else self.scale.astype(np.float64)
        width = max(self.kind, 0) or self.k
        y = np.zeros((self.rows, self.n))
        for first, scale in zip(range(0, self.k, width), scales, strict=True):
            columns = slice(first, first + width)
            y += scale * (self.x[:, columns].astype(np.float64) @ self.w[:, columns].T.astype(np.float64))
        y = y.astype(np.float32) if self.bias is None else y.astype(np.float32) + self.bias
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

    def run(
        self, launch: Any, weight: Weight, epilogue: Epilogue, activation: int = 0, rows: slice = slice(None)
    ) -> np.ndarray:
        """What a kernel writes for some rows; nothing may change behind the 16 bytes in which a row ends."""
        x = self.x[rows]
        before = self.before[rows] if epilogue is Epilogue.ADD else np.full((len(x), self.n), np.nan, np.float32)
        columns = self.n // 2 if epilogue is Epilogue.GATED else self.n
        if epilogue not in (Epilogue.ADD, Epilogue.TO_FLOAT):
            before = before.astype(np.float16)
        whole = padded(before[:, :columns], 32, np.nan)
        out = whole[: len(x), :columns]
        launch(StepContext(in_step=False), padded(x, 32, np.nan)[: len(x), : self.k], weight, out, epilogue, activation)
        found = cp.asnumpy(whole)
        assert (
            np.isnan(found[len(x) :]).all()
            and np.isnan(found[: len(x), round_up(columns, 16 // whole.itemsize) :]).all()
        )
        return found[: len(x), :columns]


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"i{x.itemsize}")


class Kernels:
    """Every way to compute a product on the GPU at hand, by name; ``all``: as the backend chooses.

    ``has_clusters`` is False where kernels are interpreted, which cannot be done with clusters.
    """

    def __init__(self, device: Any, has_clusters: bool) -> None:
        self.tiles = TILES if has_clusters else tuple(tile for tile in TILES if tile[1] == 1)
        self.launcher = Launcher(device, cp.cuda.get_current_stream().ptr)
        self.all = FloatProductKernels(self.launcher)

    def choose(self, step: StepContext, x: Any, weight: Weight, *others: Any) -> None:
        self.all.launch(step, x, None, weight, *others)

    def ways(self, rows: int, weight: Weight, epilogue: Epilogue) -> dict[str, Any]:
        found: dict[str, Any] = {"any GPU": FloatGemmSync(self.launcher).launch}
        if not (self.all.is_hopper and has_scales_for_tma(weight, epilogue is Epilogue.GATED)):
            return found
        if rows <= SkinnyFloatGemmHopper.max_rows:
            skinny = SkinnyFloatGemmHopper(self.launcher)
            found["skinny"] = lambda step, x, *others: skinny.launch(step, x, None, *others)
        if self.tiles == TILES:
            found["chosen"] = self.choose
        many = FloatGemmHopper(self.launcher)
        for tile in self.tiles[: len(COSTS[0])] if weight.group_size > 0 else self.tiles:
            found[f"tiles of {tile}"] = lambda *arguments, tile=tile: many.launch(*arguments, tile=tile)
        return found


@pytest.fixture(scope="module")
def kernels(device, request) -> Kernels:
    return Kernels(device, has_clusters=not request.config.getoption("--fake-gpu-ptx"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_sums_that_have_no_order_are_exact(kernels, rows, n, k, kind):
    operands = Operands(rows, n, k, kind, exact=True)
    weight = operands.weight()
    for name, launch in kernels.ways(rows, weight, Epilogue.TO_FLOAT).items():
        y = operands.run(launch, weight, Epilogue.TO_FLOAT)
        np.testing.assert_array_equal(y, operands.expected(Epilogue.TO_FLOAT), name)


@pytest.mark.parametrize("bias", [True, *repeats(False)])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("rows", [1, *repeats(16), 40, 200])
@pytest.mark.parametrize("kind", [HALF_WEIGHT, 0, 128])
def test_epilogues(kernels, rows, epilogue, kind, bias):
    operands = Operands(rows, 272, 192, kind, exact=True, bias=bias)
    weight, activation = operands.weight(), RELU if epilogue in (Epilogue.GATED, Epilogue.ACTIVATED) else 0
    for name, launch in kernels.ways(rows, weight, epilogue).items():
        y = operands.run(launch, weight, epilogue, activation)
        np.testing.assert_array_equal(y, operands.expected(epilogue), name)


@pytest.mark.parametrize("n", [2, 10, 36, 132])
def test_a_gate_of_any_width(kernels, n):
    """Gate and up take turns by eight channels, which need not divide their number."""
    for rows in (1, 20, 70):
        for kind in (HALF_WEIGHT, 0, 64):
            operands = Operands(rows, n, 96, kind, exact=True)
            weight = operands.weight()
            for name, launch in kernels.ways(rows, weight, Epilogue.GATED).items():
                y = operands.run(launch, weight, Epilogue.GATED, RELU)
                np.testing.assert_array_equal(y, operands.expected(Epilogue.GATED), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(264, 1056), *repeats((1024, 4096), (96, 14336))])
def test_a_row_has_the_same_bits_in_every_kernel_and_batch(kernels, n, k, kind):
    operands = Operands(max(BATCHES), n, k, kind, exact=False, scale_type=np.float32 if kind == 64 else np.float16)
    weight = operands.weight()
    for epilogue, activation in ((Epilogue.TO_FLOAT, 0), (Epilogue.ADD, 0), (Epilogue.GATED, SILU)):
        everything = operands.run(
            kernels.ways(len(operands.x), weight, epilogue)["any GPU"], weight, epilogue, activation
        )
        for count in BATCHES:
            for first in {0, len(operands.x) - count}:
                rows = slice(first, first + count)
                for name, launch in kernels.ways(count, weight, epilogue).items():
                    y = operands.run(launch, weight, epilogue, activation, rows)
                    np.testing.assert_array_equal(bits(y), bits(everything[rows]), f"{name}, {count} rows")


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", [HALF_WEIGHT, 0, *repeats(128)])
@pytest.mark.parametrize("k", [40, 4096, *repeats(1000, 8000)])
def test_a_norm_inside_the_kernel_has_the_bits_of_one_before_it(kernels, k, kind, center):
    random = np.random.default_rng(k)
    operands = Operands(1, 272, k, kind, exact=False)
    if not kernels.all.normalises(1, operands.weight(), Epilogue.TO_FLOAT):
        pytest.skip("this GPU has a kernel for the norm")
    weight, gain, shift = (
        operands.weight(),
        *(cp.asarray(random.standard_normal(k + 32).astype(np.float32)) for _ in "ab"),
    )
    norm = Norm(gain, 1e-5, shift if center else None, center)
    row = padded(random.standard_normal((1, k)).astype(np.float32), 32, np.nan)[:1, :k]
    step, half = StepContext(in_step=False), padded(np.zeros((1, k), np.float16))[:1, :k]
    RowKernels(kernels.launcher).transform(step, NO_ROWS, array_target(half), 1, k, row, norm)
    found = []
    for x, of_row in ((row, norm), (half, None)):
        out = padded(np.full((1, 272), np.nan, np.float32))[:1, :272]
        kernels.all.launch(step, x, of_row, weight, out, Epilogue.TO_FLOAT)
        found.append(cp.asnumpy(out))
    np.testing.assert_array_equal(bits(found[0]), bits(found[1]))
