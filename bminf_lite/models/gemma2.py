"""Gemma 2 (https://arxiv.org/abs/2408.00118): four norms a layer, windows on every second one, and soft-caps.

Soft-caps limit attention scores and logits. The embedding is multiplied by the root of its size, rounded to the model's
own type as in transformers: a folder in bf16 says so in its ``dtype``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from . import llama
from ._config import ACTIVATIONS, ConfigReader, Key, choice, flag, integer, number, with_defaults
from ._rotary import parse_rotary
from ._transformer import FULL, SLIDING, Config, TensorNames, layer_types

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
) | {
    "activation": choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
}
NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
WINDOW = integer("sliding_window", 4096)
QUERY_SCALE = number("query_pre_attn_scalar", 256, low=1e-6)
ATTENTION_CAP = number("attn_logit_softcapping", 50.0, low=1e-3)
LOGITS_CAP = number("final_logit_softcapping", 30.0, low=1e-3)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
"""Types to which the factor of the embedding is rounded, by their names in ``config.json``."""


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    types = layer_types(read, [FULL if i % 2 else SLIDING for i in range(read.fields["layers"])])
    rotary = parse_rotary(read)
    return parse_gemma(read, types, dict.fromkeys((FULL, SLIDING), rotary), ATTENTION_CAP, LOGITS_CAP)


def parse_gemma(
    read: ConfigReader, types: list[str], rotary: Mapping[str, Any], attention_cap: Key, logits_cap: Key
) -> Config:
    """The configuration of a Gemma whose layers of each of the ``types`` have a rotation of their own."""
    if read.value(flag("use_bidirectional_attention", False)):
        read.problem("use_bidirectional_attention", "use_bidirectional_attention is true; only causal models are run")
    window, attention_softcap, logits_softcap = map(read.value_or_none, (WINDOW, attention_cap, logits_cap))
    score_scale = read.value(QUERY_SCALE) ** -0.5
    return replace(
        llama.family_config(read, None),
        names=NAMES,
        rotary=tuple(rotary[kind] for kind in types),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        norm_offset=1.0,
        score_scale=score_scale,
        attention_softcap=attention_softcap,
        logits_softcap=logits_softcap,
        embedding_multiplier=embedding_multiplier(read),
    )


def embedding_multiplier(read: ConfigReader) -> float:
    """The root of the embedding's size, in fp32 rounded to the ``dtype`` of the model."""
    dtype = str(read.config.get("dtype") or read.config.get("torch_dtype")).removeprefix("torch.")
    root = np.float32(read.fields["hidden_size"] ** 0.5)
    return float(root.astype(DTYPES.get(dtype, np.float32)))


architecture = replace(llama.architecture, parse=parse)
