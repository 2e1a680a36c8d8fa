"""LLaMA 2 and 3 (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783), the base of Mistral and Qwen.

A pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, a gated feed-forward layer. Others of the
family differ by a window, biases or a norm on queries and keys: fields of :class:`._transformer.Config` that their
files set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _transformer
from ._architecture import Architecture
from ._config import ACTIVATIONS, MAX_HEAD_DIM, MAX_LAYERS, ConfigReader, choice, flag, integer, number
from ._decoder import Decoder
from ._rotary import Rotary, parse_rotary
from ._transformer import Config, ModelBuilder

KEYS = {
    "vocab_size": integer("vocab_size", 32000),
    "hidden_size": integer("hidden_size", 4096),
    "intermediate_size": integer("intermediate_size", 11008),
    "layers": integer("num_hidden_layers", 32, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 32),
    "kv_heads": integer("num_key_value_heads", derive=lambda fields: fields["heads"]),
    "head_dim": integer(
        "head_dim", derive=lambda fields: max(fields["hidden_size"] // fields["heads"], 1), high=MAX_HEAD_DIM
    ),
    "context_length": integer("max_position_embeddings", 2048),
    "norm_eps": number("rms_norm_eps", 1e-6, high=1.0),
    "activation": choice("hidden_act", "silu", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", False),
}
"""The keys that the whole family has."""

ATTENTION_BIAS = flag("attention_bias", False)
BIASES = {"qkv_bias": ATTENTION_BIAS, "o_bias": ATTENTION_BIAS, "mlp_bias": flag("mlp_bias", False)}


def parse(config: Mapping[str, Any]) -> Config:
    return parse_family(ConfigReader(config, KEYS | BIASES))


def parse_family(read: ConfigReader) -> Config:
    """The configuration of a model of the family, without windows."""
    check_heads(read)
    rotary = parse_rotary(read)
    return family_config(read, rotary)


def check_heads(read: ConfigReader) -> None:
    """Record problems with the numbers of heads and their size."""
    head_dim = read.fields["head_dim"]
    if read.is_null(read.keys["head_dim"]):
        read.require_divisible("hidden_size", "heads")
    read.require_divisible("heads", "kv_heads")
    text = f"head_dim ({head_dim}) is odd, which rotary positions do not allow"
    read.require(head_dim % 2 == 0, text, "head_dim", "hidden_size", "num_attention_heads")


def family_config(read: ConfigReader, rotary: Rotary | None) -> Config:
    """The configuration with the same rotation in all layers, without windows. Raises with every problem."""
    fields = read.checked_fields()
    layers = fields["layers"]
    return Config(**fields, rotary=(rotary,) * layers, windows=(None,) * layers)


architecture = Architecture(parse, _transformer.spec, ModelBuilder, Decoder)
