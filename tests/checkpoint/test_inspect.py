"""inspect describes any checkpoint that can be opened, in what JSON can hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint

from bminf_lite.checkpoint.inspect import inspect
from bminf_lite.checkpoint.migrate import migrate

PARAMETERS = sum(value.size for value in random_tensors(CONFIG).values())
LINEAR = "model.layers.0.mlp.up_proj"


def test_float_checkpoint(make_checkpoint: MakeCheckpoint) -> None:
    source = make_checkpoint(shards=2)
    found = inspect(source)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["model_type"] == "llama" and found["architectures"] == ["LlamaForCausalLM"]
    assert found["parameters"] == PARAMETERS and found["bytes"] == 4 * PARAMETERS == found["dtypes"]["F32"]
    assert found["file_bytes"] == sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert found["quantization"] is None and found["migration"] is None
    tensor = found["tensors"][f"{LINEAR}.weight"]
    assert tensor["dtype"] == "F32" and tensor["shape"] == [24, 16] and tensor["bytes"] == 24 * 16 * 4
    assert tensor["file"].startswith("model-0000") and "scale" not in tensor


@pytest.mark.parametrize("recipe, activations, name", [("w8a8", "int8", "weight"), ("w8a16", "float", "weight_packed")])
def test_migrated_checkpoint(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, recipe: str, activations: str, name: str
) -> None:
    report = migrate(make_checkpoint(intermediate_size=27, tensors=None), tmp_path / "out", recipe)
    found = inspect(tmp_path / "out")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["parameters"] == sum(np.prod(row.shape) for row in report.tensors)
    assert found["bytes"] == report.bytes_after
    assert found["quantization"]["groups"][0]["activations"] == activations
    assert found["migration"]["recipe"]["name"] == recipe
    tensor = found["tensors"][f"{LINEAR}.{name}"]
    assert tensor["activations"] == activations and tensor["scale"]["dtype"] == "float16"
    assert 0 < tensor["scale"]["min"] <= tensor["scale"]["median"] <= tensor["scale"]["max"]
    assert tensor.get("unpacked_shape", tensor["shape"]) == [27, 16]


def test_unknown_architectures_are_described_too(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(model_type="nonsense", tensors={"x": np.zeros((2, 3), np.int32)})
    found = inspect(folder)
    assert found["model_type"] == "nonsense" and found["parameters"] == 6
