"""The product that scales its own sums equals an exact product and the definition's arithmetic, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from checked import repeats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scaled_operands import CUPY_EPILOGUES, RELU, ScaledOperands

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.cuda.kernels.constants import Epilogue  # noqa: E402
from bminf_lite.cuda.kernels.gemm.gemm_hopper import (  # noqa: E402
    EPILOGUES,
    TILE_CONFIGS,
    GemmTileConfig,
    PitchedPointer,
    ScaledGemm,
)

SILU = 0
SHAPES = [  # rows, channels, in_features
    (1, 4, 1),
    (64, 512, 1100),
    (128, 4096, 14336),
    (127, 132, 100),
    (129, 256, 128),
    (300, 700, 130),
    *repeats(((257, 4000, 1000),), ((640, 1536, 4096),)),
]


@pytest.fixture(scope="module")
def gemm(device):
    made = ScaledGemm(device)
    if not made.supports(4096, 4096, Epilogue.TO_HALF):
        pytest.skip("this GPU lacks the instructions")
    return made


def padded(values: np.ndarray, multiple: int) -> cp.ndarray:
    """A copy on the GPU whose rows are padded with garbage."""
    pitch = -(-values.shape[1] // multiple) * multiple + multiple
    garbage = np.nan if values.dtype.kind == "f" else 85
    whole = cp.full((len(values), pitch), garbage, values.dtype)
    whole[:, : values.shape[1]] = cp.asarray(values)
    return whole[:, : values.shape[1]]


def matrix(x: cp.ndarray) -> PitchedPointer:
    return x.data.ptr, x.strides[0] // x.itemsize


class Case(ScaledOperands):
    def run(
        self, gemm: ScaledGemm, epilogue: Epilogue, tile_config: GemmTileConfig | None = None, activation: int = 0
    ) -> np.ndarray:
        """What the kernel writes; nothing behind its result may change, but for the rest of 16 bytes."""
        columns = self.channels // 2 if epilogue is Epilogue.GATED else self.channels
        dtype = np.float32 if epilogue is Epilogue.TO_FLOAT else np.float16
        before = self.before if epilogue is Epilogue.ADD else np.full((self.rows, columns), np.nan, dtype)
        x, w, out = padded(self.x, 16), padded(self.w, 16), padded(before, 8)
        scales = [cp.asarray(v) for v in (self.x_scale, self.w_scale)]
        bias = None if self.bias is None else cp.asarray(self.bias)
        gemm.launch(
            matrix(x),
            scales[0].data.ptr,
            matrix(w),
            scales[1].data.ptr,
            0 if bias is None else bias.data.ptr,
            matrix(out),
            rows=self.rows,
            channels=self.channels,
            in_features=self.in_features,
            epilogue=epilogue,
            activation=activation,
            tile_config=tile_config,
            stream=cp.cuda.get_current_stream().ptr,
        )
        whole = cp.asnumpy(cp.ndarray((self.rows, matrix(out)[1]), out.dtype, out.data))
        vector = 16 // out.itemsize
        assert np.isnan(whole[:, -(-columns // vector) * vector :]).all()
        return whole[:, :columns]


def needs(tile_config: GemmTileConfig, epilogue: Epilogue, in_features: int) -> None:
    if not tile_config.serves(epilogue, -(-in_features // 128)):
        pytest.skip("too little for each part")


@pytest.mark.parametrize(
    ("epilogue", "bias"),
    [
        (Epilogue.TO_HALF, False),
        (Epilogue.TO_HALF, True),
        (Epilogue.TO_FLOAT, True),
        (Epilogue.ADD, True),
        (Epilogue.GATED, False),
    ],
)
@pytest.mark.parametrize("tile_config", TILE_CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_are_the_definition_s(gemm, shape, tile_config, epilogue, bias):
    needs(tile_config, epilogue, shape[2])
    case = Case(*shape, bias)
    np.testing.assert_array_equal(case.run(gemm, epilogue, tile_config, RELU), case.expected(epilogue))


@pytest.mark.parametrize("bias", [True, *repeats(False)])
@pytest.mark.parametrize("epilogue", [Epilogue.TO_HALF, Epilogue.TO_FLOAT, Epilogue.ADD, Epilogue.GATED])
@pytest.mark.parametrize("in_features", [300, *repeats(1024, 1100)])
@pytest.mark.parametrize("tile_config", list(map(GemmTileConfig, (256, 224, 160, 128), (2, 1, 2, 1))), ids=str)
def test_blocks_that_compute_several_tiles(gemm, tile_config, in_features, epilogue, bias):
    """A tile is written beside the next one's first stages, of which 300 columns have fewer than a tile has pieces."""
    case = Case(17 * 128 + 5, 17 * tile_config.width - 4, in_features, bias)
    np.testing.assert_array_equal(case.run(gemm, epilogue, tile_config, RELU), case.expected(epilogue))


