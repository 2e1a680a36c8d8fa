"""The tool that measures embeddings makes checkpoints that load, and vectors that int8 changes little."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import measure_embeddings

SHAPE = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 2000,
    "max_position_embeddings": 512,
}


def test_it_measures_a_small_shape(tmp_path: Path) -> None:
    shape = tmp_path / "small.json"
    shape.write_text(json.dumps(SHAPE))
    options = {"folder": tmp_path / "out", "texts": 3, "runs": 1, "device": "cpu", "without_torch": True, "batch": 2}
    found = measure_embeddings.measure(str(shape), argparse.Namespace(**options))
    assert found["tokens"] > 60 and found["int8_seconds"] > 0
    assert found["int8_least_cosine"] > 0.99
