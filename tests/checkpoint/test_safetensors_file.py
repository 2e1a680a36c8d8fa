"""The strict reader of one file: the same tensors as the library, and every defect named."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from bminf_lite.checkpoint.safetensors_file import SafetensorsFile
from bminf_lite.errors import CheckpointError

TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int8, np.uint8, np.bool_]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def write(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> Path:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def message(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda s: s != "__metadata__"),
        st.tuples(st.sampled_from(TYPES), shapes),
        max_size=5,
    ),
    st.integers(0, 2**32),
)
def test_reads_what_the_library_wrote(tmp_path_factory: pytest.TempPathFactory, layout: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = {name: random.integers(0, 100, shape).astype(dtype) for name, (dtype, shape) in layout.items()}
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    save_file(tensors, path)
    file = SafetensorsFile(path)
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        got = file.read(name)
        assert got.dtype == expected.dtype and got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)
        part = bytearray(expected.nbytes // 2)
        file.read_tensor(name, memoryview(part), 1 if part else 0)
        assert part == expected.tobytes()[1 : 1 + len(part)]
    file.close()


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    data = b"abc" + np.array([1.5, 2], np.float32).tobytes()
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 3), "b": entry(3, 11, "F32", [2])}, data)
    np.testing.assert_array_equal(SafetensorsFile(path).read("b"), np.array([1.5, 2], np.float32))


DEFECTS = {
    "empty": (None, b"", "is empty"),
    "short": (None, b"abc", "has only 3 bytes"),
    "gigabytes": (None, (5_000_000_000).to_bytes(8, "little") + b"{}", "claims a header of 5,000,000,000 bytes"),
    "huge": (None, b"\xff" * 8 + b"{}", "the format allows 100,000,000"),
    "header cut": (None, (1000).to_bytes(8, "little") + b"{", "it is truncated"),
    "lfs": (None, b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "not json": (b"{'a'", b"", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "deep": (b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
    "huge number": (b'{"a":' + b"9" * 5000 + b"}", b"", "not valid JSON"),
    "not an object": (b"[]", b"", "not a JSON object"),
    "duplicate": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        "names 'a' twice",
    ),
    "duplicate key": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x", "'dtype' twice"),
    "entry": ({"a": 1}, b"", "tensor 'a': its entry"),
    "extra key": ({"a": {**entry(0, 1), "x": 1}}, b"x", "tensor 'a': its entry"),
    "dtype": ({"a": entry(0, 1, "Q3")}, b"x", "dtype 'Q3' is not one of"),
    "dtype type": ({"a": {**entry(0, 1), "dtype": [1]}}, b"x", "is not one of"),
    "negative": ({"a": entry(0, 1, shape=[-1])}, b"x", "shape [-1]"),
    "boolean": ({"a": entry(0, 1, shape=[True])}, b"x", "shape [True]"),
    "offsets": ({"a": {**entry(0, 1), "data_offsets": [1, 0]}}, b"x", "data_offsets [1, 0]"),
    "size": ({"a": entry(0, 4, "F32", [2])}, b"xxxx", "has 4 bytes, but F32 [2] takes 8"),
    "overflow": ({"a": entry(0, 4, "F32", [2**62, 2**62])}, b"xxxx", "takes"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"xxxxxx", "tensor 'b' overlaps 'a' by 2 bytes"),
    "same place": ({"a": entry(0, 4), "b": entry(0, 4)}, b"xxxx", "overlaps"),
    "gap": ({"a": entry(0, 2), "b": entry(3, 4)}, b"xxxx", "1 bytes before tensor 'b'"),
    "truncated": ({"a": entry(0, 4), "b": entry(4, 8)}, b"xxxxxx", "truncated: it has"),
    "trailing": ({"a": entry(0, 2)}, b"xxxx", "2 bytes after the last tensor"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_named(tmp_path: Path, defect: str) -> None:
    header, data, expected = DEFECTS[defect]
    path = tmp_path / "model.safetensors"
    if header is None:
        path.write_bytes(data)
    else:
        write(path, header, data)
    assert expected in message(path)


def test_all_defects_are_listed(tmp_path: Path) -> None:
    header = {"a": entry(0, 1, "Q3"), "b": 2, "c": entry(0, 4, "F32", [7])}
    text = message(write(tmp_path / "x.safetensors", header))
    assert "3 problems" in text and all(f"tensor '{name}'" in text for name in "abc")


@given(st.binary(max_size=64), st.integers(0, 200), st.integers(1, 255))
def test_damage_never_escapes_as_another_exception(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, at: int, change: int
) -> None:
    """A file with one byte changed and a tail added opens as the library opens it, or is a CheckpointError."""
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.int8)}, path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= change
    path.write_bytes(bytes(data) + tail)
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    with safe_open(path, "np") as reference:
        assert set(reference.keys()) == file.tensors.keys()
        for name in file.tensors:
            assert file.read(name).tobytes() == reference.get_tensor(name).tobytes()


@pytest.mark.parametrize("change", ["shrink", "rewrite"])
def test_a_file_that_changes_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, path)
    file = SafetensorsFile(path)
    file.read("a")
    if change == "shrink":
        os.truncate(path, 100)
    else:
        with open(path, "rb+") as other:
            other.write(b"x")
        os.utime(path, ns=(0, 0))
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        file.read("a")


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, path)
    file, preadv = SafetensorsFile(path), os.preadv

    def cut_and_read(*arguments: Any) -> int:
        os.truncate(path, 100)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", cut_and_read)
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        file.read("a")


def test_time_and_memory_are_bounded(tmp_path: Path) -> None:
    """A header of 1.5 million tensors without bytes took 23 s."""
    entries = b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(1_500_000))
    start = time.process_time()
    path = write(tmp_path / "x.safetensors", b"{" + entries + b"}")
    assert "describes about 1,500,001 tensors, and 131,072 are allowed" in message(path)
    assert time.process_time() - start < 5  # most of it is writing the file


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"x" * 1001: entry(0, 0)}, "a tensor whose name has 1,001 characters, and 1,000 are allowed"),
        ({"x": entry(0, 0, shape=[1 << 63])}, "is not a list of sizes"),
        ({"x": entry(0, 0, shape=[1] * 33)}, "is not a list of sizes"),
        ({"x": entry(0, 0, shape=[10**4000] * 30)}, "is not a list of sizes"),
        (b'{"x":{"dtype":"U8","shape":[' + b"1," * (1 << 21) + b"1]}}", "values, and 2,097,152 are allowed"),
        (b'{"x":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", "it nests too deeply"),
    ],
)
def test_absurd_entries_are_refused(tmp_path: Path, header: Any, problem: str) -> None:
    found = message(write(tmp_path / "x.safetensors", header))
    assert problem in found and len(found) < 10_000
