"""What llama.cpp's converter does to models with states or experts, beside what :mod:`gguf_kit` does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from bminf_lite.models.parts.attention import AttentionPart
from bminf_lite.models.parts.delta_net import DeltaNetPart
from bminf_lite.models.parts.experts import ExpertsPart
from bminf_lite.models.parts.feed_forward import FeedForwardPart
from bminf_lite.models.parts.mamba2 import Mamba2Part
from bminf_lite.models.parts.short_convolution import ShortConvolutionPart
from bminf_lite.models.parts.side_by_side import SideBySidePart


def parts_of(layer: Any) -> list[Any]:
    """All parts of a layer, also those that are side by side."""
    parts = [sub.part for sub in layer.sublayers]
    return [one for part in parts for one in (part.parts if isinstance(part, SideBySidePart) else (part,))]


def _first(layer: Any, kind: type) -> Any:
    return next((part for part in parts_of(layer) if isinstance(part, kind)), None)


def attention_of(config: Any) -> Any:
    """The attention of the first layer that has one."""
    return next(
        (part for layer in config.layer_parts for part in parts_of(layer) if isinstance(part, AttentionPart)), None
    )


def metadata(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a model, whose ``config.json`` is ``given``."""
    layers, attention = config.layer_parts, attention_of(config)
    kv_heads = [part.kv_heads if (part := _first(layer, AttentionPart)) else 0 for layer in layers]
    experts = next((part for layer in layers if (part := _first(layer, ExpertsPart))), None)
    widths = [part.inner_size if (part := _first(layer, FeedForwardPart)) else 0 for layer in layers]
    found = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "feed_forward_length": widths if given["model_type"] == "nemotron_h" else widths[0],
        "attention.head_count": attention.heads,
        "attention.head_count_kv": kv_heads[0] if given["model_type"] == "falcon_h1" else kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": layers[0].norms[0].eps,
        "rope.dimension_count": attention.rotary.size if attention.rotary else attention.head_dim,
    }
    for layer in layers:
        if mamba := _first(layer, Mamba2Part):
            found |= {
                "ssm.conv_kernel": mamba.taps,
                "ssm.state_size": mamba.state_dim,
                "ssm.time_step_rank": mamba.heads,
                "ssm.group_count": mamba.groups,
                "ssm.inner_size": mamba.features,
            }
        if convolution := _first(layer, ShortConvolutionPart):
            found["shortconv.l_cache"] = convolution.taps
    delta_net = next((part for layer in layers if (part := _first(layer, DeltaNetPart))), None)
    if delta_net is not None:
        found |= {
            "ssm.conv_kernel": delta_net.taps,
            "ssm.state_size": delta_net.key_dim,
            "ssm.group_count": delta_net.key_heads,
            "ssm.time_step_rank": delta_net.value_heads,
            "ssm.inner_size": delta_net.value_heads * delta_net.value_dim,
            "attention.head_count_kv": attention.kv_heads,
            "rope.dimension_sections": [11, 11, 10, 0],
        }
        if "layer_types" in given:
            found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in given["layer_types"]]
        else:
            found["full_attention_interval"] = given["full_attention_interval"]
    if experts is not None:
        is_granite = given["model_type"].startswith("granitemoe")
        found |= {
            "expert_count": experts.router.num_experts,
            "expert_used_count": experts.router.top_k,
            "expert_feed_forward_length": 0 if is_granite else experts.inner_size,
            "feed_forward_length": [experts.inner_size if _first(layer, ExpertsPart) else 0 for layer in layers],
        }
        if given["model_type"] in ("qwen3_5_moe_text", "qwen3_next"):
            found["feed_forward_length"] = given["intermediate_size"]
            found["expert_shared_feed_forward_length"] = given["shared_expert_intermediate_size"]
        if given["model_type"] == "lfm2_moe":
            found |= {"expert_gating_func": 2, "leading_dense_block_count": given["num_dense_layers"]}
            found["feed_forward_length"] = given["intermediate_size"]
        if given["model_type"] == "nemotron_h":
            found |= {
                "expert_shared_feed_forward_length": experts.shared.inner_size,
                "expert_shared_count": 1,
                "expert_weights_norm": True,
                "expert_weights_scale": float(experts.router.scale),
                "expert_group_count": experts.router.num_groups,
                "expert_group_used_count": experts.router.top_groups,
                "moe_latent_size": experts.latent.width,
            }
    if attention.rotary:
        default = 1000000.0 if given["model_type"].startswith("lfm2") else 10000.0
        rope = given.get("rope_parameters") or given
        found["rope.freq_base"] = float(rope.get("rope_theta", default))
    if given["model_type"].startswith("granitemoe"):
        found |= {
            "attention.scale": float(given.get("attention_multiplier", 1.0)),
            "embedding_scale": float(given.get("embedding_multiplier", 1.0)),
            "residual_scale": float(given.get("residual_multiplier", 1.0)),
            "logit_scale": float(given.get("logits_scaling", 1.0)),
        }
    if given["model_type"] == "granitemoeshared":
        found["expert_shared_feed_forward_length"] = given["shared_intermediate_size"]
    if given["model_type"] == "granitemoehybrid":
        found |= {
            "rope.scaling.finetuned": attention.rotary is not None,
            "expert_shared_feed_forward_length": given["shared_intermediate_size"],
        }
    return found


