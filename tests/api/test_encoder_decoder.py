"""Generation with an encoder-decoder: what a request gets depends on its source alone, however requests are grouped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit import WatchedBackend
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.errors import UsageError
from bminf_lite.layers.cache import KVCache
from bminf_lite.placement import make_engine_config
from bminf_lite.text.prompts import EncodedPrompt

CONFIG = {
    "model_type": "cpm2",
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "max_position_embeddings": 40,
}


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Caches that start small and often grow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "BLOCK", 8)
        yield


def make_model(
    quantized: bool = False,
    max_batch: int = 16,
    chunk: int = 2048,
    max_steps_in_flight: int = 0,
    eos: tuple[int, ...] = (),
) -> Model:
    architecture = models.find(CONFIG)
    config = architecture.parse(CONFIG)
    network = architecture.Model(config, RandomWeights(CONFIG, 3, quantized), WatchedBackend(max_steps_in_flight))
    engine_config = make_engine_config(config, config.cache_shape, None, max_batch)
    return Model(network, replace(engine_config, max_num_batched_tokens=chunk), eos_ids=frozenset(eos))


def source_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 61, length).tolist()


def test_greedy_generation_is_the_largest_logit_each_time():
    model = make_model()
    for source in (source_of(9), source_of(1), source_of(40)):
        tokens = [1]
        for _ in range(12):
            tokens.append(int(model.logits(tokens, source=source)[-1].argmax()))
        result = model.generate(source, max_new_tokens=12, temperature=0)
        assert result.token_ids == tokens[1:]
        assert result.prompt_tokens == len(source) and result.finish_reason == "length"


def test_a_target_is_what_the_decoder_goes_on_from():
    model = make_model()
    tokens = [1, 5, 9]
    for _ in range(6):
        tokens.append(int(model.logits(tokens, source=source_of(7))[-1].argmax()))
    prompt = EncodedPrompt(tuple(source_of(7)), target=(5, 9))
    assert model.generate(prompt, max_new_tokens=6, temperature=0).token_ids == tokens[3:]


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 39)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([1, 7, 64]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.0, 0.9]),
)
def test_a_ragged_batch_equals_its_prompts_alone(drawn, max_batch, chunk, max_steps_in_flight, temperature):
    """In any grouping of sources into chunks and slots, with slots used again; int8 products are exact in any batch."""
    options = {"max_new_tokens": 39, "temperature": temperature, "seed": 5, "logprobs": True}
    together = make_model(True, max_batch, chunk, max_steps_in_flight, eos=(11, 23))
    sources = [source_of(length, seed) for seed, (length, _) in enumerate(drawn)]
    results = together.generate(sources, **options)
    for index, (source, result) in enumerate(zip(sources, results, strict=True)):
        alone = make_model(True, eos=(11, 23))
        expected = alone.generate([source] * (index + 1), **options)[index]
        assert (result.token_ids, result.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert result.logprobs == pytest.approx(expected.logprobs, rel=1e-5)


def test_decoding_ends_with_the_context():
    model = make_model()
    result = model.generate(source_of(40), max_new_tokens=100, temperature=0)
    assert len(result.token_ids) == 39 and result.finish_reason == "length"


def test_an_interrupted_stream_gives_its_memory_back():
    model = make_model()
    stream = model.stream([source_of(9), source_of(30)], max_new_tokens=30)
    for _ in range(5):
        next(stream)
    assert not model.ops.memory_is_free
    stream.close()
    assert model.ops.memory_is_free


def test_what_does_not_fit_is_refused():
    model = make_model()
    with pytest.raises(UsageError, match="41 tokens, but the model's encoder reads 40 at most: shorten the prompt"):
        model.generate(source_of(41))
    with pytest.raises(UsageError, match="the target has 39 tokens, but the decoder's context is 40"):
        model.generate(EncodedPrompt((1, 2), target=(3,) * 39))
    with pytest.raises(UsageError, match="source of 1 to 40 token ids, not none"):
        model.logits([1, 2, 3])
    with pytest.raises(UsageError, match="token 1 is 61"):
        model.logits([1], source=[3, 61])
