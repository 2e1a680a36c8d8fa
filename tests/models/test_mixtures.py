"""Mixtures of experts: what a file may hold, and what is decided and compared where few tokens reach an expert."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_layer import ExpertLayer, experts_forward
from safetensors.numpy import save_file
from tiny_models import MIXTURES, Golden, RandomWeights, TinyModel, goldens, random_tokens

import bminf_lite
from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.expert_values import ExpertActivation, ExpertBiases, RouterSpec
from bminf_lite.backend.experts import ExpertWeights
from bminf_lite.backend.mixture import SharedExpert, choose_experts, mix
from bminf_lite.backend.quantization import HostWeight, Int8Weight, quantize_weight
from bminf_lite.backend.rotation import rotated, rotation_of
from bminf_lite.backend.values import Norm
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window
from bminf_lite.layers.recording import LEAST_ROWS, LinearCall, LinearHooks

FIRST = [next(goldens(family)) for family in MIXTURES]
NAMES_SINCE_5 = (r"\.block_sparse_moe\.", ".mlp.")


def fused(golden: Golden) -> dict[str, np.ndarray]:
    """The golden's tensors, those of experts in one tensor for a layer, with the names of transformers 5."""
    tensors, spec = dict(RandomWeights(golden.config, golden.seed).tensors), golden.spec
    for name, experts in spec.fused.items():
        if not name.endswith("_blocks"):
            tensors[name] = experts.joined(tensors)
    parts = {name for experts in spec.fused.values() for name in chain(*experts.experts)}
    tensors = {name: values for name, values in tensors.items() if name not in parts}
    is_renamed = golden.config["model_type"] in ("mixtral", "minimax_m2")
    return {re.sub(*NAMES_SINCE_5, name) if is_renamed else name: values for name, values in tensors.items()}


def expert_matrices(golden: Golden) -> set[str]:
    """The names of all matrices of experts."""
    names = (name for fused in golden.spec.fused.values() for expert in fused.experts for name in expert)
    return {name for name in names if name.endswith(".weight")}


@pytest.mark.parametrize("golden", FIRST, ids=str)
def test_fused_and_separate_tensors_are_the_same_model(golden: Golden, tmp_path: Path) -> None:
    """Float and migrated, bit for bit; a migrated folder has a matrix for each expert."""
    golden.save(tmp_path / "separate", RandomWeights(golden.config, golden.seed).tensors)
    golden.save(tmp_path / "fused", fused(golden))
    found = []
    for source in ("separate", "fused"):
        bminf_lite.migrate(tmp_path / source, tmp_path / f"{source} w8a8")
        for folder in (source, f"{source} w8a8"):
            with bminf_lite.load(tmp_path / folder, device="cpu") as model:
                found.append(model.logits(golden.tokens))
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    with open_model(tmp_path / "fused w8a8") as migrated:
        stored = {name: info.dtype for name, info in migrated.checkpoint.tensors.items()}
        spec = migrated.spec
    assert all(stored[matrix] == "I8" for matrix in expert_matrices(golden))
    routers = {stored[name] for name, p in spec.parameters.items() if p.role.value == "router"}
    assert routers == {"F32"}


@pytest.mark.parametrize("golden", FIRST, ids=str)
def test_a_fused_tensor_of_another_shape_is_named(golden: Golden, tmp_path: Path) -> None:
    tensors = fused(golden)
    name = next(name for name, values in tensors.items() if values.ndim == 3 and "conv" not in name)
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])
    golden.save(tmp_path / "source", tensors)
    with pytest.raises(CheckpointError, match=r"' has shape \[\d, \d+, \d+\]; config\.json needs \[\d, "):
        bminf_lite.load(tmp_path / "source", device="cpu")


