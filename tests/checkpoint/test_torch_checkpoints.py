"""Checkpoints in PyTorch's form, one file or sharded: the same to every reader as safetensors are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoint
import torch_writer
from safetensors.numpy import load_file
from tiny_checkpoints import CONFIG, MakeCheckpoint, random_tensors, spec_of

import bminf_lite
from bminf_lite.checkpoint.inspect import inspect
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.errors import CheckpointError

INDEX = "pytorch_model.bin.index.json"


def write_bin(
    folder: Path, tensors: dict[str, np.ndarray], shards: int = 1, legacy: bool = False, **config: Any
) -> Path:
    """A Hugging Face folder with PyTorch weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if shards == 1:
        torch_writer.save(folder / "pytorch_model.bin", tensors, legacy)
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        part = {k: v for j, (k, v) in enumerate(tensors.items()) if j % shards == i}
        torch_writer.save(folder / name, part, legacy)
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_every_tensor(tmp_path: Path, shards: int, legacy: bool, dtype: Any) -> None:
    tensors = random_tensors(CONFIG, dtype)
    folder = write_bin(tmp_path / "source", tensors, shards, legacy)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.validate(spec_of(CONFIG))
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            np.testing.assert_array_equal(checkpoint.read(name), expected)
            got = checkpoint.weight(name) if expected.ndim == 2 else checkpoint.vector(name)
            assert isinstance(got, np.ndarray) and got.dtype == expected.dtype
        assert len(checkpoint.files()) == (2 if shards == 1 else 5)
        assert all(file.is_file() for file in checkpoint.files())


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_migration_gives_the_bits_that_safetensors_give(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, shards: int, recipe: str
) -> None:
    """With a matrix that lies transposed in the file, as ``state_dict`` may hold one."""
    tensors = random_tensors(CONFIG)
    expected = tmp_path / "expected"
    migrate(make_checkpoint(tensors=tensors), expected, recipe)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T).T
    folder = write_bin(tmp_path / "torch", tensors, shards, legacy=shards == 2)
    (folder / "tokenizer.json").write_text("{}")
    report = migrate(folder, tmp_path / "got", recipe)
    assert sorted(file.name for file in (tmp_path / "got").iterdir()) == [
        "bminf_lite.json", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    got, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "got", expected))
    assert got.keys() == wanted.keys()
    assert all(got[k].dtype == wanted[k].dtype and got[k].tobytes() == wanted[k].tobytes() for k in wanted)
    assert {source.name for source in report.sources} >= {f.name for f in folder.glob("pytorch_model*")}


def test_loads_and_generates_what_safetensors_do(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    with bminf_lite.load(folder, device="cpu") as model:
        expected = model.logits([3, 1, 4, 1, 5])
    (folder / "model.safetensors").unlink()
    torch_writer.save(folder / "pytorch_model.bin", tensors)
    with bminf_lite.load(folder, device="cpu") as model:
        np.testing.assert_array_equal(model.logits([3, 1, 4, 1, 5]), expected)
    assert inspect(folder)["parameters"] == sum(t.size for t in tensors.values())


def test_safetensors_go_before(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    with open_checkpoint(folder) as checkpoint:
        assert [file.name for file in checkpoint.files()] == ["config.json", "model.safetensors"]


def message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(folder) as checkpoint:
        checkpoint.validate(spec_of(CONFIG))
    return str(caught.value)


def test_broken_shards_are_all_told(tmp_path: Path) -> None:
    folder = write_bin(tmp_path / "source", random_tensors(CONFIG), 3)
    for i in (1, 3):
        file = folder / f"pytorch_model-0000{i}-of-00003.bin"
        file.write_bytes(file.read_bytes()[:-100])
    text = message(folder)
    assert "pytorch_model-00001" in text and "pytorch_model-00003" in text and "pytorch_model-00002" not in text
    (folder / INDEX).unlink()
    assert "neither pytorch_model.bin nor pytorch_model.bin.index.json" in message(folder)


def test_an_index_that_does_not_fit(tmp_path: Path) -> None:
    folder = write_bin(tmp_path / "source", random_tensors(CONFIG), 2)
    index = json.loads((folder / INDEX).read_text())
    names = list(index["weight_map"])
    index["weight_map"][names[0]] = index["weight_map"].pop(names[-1])
    (folder / INDEX).write_text(json.dumps(index))
    text = message(folder)
    assert f"{INDEX} places tensor {names[0]!r}" in text and f"{names[-1]!r}" in text
    index["weight_map"] = dict.fromkeys(names, "model.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    assert "is not a bin file" in message(folder)


def test_memory_of_a_migration(tmp_path: Path) -> None:
    """A file of 150 MB is migrated by a process that may have 75 MB more than it started with."""
    layers = 20
    config = {"num_hidden_layers": layers, "hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
    rows = np.random.default_rng(0).standard_normal((2048, 256)).astype(np.float32)
    tensors = {}
    for name, parameter in spec_of(CONFIG | config).parameters.items():
        large = np.resize(rows, parameter.shape)
        tensors[name] = np.ascontiguousarray(large.T).T if "layers.0." in name else large
    folder = write_bin(tmp_path / "source", tensors, **config)
    assert (folder / "pytorch_model.bin").stat().st_size > 150e6
    code = (
        "import resource, sys, bminf_lite.checkpoint.migrate as m\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "m.migrate(sys.argv[1], sys.argv[2])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(result.stdout) < 75_000
