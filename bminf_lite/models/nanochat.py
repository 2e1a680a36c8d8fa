"""nanochat (https://github.com/karpathy/nanochat): norms without weights, a squared ReLU, a soft-cap of the logits.

The embedding is normalised too. Heads are rotated the other way round, and normalised behind that. A rotation keeps the
length of a head, so the norm may come first; a factor on cosine and sine then only divides the norm's epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import gemma2, llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import QueryKeyNorm
from .parts.norms import NormKind

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=50304,
    hidden_size=768,
    intermediate_size=8192,
    num_hidden_layers=12,
    num_attention_heads=6,
) | {
    "activation": choice("hidden_act", "relu2", ACTIVATIONS),
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
}
LOGITS_CAP = replace(gemma2.LOGITS_CAP, default=15.0)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    softcap = read.value_or_none(LOGITS_CAP)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields, kind = read.checked_fields(), NormKind.RMS_WITHOUT_WEIGHT
    assert rotary is not None
    attention = llama.attention(
        fields,
        rotary=replace(rotary, frequencies=tuple(-frequency for frequency in rotary.frequencies), scale=1.0),
        qk_norm=QueryKeyNorm.PLAIN_HEAD,
        norm_eps=fields["norm_eps"] / rotary.scale**2,
    )
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.fc1",), down="mlp.fc2")
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp, kind)] * fields["layers"],
        kind,
        input={"norm": llama.norm(fields, "model.norm", kind)},
        output={"softcap": softcap},
    )


architecture = decoder(parse)
