"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia (https://arxiv.org/abs/2304.01373).

Attention and feed-forward layer read the same residual stream, rotary positions apply to the first part of each head
only, and the fused matrix holds query, key and value head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layers.position import rope_frequencies, rope_parameters
from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, flag, integer, number
from ._decoder import DecoderConfig
from ._rotary import Rotary
from .parts.attention import grouped_rows
from .parts.norms import NormKind

KEYS = {
    "vocab_size": integer("vocab_size", 50432),
    "hidden_size": integer("hidden_size", 6144),
    "layers": integer("num_hidden_layers", 44, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 64),
    "intermediate_size": integer("intermediate_size", 24576),
    "context_length": integer("max_position_embeddings", 2048),
    "norm_eps": number("layer_norm_eps", 1e-5, high=1.0),
    "activation": choice("hidden_act", "gelu", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", False),
    "parallel": flag("use_parallel_residual", True),
    "attention_bias": flag("attention_bias", True),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """GPT-NeoX's configuration, with the rotary keys of every version of transformers."""
    read = ConfigReader(config, KEYS)
    read.require_divisible("hidden_size", "heads")
    rotary = parse_rotary(read)
    fields, kind = read.checked_fields(), NormKind.LAYER
    fields |= {"kv_heads": fields["heads"], "head_dim": fields["hidden_size"] // fields["heads"]}
    attention = llama.attention(
        fields,
        rotary=rotary,
        qkv=("attention.query_key_value",),
        out="attention.dense",
        qkv_bias=fields["attention_bias"],
        out_bias=fields["attention_bias"],
        fused_rows=grouped_rows,
    )
    inner, down = ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"
    mlp = llama.feed_forward(fields, gated=False, inner=inner, down=down, bias=True)
    names = ("input_layernorm", "post_attention_layernorm")
    form = llama.parallel if fields["parallel"] else llama.pre_norm
    return llama.model(
        fields,
        [form(fields, attention, mlp, kind, names=names)] * fields["layers"],
        kind,
        names={
            "embedding": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        prefix="gpt_neox.layers",
        ignored=(r".*attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
        aliases=((r"lm_head\.(.*)", r"embed_out.\1"),),
    )


def parse_rotary(read: ConfigReader) -> Rotary | None:
    """Rotary positions of the first elements of each head; None if there is a problem."""
    config = dict(read.config)
    head_dim = max(read.fields["hidden_size"] // read.fields["heads"], 1)
    found = config.get("rope_scaling") or config.get("rope_parameters")
    given = found.get("partial_rotary_factor") if isinstance(found, dict) else None
    part = read.value(number("rotary_pct", 0.25, high=1.0)) if given is None else given
    rotated = int(head_dim * part) if isinstance(part, (int, float)) and 0 < part <= 1 else 0
    if rotated < 2 or rotated % 2 or head_dim % 2:
        read.problem("rotary_pct", f"rotary_pct ({part!r}) of heads of {head_dim} elements is not a number of pairs")
        return None
    if isinstance(found, dict) and given is not None:
        config["rope_scaling"] = {k: v for k, v in found.items() if k != "partial_rotary_factor"}
    config.pop("partial_rotary_factor", None)
    try:
        parameters = rope_parameters(config, read.value(number("rotary_emb_base", 10000.0)))
        frequencies, scale = rope_frequencies(parameters, rotated, read.fields["context_length"])
    except ValueError as error:
        read.problem("rope_parameters", str(error))
        return None
    if scale != 1 and rotated < head_dim:
        read.problem("rope_parameters", f"rope_type {parameters['rope_type']!r} is for rotations of whole heads only")
    return Rotary(tuple(map(float, frequencies)), scale)


architecture = decoder(parse)
