"""GPT-BigCode (https://arxiv.org/abs/2301.03988), the architecture of SantaCoder and StarCoder.

GPT-2 with one key-value head, and matrices that are stored ``[out, in]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import gpt2
from ._config import ConfigReader, flag, with_defaults
from ._gpt import Config, gpt_architecture

KEYS = with_defaults(
    {field: key for field, key in gpt2.KEYS.items() if field != "scale_by_layer"},
    activation_function="gelu_pytorch_tanh",
) | {"multi_query": flag("multi_query", True)}
NAMES = replace(gpt2.NAMES, transposed=False)


def parse(config: Mapping[str, Any]) -> Config:
    fields = gpt2.checked_fields(ConfigReader(config, KEYS))
    return Config(**fields, interleaved_qkv=not fields["multi_query"], names=NAMES)


architecture = gpt_architecture(parse)
