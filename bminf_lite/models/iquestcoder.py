"""IQuest-Coder V1 (https://huggingface.co/IQuestLab): LLaMA under a name of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, flag, with_defaults
from ._decoder import DecoderConfig
from .olmoe import reject_clipping

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=76800,
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=80,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS | llama.BIASES)
    reject_clipping(read)
    if read.value(flag("use_sliding_window", False)):
        read.problem(
            "use_sliding_window", "use_sliding_window is true; no model has windows, and they are not supported"
        )
    return llama.parse_family(read)


architecture = decoder(parse)