@pytest.mark.parametrize("golden", FIRST, ids=str)
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "float"])
def test_a_token_gets_the_same_bits_alone_and_together(golden: Golden, kind: str) -> None:
    """Rows of tokens in one step against one step each; float products of BLAS may differ in their last bits."""
    weights = RandomWeights(golden.config, golden.seed, kind != "float", kind == "w8a8")
    together, alone = (TinyModel(CpuBackend(), golden.config, weights) for _ in range(2))
    tokens = golden.tokens[:12]
    expected = together.run(tokens)
    found = np.concatenate([alone.run(tokens[i : i + 1]) for i in range(len(tokens))])
    if kind == "w8a8":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_the_operation_is_the_definition(dynamic: bool | None, limit: float | None) -> None:
    """:meth:`Backend.experts` of weights of their own equals ``experts_forward`` of one array for all experts."""
    rng = np.random.default_rng(3)
    spec, activation = RouterSpec(6, 3, renormalise=True), ExpertActivation("silu", limit=limit)
    router, x = rng.standard_normal((6, 32)).astype(np.float32), rng.standard_normal((17, 32)).astype(np.float32)
    hidden, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 80, 32), (6, 32, 40)))
    ops = Backend(np.float16)

    def weights(values: np.ndarray) -> tuple[list[list[Any]], ExpertWeights]:
        if dynamic is None:
            return [[expert.astype(np.float16)] for expert in values], ExpertWeights(values.astype(np.float16))
        quantized = [quantize_weight(expert, dynamic) for expert in values]
        codes, scale = (np.stack([getattr(q, f) for q in quantized]) for f in ("codes", "scale"))
        return [[q] for q in quantized], ExpertWeights(codes, scale.astype(np.float32), dynamic=dynamic)

    (separate, all_hidden), (separate_down, all_down) = weights(hidden), weights(down)
    mixture = ops.mixture(spec, router, separate, separate_down, activation)
    ids, topk_weights = choose_experts(x, mixture)
    expected = experts_forward(x, ids, topk_weights, ExpertLayer(all_hidden, all_down, activation), np.float16)
    if dynamic:
        np.testing.assert_array_equal(ops.experts(x, mixture), expected)
    else:  # BLAS sums in another order for other numbers of rows
        np.testing.assert_allclose(ops.experts(x, mixture), expected, rtol=2e-3, atol=0.3)


def test_results_are_added_in_the_order_of_ranks() -> None:
    ids, weights = np.array([[2, 0], [0, 2]], np.int32), np.array([[1, 1e-8], [1, 1e-8]], np.float32)
    results = {0: np.float32(3e7), 2: np.float32(-1)}
    found = mix(ids, weights, lambda expert, tokens: np.full((len(tokens), 1), results[expert]))
    assert found.ravel().tolist() == [np.float32(-1) + np.float32(1e-8) * np.float32(3e7), np.float32(3e7)]


@pytest.mark.parametrize("golden", FIRST, ids=str)
def test_every_expert_is_observed_with_enough_tokens(golden: Golden) -> None:
    """Whether tokens chose it or not; the result is that of a model that nobody watches."""
    seen: list[LinearCall] = []
    weights, ops = RandomWeights(golden.config, golden.seed), CpuBackend()
    hooks = LinearHooks(ops, weights, seen.append)
    tokens = random_tokens(5, 100, 97)
    model = TinyModel(CpuBackend(), golden.config, weights)
    expected = model.run(tokens)
    architecture = models.find(golden.config)
    model.network = architecture.Model(model.config, hooks.weights, hooks.ops)
    model.clear()
    found = model.run(tokens)  # with other numbers of rows, for which BLAS has other orders of sums
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    expert_calls = [call for call in seen if call.rows is not None]
    named = {name for call in expert_calls for name in call.tensors}
    assert named == expert_matrices(golden)
    assert all(len(call.rows) == call.x.shape[0] >= LEAST_ROWS for call in expert_calls if call.rows is not None)


@pytest.mark.parametrize("golden", FIRST, ids=str)
def test_migrated_mixtures_are_compared_expert_by_expert(golden: Golden, tmp_path: Path) -> None:
    golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    bminf_lite.migrate(tmp_path / "source", tmp_path / "out", "w8a8")
    windows = [Window(random_tokens(i, 90, 97), 89) for i in range(2)]
    found = compare(tmp_path / "out", tmp_path / "source", windows, "cpu")
    names = {name for linear in found.linears for name in linear.tensors}
    assert expert_matrices(golden) <= names
    assert all(linear.own.snr_db > 25 for linear in found.linears)
    assert 0 < found.divergence.kl < 0.2


