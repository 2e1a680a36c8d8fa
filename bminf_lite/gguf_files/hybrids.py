"""Architectures whose layers have a state, a short convolution, or both beside attention."""

from __future__ import annotations

from . import recurrent
from .converted import COMMON, EXPERTS, GRANITE, HEAD_SIZE, RMS, SHARED_EXPERT, Converted

NEMOTRON_H = (
    {key: name for key, name in COMMON.items() if key not in ("block_count", "rope.freq_base")}
    | HEAD_SIZE
    | {"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"}
    | recurrent.NEMOTRON_MAMBA
)
QWEN35 = COMMON | RMS | HEAD_SIZE | recurrent.DELTA_NET
LFM2 = COMMON | HEAD_SIZE | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}

HYBRIDS: dict[str, Converted] = {
    "falcon-h1": Converted(
        "falcon_h1",
        COMMON | RMS | HEAD_SIZE | recurrent.MAMBA,
        {"mamba_d_head": "auto"},
        required=tuple(recurrent.MAMBA),
        further=recurrent.falcon_h1,
    ),
    "granitehybrid": Converted(
        "granitemoehybrid",
        COMMON
        | RMS
        | recurrent.MAMBA
        | GRANITE
        | EXPERTS
        | {"expert_count": "num_local_experts", "expert_shared_feed_forward_length": "shared_intermediate_size"},
        {"mamba_d_head": "auto"},
        permuted=True,
        required=tuple(recurrent.MAMBA),
        renamed={"shared_mlp.output_linear": "ffn_down"},
        joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
        further=recurrent.granite_hybrid,
    ),
    "nemotron_h": Converted(
        "nemotron_h",
        NEMOTRON_H,
        {},
        permuted=True,
        required=tuple(recurrent.NEMOTRON_MAMBA),
        further=recurrent.nemotron_h,
    ),
    "nemotron_h_moe": Converted(
        "nemotron_h",
        NEMOTRON_H | recurrent.NEMOTRON_EXPERTS,
        {},
        permuted=True,
        required=(*recurrent.NEMOTRON_MAMBA, *list(recurrent.NEMOTRON_EXPERTS)[:4]),
        further=recurrent.nemotron_h_moe,
    ),
    "qwen35": Converted(
        "qwen3_5_text",
        QWEN35,
        {},
        norm_offset=True,
        required=tuple(recurrent.DELTA_NET),
        tiled=True,
        drafts=True,
        further=recurrent.qwen35,
    ),
    "qwen35moe": Converted(
        "qwen3_5_moe_text",
        QWEN35 | EXPERTS | SHARED_EXPERT,
        {},
        norm_offset=True,
        required=(*recurrent.DELTA_NET, *EXPERTS, "expert_feed_forward_length"),
        tiled=True,
        drafts=True,
        further=recurrent.qwen35,
    ),
    "qwen3next": Converted(
        "qwen3_next",
        QWEN35 | EXPERTS | SHARED_EXPERT,
        {"norm_topk_prob": True},
        norm_offset=True,
        required=(*recurrent.DELTA_NET, *EXPERTS, "expert_feed_forward_length"),
        joined={"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")},
        further=recurrent.qwen35,
    ),
    "lfm2": Converted(
        "lfm2",
        LFM2,
        {"block_auto_adjust_ff_dim": False},
        required=("shortconv.l_cache",),
        further=recurrent.lfm2,
    ),
    "lfm2moe": Converted(
        "lfm2_moe",
        LFM2
        | EXPERTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        required=("shortconv.l_cache", *EXPERTS, "expert_feed_forward_length"),
        further=recurrent.lfm2_moe,
    ),
}
