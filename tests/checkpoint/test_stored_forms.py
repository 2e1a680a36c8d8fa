"""Tensors that a file holds in another form than a model uses them: under other names, or the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import spec_of

from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.errors import CheckpointError

GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
MATRIX = "transformer.h.1.mlp.c_fc.weight"


def write(folder: Path, config: dict[str, Any], prefix: str = "transformer.") -> dict[str, np.ndarray]:
    """A random checkpoint whose file leaves ``prefix`` out of its names; its tensors by the names used here."""
    rng = np.random.default_rng(3)
    spec = spec_of(config)
    shapes = {name: p.shape for name, p in spec.parameters.items() if name not in spec.tied}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir()
    save_file({name.removeprefix(prefix): values for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize(
    ("config", "prefix"),
    [(GPT2, "transformer."), ({"model_type": "opt", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1,
                               "num_attention_heads": 2, "ffn_dim": 24, "max_position_embeddings": 8}, "model.")],
)  # fmt: skip
def test_names_without_a_prefix_are_known(tmp_path, config, prefix):
    tensors = write(tmp_path / "source", config, prefix)
    migrate(tmp_path / "source", tmp_path / "out")
    for folder in ("source", "out"):
        with open_model(tmp_path / folder) as model:
            for name, parameter in model.spec.parameters.items():
                if parameter.role.value == "vector":
                    np.testing.assert_array_equal(model.weights().vector(name), tensors[name])


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_matrices_stored_in_out_are_quantized_when_loaded(tmp_path, recipe):
    """Their file stays what other readers open; what runs is what quantizing the matrix itself gives."""
    tensors = write(tmp_path / "source", GPT2, "")
    report = migrate(tmp_path / "source", tmp_path / "out", recipe)
    assert set(report.late) == {n for n in tensors if n.endswith(("c_fc.weight", "c_proj.weight", "c_attn.weight"))}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with open_model(tmp_path / "source") as model:
        np.testing.assert_array_equal(model.weights().weight(MATRIX), tensors[MATRIX].T)
    with open_model(tmp_path / "out") as model:
        np.testing.assert_array_equal(model.checkpoint.vector(MATRIX), tensors[MATRIX])
        weight = model.weights().weight(MATRIX)
    expected = quantize_weight(tensors[MATRIX].T, dynamic=recipe == "w8a8")
    assert isinstance(weight, Int8Weight) and weight.dynamic == expected.dynamic
    np.testing.assert_array_equal(weight.codes, expected.codes)
    np.testing.assert_array_equal(weight.scale, expected.scale)


def test_a_manifest_with_an_unknown_scheme_is_refused(tmp_path):
    write(tmp_path / "source", GPT2)
    migrate(tmp_path / "source", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "bminf_lite.json").read_text())
    manifest["quantized_when_loaded"][MATRIX] = "w4a4"
    (tmp_path / "out" / "bminf_lite.json").write_text(json.dumps(manifest))
    with open_model(tmp_path / "out") as model, pytest.raises(CheckpointError, match="'w4a4', which is no scheme"):
        model.weights()
