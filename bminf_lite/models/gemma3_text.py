"""Gemma 3 (https://arxiv.org/abs/2503.19786), its text model: Gemma 2 with norms of queries and keys.

Five layers of six have a window, and a rotary base of their own. Attention scores have no soft-cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import gemma2, llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, integer, layer_types, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import QueryKeyNorm

KEYS = with_defaults(gemma2.KEYS, vocab_size=262208, max_position_embeddings=131072)
ATTENTION_CAP, LOGITS_CAP = (replace(cap, default=None) for cap in (gemma2.ATTENTION_CAP, gemma2.LOGITS_CAP))
"""transformers reads ``attn_logit_softcapping`` and does not apply it; no published model has it, so it is refused."""
BASES = {FULL: ("rope_theta", 1000000.0), SLIDING: ("rope_local_base_freq", 10000.0)}
"""By type of layer, the key of the rotary base in the older spelling, and its default."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    pattern = read.value(integer("sliding_window_pattern", 6))
    types = layer_types(read, [SLIDING if (i + 1) % pattern else FULL for i in range(read.fields["layers"])])
    rotary = {kind: parse_rotary(read, parameters=rotary_parameters(read, kind)) for kind in BASES}
    if not read.is_null(ATTENTION_CAP):
        text = f"attn_logit_softcapping is {read.config[ATTENTION_CAP.name]!r}; Gemma 3 has none for attention scores"
        read.problem(ATTENTION_CAP.name, text)
    return gemma2.parse_gemma(read, types, rotary, ATTENTION_CAP, LOGITS_CAP, QueryKeyNorm.HEAD, True)


def rotary_parameters(read: ConfigReader, kind: str) -> dict[str, Any]:
    """The rotary parameters of the layers of a kind.

    ``rope_parameters`` maps each kind to its own. In the older spelling ``rope_scaling`` is for full attention.
    """
    key, default = BASES[kind]
    found = read.config.get("rope_parameters") or {}
    own = found.get(kind) if isinstance(found, Mapping) else None
    scaling = read.config.get("rope_scaling") if kind == FULL else None
    for name, value in (("rope_parameters", found), ("rope_parameters", own), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            read.problem("rope_parameters", f"{name} is {value!r}, not a mapping")
            return {"rope_theta": default}
    return {"rope_theta": read.config.get(key, default)} | dict(own or {}) | dict(scaling or {})


architecture = decoder(parse)
