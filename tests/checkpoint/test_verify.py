"""Damage to a migrated checkpoint is found: all of it by ``verify``, and where it matters most when it is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import MakeCheckpoint

import bminf_lite
from bminf_lite.checkpoint import checksum
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.verify import verify
from bminf_lite.errors import CheckpointError

SCALE = "model.layers.1.self_attn.o_proj.weight_scale"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def migrated(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    source = make_checkpoint()
    (source / "README.md").write_text("read me")
    migrate(source, tmp_path / "out", shard_bytes=2_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 3
    return tmp_path / "out"


def flip(file: Path, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def place(folder: Path, tensor: str) -> tuple[Path, int]:
    """The file of a tensor, and where its bytes begin."""
    with open_model(folder) as model:
        info = model.checkpoint.tensors[tensor]
    return info.file, info.offset


def test_an_intact_folder(migrated: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    found = verify(migrated, lambda *call: calls.append(call))
    files = [path for path in migrated.iterdir() if path.name != "bminf_lite.json"]
    assert (found.files, found.bytes) == (len(files), sum(path.stat().st_size for path in files))
    assert calls[-1][0] == calls[-1][1] == found.bytes
    assert bminf_lite.verify(str(migrated)) == found


@given(st.data())
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, int8: Path, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("copy")
    for path in int8.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    file = data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.name != "bminf_lite.json")))
    flip(file, data.draw(st.integers(0, file.stat().st_size - 1)), data.draw(st.integers(0, 7)))
    with pytest.raises(CheckpointError, match=f"{file.name} has changed since migration"):
        verify(folder)


def test_every_problem_is_listed(migrated: Path) -> None:
    first, second, third = sorted(migrated.glob("*.safetensors"))[:3]
    flip(first, first.stat().st_size - 1)
    os.truncate(second, second.stat().st_size - 1)
    third.unlink()
    with pytest.raises(CheckpointError) as caught:
        verify(migrated)
    text = str(caught.value)
    assert f"{first.name} has changed since migration" in text and f"{third.name} is missing" in text
    assert f"{second.name} has {second.stat().st_size:,} bytes; migration wrote" in text


def test_folders_without_checksums(make_checkpoint: MakeCheckpoint, migrated: Path, tmp_path: Path) -> None:
    for folder in (make_checkpoint("other"), tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="has no checksums"):
            verify(folder)
    (migrated / "bminf_lite.json").write_text('{"files": [{"name": 1}]}')
    with pytest.raises(CheckpointError, match="files is no list"):
        verify(migrated)


@pytest.mark.parametrize("tensor", [SCALE, NORM])
def test_a_flipped_bit_in_a_small_tensor_is_found_when_it_is_loaded(migrated: Path, tensor: str) -> None:
    file, offset = place(migrated, tensor)
    flip(file, offset + 3)
    with pytest.raises(CheckpointError, match=f"{tensor}' is not what migration wrote: the file is damaged"):
        bminf_lite.load(migrated, device="cpu")


def test_a_file_of_another_size_is_found_when_it_is_opened(migrated: Path) -> None:
    """As when a shard comes from another migration."""
    file = min(migrated.glob("*.safetensors"))
    tensors = load_file(file)
    save_file(tensors, file, {"format": "pt", "more": "x" * 100})
    with pytest.raises(CheckpointError, match=rf"{file.name} has [\d,]+ bytes; migration wrote"):
        open_model(migrated)


@pytest.mark.parametrize("value", [0.0, -0.001])
def test_scales_that_are_not_positive_are_refused(migrated: Path, value: float) -> None:
    """Also where no checksum says what they were."""
    file, _ = place(migrated, SCALE)
    tensors = load_file(file)
    tensors[SCALE][2] = value
    save_file(tensors, file, {"format": "pt"})
    (migrated / "bminf_lite.json").unlink()
    with open_model(migrated) as model, pytest.raises(CheckpointError, match="but scales are positive"):
        model.weights().weight(SCALE.removesuffix("_scale"))


@pytest.mark.parametrize(
    "damage",
    [
        {"files": "x"},
        {"files": {"name": "x"}},
        {"files": ["x"]},
        {"files": [{"name": "model.safetensors"}]},
        {"files": [{"name": "model.safetensors", "bytes": "1", "xxh3": ""}]},
        {"recipe": ["w8a8"]},
        {"checked_when_loaded": 1},
        {"rotated_when_loaded": [1]},
    ],
    ids=str,
)
def test_a_damaged_manifest_is_named(migrated: Path, damage: dict[str, object]) -> None:
    manifest = migrated / "bminf_lite.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | damage))
    for run in (verify, open_model):
        with pytest.raises(CheckpointError, match=rf"^{manifest}: {next(iter(damage))} is no.* the file is damaged"):
            run(migrated)


@pytest.mark.parametrize("version", [0, 4, "1", None])
def test_an_unknown_version_of_the_manifest_is_refused(migrated: Path, version: object) -> None:
    manifest = json.loads((migrated / "bminf_lite.json").read_text())
    (migrated / "bminf_lite.json").write_text(json.dumps(manifest | {"format_version": version}))
    with pytest.raises(CheckpointError, match=r"format_version is .*; upgrade bminf-lite"):
        open_model(migrated)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250, 400])
@pytest.mark.parametrize(
    "given", [[], [(0, 400)], [(30, 80), (90, 160)], [(110, 290), (290, 330)], [(70, 80), (320, 380)]]
)
def test_a_checksum_is_that_of_the_digests_of_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, given: list[tuple[int, int]]
) -> None:
    """Whatever bytes of a part are given to it: some, none, or more than its own."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(checksum, "PART_BYTES", 100)
    monkeypatch.setattr(checksum, "_READ_BYTES", 17)
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    file = tmp_path / "file"
    file.write_bytes(content)
    with ThreadPoolExecutor(2) as pool:
        checksums = checksum.FileChecksums([file], tmp_path, pool)
        for index in (2, 1, 9):
            part = checksums.take_part(file, index)
            assert (part is None) == (index * 100 >= size)
            assert checksums.take_part(file, index) is None
            for start, end in given:
                if part is not None and start < size:
                    part.update(memoryview(content[start:end]), start)
        (record,) = checksums.records()
        assert checksums.records() == [record]
    digests = [xxhash.xxh3_128_digest(content[i : i + 100]) for i in range(0, size, 100)]
    assert record == checksum.FileRecord("file", size, xxhash.xxh3_128_hexdigest(b"".join(digests)))