def test_a_calibration_decides_experts_that_no_token_chooses(tmp_path: Path) -> None:
    """A router whose weights are zeros but for two experts: all tokens choose these."""
    golden = FIRST[0]
    tensors = dict(RandomWeights(golden.config, golden.seed).tensors)
    for name, parameter in golden.spec.parameters.items():
        if parameter.role.value == "router":
            tensors[name] = np.zeros_like(tensors[name])  # of equal experts the first are chosen
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(golden.config))
    tokens = random_tokens(1, 600, 97).tolist()
    report = bminf_lite.migrate(folder, tmp_path / "out", "auto", calibrate=tokens, device="cpu")
    assert report.calibration is not None
    decided = {name for product in report.calibration["products"] for name in product["tensors"]}
    assert expert_matrices(golden) <= decided


@pytest.mark.gpu
@pytest.mark.parametrize("changed", [{"scale": 5}, {"input_group_size": 16}, {"rotation": 8}, {"dynamic": False}, {}])
def test_a_gpu_says_which_experts_it_does_not_compute(cuda_backend: Backend, changed: dict[str, Any]) -> None:
    """Expert 1 differs from the others."""
    rng = np.random.default_rng(0)
    parts: list[list[Any]] = [[quantize_weight(rng.standard_normal((32, 48)).astype(np.float32))] for _ in range(3)]
    downs = [[quantize_weight(rng.standard_normal((48, 16)).astype(np.float32))] for _ in range(3)]
    one = parts[1][0]
    groups = np.repeat(one.scale[:, None], 3, axis=1)
    if not changed:
        parts[1] = [one.dequantize()]
    else:
        parts[1] = [replace(one, **{**changed, **({"scale": groups} if "scale" in changed else {})})]
    with pytest.raises(UsageError, match=r"expert 1 (is (w8a8|w8a16|float)|are with scales of groups)"):
        cuda_backend.mixture(
            RouterSpec(3, 2), rng.standard_normal((3, 48)).astype(np.float32), parts, downs, ExpertActivation()
        )


KINDS = {
    "w8a8": (True, True, 1), "w8a8-rotate-all": (True, True, 256), "w8a16": (True, False, 1),
    "w8a16, rotated": (True, False, 256), "float": (False, False, 1),
}  # fmt: skip
"""Arguments of ``RandomWeights``: quantized, dynamic, and the largest block of a rotation."""


