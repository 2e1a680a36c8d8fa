"""Falcon-H1 (https://arxiv.org/abs/2507.22448): attention and Mamba 2 side by side, with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import MAX_HEAD_DIM, ConfigReader, Fields, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.mamba2 import HeadNorm, Mamba2Part
from .parts.part import LayerParts, Sublayer
from .parts.side_by_side import SideBySidePart

MAMBA = {
    "state_heads": integer("mamba_n_heads", 128),
    "groups": integer("mamba_n_groups", 1),
    "state_dim": integer("mamba_d_state", 256, high=4096),
    "taps": integer("mamba_d_conv", 4, high=64),
    "expand": integer("mamba_expand", 2),
    "conv_bias": flag("mamba_conv_bias", True),
    "mamba_bias": flag("mamba_proj_bias", False),
}
"""The keys of layers with Mamba 2."""


def multiplier(name: str) -> Any:
    """The key of a multiplier."""
    return number(name, 1.0, low=1e-30)


KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=128000,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    )
    | llama.BIASES
    | MAMBA
    | {
        "state_features": integer("mamba_d_ssm", 1024, derive=lambda fields: fields["expand"] * fields["hidden_size"]),
        "norm_first": flag("mamba_norm_before_gate", True),
        "has_norm": flag("mamba_rms_norm", False),
        "out_bias": flag("projectors_bias", False),
        "key_multiplier": multiplier("key_multiplier"),
        "attention_in": multiplier("attention_in_multiplier"),
        "attention_out": multiplier("attention_out_multiplier"),
        "mamba_in": multiplier("ssm_in_multiplier"),
        "mamba_out": multiplier("ssm_out_multiplier"),
        "embedding_multiplier": multiplier("embedding_multiplier"),
        "head_multiplier": multiplier("lm_head_multiplier"),
    }
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    check_activation(read)
    of_sections, of_mlp = multipliers(read, "ssm_multipliers", 5), multipliers(read, "mlp_multipliers", 2)
    limits, head_dim = step_limits(read), state_head_dim(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    norm = HeadNorm(fields["norm_eps"], fields["groups"], fields["norm_first"]) if fields["has_norm"] else None
    mamba = mamba2(
        fields,
        head_dim,
        norm=norm,
        step_limits=limits,
        out_bias=fields["out_bias"],
        input_multiplier=fields["mamba_in"],
        section_multipliers=of_sections,
        multiplier=fields["mamba_out"],
    )
    attention = llama.attention(
        fields,
        rotary=rotary,
        score_scale=fields["head_dim"] ** -0.5 * fields["key_multiplier"],
        input_multiplier=fields["attention_in"],
        multiplier=fields["attention_out"],
    )
    names = tuple(f"feed_forward.{name}_proj" for name in ("gate", "up", "down"))
    mlp = llama.feed_forward(fields, inner=names[:2], down=names[2], gate_multiplier=of_mlp[0], multiplier=of_mlp[1])
    mixer, feed_forward = (llama.norm(fields, name) for name in ("input_layernorm", "pre_ff_layernorm"))
    layer = LayerParts((Sublayer(SideBySidePart((mamba, attention)), mixer), Sublayer(mlp, feed_forward)))
    return llama.model(
        fields,
        [layer] * fields["layers"],
        names={"final_norm": "model.final_layernorm"},
        input={"multiplier": fields["embedding_multiplier"]},
        output={"multiplier": fields["head_multiplier"]},
    )


def check_activation(read: ConfigReader) -> None:
    """Record a problem with an activation that layers of Mamba 2 are not run with."""
    text = f"hidden_act is {read.config.get('hidden_act')!r}; Mamba 2 is run with 'silu' only"
    read.require(read.fields["activation"] == "silu", text, "hidden_act")


def mamba2(fields: Fields, head_dim: int, **others: Any) -> Mamba2Part:
    """Mamba 2 with the sizes of ``fields``, and the ``others`` of its options."""
    return Mamba2Part(
        fields["hidden_size"],
        fields["groups"],
        fields["state_heads"],
        head_dim,
        fields["state_dim"],
        fields["taps"],
        conv_bias=fields["conv_bias"],
        inner_bias=fields["mamba_bias"],
        **others,
    )


def state_head_dim(read: ConfigReader) -> int:
    """The size of a head of Mamba 2: ``auto``, or as it follows from the width of all, the field ``state_features``."""
    width, heads = read.fields["state_features"], read.fields["state_heads"]
    read.require_divisible("state_heads", "groups")
    name, names = "mamba_d_head", ("mamba_d_ssm", "mamba_expand", "hidden_size", "mamba_n_heads")
    text = f"the {width} features of Mamba 2 are not a multiple of mamba_n_heads ({heads})"
    read.require(width % heads == 0, text, *names)
    found: int = max(width // heads, 1)
    if read.config.get(name, "auto") != "auto":
        own = read.value(integer(name, high=MAX_HEAD_DIM))
        text = f"{name} ({own}) times mamba_n_heads ({heads}) is not the {width} features of Mamba 2"
        read.require(own * heads == width, text, name, *names)
    return found


def step_limits(read: ConfigReader, name: str = "time_step_limit") -> tuple[float, float]:
    """The least and the largest time step; transformers writes an infinity as a mapping."""
    low, high = 0.0, float("inf")
    given = read.config.get(name)
    if given is None:
        return low, high
    values = [high if x == {"__float__": "Infinity"} else x for x in given] if isinstance(given, (list, tuple)) else []
    if len(values) == 2 and all(type(x) in (int, float) for x in values) and 0 <= values[0] <= values[1]:
        return float(values[0]), float(values[1])
    read.problem(name, f"{name} is {given!r}, not two numbers from 0 on, the least and the largest time step")
    return low, high


def multipliers(read: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    """A list of ``count`` multipliers; all 1 if it is null."""
    given = read.config.get(name)
    if given is None:
        return (1.0,) * count
    if (
        isinstance(given, (list, tuple))
        and len(given) == count
        and all(type(x) in (int, float) and 1e-30 <= x <= 1e30 for x in given)
    ):
        return tuple(map(float, given))
    read.problem(name, f"{name} is {given!r}, not {count} numbers from 1e-30 to 1e30")
    return (1.0,) * count


architecture = decoder(parse)
