"""GPT-Neo (https://github.com/EleutherAI/gpt-neo): GPT-2 with a window on every second layer, and scores as they are.

TinyStories' models are of this family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, flag, integer, number
from ._decoder import DecoderConfig
from .parts.ends import PositionsPart
from .parts.norms import NormKind

GLOBAL, LOCAL = "global", "local"
KEYS = {
    "vocab_size": integer("vocab_size", 50257),
    "context_length": integer("max_position_embeddings", 2048),
    "hidden_size": integer("hidden_size", 2048),
    "layers": integer("num_layers", 24, high=MAX_LAYERS),
    "heads": integer("num_heads", 16),
    "intermediate_size": integer("intermediate_size", derive=lambda fields: 4 * fields["hidden_size"]),
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
    "activation": choice("activation_function", "gelu_new", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", True),
    "window": integer("window_size", 256),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    read.require_divisible("hidden_size", "heads")
    is_local = local_layers(read)
    fields, kind = read.checked_fields(), NormKind.LAYER
    fields |= {"kv_heads": fields["heads"], "head_dim": fields["hidden_size"] // fields["heads"], "o_bias": True}
    names = tuple(f"attn.attention.{name}_proj" for name in "qkv")
    attention = llama.attention(fields, qkv=names, out="attn.attention.out_proj", score_scale=1.0)
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.c_fc",), down="mlp.c_proj", bias=True)
    mixers = (replace(attention, window=fields["window"] if local else None) for local in is_local)
    return llama.model(
        fields,
        [llama.pre_norm(fields, own, mlp, kind, names=("ln_1", "ln_2")) for own in mixers],
        kind,
        names={"embedding": "transformer.wte", "final_norm": "transformer.ln_f"},
        input={"positions": PositionsPart("transformer.wpe", fields["context_length"])},
        prefix="transformer.h",
        ignored=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
        aliases=((r"((?:wte|wpe|h|ln_f)\..*)", r"transformer.\1"),),
    )


def local_layers(read: ConfigReader) -> list[bool]:
    """Whether each layer has a window: ``attention_types`` has kinds of layers, and how often they follow."""
    layers, given = read.fields["layers"], read.config.get("attention_types")
    groups: Any = [[[GLOBAL, LOCAL], 12]] if given is None else given
    kinds: list[Any] = []
    try:
        for names, count in groups:
            kinds += list(names) * min(int(count), layers)
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not all(kind in (GLOBAL, LOCAL) for kind in kinds):
        text = f"attention_types is {given!r}, which does not name {layers} layers {GLOBAL} or {LOCAL}"
        read.problem("attention_types", text)
        return [False] * layers
    return [kind == LOCAL for kind in kinds]


architecture = decoder(parse)
