"""The kernels of mixtures of experts equal their definition: integers and w8a8 products bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from expert_layer import experts_forward
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_experts import RandomLayer, Sizes, codes_on_device, padded, rows_on_device

from bminf_lite.backend.expert_values import (
    CHOSEN_BY_LOGITS,
    ExpertActivation,
    GroupScore,
    MaskedScore,
    RouterSpec,
    Score,
)
from bminf_lite.backend.experts import (
    ExpertWeights,
    activated,
    expert_linear,
    expert_linear_codes,
    rounded,
    sort_by_expert,
    weighted_sum,
)
from bminf_lite.backend.quantization import quantize_rows
from bminf_lite.backend.rotation import rotated
from bminf_lite.backend.routing import route

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.cuda.kernels.constants import GROUPED_PRODUCTS  # noqa: E402
from bminf_lite.cuda.kernels.experts import router  # noqa: E402
from bminf_lite.cuda.kernels.experts.grouped_gemm import GroupedGemm  # noqa: E402
from bminf_lite.cuda.kernels.experts.layer import ExpertKernels, ExpertLayerWeights  # noqa: E402
from bminf_lite.cuda.kernels.experts.pairs import Addend, SortedPairs  # noqa: E402
from bminf_lite.cuda.kernels.experts.router import FEW_ROWS  # noqa: E402
from bminf_lite.cuda.kernels.experts.weights import (  # noqa: E402
    ExpertMatrices,
    RouterWeights,
    SharedExpertWeights,
    alternate_gate_and_up,
)
from bminf_lite.cuda.kernels.launcher import Launcher  # noqa: E402
from bminf_lite.cuda.kernels.rowwise.rows import RowKernels  # noqa: E402

RELU = ExpertActivation("relu")
"""Has no function that a device approximates, so results are compared bit for bit."""
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalise": True},
    "qwen2_moe": {"weight_type": "bfloat16"},
    "gpt_oss": {"score": Score.SOFTMAX_OF_CHOSEN},
    "minimax_m2": {"score": Score.SIGMOID, "renormalise": True},
    "ernie4_5_moe": {"renormalise": True, "min_sum": 0.4, "weight_type": "float16"},
    "deepseek_v2": {
        "num_groups": 4,
        "top_groups": 2,
        "group_score": GroupScore.LARGEST,
        "masked": MaskedScore.ZERO,
        "scale": 16.0,
    },
    "deepseek_v3": {
        "score": Score.SIGMOID,
        "renormalise": True,
        "epsilon": 1e-20,
        "scale": 2.5,
        "num_groups": 4,
        "top_groups": 2,
    },
    "lfm2_moe": {"score": Score.SIGMOID, "renormalise": True, "epsilon": 1e-6},
    "phimoe": {"score": Score.SPARSE_MIXER, "closeness": 0.6},
}


@pytest.fixture(scope="module", params=["best", "mma.sync"])
def kernels(request: pytest.FixtureRequest, device: Any) -> ExpertKernels:
    """This GPU's kernels; and where it has a better grouped product, also those with the one that every GPU has."""
    launcher = Launcher(device, cp.cuda.get_current_stream().ptr)
    made = ExpertKernels(launcher, RowKernels(launcher))
    if request.param == "mma.sync":
        if type(made.grouped) is GroupedGemm:
            pytest.skip("this GPU has no better one")
        made.grouped = GroupedGemm(launcher)
    return made


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Memory in which every unwritten value shows."""
    made = cp.empty(shape, dtype)
    made.view(np.uint8).fill(0xFF) if made.size else None
    return made


# -- the router --------------------------------------------------------------------------------------------------------


def chosen_on_device(
    kernels: ExpertKernels, logits: np.ndarray, spec: RouterSpec, bias: np.ndarray | None, scale: np.ndarray | None
) -> list[np.ndarray]:
    """``route`` on the GPU."""
    vectors = [None if v is None else cp.asarray(v) for v in (bias, scale)]
    router = RouterWeights(spec, cp.zeros((1, 32), np.float16), 32, None, *vectors)
    out = [empty((len(logits), spec.top_k), kind) for kind in (np.int32, np.float32)]
    kernels.router.choose(None, cp.asarray(logits), router, *out)
    return [cp.asnumpy(x) for x in out]


@pytest.mark.parametrize("experts", [8, 40, 128, 160, 384])
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_and_weights_are_the_definition_s(kernels: ExpertKernels, family: str, experts: int) -> None:
    spec = RouterSpec(experts, 6 if experts > 8 else 2, **FAMILIES[family])
    random = np.random.default_rng(experts)
    logits = (random.normal(size=(23, experts)) * 4).astype(np.float32)
    logits[5], logits[6], logits[7, 3], logits[8] = np.nan, 0, np.nan, np.round(logits[8])
    logits[9, 1], logits[10, 2] = np.inf, -np.inf
    for has_bias in (False, True) if spec.score not in CHOSEN_BY_LOGITS else (False,):
        bias = random.normal(size=experts).astype(np.float32) * 0.3 if has_bias else None
        scale = random.uniform(0.5, 2, experts).astype(np.float32) if has_bias else None
        found, expected = chosen_on_device(kernels, logits, spec, bias, scale), route(logits, spec, bias, scale)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def logits_on_device(
    kernels: ExpertKernels, layer: RandomLayer, device: ExpertLayerWeights, x: np.ndarray
) -> list[np.ndarray]:
    """Logits, codes and scales of a residual stream."""
    count, sizes = len(x), layer.sizes
    pitch = device.hidden.pitch
    out = empty((count, sizes.experts), np.float32)
    codes, scales, normed = (
        empty((count, pitch), np.int8),
        empty((count,), np.float32),
        empty((count, pitch), np.float32),
    )
    kernels.router.logits(
        None,
        rows_on_device(x, cp.asarray),
        layer.norm(cp.asarray),
        device.router,
        out,
        normed,
        codes,
        scales,
        device.hidden.rotation,
    )
    return [cp.asnumpy(v) for v in (out, codes[:, : sizes.hidden], scales)]


@pytest.mark.parametrize(
    ("hidden", "experts", "rotation", "has_norm"),
    [
        (96, 8, 1, True),
        (2048, 128, 256, True),
        (2880, 32, 64, True),
        (4112, 60, 16, True),
        (2048, 8, 1, True),
        (100, 8, 1, False),
        (2112, 40, 64, False),
    ],
)
def test_logits_have_one_order_of_sums(
    kernels: ExpertKernels, hidden: int, experts: int, rotation: int, has_norm: bool
) -> None:
    """Whatever the number of rows, and for weights in fp16 and in fp32. The codes are those of the rotated rows."""
    layer = RandomLayer(Sizes(hidden, 32, 32, experts, 2, rotations=(rotation, 1), normed=has_norm), RELU)
    device = layer.on_device(cp.asarray)
    wide = replace(device, router=replace(device.router, matrix=device.router.matrix.astype(np.float32)))
    x = layer.tokens(FEW_ROWS + 4)
    normed = layer.read(x)
    assert layer.router_bias is not None
    exact = normed.astype(np.float64) @ layer.router.T.astype(np.float64) + layer.router_bias
    together = logits_on_device(kernels, layer, device, x)
    terms = np.abs(normed) @ np.abs(layer.router.T.astype(np.float32)) + 1
    assert (np.abs(together[0] - exact) <= 64 * 2.0**-24 * terms).all()
    for weights, count in ((device, 1), (device, 5), (wide, 2), (wide, len(x))):
        for a, b in zip(logits_on_device(kernels, layer, weights, x[-count:]), together, strict=True):
            np.testing.assert_array_equal(a, b[-count:])
    codes, scales = quantize_rows(rotated(normed, rotation))
    assert (np.abs(together[1].astype(int) - codes) <= has_norm).all()
    np.testing.assert_allclose(together[2], scales, rtol=2.0**-20)


@pytest.mark.parametrize(("hidden", "experts", "rows"), [(100, 40, 21), (1040, 70, 18)])
@pytest.mark.parametrize("many", router.MANY, ids=str)
def test_warps_of_many_rows_have_the_same_order_of_sums(
    kernels: ExpertKernels,
    hidden: int,
    experts: int,
    rows: int,
    many: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = RandomLayer(Sizes(hidden, 32, 32, experts, 2), RELU)
    device, x = layer.on_device(cp.asarray), layer.tokens(rows)
    expected = np.concatenate([logits_on_device(kernels, layer, device, part)[0] for part in np.split(x, [FEW_ROWS])])
    monkeypatch.setattr(router, "MANY", (many,) * 3)
    np.testing.assert_array_equal(logits_on_device(kernels, layer, device, x)[0], expected)


@pytest.mark.parametrize(
    ("hidden", "experts", "rows", "stages"), [(100, 40, 70, 4), (260, 33, 33, 4), (1000, 33, 33, 4), (900, 33, 33, 3)]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_tiles_of_many_rows_have_the_same_order_of_sums(
    kernels: ExpertKernels,
    hidden: int,
    experts: int,
    rows: int,
    stages: int,
    dtype: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = RandomLayer(Sizes(hidden, 32, 32, experts, 2), RELU)
    device = layer.on_device(cp.asarray)
    matrix = padded(layer.router.astype(np.float32), np.nan)[:, : hidden + -hidden % 16].astype(dtype)
    device = replace(device, router=replace(device.router, matrix=cp.asarray(matrix)))
    x = layer.tokens(rows)
    expected = logits_on_device(kernels, layer, device, x)[0]
    monkeypatch.setattr(router, "TILE_SHARE", 1000)
    monkeypatch.setattr(router, "TILE_STAGES", [n for n in router.TILE_STAGES if n <= stages])
    np.testing.assert_array_equal(logits_on_device(kernels, layer, device, x)[0], expected)


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "top_k", "experts"), [(1, 1, 1), (5, 2, 3), (40, 8, 128), (700, 2, 8), (1100, 4, 2)])
@pytest.mark.parametrize("scaled", [False, True])
def test_pairs_are_sorted_as_defined(
    kernels: ExpertKernels, count: int, top_k: int, experts: int, scaled: bool
) -> None:
    random = np.random.default_rng(count)
    ids = random.integers(0, experts, (count, top_k)).astype(np.int32) // random.integers(1, 3, (count, 1), np.int32)
    codes, scales = random.integers(-128, 128, (count, 32), np.int8), random.uniform(0, 1, count).astype(np.float32)
    factors = random.uniform(0, 1, (count, top_k)).astype(np.float32)
    pairs = ids.size
    out = SortedPairs(
        empty((experts + 1,), np.int32),
        empty((pairs,), np.int32),
        empty((pairs,), np.int32),
        empty((pairs, 32), np.int8),
        empty((pairs,), np.float32),
        claimed=empty((GROUPED_PRODUCTS,), np.int32),
    )
    kernels.pairs.sort(
        None, cp.asarray(ids), cp.asarray(codes), cp.asarray(scales), cp.asarray(factors) if scaled else None, out
    )
    order, offsets = sort_by_expert(ids, experts)
    np.testing.assert_array_equal(cp.asnumpy(out.offsets), offsets)
    np.testing.assert_array_equal(cp.asnumpy(out.pairs), order)
    np.testing.assert_array_equal(cp.asnumpy(out.places)[order], np.arange(pairs))
    np.testing.assert_array_equal(cp.asnumpy(out.codes), codes[order // top_k])
    expected = scales[order // top_k] * (factors.ravel()[order] if scaled else np.float32(1))
    np.testing.assert_array_equal(cp.asnumpy(out.scales), expected)
    assert not cp.asnumpy(out.claimed).any()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("count", "top_k", "columns"), [(1, 8, 2048), (7, 3, 40), (3, 1, 2880)])
def test_results_are_added_as_defined(kernels: ExpertKernels, count: int, top_k: int, columns: int, add: bool) -> None:
    random = np.random.default_rng(0)
    results = random.normal(size=(count * top_k, columns)).astype(np.float16)
    places = random.permutation(count * top_k).astype(np.int32)
    weights = random.uniform(0, 1, (count, top_k)).astype(np.float32)
    before = random.normal(size=(count, columns)).astype(np.float32)
    other, gate = random.normal(size=(count, columns)).astype(np.float32), random.uniform(0, 1, count)
    gate = gate.astype(np.float32)
    for given_weights, gates in ((weights, None), (None, gate), (weights, np.ones_like(gate))):
        out = rows_on_device(before, cp.asarray)
        of_device = None if given_weights is None else cp.asarray(given_weights)
        addend = None
        if gates is not None:
            addend = Addend(rows_on_device(other, cp.asarray), None if gates is not gate else cp.asarray(gates))
        kernels.pairs.weighted_sum(
            None, rows_on_device(results, cp.asarray), cp.asarray(places), of_device, top_k, out, add, addend
        )
        ordered = results[places].astype(np.float32).reshape(count, top_k, columns)
        expected = weighted_sum(ordered, np.ones_like(weights) if given_weights is None else weights)
        expected = expected if gates is None else expected + gates[:, None] * other
        np.testing.assert_array_equal(cp.asnumpy(out), before + expected if add else expected)


# -- products ----------------------------------------------------------------------------------------------------------


def product(kernels: ExpertKernels, layer: RandomLayer, counts: list[int], activation: ExpertActivation | None) -> Any:
    """The grouped product of random rows, ``counts`` of each expert, and what the definition makes of them."""
    weight = layer.on_device(cp.asarray).hidden
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    experts = np.repeat(np.arange(len(counts)), counts)
    codes = layer.random.integers(-127, 128, (offsets[-1], layer.sizes.hidden), np.int8)
    scales = layer.random.uniform(1e-3, 1e-2, len(codes)).astype(np.float32)
    features = weight.out_features // (2 if activation and activation.gated else 1)
    out = empty((len(codes) + 1, features + 8), np.float16)
    given = [cp.asarray(v) for v in (scales, offsets, np.zeros(1, np.int32))]
    kernels.grouped.launch(None, codes_on_device(codes, cp.asarray), *given, weight, out, activation)
    found = cp.asnumpy(out)
    assert np.isnan(found[-1]).all() and np.isnan(found[:, features:]).all()
    y = rounded(expert_linear_codes(codes, scales, experts, layer.layer.hidden), np.dtype(np.float16))
    if activation is not None:
        y = rounded(activated(y.astype(np.float32), activation), np.dtype(np.float16))
    return found[:-1, :features], y


SHAPES = [
    (Sizes(64, 16, 16, 4, 2), [3, 0, 9, 1]),
    (Sizes(272, 136, 16, 3, 2), [0, 17, 0]),  # more than one tile of the weight, the last one not whole
    (Sizes(48, 72, 16, 5, 2, bias=False), [8, 40, 65, 2, 0]),
    (Sizes(400, 64, 16, 2, 2), [130, 70]),  # several tiles of rows
    (Sizes(800, 136, 16, 3, 2), [90, 121, 155]),  # tiles of other numbers of rows, of more columns than stages hold
    # more tiles than a GPU has SMs, of very different numbers of rows
    (Sizes(136, 2056, 16, 24, 2), [37 * i % 200 for i in range(24)]),
    (Sizes(800, 2056, 16, 24, 2), [5 * i % 9 for i in range(24)]),
]


@pytest.mark.parametrize("activation", [RELU, ExpertActivation("relu_squared", gated=False), None], ids=str)
@pytest.mark.parametrize(("sizes", "counts"), SHAPES, ids=str)
def test_a_grouped_product_is_the_definition_s(
    kernels: ExpertKernels, sizes: Sizes, counts: list[int], activation: ExpertActivation | None
) -> None:
    layer = RandomLayer(sizes, activation or ExpertActivation("relu", gated=False))
    found, expected = product(kernels, layer, counts, activation)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("function", ["silu", "gelu_tanh", "gelu", "gpt-oss"])
def test_activations(kernels: ExpertKernels, function: str) -> None:
    activation = ExpertActivation(limit=1.0) if function == "gpt-oss" else ExpertActivation(function)
    found, expected = product(kernels, RandomLayer(Sizes(64, 16, 16, 3, 2), activation), [3, 5, 2], activation)
    # a function's approximation of 2^-20 moves a rounding to fp16
    np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=2.0**-9, atol=2.0**-20)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 300), st.booleans(), st.integers(0, 99), st.data())
def test_grouped_products_of_any_shape(
    kernels: ExpertKernels, experts: int, groups: int, hidden: int, gated: bool, seed: int, data: Any
) -> None:
    counts = data.draw(st.lists(st.integers(0, 90), min_size=experts, max_size=experts).filter(any))
    layer = RandomLayer(Sizes(hidden, 8 * groups, 8, experts, 1), replace(RELU, gated=gated), seed)
    found, expected = product(kernels, layer, counts, layer.activation)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("unused", [0, 30])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(
    ("activation", "bias"), [(RELU, False), (ExpertActivation("relu", gated=False), True), (None, True)], ids=str
)
def test_a_float_product_has_one_order_of_sums(
    kernels: ExpertKernels, is_int8: bool, activation: ExpertActivation | None, bias: bool, unused: int
) -> None:
    """Near the definition; a row has the same bits among others and alone, whether it is found by a pair's number.

    Experts that no token chose make the experts more than the pairs, of which most then have one row.
    """
    random, (used, features, n, top_k) = np.random.default_rng(2), (3, 44, 48, 2)
    experts = used + unused
    kind = np.int8 if is_int8 else np.float16
    values = (
        random.integers(-127, 128, (experts, n, features)) if is_int8 else random.normal(size=(experts, n, features))
    )
    scale = random.uniform(0.5, 1.5, (experts, n)).astype(np.float32) / 64 if is_int8 else None
    made = ExpertWeights(
        values.astype(kind), scale, random.normal(size=(experts, n)).astype(np.float32) if bias else None
    )
    gated = activation is not None and activation.gated
    order = alternate_gate_and_up if gated else np.asarray
    vectors = [None if v is None else cp.asarray(order(v)) for v in (made.scale, made.bias)]
    weight = ExpertMatrices(cp.asarray(padded(order(made.values))), *vectors, features, dynamic=False)
    x = random.normal(size=(14, features)).astype(np.float16)
    ids = np.stack([random.permutation(used)[:top_k] for _ in x]).astype(np.int32)

    def product(tokens: np.ndarray) -> np.ndarray:
        """The products of the pairs of some tokens, by pair."""
        pairs, offsets = sort_by_expert(ids[tokens], experts)
        out = empty((len(pairs), n), np.float16)
        kernels.floats.launch(
            None,
            rows_on_device(x[tokens], cp.asarray),
            cp.asarray(pairs),
            top_k,
            cp.asarray(offsets),
            weight,
            out,
            activation,
        )
        sorted_rows = empty((len(pairs), n), np.float16)
        kernels.floats.launch(
            None,
            rows_on_device(x[tokens][pairs // top_k], cp.asarray),
            None,
            1,
            cp.asarray(offsets),
            weight,
            sorted_rows,
            activation,
        )
        columns = n // 2 if gated else n
        np.testing.assert_array_equal(cp.asnumpy(sorted_rows)[:, :columns], cp.asnumpy(out)[:, :columns])
        found = np.empty((len(pairs), columns), np.float16)
        found[pairs] = cp.asnumpy(out)[:, :columns]
        return found

    together, half = product(np.arange(len(x))), np.dtype(np.float16)
    y = rounded(expert_linear(np.repeat(x, top_k, axis=0), ids.ravel(), made), half)
    expected = y if activation is None else rounded(activated(y.astype(np.float32), activation), half)
    # each of gate and up may be rounded to another fp16 number, and their product once more
    np.testing.assert_allclose(together, expected, rtol=2.0**-8, atol=2.0**-8)
    by_token = together.reshape(len(x), -1)
    for tokens in ([3], [0, 13], list(range(2, 9))):
        np.testing.assert_array_equal(product(np.array(tokens)).reshape(len(tokens), -1), by_token[tokens])


@pytest.mark.parametrize(("hidden", "has_norm"), [(48, True), (2056, True), (60, False)])
def test_a_gate_is_the_sigmoid_of_a_product(kernels: ExpertKernels, hidden: int, has_norm: bool) -> None:
    layer = RandomLayer(Sizes(hidden, 32, 32, 4, 2, normed=has_norm), RELU)
    x, vector = layer.tokens(3), (layer.random.normal(size=hidden) / np.sqrt(hidden)).astype(np.float32)
    out = empty((3, 1), np.float32)
    gate = cp.asarray(padded(vector))
    kernels.router.scalar_gate(None, rows_on_device(x, cp.asarray), layer.norm(cp.asarray), gate, out)
    exact = layer.read(x).astype(np.float64) @ vector
    np.testing.assert_allclose(cp.asnumpy(out)[:, 0], 1 / (1 + np.exp(-exact)), rtol=1e-5)
    alone = empty((1, 1), np.float32)
    kernels.router.scalar_gate(None, rows_on_device(x[1:2], cp.asarray), layer.norm(cp.asarray), gate, alone)
    assert cp.asnumpy(alone)[0, 0] == cp.asnumpy(out)[1, 0]


# -- layers ------------------------------------------------------------------------------------------------------------

LAYERS = {  # the kernels of few tokens compute three tokens of those with many experts
    "qwen3": (Sizes(256, 96, 256, 104, 4, bias=False), RELU, {"renormalise": True}),
    "flex_olmo": (Sizes(128, 96, 128, 7, 5, False, (128, 32), normed=False), RELU, {}),
    "no norm, many experts": (Sizes(96, 64, 96, 64, 2, bias=False, normed=False), RELU, {"renormalise": True}),
    "phimoe": (Sizes(128, 64, 128, 16, 2, False), RELU, {"score": Score.SPARSE_MIXER, "closeness": 0.5}),
    "mixtral": (Sizes(128, 448, 136, 8, 2, bias=False), RELU, {"renormalise": True}),
    "gpt-oss": (Sizes(208, 72, 208, 12, 3), RELU, {"score": Score.SOFTMAX_OF_CHOSEN}),
    "all rotated": (Sizes(256, 96, 256, 16, 4, False, (256, 32)), RELU, {"renormalise": True}),
    "rotated beyond what registers hold": (Sizes(64, 544, 64, 5, 4, True, (64, 32)), RELU, {}),
    "llama4, rotated": (Sizes(96, 272, 96, 4, 1, False, (1, 16)), RELU, {"score": Score.SIGMOID, "scales_input": True}),
    "llama4": (Sizes(96, 64, 96, 32, 1, bias=False), RELU, {"score": Score.SIGMOID, "scales_input": True}),
    "short pipelines": (Sizes(96, 64, 672, 128, 16, bias=False), RELU, {"renormalise": True}),
    "nemotron_h": (
        Sizes(96, 272, 64, 160, 6),
        ExpertActivation("relu_squared", gated=False),
        {"score": Score.SIGMOID, "renormalise": True, "scale": 2.5, "num_groups": 4, "top_groups": 2},
    ),
}


def run(
    kernels: ExpertKernels,
    layer: RandomLayer,
    device: ExpertLayerWeights,
    x: np.ndarray,
    add: bool = False,
    **more: Any,
) -> list[np.ndarray]:
    """Results, ids and weights of a residual stream."""
    out, norm = rows_on_device(np.full((len(x), layer.sizes.out), 0.5, np.float32), cp.asarray), layer.norm(cp.asarray)
    routing = kernels.forward(None, rows_on_device(x, cp.asarray), norm, device, out, add, empty, **more)
    return [cp.asnumpy(v) for v in (out, routing.ids, routing.weights)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("count", [1, 3, 19])
def test_a_layer_is_the_definition_s(kernels: ExpertKernels, name: str, count: int) -> None:
    """From the codes and logits that the router's kernels give, to the bit."""
    sizes, activation, spec = LAYERS[name]
    layer = RandomLayer(sizes, activation, **spec)
    device, x = layer.on_device(cp.asarray), layer.tokens(count)
    logits, codes, scales = logits_on_device(kernels, layer, device, x)
    ids, weights = route(logits, layer.spec)
    found = run(kernels, layer, device, x)
    np.testing.assert_array_equal(found[1], ids)
    np.testing.assert_array_equal(found[2], weights)
    # the definition quantizes dequantized codes to the same codes, and scales that may differ in the last bit
    hidden = replace(layer.layer.hidden, scale=layer.layer.hidden.scale)
    pairs, half = np.repeat(np.arange(count), layer.spec.top_k), np.dtype(np.float16)
    factors = weights.ravel() if layer.spec.scales_input else np.ones(len(pairs), np.float32)
    y = rounded(expert_linear_codes(codes[pairs], scales[pairs] * factors, ids.ravel(), hidden), half)
    y = rounded(activated(y.astype(np.float32), activation), half)
    y = rounded(expert_linear(y, ids.ravel(), layer.layer.down), half)
    weights = np.ones_like(weights) if layer.spec.scales_input else weights
    expected = weighted_sum(y.astype(np.float32).reshape(*ids.shape, -1), weights)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(run(kernels, layer, device, x, add=True)[0], np.float32(0.5) + expected)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_near_the_definition_from_the_residual_stream(kernels: ExpertKernels, name: str) -> None:
    sizes, activation, spec = LAYERS[name]
    layer = RandomLayer(sizes, activation, **spec)
    x = layer.tokens(3)
    found, ids, weights = run(kernels, layer, layer.on_device(cp.asarray), x)
    expected = experts_forward(layer.read(x), ids, weights, layer.layer, np.float16)
    # a last bit of the norm moves a code next to a tie
    assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("name", LAYERS)
