"""Gemma 1 (https://arxiv.org/abs/2403.08295): LLaMA with norms of 1 + weight, a gated GELU and a scaled embedding.

The embedding is multiplied by the root of its size, as in Gemma 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import gemma2, llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, flag, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=256000,
    hidden_size=3072,
    intermediate_size=24576,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
) | {
    # The files of the first release say "gelu" and mean its approximation, as transformers reads them.
    "activation": choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS | {"gelu": "gelu_tanh"}),
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    if read.value_or_none(flag("use_bidirectional_attention", False)):
        read.problem("use_bidirectional_attention", "use_bidirectional_attention is true; only causal models are run")
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp, offset=1.0)] * fields["layers"],
        offset=1.0,
        input={"multiplier": gemma2.embedding_multiplier(read)},
    )


architecture = decoder(parse)
