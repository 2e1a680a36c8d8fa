"""Files written piece by piece are files of the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from bminf_lite.checkpoint.safetensors_file import SafetensorsFile
from bminf_lite.checkpoint.writer import CheckpointWriter, SafetensorsWriter, TensorDeclaration
from bminf_lite.errors import CheckpointError

TYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
layouts = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(TYPES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    max_size=6,
)


@given(layouts, st.integers(0, 2**32), st.integers(1, 9))
def test_round_trip_through_both_readers(
    tmp_path_factory: pytest.TempPathFactory, layout: Any, seed: int, piece: int
) -> None:
    """Tensors written in pieces, in any order, some of them late and in a narrower type, come back bit for bit."""
    random = np.random.default_rng(seed)
    tensors = {name: random.integers(-9, 9, shape).astype(TYPES[dtype]) for name, (dtype, shape) in layout.items()}
    floats = [name for name, (dtype, _) in layout.items() if dtype in ("F32", "F16")]
    late = {name for name in floats if random.random() < 0.5}
    fixed = {name: TensorDeclaration(*layout[name]) for name in tensors if name not in late}
    path = tmp_path_factory.mktemp("w") / "x.safetensors"
    writer = SafetensorsWriter(path, fixed, {name: TensorDeclaration("F32", tensors[name].shape) for name in late})
    pieces = [(name, start) for name in fixed for start in range(0, tensors[name].nbytes, piece)]
    random.shuffle(pieces)
    for name, start in pieces:
        data = np.frombuffer(tensors[name].tobytes(), np.uint8)
        writer.write(name, data[start : start + piece], start)
        if random.random() < 0.2:
            writer.start_writeback(name, start, piece)
    writer.complete({name: tensors[name] for name in late})
    ours = SafetensorsFile(path)
    with safe_open(path, "np") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        assert set(theirs.keys()) == ours.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            for got in (ours.read(name), theirs.get_tensor(name)):
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
    assert writer.data_bytes == sum(value.nbytes for value in tensors.values())


def test_an_unfinished_file_cannot_be_read(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "x.safetensors", {"a": TensorDeclaration("F32", (1000,))}, {})
    writer.write("a", np.zeros(1000, np.float32))
    writer.close()
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "x.safetensors")


def test_wide_tensors_come_first_so_all_are_aligned(tmp_path: Path) -> None:
    dtypes = {"a": "I8", "b": "F16", "c": "I64", "d": "F32"}
    writer = SafetensorsWriter(
        tmp_path / "x.safetensors", {k: TensorDeclaration(v, (1,)) for k, v in dtypes.items()}, {}
    )
    for name, dtype in dtypes.items():
        writer.write(name, np.ones(1, TYPES[dtype]))
    writer.complete({})
    tensors = SafetensorsFile(tmp_path / "x.safetensors").tensors
    assert sorted(tensors, key=lambda name: tensors[name].offset) == ["c", "d", "b", "a"]
    assert all(info.offset % info.nbytes == 0 for info in tensors.values())


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 100))
def test_shards(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int) -> None:
    folder = tmp_path_factory.mktemp("shards")
    declared = {f"t{i}": TensorDeclaration("I8", (size,)) for i, size in enumerate(sizes)}
    writer = CheckpointWriter(folder, declared, {"t0"}, shard_bytes=limit)
    for i, size in enumerate(sizes[1:], 1):
        writer.write(f"t{i}", np.full(size, i, np.int8))
    writer.write_late("t0", np.full(sizes[0], 0, np.int8))
    writer.finish()
    files = sorted(folder.glob("*.safetensors"))
    found = {name: file for file in files for name in SafetensorsFile(file).tensors}
    assert found.keys() == declared.keys()
    for file in files:
        opened = SafetensorsFile(file)
        held = sum(info.nbytes for info in opened.tensors.values())
        assert held <= limit or len(opened.tensors) == 1
        for name in opened.tensors:
            assert (opened.read(name) == int(name[1:])).all()
    index = folder / "model.safetensors.index.json"
    if len(files) == 1:
        assert files[0].name == "model.safetensors" and not index.exists()
        return
    count = len(files)
    assert [file.name for file in files] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    content = json.loads(index.read_text())
    assert content["weight_map"] == {name: file.name for name, file in found.items()}
    assert content["metadata"]["total_size"] == sum(sizes)
