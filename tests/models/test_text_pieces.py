"""A long text that becomes vectors in pieces, a layer at a time, has the vectors of the text computed whole."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    GPTS,
    LATENTS,
    STATES,
    RandomWeights,
    goldens,
    reading_architecture,
)
from tolerances import assert_close

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import ForwardBatch

TOKENS, PIECE = 150, 37
PLAIN = ("qwen3", "gemma2", "granitemoehybrid", "deepseek_v3", "qwen3_next")
EACH = [
    pytest.param(family, marks=() if family in PLAIN else pytest.mark.slow)
    for family in (*FAMILIES, *GPTS, *DECODERS, *STATES, *LATENTS)
]


@pytest.mark.parametrize("family", EACH)
def test_pieces_give_the_vectors_of_the_whole_text(backend: Backend, family: str):
    config = next(goldens(family)).config | {"max_position_embeddings": 512, "n_positions": 512}
    architecture = models.embedder(models.find(config))
    weights = RandomWeights(config, 1, quantized=True, architecture=architecture)
    network = architecture.Model(architecture.parse(config), weights, backend)
    assert network.reads_pieces
    text = np.random.default_rng(2).integers(0, config["vocab_size"], TOKENS).astype(np.int32)
    batch = ForwardBatch.packed(backend.array, [text], block_tables=network.tables([TOKENS]))
    with backend.step(batch):
        whole = np.array(backend.host(network(batch)), np.float32)
    work, parts = network.pieces(text, PIECE), 0

    def results():
        vectors = yield from work
        found.extend(np.array(backend.host(piece), np.float32) for piece in vectors)

    found: list[np.ndarray] = []
    for _ in results():
        parts += 1
    assert [len(piece) for piece in found] == [37, 37, 37, 37, 2]
    assert parts == 5 * network.config.num_layers == 5 * network.parts_at_once
    if backend.has_one_order:
        np.testing.assert_array_equal(np.concatenate(found), whole)
    else:
        assert_close(np.concatenate(found), whole, "logits", backend.activation_dtype, np.abs(whole).max())


@pytest.mark.parametrize("family", ENCODERS)
def test_a_text_whose_tokens_see_those_behind_them_has_no_pieces(family: str):
    config = {"model_type": family}
    assert not reading_architecture(config).parse(config).reads_pieces