def test_a_token_has_the_same_bits_in_every_batch(kernels: ExpertKernels, name: str) -> None:
    """Alone, with a few others, and with many."""
    sizes, activation, spec = LAYERS[name]
    layer = RandomLayer(sizes, replace(activation, function="silu") if activation.gated else activation, **spec)
    device, x = layer.on_device(cp.asarray), layer.tokens(FEW_ROWS + 5)
    together = run(kernels, layer, device, x)
    for rows in ([0], [20], [3, 9], [5, 2, 20], list(range(7, 15))):
        for a, b in zip(run(kernels, layer, device, x[rows]), together, strict=True):
            np.testing.assert_array_equal(a, b[rows])


def in_slots(layer: ExpertLayerWeights, random: np.random.Generator) -> ExpertLayerWeights:
    """The same weights in the slots of a cache, some of which hold something else."""
    experts = layer.router.spec.num_experts
    slots = random.permutation(2 * experts)[:experts].astype(np.int32)

    def moved(weights: ExpertMatrices) -> ExpertMatrices:
        values = np.full((2 * experts, *weights.matrix.shape[1:]), 99, weights.matrix.dtype)
        values[slots] = cp.asnumpy(weights.matrix)
        return replace(weights, matrix=cp.asarray(values), slots=cp.asarray(slots))

    return replace(layer, hidden=moved(layer.hidden), down=moved(layer.down))


