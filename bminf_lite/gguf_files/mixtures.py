"""Architectures with attention and experts."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError
from .converted import (
    COMMON,
    EXPERTS,
    GRANITE,
    HEAD_SIZE,
    RMS,
    SHARED_EXPERT,
    WINDOW,
    Converted,
    biases,
    checked_layers,
    granite,
    has,
    largest,
    partial_of_head,
    windows,
)
from .header import REMEDY, GgufHeader

SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""
CORRECTION_BIAS = "exp_probs_b.bias"
ROUTER = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
}
"""Sizes and factors of experts by DeepSeek's names, without their number."""
ROUTED = (
    ROUTER
    | {"expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts"}
    | {"leading_dense_block_count": "first_k_dense_replace"}
)
GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
LOCAL = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
}
NEEDED = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_PERIODS = {"gpt-oss": 2, "afmoe": 4}
"""The number of layers after which windows repeat, for files that do not say it: the last of them has no window."""


def routed(header: GgufHeader, config: dict[str, Any], function: int = SIGMOID) -> None:
    """What llama.cpp takes for absent factors of a router: weights are not normalised, and the factor is 1.

    Raises :class:`CheckpointError` if the router has another function than ``function``. Where a file names none, a
    bias that only chooses is one of sigmoids.
    """
    _check_function(header, SIGMOID if has(header, CORRECTION_BIAS) else SOFTMAX, function)
    config["norm_topk_prob"] = config.get("norm_topk_prob") or False
    config["routed_scaling_factor"] = config.get("routed_scaling_factor") or 1.0
    config["n_group"], config["topk_group"] = config.get("n_group") or 1, config.get("topk_group") or 1


def _check_function(header: GgufHeader, default: int, function: int) -> None:
    if (found := header.of_model("expert_gating_func") or default) != function:
        names = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
        problem = f"expert_gating_func is {found}, not {function} ({names[function]})"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")


def without_drafting(header: GgufHeader, config: dict[str, Any]) -> None:
    """Leave out the layers behind the others, which draft tokens."""
    config["num_hidden_layers"] = checked_layers(header)


def leading(header: GgufHeader, config: dict[str, Any]) -> None:
    """The first layers may have one feed-forward layer; by default none does."""
    config.setdefault("first_k_dense_replace", 0)
    config.setdefault("n_shared_experts", 0)


def windows_by_period(header: GgufHeader, config: dict[str, Any]) -> None:
    """The layers with a window: as the file says, or all but the last one of each period."""
    layers, key = config["num_hidden_layers"], "attention.sliding_window_pattern"
    pattern = header.of_model(key, _PERIODS[header.architecture])
    if isinstance(pattern, int) and pattern > 0:
        pattern = [layer % pattern < pattern - 1 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        problem = f"{key} is not a period, nor a list of {layers} flags"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; export the model again")
    config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]


def _granite_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    """A size of a shared expert tells that there is one."""
    granite(header, config)
    if config.get("shared_intermediate_size"):
        config["model_type"] = "granitemoeshared"


def _gpt_oss(header: GgufHeader, config: dict[str, Any]) -> None:
    """YaRN's bounds are not rounded, which a file does not say."""
    biases(header, config)
    windows_by_period(header, config)
    rope = config.pop("rope_scaling", None) or {"rope_type": "default"}
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    config["rope_parameters"] = {"rope_theta": config["rope_theta"]} | rope


def _qwen2_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    """Of absent sizes, a shared expert has that of the feed-forward layer, and all experts of a token together too."""
    config["qkv_bias"] = has(header, "attn_q.bias")
    whole = largest(config["intermediate_size"])
    config["shared_expert_intermediate_size"] = config.get("shared_expert_intermediate_size") or whole
    config["moe_intermediate_size"] = config.get("moe_intermediate_size") or whole // max(
        config["num_experts_per_tok"], 1
    )


def _glm4_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    without_drafting(header, config)
    leading(header, config)
    routed(header, config)
    partial_of_head(header, config)
    header.of_model("rope.dimension_sections")  # only for images
    config["attention_bias"] = has(header, "attn_q.bias")
    config["use_qk_norm"] = has(header, "attn_q_norm.weight")


def _dots1(header: GgufHeader, config: dict[str, Any]) -> None:
    leading(header, config)
    routed(header, config)
    config["attention_bias"] = has(header, "attn_q.bias")


def _minimax_m2(header: GgufHeader, config: dict[str, Any]) -> None:
    routed(header, {})
    config["rotary_dim"] = header.of_model("rope.dimension_count", config["head_dim"])


def _ernie4_5_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    """The size of the shared experts follows from their number."""
    _check_function(header, SOFTMAX, SOFTMAX)
    header.of_model("expert_shared_feed_forward_length")
    config.setdefault("moe_num_shared_experts", 0)
    config["use_bias"] = has(header, "attn_q.bias")


CHUNK = 8192
"""The tokens of a chunk in Llama 4, and those after which queries without a rotation grow, which no file states."""
_WITHOUT_NORMS = 128
"""Llama 4 with this number of experts (Maverick) does not normalise queries and keys; no file says it."""


