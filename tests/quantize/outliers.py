"""The demo model with outliers put in that do not change what it computes, as they are found in large models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from bminf_lite.backend.functions import silu
from bminf_lite.checkpoint.weight_rewrite import WeightRewrite
from bminf_lite.models.spec import Fold, Spec

Tensors = dict[str, np.ndarray]
FACTORS = (10, 30, 100)
"""A channel is multiplied by each."""


def channels(count: int, seed: int) -> np.ndarray:
    """A channel for each factor."""
    return np.random.default_rng(seed).choice(count, len(FACTORS), replace=False)


def in_norms(tensors: Tensors, config: dict) -> None:
    """Gains multiplied, and the columns of what reads the norm divided."""
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm, consumers in (
            ("input_layernorm", [f"self_attn.{x}_proj" for x in "qkv"]),
            ("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            chosen = channels(config["hidden_size"], layer)
            tensors[f"{name}.{norm}.weight"][chosen] *= FACTORS
            for consumer in consumers:
                tensors[f"{name}.{consumer}.weight"][:, chosen] /= FACTORS


def in_neurons(tensors: Tensors, config: dict) -> None:
    """Rows of the up projection multiplied, and columns of the down projection divided."""
    for layer in range(config["num_hidden_layers"]):
        chosen = channels(config["intermediate_size"], layer)
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][chosen] *= np.array(FACTORS)[:, None]
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, chosen] /= FACTORS


def in_values(tensors: Tensors, config: dict) -> None:
    """Rows of the value projection multiplied, and the columns of every query head that reads them divided."""
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    group = config["num_attention_heads"] // kv_heads
    for layer in range(config["num_hidden_layers"]):
        chosen = channels(kv_heads * head_dim, layer)
        tensors[f"model.layers.{layer}.self_attn.v_proj.weight"][chosen] *= np.array(FACTORS)[:, None]
        o = tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
        for channel, factor in zip(chosen, FACTORS, strict=True):
            head, element = divmod(channel, head_dim)
            o[:, (head * group + np.arange(group)) * head_dim + element] /= factor


def spike(token: int, size: float = 3000.0) -> Callable[[Tensors, dict], None]:
    """In the first layers, a pair of neurons more, with equal inputs and opposite outputs, that spikes on ``token``.

    The first layer's input is the embedding (little changed by attention), so a linear function of it tells the token.
    """

    def put_in(tensors: Tensors, config: dict) -> None:
        embedding = tensors["model.embed_tokens.weight"].astype(np.float64)
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}.mlp"
            gain = tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
            x = embedding / np.sqrt((embedding**2).mean(axis=1, keepdims=True)) * gain
            target = np.full(len(x), -0.3)
            target[token] = 1
            sharp = np.linalg.solve(x.T @ x + 20 * np.eye(x.shape[1]), x.T @ target)
            sharp *= 20 / (x[token] @ sharp) if layer == 0 else 0
            row = np.tile(sharp, (2, 1)).astype(np.float32)
            up = row * np.float32(size / 20 / silu(np.float32(20)))
            down = np.median(np.abs(tensors[f"{name}.down_proj.weight"]).max(axis=1))
            columns = np.outer(np.full(config["hidden_size"], down), [1, -1]).astype(np.float32)
            tensors[f"{name}.gate_proj.weight"] = np.concatenate([tensors[f"{name}.gate_proj.weight"], row])
            tensors[f"{name}.up_proj.weight"] = np.concatenate([tensors[f"{name}.up_proj.weight"], up])
            tensors[f"{name}.down_proj.weight"] = np.concatenate([tensors[f"{name}.down_proj.weight"], columns], axis=1)
        config["intermediate_size"] += 2

    return put_in


def multiplied(tensor: np.ndarray, rewrite: WeightRewrite) -> np.ndarray:
    """A tensor with the factors of a rewrite, as migration writes it."""
    if rewrite.row_factors is not None:
        tensor = tensor * rewrite.row_factors[:, None]
    return tensor if rewrite.column_factors is None else tensor * rewrite.column_factors


def width(spec: Spec, fold: Fold) -> int:
    """The number of channels that a fold's producers have."""
    producer = spec.parameters[fold.producers[0]]
    return producer.shape[-1 if producer.transposed else 0]


def write(source: Path, folder: Path, put_in: Callable[[Tensors, dict], None]) -> Path:
    """A copy of the checkpoint in ``source`` with outliers; returns ``folder``."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    tensors = {name: value.copy() for name, value in load_file(source / "model.safetensors").items()}
    put_in(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder
