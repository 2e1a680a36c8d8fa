"""Arcee's AFM (https://huggingface.co/arcee-ai/AFM-4.5B): LLaMA with a squared ReLU, and no gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

KEYS = (
    with_defaults(
        llama.KEYS, hidden_size=2560, intermediate_size=18432, max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    | llama.BIASES
    | {"activation": choice("hidden_act", "relu2", ACTIVATIONS)}
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary)
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.up_proj",))
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp)] * fields["layers"])


architecture = decoder(parse)
