"""GPT-J (https://github.com/kingoflolz/mesh-transformer-jax): both layers of a block read one LayerNorm.

The first elements of each head are rotated in pairs of neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, MAX_HEAD_DIM, MAX_LAYERS, ConfigReader, choice, flag, integer, number
from ._decoder import DecoderConfig
from ._rotary import Rotary, rotary_of_size
from .parts.norms import NormKind

KEYS = {
    "vocab_size": integer("vocab_size", 50400),
    "context_length": integer("n_positions", 2048),
    "hidden_size": integer("n_embd", 4096),
    "layers": integer("n_layer", 28, high=MAX_LAYERS),
    "heads": integer("n_head", 16),
    "intermediate_size": integer("n_inner", derive=lambda fields: 4 * fields["hidden_size"]),
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
    "activation": choice("activation_function", "gelu_new", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", False),
}
ROTATED = integer("rotary_dim", 64, low=2, high=MAX_HEAD_DIM)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    return parse_gptj(ConfigReader(config, KEYS), qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"))


def parse_gptj(read: ConfigReader, **attention: Any) -> DecoderConfig:
    """The configuration of a GPT-J with these options of attention. Raises with every problem."""
    read.require_divisible("hidden_size", "heads")
    head_dim, rotated = max(read.fields["hidden_size"] // read.fields["heads"], 1), read.value(ROTATED)
    text = f"rotary_dim ({rotated}) of heads of {head_dim} elements is not a number of pairs"
    read.require(rotated <= head_dim and rotated % 2 == head_dim % 2 == 0, text, "rotary_dim", "n_embd", "n_head")
    rotary: Rotary = rotary_of_size(rotated, interleaved=True)
    fields, kind = read.checked_fields(), NormKind.LAYER
    fields |= {"kv_heads": fields["heads"], "head_dim": head_dim}
    mixer = llama.attention(fields, rotary=rotary, out="attn.out_proj", **attention)
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.fc_in",), down="mlp.fc_out", bias=True)
    return llama.model(
        fields,
        [llama.parallel(fields, mixer, mlp, kind, ("ln_1",))] * fields["layers"],
        kind,
        names={"embedding": "transformer.wte", "final_norm": "transformer.ln_f"},
        output={"bias": True},
        prefix="transformer.h",
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_bias|bias|embed_positions|causal_mask)",),
    )


architecture = decoder(parse)
