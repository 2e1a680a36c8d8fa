"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019).

Its matrices are stored ``[in, out]`` (``Conv1D`` in transformers), query, key and value as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, Fields, choice, flag, integer, number
from ._decoder import DecoderConfig
from .parts.ends import PositionsPart
from .parts.norms import NormKind

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


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    fields = checked_fields(ConfigReader(config, KEYS))
    return gpt2_model(fields | {"kv_heads": fields["heads"]}, transposed=True)


def checked_fields(read: ConfigReader) -> dict[str, Any]:
    """The fields of a GPT-2. Raises with every problem."""
    read.require_divisible("hidden_size", "heads")
    if read.value(flag("add_cross_attention", False)):
        read.problem("add_cross_attention", "add_cross_attention is true; cross-attention of GPT-2 is not supported")
    fields = read.checked_fields()
    return fields | {"head_dim": fields["hidden_size"] // fields["heads"], "qkv_bias": True, "o_bias": True}


def gpt2_model(fields: Fields, transposed: bool, **attention: Any) -> DecoderConfig:
    """The configuration with these options of attention; ``transposed``: matrices are stored ``[in, out]``."""
    kind = NormKind.LAYER
    mixer = llama.attention(fields, qkv=("attn.c_attn",), out="attn.c_proj", transposed=transposed, **attention)
    scale = fields["head_dim"] ** -0.5 if fields["scale_scores"] else 1.0
    by_layer = fields.get("scale_by_layer", False)
    mlp = llama.feed_forward(
        fields, gated=False, inner=("mlp.c_fc",), down="mlp.c_proj", bias=True, transposed=transposed
    )
    mixers = (replace(mixer, score_scale=scale / (i + 1) if by_layer else scale) for i in range(fields["layers"]))
    return llama.model(
        fields,
        [llama.pre_norm(fields, own, mlp, kind, names=("ln_1", "ln_2")) for own in mixers],
        kind,
        names={"embedding": "transformer.wte", "final_norm": "transformer.ln_f"},
        input={"positions": PositionsPart("transformer.wpe", fields["context_length"])},
        prefix="transformer.h",
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        aliases=((r"((?:wte|wpe|h|ln_f)\..*)", r"transformer.\1"),),
    )


architecture = decoder(parse)
