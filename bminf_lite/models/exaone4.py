"""EXAONE 4 (https://arxiv.org/abs/2507.11407): norms behind the layers, and windows on three layers of four.

Queries and keys are normalised per head. In a model with windows, the layers without one have no rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, olmo2
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, Fields, integer, layer_types, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import AttentionPart, QueryKeyNorm

KEYS = with_defaults(llama.KEYS, vocab_size=102400, intermediate_size=16384, num_key_value_heads=32, rms_norm_eps=1e-5)
WINDOW = integer("sliding_window", 4096)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    fields, mixers = parse_mixers(ConfigReader(config, KEYS))
    return llama.model(fields, [olmo2.post_norm(fields, mixer) for mixer in mixers])


def parse_mixers(read: ConfigReader) -> tuple[Fields, list[AttentionPart]]:
    """The fields of a configuration, and the attention of each layer.

    Raises ``CheckpointError`` with all problems.
    """
    llama.check_heads(read)
    window, default = read.value_or_none(WINDOW), [FULL] * read.fields["layers"]
    if window is not None:
        pattern = period(read)
        default = [SLIDING if (i + 1) % pattern else FULL for i in range(len(default))]
    types, rotary = layer_types(read, default), parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, qk_norm=QueryKeyNorm.HEAD)
    mixers = []
    for kind in types:
        is_rotated = window is None or kind == SLIDING
        own = replace(attention, rotary=rotary if is_rotated else None, window=window if kind == SLIDING else None)
        mixers.append(own)
    return fields, mixers


def period(read: ConfigReader) -> int:
    """The distance between layers without a window; the key may be a text such as ``LLLG``, which is 4."""
    given = read.config.get("sliding_window_pattern")
    if isinstance(given, str) and given:
        return len(given)
    found: int = read.value(integer("sliding_window_pattern", 4))
    return found


architecture = decoder(parse)
