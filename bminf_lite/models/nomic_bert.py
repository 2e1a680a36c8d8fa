"""Nomic BERT (https://arxiv.org/abs/2402.01613): BERT with rotary positions and gated feed-forward layers, no biases.

Its files have the names of GPT-2's configuration and fused matrices, or those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _encoder as encoder
from . import bert
from ._architecture import encoder_architecture
from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, integer, number, with_defaults
from ._encoder import EncoderConfig, LayerNames
from ._rotary import parse_rotary

KEYS = with_defaults(bert.KEYS, vocab_size=30528, max_position_embeddings=2048, hidden_act="silu") | {
    "head_dim": integer("head_dim", derive=lambda fields: max(fields["hidden_size"] // fields["heads"], 1), high=1024)
}
ORIGINAL_KEYS = {
    "vocab_size": integer("vocab_size", 30528),
    "hidden_size": integer("n_embd", 768),
    "intermediate_size": integer("n_inner", derive=lambda fields: 4 * fields["hidden_size"]),
    "layers": integer("n_layer", 12, high=MAX_LAYERS),
    "heads": integer("n_head", 12),
    "positions": integer("max_trained_positions", 2048),
    "norm_eps": number("layer_norm_epsilon", 1e-12, high=1.0),
    "activation": choice("activation_function", "swiglu", {"swiglu": "silu", "silu": "silu"} | ACTIVATIONS),
    "token_types": integer("type_vocab_size", 2),
    "head_dim": integer("head_dim", derive=lambda fields: max(fields["hidden_size"] // fields["heads"], 1), high=1024),
}
"""The keys of the published files."""
UNSUPPORTED = {
    "prenorm": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "parallel_block": False,
}
"""Keys of the published files, and the only value of each that is run."""
NAMES = LayerNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    inner=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    norm="post_mlp_layernorm",
)
ORIGINAL_NAMES = LayerNames(("attn.Wqkv",), "attn.out_proj", "norm1", ("mlp.fc12", "mlp.fc11"), "mlp.fc2", "norm2")


def parse(config: Mapping[str, Any]) -> EncoderConfig:
    is_original = "n_embd" in config
    read = ConfigReader(config, ORIGINAL_KEYS if is_original else KEYS)
    if encoder.head_kind(config):
        read.problem("architectures", f"{config['architectures'][0]}: heads of this model_type are not supported")
    for name, value in UNSUPPORTED.items() if is_original else ():
        if config.get(name, value) != value:
            read.problem(name, f"{name} is {config[name]!r}; {value!r} is supported")
    theta = config.get("rotary_emb_base", 10000.0) if is_original else 1000.0
    read.fields["context_length"] = read.fields["positions"]
    rotary = parse_rotary(read, theta, parameters={"rope_theta": theta} if is_original else None)
    head_dim = read.fields["head_dim"]
    fields = encoder.checked_fields(read) | {"head_dim": head_dim}
    names, norm = (ORIGINAL_NAMES, "emb_ln") if is_original else (NAMES, "embeddings.LayerNorm")
    layer = encoder.post_norm_layer(fields, names, bias=False, gated=True, rotary=rotary)
    modules = ("embeddings", "encoder", "emb_ln") if is_original else ("embeddings", "layers")
    return EncoderConfig(
        fields["vocab_size"],
        fields["hidden_size"],
        read.fields["context_length"],
        encoder.encoder_input(fields, "", None, fields["token_types"], norm),
        (layer,) * fields["layers"],
        prefix="encoder.layers" if is_original else "layers",
        ignored=(*bert.IGNORED, r".*rotary.*\.inv_freq"),
        aliases=encoder.base_names("", modules),
    )


architecture = encoder_architecture(parse)
