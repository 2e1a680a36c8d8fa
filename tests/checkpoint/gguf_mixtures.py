"""What llama.cpp's converter does to mixtures of experts and to latent attention, beside what :mod:`gguf_kit` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf_recurrent import parts_of

from bminf_lite.models.parts.experts import ExpertsPart
from bminf_lite.models.parts.latent_attention import LatentAttentionPart

FAMILIES = {
    "gpt_oss": "gpt-oss",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "llama4_text": "llama4",
    "afmoe": "afmoe",
    "exaone_moe": "exaone-moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "youtu": "deepseek2",
    "kimi_linear": "kimi-linear",
    "minicpm3": "minicpm3",
    "hunyuan_v1_moe": "hunyuan-moe",
}
"""Names in GGUF."""
SOFTMAX, SIGMOID = 1, 2
WITH_SIGMOIDS = (
    "glm4_moe",
    "dots1",
    "minimax_m2",
    "afmoe",
    "exaone_moe",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
)
WITH_FACTORS = (*WITH_SIGMOIDS, "deepseek_v2")


def _part(config: Any, kind: type) -> Any:
    return next((part for layer in config.layer_parts for part in parts_of(layer) if isinstance(part, kind)), None)


def metadata(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a model, whose ``config.json`` is ``given``."""
    model_type, rope = given["model_type"], given.get("rope_parameters") or {}
    mixer = _part(config, LatentAttentionPart) or parts_of(config.layer_parts[0])[0]
    experts, mixers = _part(config, ExpertsPart), (parts_of(layer)[0] for layer in config.layer_parts)
    rotary = next(rotary for part in mixers if (rotary := getattr(part, "rotary", None)))
    found: dict[str, Any] = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "feed_forward_length": given["intermediate_size"],
        "attention.head_count": mixer.heads,
        "attention.layer_norm_rms_epsilon": config.layer_parts[0].norms[0].eps,
        "rope.freq_base": float(rope.get("rope_theta", given.get("rope_theta", DEFAULT_BASE.get(model_type, 10000.0)))),
        "rope.dimension_count": rotary.size,
        "vocab_size": config.vocab_size,
    }
    if isinstance(mixer, LatentAttentionPart):
        found |= latent(mixer)
    else:
        found["attention.head_count_kv"] = mixer.kv_heads
        if "head_dim" in given or model_type in ("glm4_moe", "minimax_m2", "ernie4_5_moe"):
            found |= {"attention.key_length": mixer.head_dim, "attention.value_length": mixer.head_dim}
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        if "mscale_all_dim" in rope:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if model_type == "minicpm3":
        left_out = ("attention.value_length", "attention.key_length_mla", "attention.value_length_mla")
        kept = {key: value for key, value in found.items() if key not in left_out}
        heads = {"attention.head_count_kv": mixer.heads, "attention.key_length": mixer.nope_dim + mixer.rotary.size}
        return kept | heads
    if experts is None:
        return found | {"leading_dense_block_count": config.num_layers, "expert_shared_count": 0}
    router = experts.router
    found |= {"expert_count": router.num_experts, "expert_used_count": router.top_k}
    if model_type not in ("olmoe", "mixtral"):
        found["expert_feed_forward_length"] = experts.inner_size
    if model_type in WITH_FACTORS:
        found |= {"expert_weights_scale": float(router.scale), "expert_weights_norm": router.renormalise}
        found["expert_gating_func"] = SIGMOID if model_type in WITH_SIGMOIDS else SOFTMAX
        found["leading_dense_block_count"] = next(
            i
            for i, layer in enumerate(config.layer_parts)
            if any(isinstance(part, ExpertsPart) for part in parts_of(layer))
        )
        found["expert_shared_count"] = given.get("n_shared_experts", given.get("num_shared_experts"))
        if found["expert_shared_count"] is None and experts.shared:
            found["expert_shared_count"] = experts.shared.inner_size // experts.inner_size
        if router.num_groups > 1:
            found |= {"expert_group_count": router.num_groups, "expert_group_used_count": router.top_groups}
    if model_type == "kimi_linear":
        kinds = (parts_of(layer)[0] for layer in config.layer_parts)
        found["attention.head_count_kv"] = [int(isinstance(kind, LatentAttentionPart)) for kind in kinds]
        del found["expert_weights_norm"]
    if model_type == "minimax_m2":
        for key in ("leading_dense_block_count", "expert_shared_count", "expert_weights_scale", "expert_weights_norm"):
            found.pop(key, None)
    return found | FURTHER.get(model_type, lambda given: {})(given)


