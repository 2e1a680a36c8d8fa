"""Layers with a state in GGUF files: which layers they are, their sizes, and how their tensors are stored.

Of each layer a file says the number of key-value heads, which is 0 without attention, and in some architectures the
width of the feed-forward layer, which is 0 without one. llama.cpp's converter stores ``A`` instead of ``A_log``, and
leaves out or adds sizes of 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import CheckpointError, is_whole
from .converted import checked_layers, has
from .header import REMEDY, GgufHeader

MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_d_ssm",
}
"""Sizes of Mamba 2 by the names of Falcon-H1."""
NEMOTRON_MAMBA = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.time_step_rank": "mamba_num_heads",
    "ssm.group_count": "n_groups",
    "ssm.inner_size": "mamba_inner_size",
}
DELTA_NET = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_features",
}
"""Sizes of a gated DeltaNet."""
NEMOTRON_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "moe_latent_size": "moe_latent_size",
}


_CONVOLUTIONS_OF_KDA = tuple(f".ssm_conv1d_{one}.weight" for one in "qkv")


def hugging_face_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that Hugging Face has for the tensor ``name`` of a file, where it has ``shape``."""
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
        return (1, *shape)
    if name.endswith(_CONVOLUTIONS_OF_KDA) and len(shape) > 2:
        return (math.prod(shape[:-1]), 1, shape[-1])
    if len(shape) != 2:
        return shape
    if name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")):
        return (shape[0], 1, shape[1])
    if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
        return (shape[0] * shape[1],)
    return shape


_BIASES = {
    ".dt_bias": ".dt_proj.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
}


def with_bias(name: str) -> str:
    """A tensor's ``name``, in which vectors that are added are those of a linear layer, as in llama.cpp's converter."""
    end = next((end for end in _BIASES if name.endswith(end)), "")
    return name.removesuffix(end) + _BIASES.get(end, "")


def log_of_decay(values: np.ndarray) -> np.ndarray:
    """``A_log`` of ``A = -exp(A_log)``."""
    logarithm: np.ndarray = np.log(-values)
    return logarithm


def layers_with_attention(header: GgufHeader, config: dict[str, Any]) -> list[bool]:
    """Whether each layer has attention; sets the number of key-value heads of those that do."""
    heads = _of_each_layer(header, config, "attention.head_count_kv", config["num_attention_heads"])
    config["num_key_value_heads"] = _only(header, heads, "attention.head_count_kv", config["num_attention_heads"])
    return [count > 0 for count in heads]


