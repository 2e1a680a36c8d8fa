"""GLM-4-0414 (https://github.com/zai-org/GLM-4): GLM with a norm before and one behind each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import glm, llama
from ._transformer import Config

NAMES = replace(glm.NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")


def parse(config: Mapping[str, Any]) -> Config:
    return replace(glm.parse(config), names=NAMES)


architecture = replace(llama.architecture, parse=parse)
