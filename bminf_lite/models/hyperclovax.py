"""HyperCLOVA X SEED Think (https://huggingface.co/naver-hyperclovax): Granite with norms behind the parts too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import granite, llama
from ._architecture import decoder
from ._config import ConfigReader, flag, number
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.part import LayerParts, Sublayer

KEYS = {field: key for field, key in granite.KEYS.items() if field != "score_scale"} | {
    "post_norms": flag("use_post_norm", True)
}
SCORE_SCALE = replace(granite.KEYS["score_scale"], default=None)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    factor = read.value(number("logits_scaling", 1.0, low=1e-30))
    given_scale = read.value_or_none(SCORE_SCALE)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    score_scale = fields["head_dim"] ** -0.5 if given_scale is None else given_scale
    multiplier = fields["residual_multiplier"]
    of_part = 1.0 if fields["post_norms"] else multiplier
    parts = (
        llama.attention(fields, rotary=rotary, score_scale=score_scale, multiplier=of_part),
        llama.feed_forward(fields, multiplier=of_part),
    )
    sublayers = (
        Sublayer(
            part,
            llama.norm(fields, before),
            replace(llama.norm(fields, behind), factor=multiplier) if fields["post_norms"] else None,
        )
        for part, before, behind in zip(
            parts, ("input_layernorm", "post_attention_layernorm"), ("post_norm1", "post_norm2"), strict=True
        )
    )
    return llama.model(
        fields,
        [LayerParts(tuple(sublayers))] * fields["layers"],
        input={"multiplier": fields["embedding_multiplier"]},
        output={"multiplier": factor},
    )


architecture = decoder(parse)
