"""GPT-BigCode (https://arxiv.org/abs/2301.03988), the architecture of SantaCoder and StarCoder.

GPT-2 with one key-value head, and matrices that are stored ``[out, in]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import gpt2
from ._architecture import decoder
from ._config import ConfigReader, flag, with_defaults
from ._decoder import DecoderConfig
from .parts.attention import grouped_rows

KEYS = with_defaults(
    {field: key for field, key in gpt2.KEYS.items() if field != "scale_by_layer"},
    activation_function="gelu_pytorch_tanh",
) | {"multi_query": flag("multi_query", True)}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    fields = gpt2.checked_fields(ConfigReader(config, KEYS))
    if fields["multi_query"]:
        return gpt2.gpt2_model(fields | {"kv_heads": 1}, transposed=False)
    return gpt2.gpt2_model(fields | {"kv_heads": fields["heads"]}, transposed=False, fused_rows=grouped_rows)


architecture = decoder(parse)
