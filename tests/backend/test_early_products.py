"""Products that compute beside their predecessor, as what they read is complete.

They are the feed-forward product behind attention, if it reads the stream that attention's input was of, and a float
product behind another one of the same norm.
"""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest
from random_values import make_batch, norm_on, random_int8, random_norm, random_rows

from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import Array, AttentionSpec, sequential_tables
from bminf_lite.bench.model import random_model
from bminf_lite.cuda.kernels.launcher import StepContext
from bminf_lite.cuda.runtime.kernel import Kernel
from bminf_lite.layers.cache import KVCache

SPEC = AttentionSpec(16, 16, 64, 0.125)  # enough blocks that what follows starts behind the projection
WIDTH, INNER = SPEC.heads * SPEC.head_dim, 1024


class Layer:
    """The operations of a layer with one token, and the kernels that they launched."""

    def __init__(self, backend: Backend, monkeypatch: pytest.MonkeyPatch):
        self.backend, self.launched, rng = backend, [], np.random.default_rng(0)
        launch = Kernel.__call__

        def recording(kernel: Kernel, *arguments: object) -> None:
            self.launched.append(kernel.name)
            launch(kernel, *arguments)

        monkeypatch.setattr(Kernel, "__call__", recording)
        shapes = {"qkv": (SPEC.qkv_features, WIDTH), "out": (WIDTH, WIDTH), "up": (INNER, WIDTH)}
        shapes["down"] = WIDTH, INNER
        self.weights = {n: backend.weight([random_int8(rng, *s, dynamic=True)]) for n, s in shapes.items()}
        self.norms = [norm_on(backend, random_norm(rng, WIDTH, center=True)) for _ in range(2)]
        self.table = backend.table(random_rows(rng, 8, WIDTH, np.float16))
        self.cache = backend.layer_cache(2, SPEC.kv_heads, SPEC.head_dim)
        self.batch = make_batch(backend, [1], [0], sequential_tables(1, 16))

    def embed(self) -> Array:
        return self.backend.embed(self.backend.array(np.ones(1, np.int32)), self.table)

    def attend(self, residual: Array) -> Array:
        qkv = self.backend.linear(self.backend.norm(residual, self.norms[0]), self.weights["qkv"])
        return self.backend.attention(qkv, SPEC, self.cache, self.batch)

    def hidden(self, residual: Array, name: str = "up") -> Array:
        return self.backend.activated_linear(self.backend.norm(residual, self.norms[1]), self.weights[name], "gelu")

    def add(self, residual: Array, x: Array, name: str) -> Array:
        return self.backend.linear_add(x, self.weights[name], residual)

    def is_early(self) -> bool:
        """Whether the last kernel waits only before it writes."""
        assert "gemv<" in self.launched[-1]
        return self.launched[-1].endswith("true>")


@pytest.fixture
def layer(cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Layer:
    if cuda_backend.kernels.device.compute_capability < (9, 0):
        pytest.skip("kernels do not start early here")
    return Layer(cuda_backend, monkeypatch)


@pytest.mark.gpu
def test_behind_attention_that_read_the_same_stream(layer: Layer) -> None:
    residual = layer.embed()
    for _ in range(2):
        heads = layer.attend(residual)
        assert "attention_decode" in layer.launched[-1]
        hidden = layer.hidden(residual)
        assert layer.is_early()
        residual = layer.add(layer.add(residual, heads, "out"), hidden, "down")
        assert not layer.is_early()


@pytest.mark.gpu
def test_not_if_the_stream_changed_or_another_product_lies_between(layer: Layer) -> None:
    residual = layer.embed()
    layer.hidden(residual)
    assert not layer.is_early()
    heads = layer.attend(residual)
    assert not any(name.endswith("true>") for name in layer.launched if "gemv<" in name)
    changed = layer.add(residual, heads, "out")
    layer.hidden(changed)
    assert not layer.is_early()
    layer.attend(changed)
    layer.hidden(changed)
    assert layer.is_early()
    layer.hidden(changed)
    assert not layer.is_early()


@pytest.mark.gpu
def test_beside_a_product_of_the_same_norm(layer: Layer) -> None:
    """The second of two products of a norm starts when the row is complete, if the first one was told of it."""
    backend, results = layer.backend, []
    matrix = backend.weight([np.random.default_rng(1).standard_normal((96, WIDTH)).astype(np.float32)])
    for shared in (False, True):
        for _ in range(3):
            residual = layer.hidden(layer.embed())
            residual = layer.add(layer.embed(), residual, "down")
            x = backend.norm(residual, layer.norms[0])
            y = backend.linear(backend.shared(x) if shared else x, layer.weights["qkv"])
            assert layer.launched[-1].endswith(f"{str(shared).lower()}>")
            found = [backend.host(y), backend.host(backend.float_linear(x, matrix))]
            results.append(np.concatenate(found, axis=1))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_context() -> None:
    step, first, second = StepContext(), np.empty(1), np.empty(1)
    assert not step.reads(None)
    step.attends()
    assert not step.reads(None)
    assert not step.reads(first)
    step.attends()
    assert not step.reads(second)
    assert not step.reads(first)
    step.attends()
    assert step.reads(first)
    assert not step.reads(first)
    step.attends(starts_next=True)
    assert not step.reads(first)
    step.starts_late()
    assert not step.reads(second)
    step.starts_late()
    assert step.reads(second)


@pytest.mark.gpu
@pytest.mark.repeats
@pytest.mark.parametrize("name", ["pythia-6.9b", "command-r"])
def test_same_bits_as_in_turn(
    cuda_backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Layers of real widths: a product that read its input too early would get other codes."""
    if request.config.getoption("--fake-gpu"):
        pytest.skip("takes minutes in NumPy")
    config = json.loads((resources.files("bminf_lite") / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    model = random_model(name, config | {"num_hidden_layers": 3, "vocab_size": 1024}, cuda_backend)
    limits, results = model.engine_config, []
    for early in (False, *[True] * 8):
        with monkeypatch.context() as patch:
            if not early:
                patch.setattr(StepContext, "reads", lambda step, stream: False)
            cache, logits = KVCache.for_sequences(cuda_backend, limits.cache_layout, 1, 64), []
            for token in range(8):
                batch = make_batch(cuda_backend, [1], [token], sequential_tables(1, 64), np.array([token]))
                logits.append(cuda_backend.host(model.network(batch, cache)))
            cache.close()
            results.append(np.concatenate(logits))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
