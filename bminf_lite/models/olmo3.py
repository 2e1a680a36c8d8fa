"""OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with a window on three layers of four.

Scaled rotary frequencies, which extend the context, apply to the layers without a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, olmo2
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, integer, layer_types
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import QueryKeyNorm

WINDOW = integer("sliding_window", 4096)
THETA = 500000.0


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, olmo2.KEYS)
    llama.check_heads(read)
    types = layer_types(read, [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(read.fields["layers"])])
    window = read.value_or_none(WINDOW)
    rotary = {kind: parse_rotary(read, parameters=parameters_of(read, kind)) for kind in (FULL, SLIDING)}
    fields = read.checked_fields()
    attention = llama.attention(fields, qk_norm=QueryKeyNorm.WHOLE)
    own = (replace(attention, rotary=rotary[t], window=window if t == SLIDING else None) for t in types)
    return llama.model(fields, [olmo2.post_norm(fields, part) for part in own])


def parameters_of(read: ConfigReader, kind: str) -> dict[str, Any]:
    """The rotary parameters of the layers of a kind.

    ``rope_parameters`` maps each kind to its own; ``rope_scaling`` and ``rope_theta`` are the older spelling.
    """
    theta, found, scaling = read.config.get("rope_theta", THETA), read.config.get("rope_parameters"), None
    if isinstance(found, Mapping) and isinstance(found.get(kind), Mapping):
        return {"rope_theta": theta} | dict(found[kind])
    if kind == FULL:
        scaling = read.config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        read.problem("rope_parameters", f"rope_scaling is {scaling!r}, not a mapping of names to numbers")
        scaling = None
    return {"rope_theta": theta} | dict(scaling or {})


architecture = decoder(parse)
