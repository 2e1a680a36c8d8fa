"""Encoder-decoders equal transformers' (tests/goldens), and do not depend on what they are batched with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import ENCODER_DECODERS, Golden, RandomWeights, TinyEncoderDecoder, digest, goldens
from tolerances import assert_close

from bminf_lite.backend.base import Backend

CASES = [golden for family in ENCODER_DECODERS for golden in goldens(family)]
SOME = [golden for golden in CASES if golden.name in ("tied", "untied, gated", "few buckets")]
OWN = [
    {"model_type": "cpm2", "vocab_size": 97, "d_model": 40, "d_kv": 12, "d_ff": 56, "num_heads": 3, "num_layers": 2,
     "num_decoder_layers": 2, "relative_attention_max_distance": 24},
    {"model_type": "eva", "vocab_size": 97, "d_model": 40, "d_kv": 12, "d_ff": 56, "num_heads": 3, "num_layers": 1,
     "num_decoder_layers": 2, "attn_scale": True},
]  # fmt: skip
"""Configurations of the models that transformers does not know; tests/parity compares CPM-2 with its T5."""


def tiny(backend: Backend, golden: Golden, kind: str = "float", slots: int = 1) -> TinyEncoderDecoder:
    weights = RandomWeights(golden.config, golden.seed, quantized=kind != "float", dynamic=kind == "w8a8")
    return TinyEncoderDecoder(backend, golden.config, weights, slots)


def own(config: dict) -> Golden:
    """A case without an expectation, for the tests that compare a model with itself."""
    tokens = (np.arange(33) * 7 % 97).astype(np.int32)
    return Golden("own", config, 5, "", tokens, np.zeros(0), (np.arange(41) * 5 % 97).astype(np.int32))


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_weights_are_those_that_the_logits_were_made_with(golden):
    assert digest(RandomWeights(golden.config, golden.seed).tensors) == golden.weights


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_float_output_equals_that_of_transformers(backend, golden):
    model = tiny(backend, golden)
    encoded = model.encode(golden.source)
    assert_close(encoded, golden.encoded, "logits", backend.activation_dtype, np.abs(golden.encoded).max())
    model.read(golden.source)
    logits = model.run(golden.tokens)
    assert logits.dtype == np.float32
    assert_close(logits, golden.logits, "logits", backend.activation_dtype, np.abs(golden.logits).max())


@pytest.mark.gpu
@pytest.mark.parametrize("golden", CASES, ids=str)
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "float"])
def test_the_gpu_gives_what_the_reference_gives(cuda_backend, golden, kind):
    results = []
    for backend in (cuda_backend, Backend(np.float16)):
        model = tiny(backend, golden, kind)
        model.read(golden.source)
        decoded = [model.run(golden.tokens[:20]), *(model.run(golden.tokens[t : t + 1]) for t in range(20, 30))]
        results.append((model.encode(golden.source), np.concatenate(decoded)))
    for actual, expected in zip(*results, strict=True):
        operation = "logits, w8a8" if kind == "w8a8" else "logits, same rounding"
        assert_close(actual, expected, operation, np.float16, np.abs(expected).max())


@pytest.mark.gpu
@pytest.mark.parametrize("golden", [*SOME, *map(own, OWN)], ids=str)
def test_the_gpu_gives_what_the_reference_gives_with_an_int8_cache(cuda_backend, golden):
    results = []
    for backend in (cuda_backend, Backend(np.float16)):
        model = tiny(backend, golden, "float")
        model.cache_shape = replace(model.cache_shape, int8=True)
        model.clear()
        model.read(golden.source)
        decoded = [model.run(golden.tokens[:20]), *(model.run(golden.tokens[t : t + 1]) for t in range(20, 30))]
        results.append(np.concatenate(decoded))
    assert_close(results[0], results[1], "logits, int8 cache", np.float16, np.abs(results[1]).max())


@pytest.fixture(params=[*SOME, *map(own, OWN)], ids=str)
def golden(request: pytest.FixtureRequest) -> Golden:
    return request.param


@pytest.fixture(params=["float", "w8a8", "w8a16"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_same(backend: Backend, kind: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the order of sums, which may move an int8 code by one."""
    operation = "logits, w8a8" if kind == "w8a8" else "logits, same rounding"
    assert_close(actual, expected, operation, backend.activation_dtype, np.abs(expected).max())


@pytest.mark.parametrize("sizes", [[1] * 33, [16, 16, 1], [5, 1, 1, 20, 6]])
def test_decoding_in_steps_equals_decoding_at_once(backend, golden, kind, sizes):
    model = tiny(backend, golden, kind)
    model.read(golden.source)
    expected = model.run(golden.tokens)
    model.clear()
    model.read(golden.source)
    chunks = np.split(golden.tokens, np.cumsum(sizes)[:-1])
    assert_same(backend, kind, np.concatenate([model.run(chunk) for chunk in chunks]), expected)


def test_a_ragged_batch_equals_its_rows_alone(backend, golden, kind):
    """Sources of all lengths encoded together and in slots in any order; so are the texts that are decoded."""
    sources = [golden.source[:3], golden.source[5:6], golden.source, golden.source[9:30]]
    texts = [golden.tokens[:1], golden.tokens[3:12], golden.tokens[12:14], golden.tokens[14:30]]
    slots = [3, 0, 4, 1]
    together, alone = tiny(backend, golden, kind, slots=5), tiny(backend, golden, kind)
    encoded = np.split(together.encode(*sources), np.cumsum([len(s) for s in sources])[:-1])
    together.read(*sources, slots=slots)
    logits = np.split(together.run(*texts, slots=slots), np.cumsum([len(t) for t in texts])[:-1])
    more = together.run(*([t] for t in golden.tokens[:4]), slots=slots)
    for i, (source, text) in enumerate(zip(sources, texts, strict=True)):
        assert_same(backend, kind, encoded[i], alone.encode(source))
        alone.read(source)
        expected = np.concatenate([alone.run(text), alone.run(golden.tokens[i : i + 1])])
        assert_same(backend, kind, np.concatenate([logits[i], more[i : i + 1]]), expected)


def test_a_slot_can_be_used_again(backend, golden, kind):
    """A shorter source and text see nothing of the longer ones that were in the slot."""
    model = tiny(backend, golden, kind, slots=2)
    model.read(golden.source[:7], slots=[1])
    expected = model.run(golden.tokens[:5], slots=[1])
    model.clear()
    model.read(golden.source, golden.source[3:20])
    model.run(golden.tokens, golden.tokens[:9])
    model.read(golden.source[:7], slots=[0])
    assert_same(backend, kind, model.run(golden.tokens[:5], slots=[0]), expected)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
@pytest.mark.parametrize(("dynamic", "bound"), [(True, 0.12), (False, 0.08)])
def test_quantization_changes_logits_a_little(backend, family, dynamic, bound):
    """Only a check of size: scores that are not scaled make a tiny random model sharp."""
    errors = []
    for golden in goldens(family):
        model = tiny(backend, golden, "w8a8" if dynamic else "w8a16")
        model.read(golden.source)
        logits = model.run(golden.tokens)
        errors.append(np.sqrt(((logits - golden.logits) ** 2).mean() / (golden.logits**2).mean()))
    assert 1e-4 < np.median(errors) < bound
