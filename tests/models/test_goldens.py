"""Logits of tiny models equal transformers' (tests/goldens), and do not depend on how tokens are put into steps."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import FAMILIES, GPTS, Golden, RandomWeights, TinyModel, digest, goldens
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.sampling import SamplerState
from bminf_lite.backend.values import ForwardBatch

CASES = [golden for family in (*FAMILIES, *GPTS) for golden in goldens(family)]
NAMES = (
    "grouped",
    "tied, biases, multi-query",
    "window",
    "layer types",
    "plain",
    "norm after, projections",
    "half of heads, new keys",
)
SOME = [golden for golden in CASES if golden.name in NAMES]
"""For each family one with everything that its attention has."""


def test_enough_configurations_of_each_family():
    assert all(sum(1 for _ in goldens(family)) >= 12 for family in FAMILIES)
    assert all(sum(1 for _ in goldens(family)) >= 8 for family in GPTS)


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_weights_are_those_that_the_logits_were_made_with(golden: Golden):
    assert digest(RandomWeights(golden.config, golden.seed).tensors) == golden.weights


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_float_logits_equal_those_of_transformers(backend, golden: Golden):
    logits = TinyModel(backend, golden.config, RandomWeights(golden.config, golden.seed)).run(golden.tokens)
    assert logits.dtype == np.float32
    assert_close(logits, golden.logits, "logits", backend.activation_dtype, np.abs(golden.logits).max())


@pytest.mark.gpu
@pytest.mark.parametrize("golden", CASES, ids=str)
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "float"])
def test_the_gpu_gives_what_the_reference_gives(cuda_backend, golden: Golden, kind: str):
    weights = RandomWeights(golden.config, golden.seed, quantized=kind != "float", dynamic=kind == "w8a8")
    logits, expected = (
        TinyModel(backend, golden.config, weights).run(golden.tokens) for backend in (cuda_backend, Backend(np.float16))
    )
    operation = "logits, w8a8" if kind == "w8a8" else "logits, same rounding"
    assert_close(logits, expected, operation, np.float16, np.abs(expected).max())


@pytest.mark.gpu
@pytest.mark.parametrize("golden", SOME, ids=str)
@pytest.mark.parametrize("kind", ["w8a8", "float"])
def test_the_gpu_gives_what_the_reference_gives_with_an_int8_cache(cuda_backend, golden: Golden, kind: str):
    """A prompt at once, then token by token, which other kernels compute."""
    weights = RandomWeights(golden.config, golden.seed, quantized=kind != "float")
    results = []
    for backend in (cuda_backend, Backend(np.float16)):
        model = TinyModel(backend, golden.config, weights, int8_cache=True)
        parts = np.split(golden.tokens, range(20, len(golden.tokens)))
        results.append(np.concatenate([model.run(part) for part in parts]))
    assert_close(results[0], results[1], "logits, int8 cache", np.float16, np.abs(results[1]).max())


@pytest.fixture(params=SOME, ids=str)
def golden(request: pytest.FixtureRequest) -> Golden:
    return request.param


@pytest.fixture(params=["float", "w8a8", "w8a16"])
def make(request: pytest.FixtureRequest, backend: Backend, golden: Golden):
    """Builds the model, unquantized or quantized."""
    weights = RandomWeights(golden.config, golden.seed, request.param != "float", request.param == "w8a8")

    def make(slots: int = 1) -> TinyModel:
        model = TinyModel(backend, golden.config, weights, slots)
        model.operation = "logits, w8a8" if request.param == "w8a8" else "logits, same rounding"
        return model

    return make


def assert_same_logits(model: TinyModel, actual: np.ndarray, expected: np.ndarray) -> None:
    """A sum taken in another order may move an int8 code by one: such a row may differ a little, most may not."""
    dtype = model.backend.activation_dtype
    magnitude = np.abs(expected).max()
    assert_close(actual, expected, model.operation, dtype, magnitude)
    if model.backend.name.startswith("cuda") and model.operation == "logits, w8a8":
        return  # other kernels for one token than for many: with fp16 activations most rows have a code that moves
    worst = np.abs(actual - expected).max(axis=1)
    assert np.median(worst) < (2e-6 if dtype == np.float32 else 2e-3) * magnitude


def test_decoding_token_by_token_equals_prefill_at_once(make, golden):
    model = make()
    expected = model.run(golden.tokens)
    model.clear()
    logits = np.concatenate([model.run(golden.tokens[t : t + 1]) for t in range(len(golden.tokens))])
    assert_same_logits(model, logits, expected)


@pytest.mark.parametrize("sizes", [[1, 32], [16, 16, 1], [5, 1, 1, 20, 6], [32, 1]])
def test_prefill_in_chunks_equals_prefill_at_once(make, golden, sizes):
    model = make()
    expected = model.run(golden.tokens)
    model.clear()
    chunks = np.split(golden.tokens, np.cumsum(sizes)[:-1])
    assert_same_logits(model, np.concatenate([model.run(chunk) for chunk in chunks]), expected)


def test_a_ragged_batch_equals_its_rows_alone(make, golden):
    """Prefilled together and decoded together, in slots in any order."""
    rows = [golden.tokens[:3], golden.tokens[4:5], golden.tokens[6:29], golden.tokens[9:20]]
    more = [row[:4] for row in np.split(golden.tokens[1:33], 4)]
    together, alone = make(slots=5), make()
    logits = together.run(*rows, slots=[3, 0, 4, 1])
    decoded = [together.run(*(m[t : t + 1] for m in more), slots=[3, 0, 4, 1]) for t in range(4)]
    for i, part in enumerate(np.split(logits, np.cumsum([len(r) for r in rows])[:-1])):
        alone.clear()
        expected = np.concatenate([alone.run(rows[i])] + [alone.run(more[i][t : t + 1]) for t in range(4)])
        assert_same_logits(together, np.concatenate([part] + [d[i : i + 1] for d in decoded]), expected)


def test_logits_of_last_tokens_are_the_last_of_all(make, golden):
    model = make(slots=3)
    rows = golden.tokens[:7], golden.tokens[7:8], golden.tokens[9:14]
    expected = model.run(*rows)[[6, 7, 12]]
    model.clear()
    assert_same_logits(model, model.run(*rows, all_logits=False), expected)


def test_a_slot_can_be_used_again(make, golden):
    """A new sequence sees nothing of the one that was in its slot, nor of its neighbours."""
    model = make(slots=2)
    expected = model.run(golden.tokens[:9])
    model.clear()
    model.run(golden.tokens[:20], golden.tokens[3:])
    model.context_lens[0] = 0
    assert_same_logits(model, model.run(golden.tokens[:9], slots=[0]), expected)


def test_repeated_decoding_equals_decoding_anew(make, golden):
    """The whole step as a backend may record it: run the model, sample, and make the token the next input."""
    anew, repeated = [], []
    for tokens in (anew, repeated):
        model = make(slots=2)
        batch, sampler, logits = start_decoding(model, golden.tokens[:5], golden.tokens[7:18])

        def decode(model=model, batch=batch, sampler=sampler):
            return model.backend.sample(model.network(batch, model.cache), sampler, batch)

        work = model.backend.capture(decode) if tokens is repeated else decode
        result = model.backend.sample(model.backend.array(logits), sampler, batch)
        for _ in range(20):
            tokens.append(model.backend.host(result)[0].tolist())
            result = work()
    assert repeated == anew


def start_decoding(model: TinyModel, *prompts: np.ndarray) -> tuple[ForwardBatch, SamplerState, np.ndarray]:
    """Prefill, and make the step and the greedy sampler that decoding uses from then on."""
    logits = model.run(*prompts, all_logits=False)
    count, ops = len(prompts), model.backend
    model.cache.reserve(64)
    values = np.zeros(count), np.arange(count + 1), np.array(model.context_lens) - 1, np.arange(count)
    arrays = (ops.array(np.asarray(x, np.int32)) for x in values)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    numbers = [ops.array(x) for x in (zeros, zeros.astype(np.int32), ones, zeros, ones, zeros, zeros)]
    keys = ops.array(zeros.astype(np.uint64)), ops.array(zeros.astype(np.int32)), ops.array(zeros.astype(np.int32))
    return (
        ForwardBatch(*arrays, batch_size=count, max_query_len=1, max_context_len=64),
        SamplerState(*numbers, *keys),
        logits,
    )
