"""Tiny checkpoints to break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_writer
from safetensors.numpy import save_file
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Write a checkpoint, and return its folder.

    ``make_checkpoint(name="source", tensors=None, shards=1, form="safetensors", **config)``; ``form`` may also be
    ``bin``, PyTorch's files, or ``legacy``, those before version 1.6.
    """

    def make(
        name: str = "source",
        tensors: dict[str, np.ndarray] | None = None,
        shards: int = 1,
        form: str = "safetensors",
        **config: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
        tensors = random_tensors(CONFIG | config) if tensors is None else tensors
        stem, suffix = ("model", "safetensors") if form == "safetensors" else ("pytorch_model", "bin")
        weight_map = {}
        for i in range(shards):
            file = f"{stem}.{suffix}" if shards == 1 else f"{stem}-{i + 1:05d}-of-{shards:05d}.{suffix}"
            part = {k: v for j, (k, v) in enumerate(tensors.items()) if j % shards == i}
            if form == "safetensors":
                save_file(part, folder / file)
            else:
                torch_writer.save(folder / file, part, legacy=form == "legacy")
            weight_map |= dict.fromkeys(part, file)
        if shards > 1:
            (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return make