def qwen35(header: GgufHeader, config: dict[str, Any]) -> None:
    """A gated DeltaNet or attention in each layer; layers that draft tokens are behind the others and are left out.

    The sections of the rotation only matter for images.
    """
    layers = checked_layers(header)
    config["num_hidden_layers"] = layers
    recurrent = header.of_model("attention.recurrent_layers")
    interval = header.of_model("full_attention_interval", 4)
    if isinstance(recurrent, list) and len(recurrent) >= layers:
        kinds = [bool(one) for one in recurrent[:layers]]
    elif recurrent is None and is_whole(interval) and interval > 0:
        kinds = [(layer + 1) % interval != 0 for layer in range(layers)]
    else:
        problem = "attention.recurrent_layers or full_attention_interval does not say which layers have attention"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; export the model again")
    config["layer_types"] = ["linear_attention" if one else "full_attention" for one in kinds]
    config["linear_value_head_dim"] = _divided(header, config, "linear_value_features", "linear_num_value_heads")
    del config["linear_value_features"]
    rotated = header.of_model("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    header.of_model("rope.dimension_sections")
    config["attention_bias"] = has(header, "attn_q.bias")


def order_of_values(header: GgufHeader, name: str) -> np.ndarray | None:
    """The rows of the tensor ``name`` of a gated DeltaNet in Hugging Face's order; None for the same order.

    The converter puts the first value head of each key head first, then the second of each.
    """
    part, rows = name.split(".", 2)[-1], header.tensors[name].shape[0]
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        shared = 2 * header.of_model("ssm.group_count") * header.of_model("ssm.state_size")
        if shared > rows:
            return None
        return np.concatenate([np.arange(shared), shared + _grouped(header, rows - shared)])
    if part in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return _grouped(header, rows)
    return None


def order_by_key_heads(header: GgufHeader, rows: int) -> np.ndarray | None:
    """The ``rows`` of q, k, v and the gate of a gated DeltaNet, which lie one after another, as Qwen3-Next has them.

    Of each key head there are q, k, the value heads and their gates. None if the tensor has another number of rows.
    """
    key_heads, key_dim = header.of_model("ssm.group_count"), header.of_model("ssm.state_size")
    keys, values = key_heads * key_dim, header.of_model("ssm.inner_size")
    if 2 * (keys + values) != rows:
        return None
    parts = np.split(np.arange(2 * (keys + values)), [keys, 2 * keys, 2 * keys + values])
    return np.concatenate([part.reshape(key_heads, -1) for part in parts], axis=1).ravel()


def grouped_columns(header: GgufHeader, values: np.ndarray) -> np.ndarray:
    """A matrix that reads the value heads of a gated DeltaNet, in Hugging Face's order of them."""
    columns: np.ndarray = values[:, _grouped(header, values.shape[1])]
    return columns


def _grouped(header: GgufHeader, size: int) -> np.ndarray:
    """The elements of all value heads by key heads."""
    key_heads, heads = header.of_model("ssm.group_count"), header.of_model("ssm.time_step_rank")
    return np.arange(size).reshape(heads // key_heads, key_heads, -1).swapaxes(0, 1).ravel()


def falcon_h1(header: GgufHeader, config: dict[str, Any]) -> None:
    """Multipliers are part of the weights, and a norm is behind the gate."""
    if config["tie_word_embeddings"]:
        problem = "has no output.weight, and does not say by what the head's logits are multiplied"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
    _mamba_of_falcon_h1(header, config)
    config["mamba_rms_norm"] = has(header, "ssm_norm.weight")
    config["mamba_norm_before_gate"] = False
    config["projectors_bias"] = has(header, "ssm_out.bias")
    config["mlp_bias"] = has(header, "ffn_up.bias")


def _mamba_of_falcon_h1(header: GgufHeader, config: dict[str, Any]) -> None:
    """The parts of layers with attention and Mamba 2 that have a bias."""
    config["attention_bias"] = has(header, "attn_q.bias")
    config["mamba_proj_bias"] = has(header, "ssm_in.bias")
    config["mamba_conv_bias"] = has(header, "ssm_conv1d.bias")


def nemotron_h(header: GgufHeader, config: dict[str, Any]) -> None:
    """Each layer is attention, a feed-forward layer, or Mamba 2, which has neither heads nor hidden units."""
    _nemotron_h(header, config, "mlp")


def nemotron_h_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    """Nemotron-H with experts in all feed-forward layers."""
    _nemotron_h(header, config, "moe")
    if header.of_model("nextn_predict_layers"):
        problem = "has further layers (nextn_predict_layers), which this version does not run"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
    if (count := header.of_model("expert_shared_count", 1)) != 1:
        problem = f"expert_shared_count is {count}; one shared expert is run"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
    config.setdefault("norm_topk_prob", False)
    config["routed_scaling_factor"] = config.get("routed_scaling_factor") or 1.0
    if not config.get("moe_latent_size"):
        config["moe_latent_size"] = None
    if not config.get("n_group"):
        config["n_group"] = 1
    if config["n_group"] > 1 and not config.get("topk_group"):
        problem = f"has {config['n_group']} groups of experts, and does not say how many are used"
        raise CheckpointError(f"{header.path}: {problem} (expert_group_used_count); {REMEDY}")
    config["topk_group"] = config.get("topk_group") or 1


def _nemotron_h(header: GgufHeader, config: dict[str, Any], feed_forward: str) -> None:
    has_attention = layers_with_attention(header, config)
    widths = _of_each_layer(header, config, "feed_forward_length", 0)
    config["intermediate_size"] = _only(header, widths, "feed_forward_length", 1)
    both = [i for i, width in enumerate(widths) if width and has_attention[i]]
    if both:
        problem = f"layer {both[0]} has key-value heads and hidden units (feed_forward_length)"
        raise CheckpointError(f"{header.path}: {problem}, which this version does not run; {REMEDY}")
    kinds = zip(has_attention, widths, strict=True)
    config["layers_block_type"] = ["attention" if a else feed_forward if width else "mamba" for a, width in kinds]
    config["mamba_head_dim"] = _divided(header, config, "mamba_inner_size", "mamba_num_heads")
    del config["mamba_inner_size"]
    config["attention_bias"] = has(header, "attn_q.bias")
    config["mlp_bias"] = has(header, "ffn_up.bias")
    config["use_bias"] = has(header, "ssm_in.bias")
    config["use_conv_bias"] = has(header, "ssm_conv1d.bias")


def granite_hybrid(header: GgufHeader, config: dict[str, Any]) -> None:
    """Mamba 2 or attention in each layer, whose rotation a flag turns off."""
    has_attention = layers_with_attention(header, config)
    config["layer_types"] = ["attention" if a else "mamba" for a in has_attention]
    config["position_embedding_type"] = "rope" if header.of_model("rope.scaling.finetuned", True) else "nope"
    config["mamba_expand"] = _divided(header, config, "mamba_d_ssm", "hidden_size")
    del config["mamba_d_ssm"]
    if not config.get("num_local_experts"):
        config["num_local_experts"] = 0
        config["shared_intermediate_size"] = config["intermediate_size"]
        config.pop("num_experts_per_tok", None)
    _mamba_of_falcon_h1(header, config)


def lfm2(header: GgufHeader, config: dict[str, Any]) -> None:
    """Attention or a short convolution in each layer."""
    has_attention = layers_with_attention(header, config)
    config["layer_types"] = ["full_attention" if a else "conv" for a in has_attention]
    config["conv_bias"] = has(header, "shortconv.conv.bias")


def lfm2_moe(header: GgufHeader, config: dict[str, Any]) -> None:
    """LFM2 with experts behind the first layers, whose router has sigmoids."""
    lfm2(header, config)
    if (function := header.of_model("expert_gating_func")) != 2:
        problem = f"expert_gating_func is {function}, not 2 (sigmoid)"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
    config["use_expert_bias"] = has(header, "exp_probs_b.bias")
    config.setdefault("num_dense_layers", 0)


def _of_each_layer(header: GgufHeader, config: dict[str, Any], key: str, default: int) -> list[int]:
    values, layers = header.of_model(key, default), header.of_model("block_count")
    if not isinstance(values, list):
        return [int(values)] * layers
    if len(values) != layers:
        problem = f"{header.architecture}.{key} has {len(values)} numbers for {layers} layers"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")
    return values


def _only(header: GgufHeader, values: list[int], key: str, default: int) -> int:
    """The number that all layers have that have one."""
    found = sorted({value for value in values if value})
    if len(found) > 1:
        problem = f"{header.architecture}.{key} is {', '.join(map(str, found))} in different layers"
        raise CheckpointError(f"{header.path}: {problem}, and such layers are not supported")
    return found[0] if found else default


def _divided(header: GgufHeader, config: dict[str, Any], size: str, by: str) -> int:
    """How many times the width of Mamba 2 holds another size."""
    if config[size] % config[by]:
        problem = f"ssm.inner_size is {config[size]}, not a multiple of {config[by]}"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; export the model again")
    return int(config[size] // config[by])
