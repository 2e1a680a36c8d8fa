"""Writes random adapters as PEFT saves them, without torch, and merges them into float checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MODULES = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def modules_of(base: Path, names: Sequence[str] = MODULES) -> list[str]:
    """The modules of all layers of a LLaMA, and its head."""
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    return [*(f"model.layers.{layer}.{name}" for layer in range(layers) for name in names), "lm_head"]


def factors(base: Path, modules: Sequence[str], rank: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Random factors of modules, by the names that PEFT gives them."""
    rng, weights = np.random.default_rng(seed), load_file(base / "model.safetensors")
    found = {}
    for module in modules:
        out, features = weights[f"{module}.weight"].shape
        for part, shape in (("A", (rank, features)), ("B", (out, rank))):
            values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))
            found[f"base_model.model.{module}.lora_{part}.weight"] = values
    return found


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """An adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def random_adapter(folder: Path, base: Path, rank: int = 4, seed: int = 0, **config: Any) -> Path:
    """An adapter of every matrix of a LLaMA."""
    return write_adapter(folder, factors(base, modules_of(base), rank, seed), r=rank, **config)


def merged(base: Path, adapter: Path, out: Path, scale: float) -> Path:
    """A copy of a float checkpoint with the adapter added to its matrices."""
    shutil.copytree(base, out)
    weights, low_rank = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in list(low_rank):
        if name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            delta = low_rank[f"{module}.lora_B.weight"].astype(np.float64) @ low_rank[name]
            weight = f"{module.removeprefix('base_model.model.')}.weight"
            weights[weight] = (weights[weight] + scale * delta).astype(np.float32)
    save_file(weights, out / "model.safetensors")
    return out