@pytest.mark.parametrize("name", LAYERS)
def test_weights_may_lie_in_slots(kernels: ExpertKernels, name: str) -> None:
    sizes, activation, spec = LAYERS[name]
    layer = RandomLayer(sizes, activation, **spec)
    device = layer.on_device(cp.asarray)
    for count in (1, 3, 19):
        x = layer.tokens(count)
        moved = in_slots(device, layer.random)
        for found, expected in zip(run(kernels, layer, moved, x), run(kernels, layer, device, x), strict=True):
            np.testing.assert_array_equal(found, expected)


NO_GATE = ExpertActivation("relu_squared", gated=False)
SHARED = {  # with many experts, of which three tokens seldom have one in common; a gate; parts of the shared expert
    "qwen3_next": (Sizes(256, 96, 256, 104, 4, False), RELU, {"renormalise": True}, True, 1),
    "deepseek_v3, rotated": (Sizes(128, 272, 136, 64, 2, False, (128, 16)), RELU, {"score": Score.SIGMOID}, False, 1),
    "llama4": (Sizes(96, 64, 96, 32, 1, False), RELU, {"score": Score.SIGMOID, "scales_input": True}, False, 1),
    "no gate": (Sizes(96, 272, 64, 160, 6, False), NO_GATE, {}, True, 1),
    "deepseek_v2": (Sizes(128, 96, 136, 64, 2, False), RELU, {"scale": 16.0}, False, 2),
    "deepseek_v2, rotated": (Sizes(128, 288, 136, 64, 2, False, (128, 32)), RELU, {}, False, 3),
    "qwen2_moe": (Sizes(96, 64, 96, 64, 1, False), RELU, {"weight_type": "bfloat16"}, True, 4),
    "nemotron_h": (Sizes(96, 544, 64, 64, 2, False), NO_GATE, {"score": Score.SIGMOID}, False, 2),
}


