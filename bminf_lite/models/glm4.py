"""GLM-4-0414 (https://github.com/zai-org/GLM-4): GLM with a norm before and one behind each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._decoder import DecoderConfig
from .glm import glm_parts
from .parts.part import LayerParts, Sublayer


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    fields, attention, mlp = glm_parts(config)
    before, behind, before_mlp, behind_mlp = (
        llama.norm(fields, f"{name}_layernorm") for name in ("input", "post_self_attn", "post_attention", "post_mlp")
    )
    layer = LayerParts((Sublayer(attention, before, behind), Sublayer(mlp, before_mlp, behind_mlp)))
    return llama.model(fields, [layer] * fields["layers"])


architecture = decoder(parse)
