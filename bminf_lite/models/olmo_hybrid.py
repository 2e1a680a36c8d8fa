"""OLMo Hybrid (https://huggingface.co/allenai/Olmo-Hybrid-7B): gated DeltaNet, and OLMo 2's layers between.

Layers of attention have their norms behind the parts, and rotate no heads if the file's ``rope_theta`` is null.
Rates of learning of a DeltaNet go up to 2, so that its states can change their sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama, olmo2
from ._architecture import decoder
from ._config import FULL, MAX_HEAD_DIM, ConfigReader, Fields, flag, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .falcon_h1 import check_activation
from .parts.attention import QueryKeyNorm
from .parts.delta_net import DeltaNetPart
from .qwen3_next import LINEAR

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=100352,
    hidden_size=3840,
    num_attention_heads=30,
    max_position_embeddings=65536,
) | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "key_heads": integer("linear_num_key_heads", derive=lambda fields: fields["heads"]),
    "value_heads": integer("linear_num_value_heads", derive=lambda fields: fields["heads"]),
    "key_dim": integer(
        "linear_key_head_dim",
        derive=lambda fields: max(int(0.75 * fields["hidden_size"] / fields["key_heads"]), 1),
        high=MAX_HEAD_DIM,
    ),
    "value_dim": integer("linear_value_head_dim", derive=lambda fields: 2 * fields["key_dim"], high=2 * MAX_HEAD_DIM),
    "taps": integer("linear_conv_kernel_dim", 4, high=64),
    "has_negative": flag("linear_allow_neg_eigval", True),
}
HEAD_NORM_EPS = 1e-5
"""That of the norm of a DeltaNet's heads, whatever the configuration says of the others."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    check_activation(read)
    read.require_divisible("value_heads", "key_heads")
    kinds, rotary = kinds_of_layers(read), rotation(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.WHOLE)
    layers = {
        FULL: olmo2.post_norm(fields, attention),
        LINEAR: llama.pre_norm(
            fields,
            delta_net(fields),
            llama.feed_forward(fields),
            names=("attention_layer_norm", "feedforward_layer_norm"),
        ),
    }
    return llama.model(fields, [layers[kind] for kind in kinds], aliases=aliases(kinds))


def rotation(read: ConfigReader) -> Rotary | None:
    """The rotation of heads; none if the file has rotary parameters whose base is null."""
    parameters = read.config.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters.get("rope_theta", 0) is None:
        return None
    return parse_rotary(read)


def delta_net(fields: Fields) -> DeltaNetPart:
    """The layer with a gated DeltaNet, whose projections are matrices of their own."""
    return DeltaNetPart(
        fields["hidden_size"],
        fields["key_heads"],
        fields["value_heads"],
        fields["key_dim"],
        fields["value_dim"],
        fields["taps"],
        HEAD_NORM_EPS,
        qkvz=tuple(f"linear_attn.{name}_proj" for name in "qkvg"),
        gates=("linear_attn.b_proj", "linear_attn.a_proj"),
        kernel=tuple(f"linear_attn.{name}_conv1d" for name in "qkv"),
        norm="linear_attn.o_norm",
        out="linear_attn.o_proj",
        max_rate=2.0 if fields["has_negative"] else 1.0,
    )


def kinds_of_layers(read: ConfigReader) -> list[str]:
    """The kind of each layer: as ``layer_types`` says, or attention in every fourth, or the last one."""
    layers, types = read.fields["layers"], read.config.get("layer_types")
    default = [FULL if layer % 4 == 3 else LINEAR for layer in range(layers)]
    if FULL not in default:
        default[-1] = FULL
    if types is None:
        return default
    if isinstance(types, list) and len(types) == layers and all(kind in (LINEAR, FULL) for kind in types):
        return types
    read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {LINEAR}, {FULL}")
    return default


def aliases(kinds: list[str]) -> tuple[tuple[str, str], ...]:
    """Names that transformers has in memory, and those that it writes where it reverses its own names."""
    of_kind = {x: "|".join(str(i) for i, kind in enumerate(kinds) if kind == x) or "none" for x in (LINEAR, FULL)}
    linear, full = (rf"(model\.layers\.(?:{of_kind[kind]}))" for kind in (LINEAR, FULL))
    return (
        (rf"{linear}\.input_layernorm\.weight", r"\1.attention_layer_norm.weight"),
        (rf"{linear}\.post_attention_layernorm\.weight", r"\1.feedforward_layer_norm.weight"),
        (rf"{full}\.feedforward_layer_norm\.weight", r"\1.post_attention_layernorm.weight"),
    )


architecture = decoder(parse)
