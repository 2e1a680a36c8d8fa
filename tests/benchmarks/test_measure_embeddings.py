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
    options = {"folder": tmp_path / "out", "texts": 3, "runs": 1, "device": "cpu", "torch": "none", "batch": 2}
    arguments = argparse.Namespace(**options, recipe="w8a8", trace=None, padding=32)
    lines = measure_embeddings.measure(str(shape), arguments)
    int8 = next(lines)  # before the float model is measured
    assert int8["tokens"] > 60 and int8["int8_seconds"] > 0 and int8["int8_seconds_from_arrays"] > 0
    (found,) = lines
    assert found["float_seconds"] > 0 and found["int8_least_cosine"] > 0.99
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.safetensors")}
    assert len(made) == 2
    measure_embeddings.make_models(str(shape), arguments)
    assert {file: file.stat().st_mtime_ns for file in made} == made
