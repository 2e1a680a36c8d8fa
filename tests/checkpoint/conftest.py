"""Tiny checkpoints to break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIG, MakeCheckpoint, random_tensors


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Write a checkpoint: ``make_checkpoint(name="source", tensors=None, shards=1, **config)`` returns its folder."""

    def make(
        name: str = "source", tensors: dict[str, np.ndarray] | None = None, shards: int = 1, **config: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = {**CONFIG, **config}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = random_tensors(config) if tensors is None else tensors
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = {k: v for j, (k, v) in enumerate(tensors.items()) if j % shards == i}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return make
