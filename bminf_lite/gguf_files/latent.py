"""Architectures with latent attention: DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash and Youtu-LLM share a name.

Kimi Linear has it in some layers.

llama.cpp's converter writes the matrix that gives keys and values of a latent as two, with a matrix for each head: that
of keys ``[heads, rank, key size]``, and that of values ``[heads, value size, rank]``. Older files have it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CheckpointError
from . import recurrent
from .converted import COMMON, RMS, Converted, has
from .dense import long_factors, long_rope
from .header import REMEDY, GgufHeader
from .mixtures import CORRECTION_BIAS, GROUPS, NEEDED, ROUTED, SIGMOID, SOFTMAX, leading, routed, without_drafting
from .rope import shortest

KEYS_OF_LATENT, VALUES_OF_LATENT = "attn_k_b", "attn_v_b"
LATENT_KEYS = {key: name for key, name in COMMON.items() if key != "attention.head_count_kv"} | {
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_LOG_MULTIPLIER = 0.1
"""``rope.scaling.yarn_log_multiplier`` of these files is YaRN's ``mscale_all_dim`` times this."""


def latent(header: GgufHeader, config: dict[str, Any], default: int = 0) -> None:
    """The sizes of heads, and YaRN, whose factor on cosine and sine is 1 in llama.cpp: it scales the scores.

    Values have ``default`` elements if the file does not say it.
    """
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["q_lora_rank"] = header.of_model("attention.q_lora_rank") or None
    rotated = config["qk_rope_head_dim"]
    keys = header.of_model("attention.key_length_mla") or header.of_model("attention.key_length", 0)
    values = header.of_model("attention.value_length_mla") or header.of_model("attention.value_length", default)
    header.of_model("attention.key_length"), header.of_model("attention.value_length")
    if keys <= rotated or values < 1:
        problem = f"attention.key_length_mla is {keys}, attention.value_length_mla {values}, and {rotated} are rotated"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; export the model again")
    config |= {"qk_nope_head_dim": keys - rotated, "v_head_dim": values}
    weight = header.of_model("rope.scaling.yarn_log_multiplier", 0.0)
    if (config.get("rope_scaling") or {}).get("rope_type") == "yarn" and weight:
        if header.of_model("rope.scaling.attn_factor", 1.0) != 1:
            problem = "rope.scaling.attn_factor is not 1 beside YaRN's own factor"
            raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
        config["rope_scaling"].pop("attention_factor", None)
        of_all = round(shortest(weight) / _LOG_MULTIPLIER, 6)
        config["rope_scaling"] |= {"mscale": of_all, "mscale_all_dim": of_all}


def _deepseek2(header: GgufHeader, config: dict[str, Any]) -> None:
    """Which of the models it is shows in the experts and in the function of their router."""
    without_drafting(header, config)
    latent(header, config)
    if not config.get("n_routed_experts"):
        config["model_type"] = "youtu"
        for name in ROUTED.values():
            config.pop(name, None)
        header.of_model("expert_gating_func")
        return
    leading(header, config)
    has_sigmoids = header.of_model("expert_gating_func") == SIGMOID or has(header, CORRECTION_BIAS)
    config["model_type"] = "deepseek_v3" if has_sigmoids else "deepseek_v2"
    routed(header, config, SIGMOID if has_sigmoids else SOFTMAX)
    if not has_sigmoids:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def _minicpm3(header: GgufHeader, config: dict[str, Any]) -> None:
    """Values have the embedding's elements divided by the heads where the file does not say their size."""
    long_rope(header, config)
    latent(header, config, config["hidden_size"] // config["num_attention_heads"])


def _kimi_linear(header: GgufHeader, config: dict[str, Any]) -> None:
    """Kimi Delta Attention where a layer has no key-value heads, and latent attention without a rotation elsewhere."""
    has_attention = recurrent.layers_with_attention(header, config)
    config["layer_types"] = ["full_attention" if one else "linear_attention" for one in has_attention]
    latent(header, config)
    config["linear_num_heads"] = config["num_attention_heads"]
    leading(header, config)
    routed(header, config)
    del config["norm_topk_prob"]


def order_of_heads(header: GgufHeader, parts: Sequence[str]) -> np.ndarray | None:
    """The rows of the two matrices of :data:`KEYS_OF_LATENT` and :data:`VALUES_OF_LATENT`, as each head has them.

    None if the file lacks one of them. Raises :class:`CheckpointError` if there is no matrix for each head.
    """
    tensors = [header.tensors[part] for part in parts if part in header.tensors]
    if len(tensors) < len(parts):
        return None
    (keys, values), heads = tensors, header.of_model("attention.head_count")
    if len(keys.shape) != 3 or len(values.shape) != 3 or not keys.shape[0] == values.shape[0] == heads:
        problem = f"tensors {parts[0]} {list(keys.shape)} and {parts[1]} {list(values.shape)} are not of {heads} heads"
        raise CheckpointError(f"{keys.path}: {problem}; export the model again")
    rows = [np.arange(heads * size).reshape(heads, size) for size in (keys.shape[2], values.shape[1])]
    return np.concatenate([rows[0], rows[0].size + rows[1]], axis=1).ravel()


LATENT: dict[str, Converted] = {
    "deepseek2": Converted(
        "deepseek_v3",
        LATENT_KEYS | RMS | ROUTED | GROUPS,
        {},
        required=("attention.kv_lora_rank", "rope.dimension_count"),
        transposed=(f".{KEYS_OF_LATENT}.",),
        joined={"self_attn.kv_b_proj": (KEYS_OF_LATENT, VALUES_OF_LATENT)},
        drafts=True,
        others=("deepseek_v2", "youtu"),
        further=_deepseek2,
    ),
    "minicpm3": Converted(
        "minicpm3",
        LATENT_KEYS | RMS,
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        required=("attention.kv_lora_rank", "rope.dimension_count", "attention.key_length"),
        unread=long_factors,
        further=_minicpm3,
    ),
    "kimi-linear": Converted(
        "kimi_linear",
        {key: name for key, name in LATENT_KEYS.items() if key != "rope.freq_base"}
        | RMS
        | ROUTED
        | {
            "context_length": "model_max_length",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_token",
            "expert_shared_count": "num_shared_experts",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "kda.head_dim": "linear_head_dim",
        },
        {"moe_renormalize": True},
        required=("attention.kv_lora_rank", "rope.dimension_count", "ssm.conv_kernel", "kda.head_dim", *NEEDED),
        transposed=(f".{KEYS_OF_LATENT}.",),
        joined={"self_attn.kv_b_proj": (KEYS_OF_LATENT, VALUES_OF_LATENT)},
        shapes={".ssm_a": (1, 1, -1, 1)},
        further=_kimi_linear,
    ),
}
