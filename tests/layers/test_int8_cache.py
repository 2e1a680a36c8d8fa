"""The key-value cache in int8: what it holds, what it takes, and that nothing but precision changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from model_kit import make_model, prompt_of, request, run

from bminf_lite.api import Model
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.quantization import LARGEST_HEAD_SCALE, quantize_heads
from bminf_lite.layers.cache import CacheLayout, KVCache


def int8_model(**config: object) -> Model:
    model = make_model(quantized=True, **config)  # type: ignore[arg-type]
    return Model(
        model.network, replace(model.engine_config, cache_layout=model.engine_config.cache_layout.with_int8(True))
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.floats(-24, 16))
def test_a_code_is_wrong_by_half_a_step_at_most_whatever_the_size_of_a_head(seed: int, width: int, size: float) -> None:
    """From the smallest fp16 number to the largest; what a GPU reads is finite, and exact where fp16 is no finer."""
    x = np.random.default_rng(seed).standard_normal((4, width)) * 2**size
    x = np.clip(x, -65504, 65504).astype(np.float16)
    codes, scales = quantize_heads(x)
    assert codes.dtype == np.int8 and scales.dtype == np.float16 and (np.abs(codes.astype(int)) <= 127).all()
    read = scales.astype(np.float64)[:, None] * codes
    clipped = 127 * (scales == LARGEST_HEAD_SCALE)[:, None]  # by at most 35.5 of 65,504
    assert (np.abs(read - x) <= scales.astype(np.float64)[:, None] / 2 * (1 + 1e-6) + clipped).all()
    assert np.isfinite((scales[:, None] * np.int8(127)).astype(np.float16)).all()
    tight = np.abs(x).max(axis=-1).astype(np.float64) / 127
    assert (scales >= np.minimum(tight, 515.5)).all() and (scales <= tight * (1 + 2**-10) + 2**-24).all()


def test_heads_of_zeros_and_heads_without_a_scale() -> None:
    codes, scales = quantize_heads(np.array([[0, 0], [np.nan, 1], [1, -np.inf], [7e4, 0], [65504, 1]], np.float32))
    np.testing.assert_array_equal(codes[:4], 0)
    np.testing.assert_array_equal(scales, np.array([0, np.nan, np.nan, np.nan, 515.5], np.float16))
    assert codes[4, 0] == 127


def test_decoding_equals_prefilling_at_once() -> None:
    """A token's codes depend on nothing but the token's own keys and values."""
    model = int8_model()
    whole = model.logits(prompt_of(40))
    chunked = Model(model.network, replace(model.engine_config, max_num_batched_tokens=7)).logits(prompt_of(40))
    np.testing.assert_array_equal(chunked, whole)


def test_a_batch_gives_each_row_what_it_gets_alone() -> None:
    model = int8_model()
    alone = [run(model, [request(i, prompt_of(4 + 9 * i), max_new_tokens=5)])[0] for i in range(3)]
    together = run(model, [request(i, prompt_of(4 + 9 * i), max_new_tokens=5) for i in range(3)])
    assert [r.output_token_ids for r in together] == [r.output_token_ids for r in alone]


def test_it_takes_about_half() -> None:
    shape = CacheLayout.uniform(32, 8, 128)
    assert shape.with_int8().bytes_per_token() / shape.bytes_per_token() == 130 / 256
    ops = CpuBackend()
    cache = KVCache(ops, CacheLayout.uniform(1, 8, 128).with_int8(), [4])
    (layer,) = cache.layers
    arrays = layer.keys, layer.values, layer.key_scales, layer.value_scales
    assert sum(a.nbytes for a in arrays) == 256 * CacheLayout.uniform(1, 8, 128).with_int8().bytes_per_token()
    cache.close()
    assert layer.keys is layer.values is layer.key_scales is layer.value_scales is None