@dataclass(frozen=True)
class Matrix:
    """A matrix as dense products read it: ``WeightRows``."""

    matrix: Any
    scale: Any
    out_features: int
    in_features: int
    pitch: int
    bias: None = None
    group_size: int = 0
    nbytes: int = 0

    @classmethod
    def of(cls, weights: ExpertWeights, expert: int) -> Matrix:
        codes, scale = padded(weights.values[expert], 77), weights.scale
        assert scale is not None
        return cls(cp.asarray(codes), cp.asarray(scale[expert]), *weights.values.shape[1:], codes.shape[1])


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("count", [1, 3])
def test_an_expert_of_all_tokens_is_one_more_pair(kernels: ExpertKernels, name: str, count: int) -> None:
    """It has the bits of a product of its own, which is added behind the others'. It may be several pairs."""
    sizes, activation, spec, has_gate, parts = SHARED[name]
    layer = RandomLayer(sizes, activation, **spec)
    device, x = layer.on_device(cp.asarray), layer.tokens(count)
    other = RandomLayer(replace(sizes, features=parts * sizes.features), activation, seed=1, **spec)
    vector = cp.asarray(padded((other.random.normal(size=sizes.hidden) / 9).astype(np.float32))) if has_gate else None
    shared = SharedExpertWeights(Matrix.of(other.layer.hidden, 2), Matrix.of(other.layer.down, 2), vector)
    assert kernels.takes_shared(count, device, shared)
    _, codes, scales = logits_on_device(kernels, layer, device, x)
    half, experts = np.dtype(np.float16), np.full(count, 2)
    y = rounded(expert_linear_codes(codes, scales, experts, other.layer.hidden), half)
    y = rounded(activated(y.astype(np.float32), activation), half)
    addend = expert_linear(y, experts, other.layer.down)
    gate = None
    if vector is not None:
        gate = empty((count,), np.float32)
        kernels.router.scalar_gate(None, rows_on_device(x, cp.asarray), layer.norm(cp.asarray), vector, gate)
    for add in (False, True):
        expected = run(kernels, layer, device, x, add, addend=Addend(rows_on_device(addend, cp.asarray), gate))
        found = run(kernels, layer, device, x, add, shared=shared)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_shared_expert_of_another_size_is_computed_alone(kernels: ExpertKernels) -> None:
    """If its hidden values are not those of whole experts, or if their maxima are not found at once."""
    sizes, activation, spec, _, parts = SHARED["nemotron_h"]
    layer = RandomLayer(sizes, activation, **spec).on_device(cp.asarray)

    def takes(count: int, features: int) -> bool:
        other = RandomLayer(replace(sizes, features=features), activation, **spec).layer
        shared = SharedExpertWeights(Matrix.of(other.hidden, 0), Matrix.of(other.down, 0))
        return kernels.takes_shared(count, layer, shared)

    assert takes(4, parts * sizes.features) and not takes(1, parts * sizes.features + 32)
    assert not takes(1, sizes.features // 2) and takes(2, 6 * sizes.features) and not takes(3, 6 * sizes.features)


def test_rows_that_are_no_numbers_stay_in_their_tokens(kernels: ExpertKernels) -> None:
    sizes, activation, spec = LAYERS["qwen3"]
    layer = RandomLayer(sizes, activation, **spec)
    device = layer.on_device(cp.asarray)
    for count in (3, 20):
        x = layer.tokens(count)
        before = run(kernels, layer, device, x)[0]
        x[1, 7] = np.nan
        found = run(kernels, layer, device, x)[0]
        assert np.isnan(found[1]).all()
        np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(before, 1, 0))
