"""``load`` under a memory limit, on a simulated device: streamed if it must be, refused if nothing fits."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from simulated import SimulatedDevice

import bminf_lite
from bminf_lite import backend
from bminf_lite import placement as planning
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.values import BLOCK_SIZE
from bminf_lite.engine.executor import FIRST_BLOCKS
from bminf_lite.errors import CheckpointError, OutOfMemory, UsageError
from bminf_lite.memory.planner import Machine, plan_memory

CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tiny_checkpoint.write(
        tmp_path_factory.mktemp("loading") / "source",
        num_hidden_layers=9,
        hidden_size=64,
        intermediate_size=96,
        max_position_embeddings=512,
    )
    bminf_lite.migrate(source, source.parent / "int8")
    return source.parent / "int8"


@pytest.fixture(autouse=True)
def small_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LIBRARY_BYTES", 0)


def device_of(memory: int, monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """What ``load`` will get."""
    device = SimulatedDevice(memory_bytes=memory)
    monkeypatch.setattr(backend, "create", lambda *_: device)
    return device


def memory_that_streams(folder: Path) -> int:
    """Bytes with which more than half of the layers, but not all, are streamed."""
    requirements = planning.requirements_of(folder)
    for memory in range(requirements.weights, 1 << 22, 1024):
        try:
            plan = plan_memory(requirements, Machine(memory), CONTEXT)
        except OutOfMemory:
            continue
        if 4 < len(plan.streamed) < 9:
            return memory
    raise AssertionError("no such memory")


def test_what_does_not_fit_is_streamed_and_gives_equal_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bminf_lite.load(folder, "cpu") as resident:
        expected = resident.generate("hello", max_new_tokens=8, temperature=0)
        logits = resident.logits(expected.token_ids)
    device = device_of(memory_that_streams(folder), monkeypatch)
    with bminf_lite.load(folder, context=CONTEXT) as model:
        assert 4 < len(device.placement.streamed) < 9 and device.placement.host_tables
        assert model.generate("hello", max_new_tokens=8, temperature=0).token_ids == expected.token_ids
        np.testing.assert_array_equal(model.logits(expected.token_ids), logits)
    assert device.link.copies
    device = device_of(1 << 30, monkeypatch)
    bminf_lite.load(folder).close()
    assert device.placement.streamed == () and not device.placement.host_tables


def test_what_fits_nowhere_says_what_would(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device_of(1 << 16, monkeypatch)
    with pytest.raises(OutOfMemory, match=r"do not hold this model.*raise the memory limit to \d+MiB"):
        bminf_lite.load(folder)


def test_a_context_out_of_range(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device_of(1 << 30, monkeypatch)
    with pytest.raises(UsageError, match="context of 513 tokens; the model's is 512"):
        bminf_lite.load(folder, context=513)


def test_cache_and_chunks_are_as_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(memory_that_streams(folder), monkeypatch)
    asked: list[tuple[int, int | None]] = []
    layer_cache = device.layer_cache

    def watch(num_blocks: int, kv_heads: int, head_dim: int, **kind: Any) -> Any:
        asked.append((num_blocks, kind["max_blocks"]))
        return layer_cache(num_blocks, kv_heads, head_dim, **kind)

    with bminf_lite.load(folder, context=CONTEXT) as model:
        config = model.engine_config
        assert config.max_num_batched_tokens < 2048 and config.max_num_seqs >= 1
        assert config.num_blocks[0] >= 1 + CONTEXT // BLOCK_SIZE
        monkeypatch.setattr(device, "layer_cache", watch)
        model.generate([[5, 6], [7]], max_new_tokens=2)
        assert set(asked) == {(min(FIRST_BLOCKS, *config.num_blocks), *config.num_blocks)}
        assert len(model.generate([5] * (CONTEXT - 2), max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["cut short", "written to", "replaced"])
def test_a_file_that_changes_while_it_is_loaded(folder: Path, tmp_path: Path, how: str, device: str) -> None:
    """It is an error, or harmless if the old file still exists; never a crash, as nothing is mapped."""
    if device == "cpu":
        kind: Any = CpuBackend
    else:
        from bminf_lite.backend.cuda import CudaBackend as kind
    shutil.copytree(folder, tmp_path / "model")
    file, calls = tmp_path / "model" / "model.safetensors", []
    weight = kind.weight

    def change(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            if how == "replaced":
                shutil.copy(file, tmp_path / "new")
                (tmp_path / "new").replace(file)
            else:
                os.truncate(file, 5000 if how == "cut short" else file.stat().st_size)
        return weight(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "weight", change)
        if how == "replaced":
            bminf_lite.load(tmp_path / "model", device).close()
        else:
            with pytest.raises(CheckpointError, match="changed since it was opened"):
                bminf_lite.load(tmp_path / "model", device)
    bminf_lite.load(folder, device).close()


def test_the_plan_is_made_without_reading_weights(folder: Path) -> None:
    """A shape file of the same model gives the same requirements."""
    config = json.loads((folder / "config.json").read_text())
    shape = folder.parent / "shape.json"
    shape.write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    assert planning.requirements_of(shape) == planning.requirements_of(folder)
