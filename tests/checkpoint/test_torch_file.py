"""PyTorch files without PyTorch: every type, order and sharing of tensors, and files that are cut, padded or wrong."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch_writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch_writer import Call, Name, Persistent, Storages, dumps, rebuild, save, write_legacy, write_zip

from bminf_lite.checkpoint.torch_file import TorchFile
from bminf_lite.errors import CheckpointError

ANY_TYPE = st.sampled_from(list(torch_writer.STORAGE_NAMES))
FORMS = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


def example(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Tensors in and out of order, that share storages, without elements and without axes."""
    base = np.arange(24).astype(dtype)
    matrix = base.reshape(4, 6)
    return {
        "matrix": matrix,
        "transposed": matrix.T,
        "rows": matrix[1:3],
        "columns": matrix[:, 2:5],
        "every second": base[::2],
        "cube": base.reshape(2, 3, 4).transpose(2, 0, 1),
        "scalar": np.array(7, dtype),
        "empty": np.empty((0, 5), dtype),
        "own": np.arange(5).astype(dtype),
    }


def message(path: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        TorchFile(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


@FORMS
@pytest.mark.parametrize("dtype", list(torch_writer.STORAGE_NAMES), ids=str)
def test_reads_every_tensor_of_every_type(tmp_path: Path, legacy: bool, dtype: Any) -> None:
    tensors = example(dtype)
    file = TorchFile(save(tmp_path / "x.bin", tensors, legacy))
    assert list(file.tensors) == list(tensors)
    for name, expected in tensors.items():
        got = file.read(name)
        assert got.dtype == expected.dtype and got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)
        assert file.tensors[name].nbytes == expected.nbytes and file.tensors[name].file == file.path


@FORMS
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example overwrites its files
@given(data=st.data())
def test_any_part_of_any_view(tmp_path: Path, legacy: bool, data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(max_dims=4, max_side=5))
    base = np.arange(np.prod(shape)).astype(data.draw(ANY_TYPE)).reshape(shape)
    view = base.transpose(data.draw(st.permutations(range(base.ndim))))
    view = view[data.draw(hnp.basic_indices(view.shape, allow_newaxis=False, allow_ellipsis=False).filter(forwards))]
    view = np.asarray(view)
    if not np.shares_memory(view, base):
        view = base
    file = TorchFile(save(tmp_path / "x.bin", {"base": base, "view": view}, legacy))
    np.testing.assert_array_equal(file.read("view"), view)
    start = data.draw(st.integers(0, view.nbytes))
    stop = data.draw(st.integers(start, view.nbytes))
    part = bytearray(stop - start)
    file.read_tensor("view", memoryview(part), start)
    assert bytes(part) == view.tobytes()[start:stop]


def forwards(index: Any) -> bool:
    """PyTorch has no negative strides."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(not isinstance(part, slice) or (part.step or 1) > 0 for part in parts)


def test_untyped_storages_with_a_type_beside_them(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.uint16)
    storage = Persistent(("storage", Name("torch.storage", "UntypedStorage"), "0", "cpu", 12))
    for name, dtype, expected in [
        ("uint16", np.uint16, values),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, values.view(ml_dtypes.float8_e4m3fn)),
    ]:
        size = 12 // np.dtype(dtype).itemsize
        arguments = (storage, 0, (size,), (1,), False, {}, Name("torch", name))
        call = Call(Name("torch._utils", "_rebuild_tensor_v3"), arguments)
        file = TorchFile(write_zip(tmp_path / f"{name}.bin", dumps({"x": call}), {"0": values.tobytes()}))
        assert file.read("x").tobytes() == expected.tobytes() and file.read("x").dtype == dtype


def test_old_views_of_storages(tmp_path: Path) -> None:
    """Before PyTorch 0.4, a storage could be a part of another: its key, start and size follow in the reference."""
    values = np.arange(10, dtype=np.float32)
    part = Persistent(("storage", Name("torch", "FloatStorage"), "a", "cpu", 10, ("b", 4, 3)))
    path = write_legacy(tmp_path / "x.bin", dumps({"x": rebuild(part, 1, (2,), (1,))}), {"a": (10, values.tobytes())})
    np.testing.assert_array_equal(TorchFile(path).read("x"), [5, 6])
    path = write_legacy(tmp_path / "y.bin", dumps({"x": rebuild(part, 1, (3,), (1,))}), {"a": (10, values.tobytes())})
    assert "reaches beyond its storage of 12 bytes" in message(path)


@FORMS
def test_an_entry_of_a_training_checkpoint(tmp_path: Path, legacy: bool) -> None:
    path = save(tmp_path / "x.pt", {"a": np.ones(3, np.float16)}, legacy, entry="module")
    np.testing.assert_array_equal(TorchFile(path, entry="module").read("a"), np.ones(3))
    assert "'iteration' is 7, not a tensor" in message(path)
    assert "'iteration' is 7, not a tensor" in message(path, entry="model")
    assert "instead of a dictionary" in message(path, entry="iteration")


def test_ignored_names_are_passed_over(tmp_path: Path) -> None:
    array = Call(Name("numpy.core.multiarray", "_reconstruct"), (Name("numpy", "ndarray"), (0,), "b"), state=(1, (3,)))
    storages = Storages()
    content = {"np_rng_state": ("MT19937", array), "module": {"a": storages.tensor(np.ones(2, np.float32))}}
    path = write_zip(tmp_path / "x.pt", dumps(content), {"0": np.ones(2, np.float32).tobytes()})
    assert "numpy.core.multiarray._reconstruct" in message(path, entry="module")
    file = TorchFile(path, entry="module", ignored=("numpy.*",))
    np.testing.assert_array_equal(file.read("a"), [1, 1])
    path = write_zip(tmp_path / "y.pt", dumps({"a": array}), {})
    assert "not a tensor" in message(path, ignored=("numpy.*",))


# -- tensors that are not in their storage, storages that are not in the file -----------------------------------------


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "words"),
    [
        (0, (7,), (1,), "reaches beyond its storage of 24 bytes"),
        (6, (1,), (1,), "reaches beyond"),
        (1, (2, 3), (3, 1), "reaches beyond"),
        (0, (2, 2), (5, 1), "reaches beyond"),
        (0, (100, 100), (0, 0), "repeats its storage"),
        (0, (1 << 40, 1 << 40), (0, 0), "repeats its storage"),
        (0, (0, 1 << 40, 1 << 40), (0, 0, 1), "more elements than can be addressed"),
        (-1, (1,), (1,), "a tensor's offset is -1"),
        (0, (-1,), (1,), "a tensor's size is -1"),
        (0, (2,), (-1,), "a tensor's stride is -1"),
        (0, (True,), (1,), "size is True"),
        (0, (2.0,), (1,), "size is a float"),
        (1 << 200, (1,), (1,), "a very large number"),
        (0, (1,), (1, 1), "same length"),
        (0, [1], (1,), "tuples"),
        (0, (1,) * 33, (1,) * 33, "33 axes"),
        (None, (1,), (1,), "offset is None"),
    ],
)
@FORMS
def test_tensors_must_lie_in_their_storage(
    tmp_path: Path, legacy: bool, offset: Any, shape: Any, strides: Any, words: str
) -> None:
    storage = Persistent(("storage", Name("torch", "FloatStorage"), "0", "cpu", 6))
    pickled, content = dumps({"x": rebuild(storage, offset, shape, strides)}), bytes(24)
    path = tmp_path / "x.bin"
    if legacy:
        write_legacy(path, pickled, {"0": (6, content)})
    else:
        write_zip(path, pickled, {"0": content})
    assert words in message(path)


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (("storage", Name("torch", "FloatStorage"), "0", "cpu", 7), "has 24 bytes, not 28"),
        (("storage", Name("torch", "DoubleStorage"), "0", "cpu", 6), "has 24 bytes, not 48"),
        (("storage", Name("torch", "FloatStorage"), "../0", "cpu", 6), "'../0' is not in the file"),
        (("storage", Name("torch", "FloatStorage"), "0", "cpu", -6), "size is -6"),
        (("storage", Name("torch", "FloatStorage"), "0", "cpu", 1 << 60), "size is"),
        (("storage", Name("torch", "FloatStorage"), "0", "cpu", 6, ("0", 4, 4)), "beyond"),
        (("storage", Name("torch", "FloatStorage"), 0, "cpu", 6), "must be text"),
        (("storage", Name("torch", "float32"), "0", "cpu", 6), "no class of storages"),
        (("storage", "FloatStorage", "0", "cpu", 6), "no class of storages"),
        (("module", Name("torch", "FloatStorage"), "0", "cpu", 6), "not a storage"),
        (("storage",), "not a storage"),
        ("storage", "not a storage"),
        (Persistent(("storage", Name("torch", "FloatStorage"), "0", "cpu", 6)), "not a storage"),
    ],
)
def test_storages_must_be_what_they_claim(tmp_path: Path, identity: Any, words: str) -> None:
    path = write_zip(tmp_path / "x.bin", dumps({"x": rebuild(Persistent(identity), 0, (1,), (1,))}), {"0": bytes(24)})
    assert words in message(path)


def test_a_storage_has_one_type(tmp_path: Path) -> None:
    tensors = {
        kind: rebuild(Persistent(("storage", Name("torch", kind), "0", "cpu", 4)), 0, (4,), (1,))
        for kind in ("FloatStorage", "IntStorage")
    }
    assert "two types" in message(write_zip(tmp_path / "x.bin", dumps(tensors), {"0": bytes(16)}))


def test_every_wrong_tensor_is_told(tmp_path: Path) -> None:
    storage = Persistent(("storage", Name("torch", "FloatStorage"), "0", "cpu", 6))
    content = {"a": rebuild(storage, 0, (7,), (1,)), "b": rebuild(storage, 0, (6,), (1,)), "c": 3, 4: "d", "e": None}
    text = message(write_zip(tmp_path / "x.bin", dumps(content), {"0": bytes(24)}))
    assert text.count("\n") == 4 and "'a'" in text and "'c' is 3" in text and "'e' is None" in text


# -- the archive ------------------------------------------------------------------------------------------------------


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", dumps({}))
        archive.writestr("a/data/0", bytes(1 << 20))
    assert "is compressed" in message(path)


def test_records_may_not_overlap(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)})
    content = bytearray(path.read_bytes())
    first, second = (_entry(content, key) for key in (0, 1))
    content[second + 42 : second + 46] = content[first + 42 : first + 46]
    path.write_bytes(content)
    assert "not where the directory says" in message(path)
    content[second + 46 + len("archive/data/")] = ord("0")
    path.write_bytes(content)
    assert "twice" in message(path)


def test_a_record_may_not_lie_within_another(tmp_path: Path) -> None:
    """The first storage holds a whole record of its own, with its header, to which the directory points."""
    name = b"archive/data/1"
    inner = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 16, 16, len(name), 0) + name + bytes(16)
    path = write_zip(tmp_path / "x.bin", dumps({}), {"0": inner, "1": bytes(16)})
    content = bytearray(path.read_bytes())
    second = _entry(content, 1)
    content[second + 42 : second + 46] = struct.pack("<I", content.index(inner))
    path.write_bytes(content)
    assert "overlaps the one before it" in message(path)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(8, struct.pack("<H", 1), "is encrypted"), (20, struct.pack("<2I", 1 << 30, 1 << 30), "ends after the file's")],
)
def test_records_that_are_not_there_to_be_read(tmp_path: Path, at: int, value: bytes, words: str) -> None:
    """By the flags and the sizes of a directory entry."""
    path = save(tmp_path / "x.bin", {"a": np.zeros(4, np.float32)})
    content = bytearray(path.read_bytes())
    first = _entry(content, 0)
    content[first + at : first + at + len(value)] = value
    path.write_bytes(content)
    assert words in message(path)


def _entry(content: bytes, key: int) -> int:
    """Where the directory entry of a storage begins."""
    return content.rindex(b"archive/data/%d" % key) - 46


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    tar = bytearray(512)
    tar[257:262] = b"ustar"
    for content, words in [
        (b"", "is empty"),
        (b"hello", "neither a zip archive nor a pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (bytes(tar), "0.1.10"),
        (dumps({}), "no PyTorch file"),
        (dumps(1) * 3, "no PyTorch file"),
        (b"PK\3\4", "damaged"),
    ]:
        path.write_bytes(content)
        assert words in message(path)
    path.unlink()
    assert "does not exist" in message(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "x")
    assert "without the data.pkl" in message(path)
    assert "holds no tensors" in message(write_zip(path, dumps({}), {}))
    assert "little-endian" in message(write_legacy(path, dumps({}), {}, little_endian=False))
    assert "little-endian" in message(write_zip(path, dumps({}), {}, byteorder=b"big"))
    assert "TorchScript" in message(write_zip(path, dumps({}), {}, **{"constants.pkl": b""}))


@pytest.mark.parametrize("count", [0, 5, 7, -1])
def test_legacy_storages_say_their_size(tmp_path: Path, count: int) -> None:
    storage = Persistent(("storage", Name("torch", "FloatStorage"), "0", "cpu", 6))
    pickled = dumps({"x": rebuild(storage, 0, (6,), (1,))})
    text = message(write_legacy(tmp_path / "x.bin", pickled, {"0": (count, bytes(24))}))
    assert "elements, not 6" in text
    assert "unknown or twice" in message(write_legacy(tmp_path / "y.bin", pickled, {"1": (6, bytes(24))}))
    assert "not in the file" in message(write_legacy(tmp_path / "z.bin", pickled, {}))


@FORMS
def test_cut_and_padded_files(tmp_path: Path, legacy: bool) -> None:
    """Cut anywhere, a file is refused; what follows the last storage of the old form is not looked at."""
    path = save(tmp_path / "x.bin", {"a": np.arange(6.0), "b": np.arange(3, dtype=np.int64)}, legacy)
    content = path.read_bytes()
    for end in range(0, len(content), 3):
        path.write_bytes(content[:end])
        message(path)


@FORMS
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example overwrites its files
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_files_are_refused_or_read(tmp_path: Path, legacy: bool, changes: list[tuple[float, int]]) -> None:
    path = save(tmp_path / "x.bin", example(), legacy)
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    path.write_bytes(content)
    try:
        file = TorchFile(path)
    except CheckpointError:
        return
    for name in file.tensors:
        file.read(name)


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": np.arange(6.0), "b": np.arange(6.0).reshape(2, 3).T})
    file = TorchFile(path)
    os.utime(path, ns=(1, 1))
    for name in "ab":
        with pytest.raises(CheckpointError, match="changed since"):
            file.read(name)
