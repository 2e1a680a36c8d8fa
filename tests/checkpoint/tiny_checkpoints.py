"""Tiny checkpoints to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
