"""Headers of GGUF files: the values of the package ``gguf``, and bounded time and memory, whatever a file claims."""

from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.errors import CheckpointError
from bminf_lite.gguf_files.header import read_header
from bminf_lite.gguf_files.header_file import MAX_ELEMENTS, HeaderFile, HeaderProblem

HUGE = (1 << 62, (1 << 64) - 1, 1 << 40, MAX_ELEMENTS + 1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file_of(*entries: bytes, tensors: tuple[bytes, ...] = (), num_entries: int | None = None) -> bytes:
    count = len(entries) if num_entries is None else num_entries
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + b"".join((*entries, *tensors))


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every type of metadata."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_key_value("a.list", [1, -2, 3], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    writer.add_key_value("a.texts", ["", "ü", "x" * 300], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
    writer.add_key_value("a.flags", [True, False], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL)
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "some text")
    writer.add_custom_alignment(64)
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.random((3, 5), np.float32))
    writer.add_tensor("f16", rng.random((2, 2, 7)).astype(np.float16))
    q8 = gguf.quants.quantize(rng.random((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_values_are_those_of_the_package_gguf(written: Path) -> None:
    reader, header = gguf.GGUFReader(written), read_header(written)
    expected = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == expected
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors:
        found = header.tensors[t.name]
        assert found.shape == tuple(int(size) for size in reversed(t.shape))
        assert (found.type, found.offset, found.nbytes) == (t.tensor_type.name, t.data_offset, t.n_bytes)


def test_a_vocabulary_takes_little_time_and_memory(tmp_path: Path) -> None:
    """The package took 10 s and 700 MB for 262,144 tokens."""
    words = b"".join(text(f"t{i}") for i in range(100_000))
    entry = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 100_000) + words
    (tmp_path / "model.gguf").write_bytes(file_of(entry))
    start = time.process_time()
    header = HeaderFile(tmp_path / "model.gguf")
    assert time.process_time() - start < 2  # 0.05 s
    assert header.metadata["tokenizer.ggml.tokens"][99_999] == "t99999"


CLAIMS = {
    "tensors": lambda n: b"GGUF" + struct.pack("<IQQ", 3, n, 0),
    "entries": lambda n: file_of(num_entries=n),
    "the length of a key": lambda n: file_of(struct.pack("<Q", n)),
    "the length of a text": lambda n: file_of(text("k") + struct.pack("<IQ", 8, n)),
    "a list of bytes": lambda n: file_of(text("k") + struct.pack("<IIQ", 9, 0, n)),
    "a list of numbers": lambda n: file_of(text("k") + struct.pack("<IIQ", 9, 12, n)),
    "a list of texts": lambda n: file_of(text("k") + struct.pack("<IIQ", 9, 8, n)),
    "a text in a list": lambda n: file_of(text("k") + struct.pack("<IIQQ", 9, 8, 1, n)),
    "the length of a name": lambda n: file_of(tensors=(struct.pack("<Q", n),)),
    "dimensions": lambda n: file_of(tensors=(text("t") + struct.pack("<I", min(n, (1 << 32) - 1)),)),
}


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_file_claims_to_hold_is_compared_with_its_size(tmp_path: Path, claim: str, count: int) -> None:
    """Followed by some bytes, so that each claim is believed as far as it can be."""
    path = tmp_path / "model.gguf"
    path.write_bytes(CLAIMS[claim](count) + bytes(4096))
    start = time.process_time()
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"model.gguf: is no GGUF file that can be read: .*; download it again"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert time.process_time() - start < 1


def test_a_large_file_does_not_make_a_large_list_acceptable(tmp_path: Path) -> None:
    """Zeros are cheap: a sparse file may be as large as the list that it claims."""
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(text("k") + struct.pack("<IIQ", 9, 0, MAX_ELEMENTS + 1)))
    with open(path, "r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(HeaderProblem, match="k has 4,194,305 elements, and 4,194,304 are allowed"):
        HeaderFile(path)


DAMAGED = {
    b"": "it ends within its first bytes",
    b"GGUF": "it ends within its version",
    b"PK\3\4" + bytes(100): "it does not begin with GGUF",
    b"GGUF" + struct.pack("<IQQ", 1, 0, 0): "version 1 of the format, and 2 and 3 can be read",
    b"GGUF" + struct.pack(">IQQ", 3, 0, 0): "big-endian",
    file_of(text("k") + struct.pack("<IIQ", 9, 9, 0) + bytes(8)): "k is a list of lists",
    file_of(text("k") + struct.pack("<IQ", 99, 0)): "k has the unknown type 99",
    file_of(*[text("k") + struct.pack("<II", 4, 1)] * 2): "its metadata has k twice",
    file_of(struct.pack("<Q", 2) + b"\xff\xff" + bytes(9)): "a key of its metadata is not UTF-8",
    file_of(text("general.alignment") + struct.pack("<II", 4, 48)): "general.alignment is 48",
    file_of(text("general.alignment") + struct.pack("<II", 4, 0)): "general.alignment is 0",
    file_of(tensors=(tensor("t", 4), tensor("t", 4))): "it has the tensor 't' twice",
    file_of(tensors=(tensor("t", *[2] * 5),)): "tensor 't' has 5 dimensions",
}


@pytest.mark.parametrize("content", DAMAGED, ids=list(DAMAGED.values()))
def test_damage_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(HeaderProblem, match=DAMAGED[content]):
        HeaderFile(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (tensor("t", 4, kind=77), "tensor 't' has type 77, which the package gguf does not know"),
        (tensor("t", 33, 32, kind=8), r"tensor 't' \[32, 33\] has no whole blocks of 32 \(Q8_0\)"),
    ],
)
def test_tensors_that_cannot_be_read_are_named(tmp_path: Path, entry: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(tensors=(entry,)) + bytes(4096))
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@given(st.data())
def test_any_damage_is_our_error(tmp_path_factory: pytest.TempPathFactory, written: Path, data: st.DataObject) -> None:
    """Bytes of the header set to others, or the file cut: a result or ``CheckpointError``, in little memory."""
    content = bytearray(written.read_bytes()[:2048])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 1200))] = data.draw(st.sampled_from([0, 1, 7, 8, 9, 127, 128, 255]))
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    tracemalloc.start()
    with contextlib.suppress(CheckpointError):
        open_checkpoint(path).close()
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
