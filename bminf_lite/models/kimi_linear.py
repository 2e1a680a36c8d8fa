"""Kimi Linear (https://arxiv.org/abs/2510.26692): Kimi Delta Attention, latent attention between, and experts.

Latent attention rotates nothing: its keys of ``qk_rope_head_dim`` elements, which all heads share, are plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, mixtral
from ._architecture import decoder
from ._config import FULL, MAX_HEAD_DIM, ConfigReader, Fields, flag, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary
from .deepseek_v3 import LATENT_KEYS, check_latent, latent_attention, query_rank, require_published_form
from .glm4_moe import router_of
from .mixtral import check_top_k
from .parts.experts import ExpertsPart
from .parts.kimi_delta import KimiDeltaPart
from .parts.part import Part
from .qwen3_next import LINEAR

DENSE, SPARSE = "dense", "sparse"
OTHER_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Keys of other families, and those of published files."""
OF_LINEAR = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Keys that a published file has in ``linear_attn_config``."""
KEYS = {
    field: key
    for field, key in with_defaults(
        LATENT_KEYS,
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=27,
        num_attention_heads=32,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1024,
        routed_scaling_factor=2.446,
    ).items()
    if field not in ("interleaved", "dense")
} | {
    "context_length": integer("model_max_length", 1048576),
    "experts": integer("num_experts", 256),
    "top_k": integer("num_experts_per_token", 8),
    "shared": integer("num_shared_experts", 1),
    "num_groups": integer("num_expert_group", 1),
    "renormalise": flag("moe_renormalize", True),
    "delta_heads": integer("linear_num_heads", 32),
    "delta_dim": integer("linear_head_dim", 128, high=MAX_HEAD_DIM),
    "taps": integer("linear_conv_kernel_dim", 4, high=64),
}
NAMES = "block_sparse_moe"
ALIASES = (
    (r"(model\.layers\.\d+)\.mlp\.((?:gate|experts|shared_experts)\..*)", rf"\1.{NAMES}.\2"),
    (r"(model\.layers\.\d+\.self_attn)\.forget_gate\.(.*)", r"\1.\2"),
    (rf"(model\.layers\.\d+)\.{NAMES}\.((?:gate|up|down)_proj\..*)", r"\1.mlp.\2"),
)
"""Names that transformers has in memory, and what it writes for layers without experts, beside those of files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_published_names(config), KEYS)
    require_published_form(
        read,
        moe_router_activation_func="sigmoid",
        moe_layer_freq=1,
        mla_use_nope=True,
        rope_scaling=None,
        tie_word_embeddings=False,
    )
    check_top_k(read)
    read.fields["interleaved"] = False
    check_latent(read)
    router, q_rank = router_of(read), query_rank(read, None)
    kinds, is_dense = kinds_of_layers(read), dense_layers(read)
    fields = read.checked_fields()
    unrotated = Rotary((0.0,) * (fields["head_dim"] // 2))
    scale = float((fields["nope_dim"] + fields["head_dim"]) ** -0.5)
    mixers: dict[str, Part] = {
        FULL: latent_attention(fields, unrotated, q_rank, scale),
        LINEAR: KimiDeltaPart(
            fields["hidden_size"], fields["delta_heads"], fields["delta_dim"], fields["taps"], fields["norm_eps"]
        ),
    }
    mlps = {True: llama.feed_forward(fields), False: replace(experts(fields, router), shared=shared_experts(fields))}
    layers = [llama.pre_norm(fields, mixers[kind], mlps[dense]) for kind, dense in zip(kinds, is_dense, strict=True)]
    return llama.model(fields, layers, aliases=ALIASES)


def with_published_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config`` with the keys of published files, and with those of ``linear_attn_config`` beside the others."""
    found = dict(config)
    for name, published in OTHER_NAMES.items():
        if found.get(published) is None and found.get(name) is not None:
            found[published] = found[name]
    of_linear = found.get("linear_attn_config")
    if isinstance(of_linear, Mapping):
        found |= {name: of_linear[key] for name, key in OF_LINEAR.items() if of_linear.get(key) is not None}
    return found


def experts(fields: Fields, router: Any) -> ExpertsPart:
    """Experts with Mixtral's names."""
    part = mixtral.experts_part(fields, router, correction_bias=f"{NAMES}.gate.e_score_correction_bias")
    return replace(part, inner_size=fields["expert_size"])


def shared_experts(fields: Fields) -> Any:
    """The feed-forward layer of every token beside the experts."""
    gate, up, down = (f"{NAMES}.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
    return llama.feed_forward(fields, inner_size=fields["shared"] * fields["expert_size"], inner=(gate, up), down=down)


def kinds_of_layers(read: ConfigReader) -> list[str]:
    """The mixer of each layer: as ``linear_attn_config`` numbers them from 1, or ``layer_types``, or every fourth."""
    layers, types, of_linear = (
        read.fields["layers"],
        *(read.config.get(x) for x in ("layer_types", "linear_attn_config")),
    )
    default = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    if types is not None:
        if isinstance(types, list) and len(types) == layers and all(kind in (LINEAR, FULL) for kind in types):
            return types
        read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {LINEAR}, {FULL}")
        return default
    if not isinstance(of_linear, Mapping) or not {"full_attn_layers", "kda_layers"} <= set(of_linear):
        return default
    full, linear = of_linear["full_attn_layers"], of_linear["kda_layers"]
    if isinstance(full, list) and isinstance(linear, list):
        numbers = [*full, *linear]
        if all(type(n) is int for n in numbers) and sorted(numbers) == list(range(1, layers + 1)):
            return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]
    text = f"full_attn_layers {full!r} and kda_layers {linear!r} are not the numbers from 1 to {layers}, each once"
    read.problem("linear_attn_config", text)
    return default


def dense_layers(read: ConfigReader) -> list[bool]:
    """Whether each layer has one feed-forward layer and no experts."""
    layers, types = read.fields["layers"], read.config.get("mlp_layer_types")
    first = read.value(integer("first_k_dense_replace", 1, low=0))
    default = [layer < first for layer in range(layers)]
    if types is None:
        return default
    if isinstance(types, list) and len(types) == layers and all(kind in (DENSE, SPARSE) for kind in types):
        return [kind == DENSE for kind in types]
    read.problem("mlp_layer_types", f"mlp_layer_types is {types!r}, not {layers} times one of {DENSE}, {SPARSE}")
    return default


architecture = decoder(parse)