@pytest.mark.parametrize("tile_config", [config for config in TILE_CONFIGS if config.split_k == 1], ids=str)
def test_no_tile_overwrites_a_box_that_is_still_stored(gemm, tile_config, request):
    """The result's rows overlap. Additions to them wait for each other, and some boxes are still stored when the next
    tile begins. All sums are integers that fp32 holds exactly, so their order does not matter.
    """
    if request.config.getoption("--fake-gpu"):
        pytest.skip("the fake GPU refuses rows that overlap")
    rows, channels, in_features, pitch = 3 * 132 * 128, tile_config.width, 32, 4  # three tiles for each of 132 SMs
    random = np.random.default_rng(0)
    x, w = random.integers(0, 2, (rows, in_features), np.int8), random.integers(0, 4, (channels, in_features), np.int8)
    y, expected = x.astype(np.float32) @ w.T.astype(np.float32), np.zeros(rows * pitch + channels, np.float32)
    for column in range(0, channels, pitch):
        expected[column : column + rows * pitch] += y[:, column : column + pitch].ravel()
    codes, weight, ones, out = (cp.asarray(v) for v in (x, w, np.ones(rows, np.float32), np.zeros_like(expected)))
    gemm.launch(
        matrix(codes),
        ones.data.ptr,
        matrix(weight),
        ones.data.ptr,
        0,
        (out.data.ptr, pitch),
        rows=rows,
        channels=channels,
        in_features=in_features,
        epilogue=Epilogue.ADD,
        tile_config=tile_config,
        stream=cp.cuda.get_current_stream().ptr,
    )
    np.testing.assert_array_equal(cp.asnumpy(out), expected)


@pytest.mark.parametrize("tile_config", TILE_CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_by_silu(gemm, shape, tile_config):
    needs(tile_config, Epilogue.GATED, shape[2])
    case = Case(*shape, bias=False)
    gate, up = np.split(case.expected(Epilogue.TO_HALF).astype(np.float32), 2, axis=1)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    # fp16 keeps 11 bits, and a few units of fp32 may move a number over the middle between two of them
    np.testing.assert_allclose(case.run(gemm, Epilogue.GATED, tile_config, SILU), expected, rtol=2**-10, atol=2**-24)


@settings(
    max_examples=min(30, settings.default.max_examples),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(1, 700),
    st.integers(1, 300),
    st.integers(1, 2500),
    st.sampled_from([e for e in EPILOGUES if e in CUPY_EPILOGUES]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_shape(gemm, rows, quarter, in_features, epilogue, bias, seed):
    case = Case(rows, 4 * quarter, in_features, bias, seed)
    np.testing.assert_array_equal(case.run(gemm, epilogue, activation=RELU), case.expected(epilogue))


def test_a_kernel_that_is_wrong_is_not_trusted(device, monkeypatch):
    assert ScaledGemm(device).verified
    wrong = ScaledGemm(device)
    monkeypatch.setattr(wrong, "launch", lambda *args, **kwargs: None)
    with pytest.warns(RuntimeWarning, match="a product of 300 x 272 by 400 x 272 was wrong"):
        assert not wrong.verified


def test_extreme_codes_do_not_overflow(gemm):
    case = Case(130, 64, 131071, bias=False)
    case.x[:], case.w[:] = -128, -128
    case.x_scale[:], case.w_scale[:] = 2.0**-15, 2.0**-3
    assert (case.run(gemm, Epilogue.TO_HALF) == np.float16(131071 * 2.0**-4)).all()


def test_a_scale_that_is_no_number_stays_in_its_row(gemm):
    case = Case(200, 256, 256, bias=False)
    case.x_scale[77] = np.nan
    for epilogue in (Epilogue.TO_HALF, Epilogue.ADD):
        assert np.isnan(case.run(gemm, epilogue)).all(axis=1).nonzero()[0].tolist() == [77]
