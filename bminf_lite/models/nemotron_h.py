"""Nemotron-H and Nemotron 3 (https://arxiv.org/abs/2512.20856): one part a layer: Mamba 2, attention, or experts.

Attention has no rotation. Feed-forward layers and experts square a ReLU and have no gate; experts may work in a latent
width. ``time_step_limit`` bounds the time steps of Mamba 2, as in the code that is published with the models;
transformers bounds them by ``time_step_min`` instead, in prompts and not when it decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import (
    ACTIVATIONS,
    FULL,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    ConfigReader,
    Fields,
    choice,
    flag,
    integer,
    number,
    with_defaults,
)
from ._decoder import DecoderConfig
from .deepseek_v3 import require_published_form
from .falcon_h1 import step_limits
from .glm4_moe import router_of
from .mixtral import check_top_k
from .parts.experts import ExpertsPart, LatentWidth
from .parts.feed_forward import FeedForwardPart
from .parts.mamba2 import HeadNorm, Mamba2Part
from .parts.part import LayerParts, Part, Sublayer
from .qwen3_moe import with_num_experts
from .qwen3_next import LINEAR

MOE, MLP = "moe", "mlp"
KINDS = {"mamba": LINEAR, "attention": FULL} | {kind: kind for kind in (LINEAR, FULL, MOE, MLP)}
"""The kinds of layers, under the names of published files and newer ones."""
PATTERN = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}
"""Their letters in a ``hybrid_override_pattern``."""
OLDER_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
KEYS = {
    field: key
    for field, key in with_defaults(
        llama.KEYS,
        vocab_size=131072,
        intermediate_size=21504,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
    ).items()
    if field != "layers"
} | {
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
    "activation": choice("mlp_hidden_act", "relu2", ACTIVATIONS),
    "mamba_activation": choice("mamba_hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "mlp_bias": flag("mlp_bias", False),
    "mamba_bias": flag("use_bias", False),
    "conv_bias": flag("use_conv_bias", True),
    "state_dim": integer("ssm_state_size", 128, high=4096),
    "state_heads": integer("mamba_num_heads", 128),
    "state_head_dim": integer("mamba_head_dim", 64, high=MAX_HEAD_DIM),
    "groups": integer("n_groups", 8),
    "taps": integer("conv_kernel", 4, high=64),
    "experts": integer("n_routed_experts", 8),
    "top_k": integer("num_experts_per_tok", 2),
    "expert_size": integer("moe_intermediate_size", 7688),
    "shared_size": integer("moe_shared_expert_intermediate_size", 7688),
    "num_groups": integer("n_group", 1),
    "top_groups": integer("topk_group", 1),
    "scale": number("routed_scaling_factor", 1.0, low=1e-30),
    "renormalise": flag("norm_topk_prob", True),
}
IGNORED = (r".*rotary_emb\.inv_freq", r"mtp\..*")
"""Tensors that are not read; ``mtp`` are those of layers that draft tokens."""
ALIASES = ((r"model\.(.*)", r"backbone.\1"),)
"""Names that transformers has in memory, and those of its files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    newer = {new: config[old] for old, new in OLDER_KEYS.items() if config.get(old) is not None}
    read = ConfigReader(with_num_experts({**config, **newer}, "n_routed_experts"), KEYS)
    require_published_form(read, sliding_window=None)
    kinds, latent, limits = kinds_of_layers(read), latent_width(read), step_limits(read)
    read.require_divisible("heads", "kv_heads")
    read.require_divisible("state_heads", "groups")
    if MOE in kinds:
        check_top_k(read)
    router = router_of(read)
    fields = read.checked_fields() | {"layers": len(kinds)}
    names = {name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")}
    attention = llama.attention(fields, qkv=(names["q"], names["k"], names["v"]), out=names["o"])
    parts: dict[str, Part] = {
        LINEAR: mamba2(fields, limits),
        FULL: attention,
        MLP: llama.feed_forward(fields, gated=False, inner=(names["up"],), down=names["down"]),
        MOE: ExpertsPart(
            fields["hidden_size"],
            fields["expert_size"],
            fields["activation"],
            router,
            router_name="mixer.gate",
            experts="mixer.experts",
            gate=None,
            fused=("mixer.experts.up_proj", "mixer.experts.down_proj"),
            correction_bias="mixer.gate.e_score_correction_bias",
            shared=shared_expert(fields),
            latent=latent,
        ),
    }
    return llama.model(
        fields,
        [LayerParts((Sublayer(parts[kind], llama.norm(fields, "norm")),)) for kind in kinds],
        names={"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f"},
        prefix="backbone.layers",
        ignored=IGNORED,
        aliases=ALIASES,
    )


def mamba2(fields: Fields, limits: tuple[float, float]) -> Mamba2Part:
    """The layer with Mamba 2."""
    return Mamba2Part(
        fields["hidden_size"],
        fields["groups"],
        fields["state_heads"],
        fields["state_head_dim"],
        fields["state_dim"],
        fields["taps"],
        norm=HeadNorm(fields["norm_eps"], fields["groups"]),
        prefix="mixer",
        conv_bias=fields["conv_bias"],
        inner_bias=fields["mamba_bias"],
        out_bias=fields["mamba_bias"],
        step_limits=limits,
    )


def shared_expert(fields: Fields) -> FeedForwardPart:
    """The feed-forward layer beside the experts, which reads the full width."""
    names = tuple(f"mixer.shared_experts.{name}_proj" for name in ("up", "down"))
    return llama.feed_forward(fields, inner_size=fields["shared_size"], gated=False, inner=names[:1], down=names[1])


def latent_width(read: ConfigReader) -> LatentWidth | None:
    """The width in which experts work, if it is not the full one."""
    if read.config.get("moe_latent_size") is None:
        return None
    width = read.value(integer("moe_latent_size"))
    return LatentWidth(width, "mixer.fc1_latent_proj", "mixer.fc2_latent_proj", read.fields["mlp_bias"])


def kinds_of_layers(read: ConfigReader) -> list[str]:
    """The kind of each layer: as a list says, or a pattern of letters, or the four of transformers' class."""
    name = next((x for x in ("layers_block_type", "layer_types") if read.config.get(x) is not None), None)
    pattern = read.config.get("hybrid_override_pattern")
    default = [LINEAR, MOE, FULL, MLP]
    if name is not None:
        types = read.config[name]
        known = isinstance(types, list) and all(isinstance(kind, str) and kind in KINDS for kind in types)
        if known and 0 < len(types) <= MAX_LAYERS:
            return [KINDS[kind] for kind in types]
        read.problem(name, f"{name} is {types!r}, not a list of {', '.join(KINDS)}")
    elif pattern is not None:
        if isinstance(pattern, str) and 0 < len(pattern) <= MAX_LAYERS and all(letter in PATTERN for letter in pattern):
            return [PATTERN[letter] for letter in pattern]
        text = f"hybrid_override_pattern is {pattern!r}, not a text of the letters {' '.join(PATTERN)}"
        read.problem("hybrid_override_pattern", text)
    return default


architecture = decoder(parse)
