"""OPT (https://arxiv.org/abs/2205.01068), and Galactica, which shares its architecture.

Positions start at row 2 of their table. The model of 350 million parameters differs from the others: it normalises
after each layer, has no final norm, and its embedding is narrower than its layers, with projections between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, flag, integer
from ._decoder import DecoderConfig
from .parts.ends import InputPart, OutputPart, PositionsPart
from .parts.norms import NormKind
from .parts.part import LayerParts, Sublayer

KEYS = {
    "vocab_size": integer("vocab_size", 50272),
    "hidden_size": integer("hidden_size", 768),
    "embedding_size": integer("word_embed_proj_dim", derive=lambda fields: fields["hidden_size"]),
    "layers": integer("num_hidden_layers", 12, high=MAX_LAYERS),
    "intermediate_size": integer("ffn_dim", 3072),
    "context_length": integer("max_position_embeddings", 2048),
    "heads": integer("num_attention_heads", 12),
    "activation": choice("activation_function", "relu", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", True),
    "norm_first": flag("do_layer_norm_before", True),
    "affine_norms": flag("layer_norm_elementwise_affine", True),
    "qkv_bias": flag("enable_bias", True),
    "o_bias": flag("enable_bias", True),
    "mlp_bias": flag("enable_bias", True),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    read.require_divisible("hidden_size", "heads")
    is_first = read.fields["norm_first"]
    has_final_norm = is_first and not read.value(flag("_remove_final_layer_norm", False))
    fields = read.checked_fields() | {"norm_eps": 1e-5}
    fields |= {"kv_heads": fields["heads"], "head_dim": fields["hidden_size"] // fields["heads"]}
    kind = NormKind.LAYER if fields["affine_norms"] else NormKind.LAYER_WITHOUT_WEIGHT
    attention = llama.attention(fields, out="self_attn.out_proj")
    mlp = llama.feed_forward(fields, gated=False, inner=("fc1",), down="fc2")
    sublayers = []
    for part, name in ((attention, "self_attn_layer_norm"), (mlp, "final_layer_norm")):
        norm = llama.norm(fields, name, kind)
        sublayers.append(Sublayer(part, norm) if is_first else Sublayer(part, stream_norm=norm))
    vocab_size, hidden, size = fields["vocab_size"], fields["hidden_size"], fields["embedding_size"]
    project_in, project_out = (f"model.decoder.project_{end}" if size != hidden else None for end in ("in", "out"))
    final_norm = llama.norm(fields, "model.decoder.final_layer_norm", kind) if has_final_norm else None
    positions = PositionsPart("model.decoder.embed_positions", fields["context_length"], first=2)
    return DecoderConfig(
        vocab_size,
        hidden,
        fields["context_length"],
        InputPart(
            vocab_size,
            hidden,
            "model.decoder.embed_tokens",
            embedding_size=size,
            project=project_in,
            positions=positions,
        ),
        (LayerParts(tuple(sublayers)),) * fields["layers"],
        OutputPart(vocab_size, hidden, final_norm, embedding_size=size, project=project_out),
        tied_head=fields["tied_head"],
        prefix="model.decoder.layers",
        ignored=(),
        aliases=((r"(decoder\..*)", r"model.\1"),),
    )


architecture = decoder(parse)