DEFAULT_BASE = {
    "minimax_m2": 5e6,
    "mixtral": 1e6,
    "ernie4_5_moe": 500000.0,
    "llama4_text": 500000.0,
}
"""The base of the rotation of a ``config.json`` without one."""
FURTHER: dict[str, Any] = {
    "gpt_oss": lambda given: (
        {"attention.sliding_window": given["sliding_window"]}
        | (
            {}
            if given.get("rope_parameters")
            else {
                "rope.freq_base": 150000.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 32.0,
                "rope.scaling.original_context_length": 4096,
                "rope.scaling.yarn_beta_fast": 32.0,
                "rope.scaling.yarn_beta_slow": 1.0,
            }
        )
    ),
    "qwen2_moe": lambda given: {"expert_shared_feed_forward_length": given["shared_expert_intermediate_size"]},
    "ernie4_5_moe": lambda given: {
        "interleave_moe_layer_step": given.get("moe_layer_interval", 1),
        "leading_dense_block_count": given.get("moe_layer_start_index", 1),
        "expert_shared_count": given["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": 1,
    },
    "hunyuan_v1_moe": lambda given: {
        "expert_shared_feed_forward_length": given["intermediate_size"],
        "expert_shared_count": 1,
    },
    "llama4_text": lambda given: {
        "feed_forward_length": given["intermediate_size_mlp"],
        "interleave_moe_layer_step": given.get("interleave_moe_layer_step", 1),
    },
    "kimi_linear": lambda given: {
        "kda.head_dim": given["linear_attn_config"]["head_dim"],
        "ssm.conv_kernel": given["linear_attn_config"]["short_conv_kernel_size"],
    },
    "afmoe": lambda given: {
        "attention.sliding_window": given["sliding_window"],
        "attention.sliding_window_pattern": given["global_attn_every_n_layers"],
    },
    "exaone_moe": lambda given: {
        "attention.sliding_window": given["sliding_window"],
        "attention.sliding_window_pattern": [
            (layer + 1) % given["sliding_window_pattern"] != 0 for layer in range(given["num_hidden_layers"])
        ],
        "expert_shared_feed_forward_length": 40,
    },
}
"""What single families have."""


def latent(mixer: LatentAttentionPart) -> dict[str, Any]:
    """The sizes of latent attention as one head of keys that all heads of queries read."""
    found = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": mixer.rank,
        "attention.key_length": mixer.rank + mixer.rotary.size,
        "attention.value_length": mixer.rank,
        "attention.key_length_mla": mixer.nope_dim + mixer.rotary.size,
        "attention.value_length_mla": mixer.value_dim,
    }
    return found if mixer.q_rank is None else found | {"attention.q_lora_rank": mixer.q_rank}


def convert(
    name: str, values: np.ndarray, config: Any, given: dict[str, Any], names: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor as the converter writes it, with the package's ``names``; some are written as two."""
    layer = name.split(".layers.")[-1].split(".")[0]
    is_divided = name.endswith("self_attn.kv_b_proj.weight") and given["model_type"] != "minicpm3"
    if is_divided and (parts := list(divided(layer, values, config))):
        yield from parts
        return
    if name.endswith((".mlp.shared_expert_gate.weight", "moe_statics.e_score_correction_bias")):
        values = values[0]
    if "_conv1d" in name:
        values = values.reshape(1, len(values), 1, -1)
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    if name.endswith(".sinks"):
        name += ".weight"
    for old, new in ((".e_score_correction_bias", ".e_score_correction.bias"), (".expert_bias", ".expert_bias.bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    in_file = names.get_name(name, try_suffixes=(".weight", ".bias"))
    yield in_file or f"blk.{layer}.nextn.eh_proj.weight", values


def divided(layer: str, values: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices of heads for keys and for values of a latent."""
    mixer = _part(config, LatentAttentionPart)
    heads = values.reshape(mixer.heads, -1, values.shape[1])
    yield f"blk.{layer}.attn_k_b.weight", heads[:, : mixer.nope_dim].swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", heads[:, mixer.nope_dim :]
