"""Generation with an encoder-decoder: a result depends on its source alone, however requests are batched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit import WatchedBackend, make_model, run

from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import OutOfMemory, UsageError
from bminf_lite.text.prompts import EncodedPrompt

CONFIG = {
    "model_type": "cpm2",
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "max_position_embeddings": 40,
}


EOS = frozenset([11, 23])
EXACT = make_model(quantized=True, **CONFIG)
FLOAT = make_model(**CONFIG)


def source_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 61, length).tolist()


@pytest.mark.parametrize(("length", "target"), [(9, ()), (1, ()), (40, ()), (7, (5, 9))])
def test_greedy_generation_takes_the_largest_logit_each_time(length, target):
    source, tokens = source_of(length), [1, *target]
    for _ in range(6):
        tokens.append(int(FLOAT.logits(tokens, source=source)[-1].argmax()))
    result = FLOAT.generate(EncodedPrompt(tuple(source), target=target), max_new_tokens=6, temperature=0)
    assert result.token_ids == tokens[1 + len(target) :]
    assert result.prompt_tokens == length and result.finish_reason == "length"


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([1, 7, 64]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.0, 0.9]),
    st.booleans(),
    st.sampled_from([(), (1, 3), (4,)]),
    st.sampled_from([(), (5, 20, 64)]),
)
def test_a_ragged_batch_equals_its_prompts_alone(
    lengths, max_batch, chunk, ahead, temperature, prefix_cache, sizes, encoded
):
    """For any grouping of sources, also of equal ones, which are encoded once, and any padding of them.

    int8 products are exact in any batch.
    """
    params = SamplingParams(max_new_tokens=8, temperature=temperature, seed=5)
    sources = [source_of(length, seed) for length, seed in lengths]

    def requests():
        return [Request(i, [1], params, EOS, source) for i, source in enumerate(sources)]

    limits = {"prefix_cache": prefix_cache}
    model = make_model(
        WatchedBackend(ahead, sizes, (), encoded),
        quantized=True,
        max_batch=max_batch,
        chunk=chunk,
        limits=limits,
        **CONFIG,
    )
    expected = run(EXACT, requests())
    for _ in range(2):
        for request, alone in zip(run(model, requests()), expected, strict=True):
            assert (request.output_token_ids, request.finish_reason) == (alone.output_token_ids, alone.finish_reason)
            assert request.logprobs == pytest.approx(alone.logprobs, rel=1e-5)
    model.close()
    assert model.ops.memory_is_free


def test_few_blocks_for_sources_let_requests_wait():
    sources = [source_of(length, 1) for length in (40, 9, 33, 20, 1)]
    model = make_model(WatchedBackend(1), limits={"num_source_blocks": 2}, **CONFIG)
    results = model.generate(sources, max_new_tokens=6, temperature=0)
    expected = [FLOAT.generate(source, max_new_tokens=6, temperature=0) for source in sources]
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


def test_decoding_ends_with_the_context():
    result = FLOAT.generate(source_of(40), max_new_tokens=100, temperature=0)
    assert len(result.token_ids) == 39 and result.finish_reason == "context"


def test_out_of_memory_for_sources_gives_the_decoder_cache_back():
    class FullBackend(WatchedBackend):
        def layer_cache(self, *shape, **kind):
            if len(self.arrays) == 2 * CONFIG["num_decoder_layers"]:
                raise MemoryError("none left")
            return super().layer_cache(*shape, **kind)

    ops = FullBackend()
    with pytest.raises(OutOfMemory, match="none left") as failure:
        make_model(ops, **CONFIG).generate(source_of(9))
    assert failure and ops.memory_is_free


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FLOAT.generate(source_of(41)), "41 tokens, but the model's encoder reads 40 at most"),
        (lambda: FLOAT.generate(EncodedPrompt((1, 2), target=(3,) * 39)), "target has 39 tokens, but .* context is 40"),
        (lambda: FLOAT.generate(source_of(9), prompt_logprobs=True), "prompt_logprobs is True, but .* an encoder"),
        (lambda: FLOAT.logits([1, 2, 3]), "source of 1 to 40 token ids, not none"),
        (lambda: FLOAT.logits([1], source=[3, 61]), "token 1 is 61"),
    ],
    ids=["source", "target", "log-probabilities", "no source", "id"],
)
def test_invalid_input_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()
