"""PyTorch's own files: whatever ``torch.save`` writes and ``torch.load`` reads, :class:`TorchFile` reads the same."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import ENCODER_DECODERS, EVERY, goldens

import bminf_lite
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.torch_file import TorchFile
from bminf_lite.errors import CheckpointError

torch = pytest.importorskip("torch", reason="parity needs torch")
pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)

pytestmark = pytest.mark.parity


def raw(tensor: Any) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(path: Path, expected: dict[str, Any]) -> None:
    file = TorchFile(path)
    assert list(file.tensors) == list(expected)
    for name, tensor in expected.items():
        values = file.read(name)
        assert values.shape == tuple(tensor.shape) and values.tobytes() == raw(tensor)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_every_kind(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(60).reshape(3, 4, 5)
    tensors = {}
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    for name in [*names, *(["uint16", "uint32", "float8_e4m3fn", "float8_e5m2"] if zipped else [])]:
        values = base.to(getattr(torch, name))
        tensors |= {f"{name} turned": values.permute(2, 0, 1), f"{name} part": values[1:, ::2, 3], name: values}
    tensors |= {"parameter": torch.nn.Parameter(torch.randn(3, 2)), "scalar": torch.tensor(1.5)}
    tensors["none"] = torch.empty(0, 4)
    torch.save(tensors, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    check(tmp_path / "x.bin", tensors)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_module_s_state(tmp_path: Path, zipped: bool, protocol: int) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6, bias=False))
    module[2].weight = torch.nn.Parameter(module[2].weight.T)
    state = module.state_dict()
    assert isinstance(state, OrderedDict) and state._metadata
    torch.save(state, tmp_path / "x.bin", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    check(tmp_path / "x.bin", state)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_no_state(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.bin"
    for value, words in [
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        ({"x": torch.zeros(2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        ({"x": np.zeros(2)}, "numpy"),
        ([torch.zeros(2)], "a list instead"),
    ]:
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match=words):
            TorchFile(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), str(path))
    with pytest.raises(CheckpointError, match=r"TorchScript|compressed"):
        TorchFile(path)


JOINED = ("olmo_hybrid", "kimi_linear")
"""Families whose ``state_dict`` has the convolution of queries, keys and values in one tensor, and files in three.

transformers 5.23 writes that of OLMo Hybrid in equal parts, whatever their widths.
"""


@pytest.mark.parametrize("family", [family for family in EVERY if family not in JOINED])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_s_bin_files_are_its_safetensors(tmp_path: Path, family: str, shards: int) -> None:
    """Every family's ``state_dict``, with what is shared and what is not a parameter, in both forms."""
    golden = next(iter(goldens(family)))
    hf = make_goldens.build(golden.config, golden.seed)
    hf.save_pretrained(tmp_path / "safetensors")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "safetensors" / "config.json").read_bytes())
    write_bin(folder, hf.state_dict(), shards)
    with open_model(folder) as got, open_model(tmp_path / "safetensors") as expected:
        for name, parameter in got.spec.parameters.items():
            read = "weight" if len(parameter.shape) == 2 else "vector"
            values = [getattr(model.weights(), read)(name) for model in (got, expected)]
            np.testing.assert_array_equal(*values, err_msg=name)
    source = [3, 1, 4] if family in ENCODER_DECODERS else None
    logits = []
    for path in (folder, tmp_path / "safetensors"):
        with bminf_lite.load(path, device="cpu") as model:
            logits.append(model.logits([1, 2, 3], source=source))
    np.testing.assert_array_equal(*logits)


def write_bin(folder: Path, state: dict[str, Any], shards: int) -> None:
    """``pytorch_model.bin``, or shards with an index, where a shard does not repeat what is in another."""
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    places: dict[int, str] = {}
    parts: dict[str, dict[str, Any]] = {f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin": {} for i in range(shards)}
    for i, (name, tensor) in enumerate(state.items()):
        file = places.setdefault(tensor.data_ptr(), list(parts)[i % shards])
        parts[file][name] = tensor
    for file, part in parts.items():
        torch.save(part, folder / file, _use_new_zipfile_serialization=False)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
