"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019).

Its matrices are stored ``[in, out]`` (``Conv1D`` in transformers), query, key and value as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, flag, integer, number
from ._gpt import Config, TensorNames, gpt_architecture

KEYS = {
    "vocab_size": integer("vocab_size", 50257),
    "context_length": integer("n_positions", 1024),
    "hidden_size": integer("n_embd", 768),
    "layers": integer("n_layer", 12, high=MAX_LAYERS),
    "heads": integer("n_head", 12),
    "intermediate_size": integer("n_inner", derive=lambda fields: 4 * fields["hidden_size"]),
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
    "activation": choice("activation_function", "gelu_new", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", True),
    "scale_scores": flag("scale_attn_weights", True),
    "scale_by_layer": flag("scale_attn_by_inverse_layer_idx", False),
}
NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    attention_out="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    aliases=((r"((?:wte|wpe|h|ln_f)\..*)", r"transformer.\1"),),
)


def parse(config: Mapping[str, Any]) -> Config:
    return Config(**checked_fields(ConfigReader(config, KEYS)), names=NAMES)


def checked_fields(read: ConfigReader) -> dict[str, Any]:
    """The fields of a GPT-2. Raises with every problem."""
    read.require_divisible("hidden_size", "heads")
    if read.value(flag("add_cross_attention", False)):
        read.problem("add_cross_attention", "add_cross_attention is true; cross-attention of GPT-2 is not supported")
    fields = read.checked_fields()
    return fields | {"embedding_size": fields["hidden_size"]}


architecture = gpt_architecture(parse)