@pytest.mark.parametrize("name", ["../victim.txt", "{tmp}/victim.txt", "sub/../../victim.txt", "..\\victim.txt", "."])
def test_a_manifest_names_no_file_outside_of_its_folder(migrated: Path, name: str) -> None:
    victim = migrated.parent / "victim.txt"
    victim.write_text("not the model's")
    record = {"name": name.format(tmp=migrated.parent), "bytes": victim.stat().st_size, "xxh3": "0" * 32}
    manifest = migrated / "bminf_lite.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"files": [*content["files"], record]}))
    for run in (verify, open_model):
        with pytest.raises(CheckpointError, match=r"files names '.*', outside of the folder; no migration") as caught:
            run(migrated)
        assert checksum.file_checksum(victim) not in str(caught.value)


@pytest.mark.parametrize("depth", ["file", "folder"])
def test_a_link_out_of_the_folder_is_not_read(migrated: Path, depth: str) -> None:
    outside = migrated.parent / "outside"
    outside.mkdir()
    (outside / "victim.txt").write_text("not the model's")
    if depth == "file":
        (migrated / "victim.txt").symlink_to(outside / "victim.txt")
        name = "victim.txt"
    else:
        (migrated / "sub").symlink_to(outside)
        name = "sub/victim.txt"
    record = {"name": name, "bytes": len("not the model's"), "xxh3": "0" * 32}
    manifest = migrated / "bminf_lite.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"files": [*content["files"], record]}))
    with pytest.raises(CheckpointError, match=f"{name} is a link that leads out of the folder") as caught:
        verify(migrated)
    assert checksum.file_checksum(outside / "victim.txt") not in str(caught.value)
    with pytest.raises(CheckpointError, match="holds files that were added or changed"):
        migrate(migrated.parent / "source", migrated, force=True)


def test_links_of_the_cache_of_hugging_face_are_followed(migrated: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "revision"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in migrated.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert verify(snapshot).files == len(list(blobs.iterdir())) - 1
