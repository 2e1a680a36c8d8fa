"""Tiny checkpoints to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.models.spec import Spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}

MakeCheckpoint = Callable[..., Path]


def spec_of(config: dict[str, Any]) -> Spec:
    """The tensors of a configuration."""
    return describe_model(config).spec


def random_tensors(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """A random tensor for each of the specification, tied ones left out."""
    random = np.random.default_rng(seed)
    spec = spec_of(config)
    return {
        name: (random.standard_normal(parameter.shape) * 0.1 + 0.05).astype(dtype)
        for name, parameter in spec.parameters.items()
        if name not in spec.tied
    }