def _llama4(header: GgufHeader, config: dict[str, Any]) -> None:
    config["attention_bias"] = has(header, "attn_q.bias")
    config["use_qk_norm"] = config["num_local_experts"] != _WITHOUT_NORMS
    config |= {"attention_chunk_size": CHUNK, "floor_scale": CHUNK, "attn_temperature_tuning": True}
    if header.of_model("attention.sliding_window") == 0:
        config["no_rope_layers"], config["attention_chunk_size"] = [1] * config["num_hidden_layers"], None
    elif header.of_model("attention.sliding_window_pattern", 4) != 4:
        problem = "attention.sliding_window_pattern is not 4, the period of layers without a rotation"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
    header.of_model("expert_gating_func")  # a sigmoid of each logit, whatever it says


def _afmoe(header: GgufHeader, config: dict[str, Any]) -> None:
    """Weights of experts are normalised, as all models have it."""
    windows_by_period(header, config)
    routed(header, config)
    config["num_dense_layers"] = config.get("num_dense_layers", 0)
    if not config.pop("norm_topk_prob"):
        problem = "expert_weights_norm is not set, and the weights of such experts are not run"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
    config["route_scale"] = config.pop("routed_scaling_factor")


def _exaone_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    """The layers with a window are those without drafting layers."""
    without_drafting(header, config)
    routed(header, config)
    windows(header, config)
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    config.setdefault("first_k_dense_replace", 0)
    header.of_model("expert_shared_feed_forward_length")


def _hunyuan_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    """All experts have the size of the shared one."""
    biases(header, config)
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if header.of_model(key, config["intermediate_size"]) != config["intermediate_size"]:
            problem = f"{key} is not feed_forward_length ({config['intermediate_size']}), and such experts are not run"
            raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
    if header.of_model("expert_shared_count", 1) != 1:
        problem = "expert_shared_count is not 1, and more shared experts are not run"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")


MIXTURES: dict[str, Converted] = {
    "hunyuan-moe": Converted(
        "hunyuan_v1_moe", COMMON | RMS | HEAD_SIZE | EXPERTS, {}, required=tuple(EXPERTS), further=_hunyuan_moe
    ),
    "qwen3moe": Converted(
        "qwen3_moe",
        COMMON | RMS | HEAD_SIZE | EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True, "use_sliding_window": False},
        required=(*EXPERTS, "expert_feed_forward_length"),
        further=biases,
    ),
    "granitemoe": Converted(
        "granitemoe",
        COMMON
        | RMS
        | GRANITE
        | EXPERTS
        | {"expert_count": "num_local_experts", "expert_shared_feed_forward_length": "shared_intermediate_size"},
        {},
        permuted=True,
        required=tuple(EXPERTS),
        renamed={"shared_mlp.output_linear": "ffn_down"},
        joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
        others=("granitemoeshared",),
        further=_granite_moe,
    ),
    "gpt-oss": Converted(
        "gpt_oss",
        COMMON | RMS | HEAD_SIZE | WINDOW | LOCAL,
        {},
        required=(*NEEDED, "attention.sliding_window"),
        tensors={"self_attn.sinks": "attn_sinks.weight"},
        further=_gpt_oss,
    ),
    "olmoe": Converted(
        "olmoe",
        COMMON | RMS | EXPERTS,
        {"norm_topk_prob": False},
        required=tuple(EXPERTS),
        further=biases,
    ),
    "qwen2moe": Converted(
        "qwen2_moe",
        COMMON | RMS | EXPERTS | SHARED_EXPERT,
        {"norm_topk_prob": False, "use_sliding_window": False},
        required=tuple(EXPERTS),
        further=_qwen2_moe,
    ),
    "glm4moe": Converted(
        "glm4_moe", COMMON | RMS | HEAD_SIZE | ROUTED | GROUPS, {}, required=NEEDED, drafts=True, further=_glm4_moe
    ),
    "dots1": Converted(
        "dots1",
        COMMON | RMS | HEAD_SIZE | ROUTED,
        {"sliding_window": None},
        required=NEEDED,
        further=_dots1,
    ),
    "minimax-m2": Converted(
        "minimax_m2",
        COMMON | RMS | HEAD_SIZE | LOCAL,
        {},
        required=NEEDED,
        further=_minimax_m2,
    ),
    "ernie4_5-moe": Converted(
        "ernie4_5_moe",
        COMMON
        | RMS
        | HEAD_SIZE
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        {},
        required=(*NEEDED, "leading_dense_block_count", "interleave_moe_layer_step"),
        shapes={CORRECTION_BIAS: (1, -1)},
        further=_ernie4_5_moe,
    ),
    "llama4": Converted(
        "llama4_text",
        COMMON
        | RMS
        | HEAD_SIZE
        | {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        {},
        required=(*NEEDED, "interleave_moe_layer_step"),
        further=_llama4,
    ),
    "afmoe": Converted(
        "afmoe",
        COMMON
        | RMS
        | HEAD_SIZE
        | WINDOW
        | ROUTER
        | {
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "num_dense_layers",
        },
        {"mup_enabled": True},
        required=(*NEEDED, "attention.sliding_window", "expert_shared_count"),
        further=_afmoe,
    ),
    "exaone-moe": Converted(
        "exaone_moe",
        COMMON
        | RMS
        | HEAD_SIZE
        | ROUTER
        | GROUPS
        | {
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        {},
        required=(*NEEDED, "expert_shared_count"),
        drafts=True,
        further=_exaone_moe,
    ),
}
