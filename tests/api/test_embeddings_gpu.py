"""Vectors of whole models on a GPU, from folder to result, beside those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_kit import cosine, write_encoder, write_modules

import bminf_lite
from bminf_lite.api import load

pytestmark = pytest.mark.gpu

TEXTS = ["a cat sits on the mat", "the dog runs", "now", "a red cat and a red dog sits on the mat and barks"]
MODELS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"model_type": "modernbert", "architectures": ["ModernBertModel"], "local_attention": 6},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2},
    "classifier": {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
}


@pytest.mark.usefixtures("cuda_backend")
@pytest.mark.parametrize("recipe", [None, "w8a16", "float"])
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_gives_the_vectors_of_the_cpu(tmp_path: Path, name: str, recipe: str | None):
    folder = write_encoder(tmp_path / "source", **MODELS[name])
    if name != "classifier":
        write_modules(folder, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, {})
    if recipe != "float":
        bminf_lite.migrate(folder, tmp_path / "int8", recipe)
        folder = tmp_path / "int8"
    found = []
    for device in ("cpu", "cuda"):
        with load(folder, device=device) as model:
            if name == "classifier":
                found.append(np.array([list(one.scores.values()) for one in model.classify(TEXTS)]))
            else:
                found.append(model.embed(TEXTS))
                model.warm_up()
    if name == "classifier":
        np.testing.assert_allclose(*found, atol=0.02)
    else:
        assert cosine(*found).min() > 0.999


def test_a_gpu_embeds_beside_generation(tmp_path: Path, cuda_backend: object):
    folder = write_encoder(tmp_path / "model", **MODELS["qwen3"])
    with load(folder, device="cpu", embeddings=True) as model:
        expected = model.embed(TEXTS)
    with load(folder, device="cuda", embeddings=True) as model:
        alone = model.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True).token_ids
        stream = model.stream([5, 6, 7], max_new_tokens=12, ignore_eos=True)
        pieces = [next(stream)]
        assert cosine(model.embed(TEXTS), expected).min() > 0.999
        pieces += stream
        assert pieces[-1].result is not None and pieces[-1].result.token_ids == alone