def convert(
    name: str, values: np.ndarray, config: Any, given: dict[str, Any], names: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor as the converter writes it, with the package's ``names``; some are written as two."""
    values = multiplied(name, values, given) if given["model_type"] == "falcon_h1" else values
    layer = name.split(".layers.")[-1].split(".")[0]
    shared = "_shexp" if given.get("num_local_experts") else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        yield f"blk.{layer}.ffn_gate{shared}.weight", gate
        yield f"blk.{layer}.ffn_up{shared}.weight", up
        return
    if name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{shared}.weight", values
        return
    for old, new in ((".e_score_correction_bias", ".e_score_correction.bias"), (".expert_bias", ".expert_bias.bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    if name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    in_file = names.get_name(name, try_suffixes=(".weight", ".bias")) or f"blk.{layer}.nextn.eh_proj.weight"
    if in_file.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")):
        values = values[:, 0]
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if delta_net := next((part for one in config.layer_parts if (part := _first(one, DeltaNetPart))), None):
        if "in_proj_qkvz" in name:
            qkv, gate = by_kind(values, delta_net)
            yield f"blk.{layer}.attn_qkv.weight", qkv
            yield f"blk.{layer}.attn_gate.weight", gate
            return
        yield in_file, tiled(name, values, delta_net) if given["model_type"].startswith("qwen3_5") else values
        return
    if in_file.endswith((".ssm_a", ".ssm_d")):
        values = values[:, None]
    if in_file.endswith(".ssm_norm.weight"):
        groups = next(part.groups for one in config.layer_parts if (part := _first(one, Mamba2Part)))
        values = values.reshape(groups, -1)
    yield in_file, values


def by_kind(values: np.ndarray, part: DeltaNetPart) -> tuple[np.ndarray, np.ndarray]:
    """q, k and v, and the gates, of rows that are ordered by key heads."""
    width = part.value_heads // part.key_heads * part.value_dim
    heads = values.reshape(part.key_heads, -1, values.shape[-1])
    ends = [part.key_dim, 2 * part.key_dim, 2 * part.key_dim + width]
    *qkv, gate = (kind.reshape(-1, values.shape[-1]) for kind in np.split(heads, ends, axis=1))
    return np.concatenate(qkv), gate


def tiled(name: str, values: np.ndarray, part: DeltaNetPart) -> np.ndarray:
    """A tensor with the first value head of each key head first, then the second of each."""

    def order(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(part.key_heads, part.value_heads // part.key_heads, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if "linear_attn" not in name:
        return values
    if "in_proj_qkv" in name or "conv1d" in name:
        shared = 2 * part.key_heads * part.key_dim
        return np.concatenate([values[:shared], order(values[shared:])])
    if "out_proj" in name:
        return order(values.T).T
    return values if ".norm." in name else order(values)


EXPERTS = re.compile(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.(weight|bias)")
KINDS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def fused(experts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gate and up of each expert in one tensor, which is an option of the converter."""
    gates = [name for name in experts if "_gate_exps" in name]
    both = {
        x.replace("_gate_", "_gate_up_"): np.concatenate([experts[x], experts[x.replace("_gate_", "_up_")]], 1)
        for x in gates
    }
    return both | {name: values for name, values in experts.items() if "_down_exps" in name}


def stacked(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tensors that are no experts', and those of all experts of a layer by their names in a file."""
    others, found = {}, {}
    for name, values in tensors.items():
        if match := EXPERTS.fullmatch(name):
            file_name = f"blk.{match[1]}.ffn_{KINDS[match[3]]}_exps.{match[4]}"
            found.setdefault(file_name, {})[int(match[2])] = values
        else:
            others[name] = values
    return others, {name: np.stack([of[i] for i in range(len(of))]) for name, of in found.items()}


def multiplied(name: str, values: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    """A tensor of Falcon-H1, multiplied by what ``given`` says."""
    gate, down = given.get("mlp_multipliers") or (1.0, 1.0)
    attention, mamba = given.get("attention_in_multiplier", 1.0), given.get("ssm_in_multiplier", 1.0)
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": given.get("key_multiplier", 1.0) * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": given.get("attention_out_multiplier", 1.0),
        "out_proj": given.get("ssm_out_multiplier", 1.0),
        "lm_head": given.get("lm_head_multiplier", 1.0),
        "embed_tokens": given.get("embedding_multiplier", 1.0),
    }
    module = name.split(".")[-2]
    if module == "in_proj" and values.ndim == 2:
        width = given["mamba_d_ssm"] or values.shape[1] * given["mamba_expand"]
        shared = given["mamba_n_groups"] * given["mamba_d_state"]
        sections = width, width, shared, shared, given["mamba_n_heads"]
        of_sections = np.repeat(given.get("ssm_multipliers") or [1.0] * 5, sections)
        return (values * of_sections[:, None] * mamba).astype(np.float32)
    return values * np.float32(factors.get(module, 1.0))
