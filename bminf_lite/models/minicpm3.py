"""MiniCPM3 (https://arxiv.org/abs/2404.06395): latent attention whose halves of heads are rotated, and multipliers.

What a part adds to the residual stream shrinks with the number of layers, and logits with the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import deepseek_v3, llama
from ._architecture import decoder
from ._config import MAX_HEAD_DIM, ConfigReader, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

LATENT = ("head_dim", "nope_dim", "rank", "bias")
KEYS = with_defaults(
    llama.KEYS | {field: deepseek_v3.LATENT_KEYS[field] for field in LATENT},
    vocab_size=73448,
    hidden_size=2560,
    intermediate_size=6400,
    num_hidden_layers=62,
    num_attention_heads=40,
    num_key_value_heads=40,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
) | {
    "value_dim": integer(
        "v_head_dim", derive=lambda fields: max(fields["hidden_size"] // fields["heads"], 1), high=MAX_HEAD_DIM
    ),
    "mlp_bias": llama.BIASES["mlp_bias"],
    "embedding_multiplier": number("scale_emb", 12.0, low=1e-30),
}
DEPTH, WIDTH = number("scale_depth", 1.4, low=1e-30), integer("dim_model_base", 256)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    depth, width = read.value_or_none(DEPTH), read.value_or_none(WIDTH)
    rank = deepseek_v3.query_rank(read, 768)
    read.fields["interleaved"] = False
    rotary = parse_rotary(read, interleaved=deepseek_v3.check_latent(read))
    scale = deepseek_v3.score_scale(read)
    fields = read.checked_fields()
    multiplier = 1.0 if depth is None else depth / fields["layers"] ** 0.5
    attention = deepseek_v3.latent_attention(fields, rotary, rank, scale, multiplier=multiplier)
    mlp = llama.feed_forward(fields, multiplier=multiplier)
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp)] * fields["layers"],
        input={"multiplier": fields["embedding_multiplier"]},
        output={"multiplier": 1.0 if width is None else width / fields["hidden_size"]},
    )


architecture = decoder(parse)