@pytest.mark.gpu
@pytest.mark.parametrize("golden", FIRST, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_what_the_reference_gives(cuda_backend: Backend, golden: Golden, kind: str) -> None:
    """A prompt at once, then three tokens one by one, which other kernels compute."""
    weights, results = RandomWeights(golden.config, golden.seed, *KINDS[kind]), []
    for ops in (cuda_backend, Backend(np.float16)):
        model = TinyModel(ops, golden.config, weights)
        parts = np.split(golden.tokens, range(len(golden.tokens) - 3, len(golden.tokens)))
        results.append(np.concatenate([model.run(part) for part in parts]))
    found, expected = results
    worst = np.sort(np.abs(found - expected).max(axis=1))[:-3]  # rounding decides ties between two experts
    # another order of sums moves a rounding to fp16 and a code of int8, which is up to 1 / 127 of a row's largest value
    assert worst.max() < 0.05 * np.abs(expected).max()


@dataclass(frozen=True)
class Layer:
    """A mixture alone: 24 tokens, of which a shared layer makes ``shared``, with gates."""

    ops: Backend
    mixture: Any
    norm: Norm
    x: np.ndarray
    shared: np.ndarray
    gates: np.ndarray

    @classmethod
    def random(
        cls,
        ops: Backend,
        hidden: str,
        down: str,
        activation: ExpertActivation,
        bias: bool = False,
        features: int = 40,
        inner: int = 52,
    ) -> Layer:
        """Matrices of the kinds ``hidden`` and ``down``. Widths of no whole vector, whose blocks are 8 and 4."""
        rng, experts, matrix = np.random.default_rng(7), 6, cls.matrix
        router = rng.standard_normal((experts, features)).astype(np.float32)
        before = [matrix(rng, hidden, 2 * inner, features) for _ in range(experts)]
        behind = [matrix(rng, down, features, inner) for _ in range(experts)]
        spec = RouterSpec(experts, 3, renormalise=True)
        norm = Norm(ops.vector(rng.uniform(0.5, 1.5, features).astype(np.float32)), 1e-6)
        x, shared = rng.standard_normal((2, 24, features)).astype(np.float32)
        gates = rng.uniform(0, 1, (24, 1)).astype(np.float32)
        biases = None
        if bias:
            sizes = experts, experts * 2 * inner, experts * features
            of_router, of_hidden, of_down = (rng.standard_normal(size).astype(np.float32) for size in sizes)
            biases = ExpertBiases(of_router, of_hidden.reshape(experts, -1), of_down.reshape(experts, -1))
        mixture = ops.mixture(spec, router, before, behind, activation, None, biases)
        return cls(ops, mixture, norm, x, shared, gates)

    @staticmethod
    def matrix(rng: np.random.Generator, kind: str, *shape: int) -> list[HostWeight]:
        """A random matrix of a kind."""
        values = (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        quantized, dynamic, rotation = KINDS[kind]
        if not quantized:
            return [values]
        block = rotation_of(shape[1], rotation)
        return [replace(quantize_weight(rotated(values, block), dynamic), rotation=block)]

    def run(self, rows: slice, has_shared: bool = False) -> np.ndarray:
        """What some tokens get, added to their stream."""
        ops = self.ops
        stream = ops.array(self.x[rows])
        others = [ops.array(v[rows]) for v in (self.shared, self.gates)] if has_shared else []
        found = ops.experts(ops.norm(stream, self.norm), self.mixture, stream, *others)
        return np.array(ops.host(found))


@pytest.mark.gpu
@pytest.mark.parametrize("down", KINDS)
@pytest.mark.parametrize("hidden", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_on_a_gpu_has_the_same_bits_alone_and_together(
    cuda_backend: Backend, hidden: str, down: str, bias: bool
) -> None:
    """Near the definition's; one, three and twenty-four tokens take different kernels. With biases as in gpt-oss."""
    activation = ExpertActivation(limit=1.0) if bias else ExpertActivation("relu")
    layer, reference = (
        Layer.random(ops, hidden, down, activation, bias) for ops in (cuda_backend, Backend(np.float16))
    )
    for has_shared in (False, True):
        together, expected = (made.run(slice(None), has_shared) for made in (layer, reference))
        # a code next to a tie moves by one
        assert np.abs(together - expected).max() < 0.03 * np.abs(expected).max()
        for rows in (slice(1), slice(5, 8), slice(20, 24)):
            np.testing.assert_array_equal(layer.run(rows, has_shared), together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 24])
def test_a_layer_can_be_captured(cuda_backend: Backend, kind: str, count: int) -> None:
    """A replay routes other tokens to other experts, so no choice went to the host."""
    layer = Layer.random(cuda_backend, kind, kind, ExpertActivation())
    stream, shared, gates = (cuda_backend.array(np.zeros_like(v[:count])) for v in (layer.x, layer.shared, layer.gates))

    def work() -> Any:
        return cuda_backend.experts(cuda_backend.norm(stream, layer.norm), layer.mixture, None, shared, gates)

    work()
    replay = cuda_backend.capture(work)
    for _ in range(2):
        layer = replace(layer, x=layer.x[::-1])
        for target, values in zip((stream, shared, gates), (layer.x, layer.shared, layer.gates), strict=True):
            cuda_backend.assign(target, values[:count])
        np.testing.assert_array_equal(cuda_backend.host(replay()), cuda_backend.host(work()))


@pytest.mark.gpu
@pytest.mark.parametrize("features", [8, 40, 21])
@pytest.mark.parametrize("together", [False, True])
def test_experts_on_a_gpu_lie_as_the_kernels_read_them(cuda_backend: Backend, features: int, together: bool) -> None:
    """Eight rows of the gate, eight of up, and so on; padding has scales of 0."""
    rng, spec = np.random.default_rng(features), RouterSpec(3, 2)
    gates, ups, downs = (
        [quantize_weight(rng.standard_normal(shape).astype(np.float32)) for _ in range(3)]
        for shape in ((features, 40), (features, 40), (48, features))
    )
    hidden = [
        [Int8Weight(*(np.concatenate([getattr(m, f) for m in pair]) for f in ("codes", "scale")))]
        if together
        else list(pair)
        for pair in zip(gates, ups, strict=True)
    ]
    router = rng.standard_normal((3, 40)).astype(np.float32)
    made: Any = cuda_backend.mixture(spec, router, hidden, [[d] for d in downs], ExpertActivation())
    whole = -(-features // 8) * 8
    codes, scale = (cuda_backend.host(x) for x in (made.hidden.matrix, made.hidden.scale))
    assert codes.shape == (3, 2 * whole, 64) and made.down.in_features == whole
    np.testing.assert_array_equal(cuda_backend.host(made.router.matrix), router)
    for expert in range(3):
        for side, matrix in enumerate((gates[expert], ups[expert])):
            rows = codes[expert].reshape(-1, 2, 8, 64)[:, side].reshape(-1, 64)
            np.testing.assert_array_equal(rows[:features, :40], matrix.codes)
            assert not rows[features:].any() and not rows[:, 40:].any()
            scales = scale[expert].reshape(-1, 2, 8)[:, side].ravel()
            np.testing.assert_array_equal(scales[:features], matrix.scale.astype(np.float32))
            assert not scales[features:].any()
        np.testing.assert_array_equal(cuda_backend.host(made.down.matrix)[expert][:, :features], downs[expert].codes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float", "w8a8"])
def test_observed_experts_on_a_gpu_are_products_of_their_own(cuda_backend: Backend, kind: str) -> None:
    """Of any kind of weights; what the observer sees changes nothing of the result."""
    golden = FIRST[0]
    weights, architecture = RandomWeights(golden.config, golden.seed, kind == "w8a8"), models.find(golden.config)
    expected = TinyModel(Backend(np.float16), golden.config, weights).run(golden.tokens)
    seen: list[LinearCall] = []
    hooks = LinearHooks(cuda_backend, weights, seen.append)
    model = TinyModel(cuda_backend, golden.config, RandomWeights(golden.config, golden.seed, quantized=True))
    model.network = architecture.Model(model.config, hooks.weights, hooks.ops)
    found = model.run(golden.tokens)
    assert any(call.rows is not None for call in seen)
    worst = np.sort(np.abs(found - expected).max(axis=1))[:-3]  # rounding decides ties between two experts
    # another order of sums moves a rounding to fp16 and a code of int8, which is up to 1 / 127 of a row's largest value
    assert worst.max() < 0.05 * np.abs(expected).max()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("features", "inner"), [(64, 56), (40, 52)])
@pytest.mark.parametrize("has_gate", [False, True])
def test_a_shared_expert_on_a_gpu_has_the_same_bits_alone_and_together(
    cuda_backend: Backend, kind: str, features: int, inner: int, has_gate: bool
) -> None:
    """Near the definition's. In w8a8 one token computes it with the others if it is as wide as these in memory."""

    def run(ops: Backend, rows: slice) -> np.ndarray:
        layer = Layer.random(ops, kind, kind, ExpertActivation("relu"), False, features, inner)
        rng = np.random.default_rng(8)
        before, behind = (
            ops.weight(layer.matrix(rng, kind, *shape)) for shape in ((2 * inner, features), (features, inner))
        )
        gate = ops.vector(rng.standard_normal(features).astype(np.float32) / 8) if has_gate else None
        stream = ops.array(layer.x[rows])
        shared = SharedExpert(before, behind, ExpertActivation("relu"), gate)
        return np.array(ops.host(ops.experts(ops.norm(stream, layer.norm), layer.mixture, stream, shared=shared)))

    together, expected = (run(ops, slice(None)) for ops in (cuda_backend, Backend(np.float16)))
    assert np.abs(together - expected).max() < 0.03 * np.abs(expected).max()
    for rows in (slice(1), slice(5, 8), slice(20, 24)):
        np.testing.assert_array_equal(run(cuda_backend, rows), together[rows])
