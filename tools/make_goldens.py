"""Make tests/goldens: the results of transformers for tiny random models of each family (torch; development only).

    python tools/make_goldens.py [FAMILY ...]

The committed files hold configurations, seeds, token ids and fp32 logits of transformers' eager attention in fp32. The
weights are made again from the seed (tests/models/tiny_models.py), so the files stay small and reading them needs no
torch. A configuration is written as a ``config.json`` has it, in the old and the new spelling of the rotary keys.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))
from tiny_models import ENCODER_DECODERS, EVERY, GOLDENS, MIXTURES, digest, random_tensors, random_tokens

from bminf_lite import models
from bminf_lite.models.spec import Spec

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # it knows images and texts alone
Case = dict[str, Any]

TOKENS = 33
BASE: Case = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
OWN_NAMES = (*MIXTURES, "olmo_hybrid", "lfm3")
"""Families whose tensors in files are not those that transformers has in memory."""
JOINED = "conv1d.weight"
"""The end of the name of a tensor that transformers joins of those of queries, keys and values, if a file has these."""
ABSENT = object()
"""Marks a key of BASE that a case leaves out, so that the class default counts."""

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_TUNED = YARN | {"beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}
YARN_MSCALE = YARN | {"mscale": 1.2, "mscale_all_dim": 0.8}


def old_spelling(parameters: Case, key: str = "rope_type") -> Case:
    """``rope_parameters`` as ``rope_theta`` and ``rope_scaling``; the type's key was ``type`` in the oldest files."""
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": {key: parameters["rope_type"], **scaling}}


COMMON: dict[str, Case] = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped": {},
    "multi-query": {"num_key_value_heads": 1},
    "tied head": {"tie_word_embeddings": True},
    "odd vocabulary": {"vocab_size": 131, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    "own head size": {"head_dim": 20},
    "small theta, old key": {"rope_theta": 100.0, "rms_norm_eps": 1e-2},
    "linear rope": {"rope_parameters": LINEAR},
    "linear rope, old keys": old_spelling(LINEAR, "type"),
    "llama3 rope": {"rope_parameters": LLAMA3},
    "llama3 rope, old keys": old_spelling(LLAMA3),
    "yarn rope": {"rope_parameters": YARN},
    "yarn rope, old keys": old_spelling(YARN_TUNED, "type"),
}
WINDOWED: dict[str, Case] = {
    "window on every layer": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    "window from layer 1": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "window on no layer": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "window not used": {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    "layer types": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
CASES: dict[str, dict[str, Case]] = {
    "llama": COMMON
    | {
        "absent keys": {"num_key_value_heads": ABSENT, "max_position_embeddings": ABSENT},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "tied, biases, multi-query": {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
        "gelu": {"hidden_act": "gelu_pytorch_tanh"},
        "relu": {"hidden_act": "relu"},
        "yarn rope, mscale": {"rope_parameters": YARN_MSCALE},
        "one head, one layer": {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
    },
    "mistral": COMMON
    | {
        "absent window": {"num_attention_heads": 8, "num_key_value_heads": ABSENT},
        "no window": {"sliding_window": None},
        "window": {"sliding_window": 5},
        "window of one": {"sliding_window": 1},
        "window, multi-query": {"sliding_window": 8, "num_key_value_heads": 1},
        "window, yarn rope": {"sliding_window": 11, "rope_parameters": YARN},
        "window, own head size, tied": {"sliding_window": 9, "head_dim": 16, "tie_word_embeddings": True},
    },
    "qwen2": COMMON | WINDOWED,
    "qwen3": COMMON
    | WINDOWED
    | {
        "absent head size": {"head_dim": ABSENT, "num_attention_heads": 2},
        "biases": {"attention_bias": True},
        "biases, tied, window": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 0,
        },
    },
}

BASES: dict[str, Case] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 128},
    "opt": {
        "hidden_size": 48,
        "ffn_dim": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "max_position_embeddings": 128,
    },
    "gpt_neox": {key: value for key, value in BASE.items() if key != "num_key_value_heads"} | {"hidden_size": 64},
}
for _family in ENCODER_DECODERS:
    BASES[_family] = {
        "d_model": 40,
        "d_kv": 12,
        "d_ff": 56,
        "num_layers": 2,
        "num_heads": 3,
        "vocab_size": 97,
        "decoder_start_token_id": 0,
    }
"""Configurations of the families that have keys of their own."""

CASES |= {
    "gpt2": {
        "plain": {},
        "inner size": {"n_inner": 72},
        "exact gelu": {"activation_function": "gelu"},
        "relu": {"activation_function": "relu"},
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "unscaled": {"scale_attn_weights": False},
        "untied": {"tie_word_embeddings": False},
        "large epsilon": {"layer_norm_epsilon": 1e-2},
        "odd vocabulary, one head, one layer": {"vocab_size": 131, "n_head": 1, "n_layer": 1, "n_embd": 36},
    },
    "opt": {
        "norm before": {},
        "norm after": {"do_layer_norm_before": False},
        "norm after, projections": {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
        "norm before, projections": {"word_embed_proj_dim": 56},
        "no final norm": {"_remove_final_layer_norm": True},
        "no biases": {"enable_bias": False},
        "plain norms, no biases, gelu": {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
        "untied": {"tie_word_embeddings": False},
    },
    "gpt_neox": {
        "parallel": {},
        "sequential": {"use_parallel_residual": False},
        "whole heads": {"rotary_pct": 1.0},
        "three quarters of heads, old keys": {"rotary_pct": 0.75, "rotary_emb_base": 100},
        "half of heads, new keys": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        },
        "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rotary_pct": 0.5},
        "no attention bias": {"attention_bias": False},
        "tied head": {"tie_word_embeddings": True},
        "gelu by tanh": {"hidden_act": "gelu_new"},
        "large epsilon": {"layer_norm_eps": 1e-2},
    },
    "t5": {
        "tied": {},
        "untied, gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "untied": {"tie_word_embeddings": False},
        "tied, gated": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": True},
        "more layers in the decoder": {"num_decoder_layers": 3},
        "fewer layers in the decoder": {"num_decoder_layers": 1, "feed_forward_proj": "gated-gelu"},
        "few buckets": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
        "exact gelu": {"feed_forward_proj": "gelu"},
        "absent keys": {"num_heads": ABSENT, "d_kv": 6, "decoder_start_token_id": ABSENT},
    },
    "mt5": {
        "gated": {},
        "one layer": {"num_layers": 1},
        "few buckets": {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 24},
        "relu": {"feed_forward_proj": "relu"},
    },
    "umt5": {
        "tied": {},
        "few buckets": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
        "relu": {"feed_forward_proj": "relu"},
    },
}
LFM2: Case = {"num_hidden_layers": 3, "block_multiple_of": 16, "norm_eps": 1e-4}
EXPERTS: Case = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12}
DELTA_NET: Case = {
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "head_dim": 16,
    "rms_norm_eps": 1e-3,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MAMBA: Case = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": "auto",
    "mamba_expand": 1,
}
"""Mamba 2 as the configurations of several families have it."""
NEMOTRON_H: Case = {
    "num_hidden_layers": ABSENT,
    "head_dim": 12,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "n_routed_experts": 5,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "time_step_min": 1e-30,
}
"""transformers bounds the time steps of prompts by ``time_step_min``, see ``models/nemotron_h.py``."""
KIMI_LINEAR: Case = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "num_experts": 6,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 24,
    "linear_head_dim": 12,
    "linear_num_heads": 3,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "routed_scaling_factor": 0.5,
}
SHARED_EXPERT: Case = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24,
}  # fmt: skip
QWEN2_MOE: Case = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
}  # fmt: skip
GLM4_MOE: Case = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_hidden_layers": 3,
}  # fmt: skip
ERNIE: Case = {
    "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2, "num_hidden_layers": 3,
}  # fmt: skip
MINIMAX_M2: Case = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12, "rotary_dim": 6}
LFM2_MOE: Case = {
    "num_hidden_layers": 3, "norm_eps": 1e-4, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2,
    "num_dense_layers": 1,
}  # fmt: skip
GPT_OSS: Case = {
    "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LATENT: Case = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_hidden_layers": 3,
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}
YOUTU = {key: value for key, value in LATENT.items() if "expert" not in key and not key.startswith("moe")}
ONE_GROUP: Case = {"n_group": 1, "topk_group": 1}
LLAMA4: Case = {
    "num_local_experts": 5, "num_experts_per_tok": 1, "head_dim": 12, "intermediate_size_mlp": 56,
    "num_key_value_heads": 2, "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
OLMOE: Case = {"num_experts": 5, "num_experts_per_tok": 3, "num_key_value_heads": 4}
FLINT: Case = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "head_dim": 12,
}
PLAIN: dict[str, Case] = {"grouped": {}, "multi-head, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True}}
SHORT = [1.0, 1.2, 1.5, 2.0, 2.5, 3.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": SHORT,
    "long_factor": [2 * factor for factor in SHORT],
    "original_max_position_embeddings": 64,
}
THREE_LAYERS = {
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GPTJ = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 128, "rotary_dim": 8}
FALCON = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
BASES |= {
    "phi3": BASE | {"pad_token_id": 0},
    "granite": BASE | {"attention_multiplier": 0.25},
    "flex_olmo": BASE | {"pad_token_id": 0},
    "lfm3": BASE | {"pad_token_id": 0, "head_dim": 12},
    "gpt_neo": {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "max_position_embeddings": 128}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "internlm3": BASE | {"head_dim": 12},
    "iquestcoder": BASE | {"head_dim": 12},
    "granite_swa": BASE | {"attention_multiplier": 0.25},
    "granitemoe_swa": BASE | {"attention_multiplier": 0.25},
    "hunyuan_v1_dense": BASE | {"head_dim": 12},
    "hunyuan_v1_moe": BASE | {"head_dim": 12},
    "smollm3": BASE | {"pad_token_id": 0},
    "ministral3": BASE | {"head_dim": 12},
    "seed_oss": BASE | {"head_dim": 12},
    "glm": BASE | {"head_dim": 12, "pad_token_id": 0},
    "glm4": BASE | {"head_dim": 12, "pad_token_id": 0},
    "stablelm": BASE | {"hidden_size": 64},
    "phi": BASE | {"hidden_size": 64},
    "nemotron": BASE | {"hidden_size": 64},
    "helium": BASE | {"head_dim": 12},
    "gemma2": BASE | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 6},
    "gemma3_text": BASE | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 6},
    "gemma4_text": BASE
    | {"head_dim": 12, "global_head_dim": 24, "sliding_window": 6, "hidden_size_per_layer_input": 0}
    | {"vocab_size_per_layer_input": 97},
    "qwen3_next": BASE | DELTA_NET,
    "qwen3_5_text": BASE | DELTA_NET,
    "qwen3_5_moe_text": BASE | DELTA_NET,
    "olmo_hybrid": BASE
    | {
        "num_hidden_layers": 3,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 12,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-3,
    }
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "nemotron_h": BASE | NEMOTRON_H,
    "kimi_linear": BASE | KIMI_LINEAR,
    "mamba2": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "vocab_size": 97,
    },
    "granitemoehybrid": BASE
    | MAMBA
    | {"num_hidden_layers": 3, "attention_multiplier": 0.25, "mamba_n_heads": 6, "num_local_experts": 5}
    | {"intermediate_size": 40, "shared_intermediate_size": 56},
    "falcon_h1": BASE | MAMBA | {"mamba_d_ssm": 32, "head_dim": 12, "pad_token_id": 0},
    "bamba": BASE | MAMBA | {"num_hidden_layers": 3, "mamba_n_heads": 6, "rms_norm_eps": 1e-3, "pad_token_id": 0},
    "gemma": BASE | {"head_dim": 12},
    "ernie4_5": BASE | {"head_dim": 12},
    "cwm": BASE | {"head_dim": 12, "sliding_window": 6},
    "ministral": BASE | {"head_dim": 12},
    "vaultgemma": BASE | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 6},
    "hyperclovax": BASE | {"attention_multiplier": 0.25},
    "nanochat": BASE | {"num_hidden_layers": 3},
    "youtu": BASE | YOUTU,
    "minicpm3": BASE | YOUTU,
    "dots1": BASE | GLM4_MOE | {"n_shared_experts": 1, "head_dim": 12},
    "solar_open": BASE | GLM4_MOE | {"head_dim": 12},
    "exaone_moe": BASE
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_hidden_layers": 3}
    | {"head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 3, "routed_scaling_factor": 0.5},
    "hy_v3": BASE
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_hidden_layers": 3}
    | {"head_dim": 12},
    "granitemoeshared": BASE
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_multiplier": 0.25, "residual_multiplier": 0.5},
    "afmoe": BASE | EXPERTS | {"num_hidden_layers": 3, "global_attn_every_n_layers": 3, "sliding_window": 6},
    "mellum": BASE | EXPERTS | {"num_hidden_layers": 3, "sliding_window": 6},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 97},
    "gptj": GPTJ,
    "codegen": GPTJ,
    "falcon": FALCON,
    "gpt_bigcode": BASES["gpt2"],
}
CASES |= {
    "lfm2": {
        "two kinds": LFM2 | {"layer_types": ["conv", "full_attention", "conv"]},
        "untied, biases": LFM2
        | {"layer_types": ["conv", "conv", "full_attention"], "tie_word_embeddings": False}
        | {"conv_bias": True, "conv_L_cache": 4},
        "older keys": LFM2 | {"full_attn_idxs": [2], "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.5},
        "attention alone": LFM2 | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 2},
    },
    "qwen3_next": {
        "two kinds": SHARED_EXPERT,
        "dense layers, biases": SHARED_EXPERT
        | {"mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False, "linear_num_value_heads": 6},
        "tied, whole heads": SHARED_EXPERT
        | {"tie_word_embeddings": True, "partial_rotary_factor": 1.0, "decoder_sparse_step": 2}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    },
    "olmo_hybrid": {
        "no rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        "rotation, positive eigenvalues, tied, biases": {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "linear_allow_neg_eigval": False,
            "tie_word_embeddings": True,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
        },
    },
    "nemotron_h": {
        "a layer of each kind": {"hybrid_override_pattern": "M*E-"},
        "experts last, groups, latent width": {
            "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "moe"],
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "moe_latent_size": 16,
            "routed_scaling_factor": 2.5,
        },
        "biases": {
            "layers_block_type": ["mlp", "moe", "linear_attention", "full_attention"],
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "norm_topk_prob": False,
            "n_groups": 1,
            "num_experts_per_tok": 3,
            "moe_latent_size": 24,
            "mlp_hidden_act": "relu",
            "conv_kernel": 3,
        },
    },
    "kimi_linear": {
        "two kinds": {
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
                "head_dim": 12,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            }
        },
        "groups, queries compressed, dense layers": {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "num_expert_group": 3,
            "topk_group": 2,
            "q_lora_rank": 20,
            "num_shared_experts": 2,
            "moe_renormalize": False,
            "linear_conv_kernel_dim": 3,
            "routed_scaling_factor": 1.5,
        },
    },
    "mamba2": {
        "groups": {"layer_norm_epsilon": 1e-3},
        "one group, biases, tied, bounded steps": {
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "time_step_limit": [0.3, 0.9],
            "tie_word_embeddings": True,
            "expand": 1,
            "num_heads": 4,
            "head_dim": 12,
        },
    },
    "granitemoehybrid": {
        "two kinds, multipliers, no rotation": {
            "layer_types": ["mamba", "attention", "mamba"],
            "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "position_embedding_type": "nope",
            "mamba_expand": 2,
            "mamba_d_head": 16,
        },
        "rotation, biases, tied, no experts": {
            "layers_block_type": ["linear_attention", "linear_attention", "full_attention"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "residual_multiplier": 1.4,
            "rms_norm_eps": 1e-3,
        },
        "three experts of five, one group": {
            "layer_types": ["attention", "mamba", "attention"],
            "num_experts_per_tok": 3,
            "mamba_n_groups": 1,
            "mamba_d_conv": 2,
            "time_step_limit": [0.3, 0.9],
            "residual_multiplier": 0.6,
        },
    },
    "falcon_h1": {
        "multipliers": {
            "key_multiplier": 0.6,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.3,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.6],
            "mlp_multipliers": [0.7, 1.3],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.4,
        },
        "norm behind the gate, expanded, no convolution bias": {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": None,
            "mamba_expand": 2,
            "mamba_conv_bias": False,
            "mamba_n_groups": 4,
            "mamba_d_conv": 3,
        },
        "norm before the gate, tied, one group": {
            "mamba_rms_norm": True,
            "mamba_n_groups": 1,
            "mamba_d_head": 8,
            "tie_word_embeddings": True,
            "time_step_limit": [0.3, 0.9],
        },
        "biases and multipliers": {
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "ssm_in_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.6],
            "attention_in_multiplier": 1.4,
            "attention_out_multiplier": 0.7,
            "mlp_multipliers": [1.3, 0.7],
            "key_multiplier": 1.2,
            "rope_parameters": LINEAR,
        },
    },
    "qwen3_5_text": {
        "two kinds": {},
        "tied, biases, one key head": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
        },
        "sections of the rotation": {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            "linear_num_value_heads": 2,
        },
    },
    "qwen3_5_moe_text": {
        "two kinds": SHARED_EXPERT,
        "all of three, tied": SHARED_EXPERT
        | {"num_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": True, "attention_bias": True},
    },
    "mixtral": {
        "two of eight": {"num_local_experts": 8},
        "one of three, window, tied": {
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
        "all of two": {"num_local_experts": 2},
        "three of five, gelu": {"num_local_experts": 5, "num_experts_per_tok": 3, "hidden_act": "gelu_pytorch_tanh"},
    },
    "qwen3_moe": {
        "plain weights": EXPERTS,
        "renormalised, window": EXPERTS | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 7},
        "dense layers": EXPERTS | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        "biases, tied": EXPERTS | {"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": True},
    },
    "qwen2_moe": {
        "plain weights": QWEN2_MOE,
        "renormalised, windows, no biases": QWEN2_MOE
        | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 7, "qkv_bias": False},
        "dense layers, tied": QWEN2_MOE | {"mlp_only_layers": [1], "tie_word_embeddings": True},
    },
    "glm4_moe": {
        "plain weights": GLM4_MOE,
        "groups, norms, biases": GLM4_MOE
        | {"n_group": 3, "topk_group": 2, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
        "two shared, not renormalised": GLM4_MOE
        | {"n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
    },
    "deepseek_v2": {
        "plain weights": LATENT,
        "groups, a dense layer, biases": LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 1, "attention_bias": True, "mlp_bias": True},
        "whole queries, yarn rope, tied": LATENT
        | {"q_lora_rank": None, "rope_parameters": LATENT_YARN, "n_shared_experts": 1, "tie_word_embeddings": True},
    },
    "deepseek_v3": {
        "groups, a dense layer": LATENT | {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
        "whole queries, yarn rope, biases": LATENT
        | ONE_GROUP
        | {"q_lora_rank": None, "rope_parameters": LATENT_YARN, "attention_bias": True, "first_k_dense_replace": 0},
        "halves rotated, not renormalised, yarn, old keys": LATENT
        | ONE_GROUP
        | old_spelling(LATENT_YARN, "type")
        | {"rope_interleave": False, "norm_topk_prob": False, "first_k_dense_replace": 2, "v_head_dim": 8},
    },
    "glm4_moe_lite": {
        "plain weights": LATENT,
        "kinds of layers, groups, biases": LATENT
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 2, "topk_group": 1, "attention_bias": True},
        "whole queries, two shared": LATENT | {"q_lora_rank": None, "n_shared_experts": 2, "v_head_dim": 24},
    },
    "mistral4": {
        "plain weights": LATENT,
        "growing queries, a dense layer, groups": LATENT
        | {"rope_parameters": LATENT_YARN | {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.3}}
        | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        "whole queries that do not grow, not renormalised": LATENT
        | {"rope_parameters": LATENT_YARN | {"llama_4_scaling_beta": 0.0}, "q_lora_rank": None}
        | {"norm_topk_prob": False, "attention_bias": True},
    },
    "granitemoe": {
        "plain weights": {"num_local_experts": 5, "num_experts_per_tok": 2},
        "multipliers, biases, tied": {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "ernie4_5_moe": {
        "plain weights": ERNIE,
        "biases, untied, every second layer": ERNIE
        | {"use_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 4, "moe_layer_interval": 2},
        "no shared, first layers": ERNIE
        | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_norm_min": 0.9},
    },
    "minimax_m2": {
        "plain weights": MINIMAX_M2,
        "whole heads, tied": MINIMAX_M2
        | {"num_local_experts": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
        | {"tie_word_embeddings": True, "num_experts_per_tok": 1, "rotary_dim": ABSENT},
        "yarn": MINIMAX_M2 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "head_dim": 16},
    },
    "lfm2_moe": {
        "two kinds": LFM2_MOE | {"layer_types": ["conv", "full_attention", "conv"]},
        "no bias, not renormalised": LFM2_MOE
        | {"layer_types": ["full_attention", "conv", "full_attention"], "tie_word_embeddings": False}
        | {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0, "conv_bias": True}
        | {"routed_scaling_factor": 1.5, "conv_L_cache": 4},
        "one dense layer of four": LFM2_MOE
        | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"routed_scaling_factor": 0.8, "num_experts_per_tok": 1},
    },
    "gpt_oss": {
        "plain weights": GPT_OSS,
        "yarn, plain attention, tied": GPT_OSS
        | {"rope_parameters": ABSENT, "attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 4}
        | {"max_position_embeddings": 131072},
        "layer types, another limit": GPT_OSS
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3}
        | {"swiglu_limit": 0.8, "swiglu_alpha": 1.1, "num_experts_per_tok": 1, "sliding_window": 3},
    },
    "llama4_text": {
        "plain weights": LLAMA4,
        "llama3 rope, dense layers, tied": LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_parameters": LLAMA3, "num_key_value_heads": 4}
        | {"tie_word_embeddings": True, "no_rope_layers": [], "no_rope_layer_interval": 2, "num_experts_per_tok": 2},
        "listed layers, biases": LLAMA4
        | {"moe_layers": [0, 2], "no_rope_layers": [0, 1, 1, 1], "attention_bias": True, "num_experts_per_tok": 3}
        | {"attn_temperature_tuning": False, "attention_chunk_size": 64},
    },
    "olmoe": {
        "plain weights": OLMOE,
        "renormalised, grouped, tied": OLMOE
        | {"norm_topk_prob": True, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "biases": OLMOE | {"attention_bias": True, "num_experts_per_tok": 1},
    },
    "flex_olmo": {
        "plain weights": OLMOE,
        "renormalised, grouped, tied": OLMOE
        | {"norm_topk_prob": True, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": YARN},
        "biases": OLMOE | {"attention_bias": True, "num_experts_per_tok": 1, "rms_norm_eps": 1e-3},
    },
}
CASES |= {
    "phi3": PLAIN
    | {
        "longrope": {
            "rope_parameters": LONGROPE,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
        },
        "longrope, old keys": {
            "rope_scaling": {
                "type": "su",
                "short_factor": SHORT,
                "long_factor": SHORT,
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings": 32,
        },
        "longrope, half of heads": {
            "rope_scaling": {"type": "longrope", "short_factor": SHORT[:3], "long_factor": SHORT[1:4]},
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
        },
        "window": {"sliding_window": 7},
    },
    "olmo2": PLAIN | {"biases": {"attention_bias": True}, "yarn rope": {"rope_parameters": YARN}},
    "olmo3": PLAIN
    | {
        "layer types": THREE_LAYERS,
        "yarn in full layers": THREE_LAYERS | {"rope_scaling": YARN},
        "four layers": {"num_hidden_layers": 4, "sliding_window": 9},
    },
    "granite": PLAIN
    | {
        "multipliers": {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.15,
            "logits_scaling": 8.0,
        },
        "multipliers, biases": {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "smollm3": PLAIN
    | {
        "no rotation in layer 1": {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3},
        "every second, window": {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_hidden_layers": 4,
        },
        "biases, untied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    },
    "ministral3": PLAIN
    | {
        "window": {"sliding_window": 5},
        "short original context": {
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 48},
        },
    },
    "seed_oss": PLAIN
    | {
        "all biases": {"attention_out_bias": True, "mlp_bias": True},
        "no biases": {"attention_bias": False},
    },
    "stablelm": PLAIN
    | {
        "parallel": {"use_parallel_residual": True},
        "biases, half of heads": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
        "whole heads": {"partial_rotary_factor": 1.0},
    },
    "cohere": PLAIN | {"biases, untied": {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.3}},
    "cohere2": PLAIN
    | {
        "layer types": THREE_LAYERS,
        "pattern of two": {"num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 2},
        "biases": {"attention_bias": True, "sliding_window": 5},
    },
    "glm": PLAIN | {"whole heads": {"partial_rotary_factor": 1.0}, "no biases": {"attention_bias": False}},
    "glm4": PLAIN | {"whole heads": {"partial_rotary_factor": 1.0}, "no biases": {"attention_bias": False}},
    "exaone4": PLAIN
    | {
        "layer types": THREE_LAYERS,
        "no window": {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
        "four layers": {"num_hidden_layers": 4, "sliding_window": 9},
    },
    "phi": PLAIN
    | {
        "three quarters of heads": {"partial_rotary_factor": 0.75},
        "exact gelu": {"hidden_act": "gelu"},
    },
    "gptj": {
        "half of heads": {},
        "whole heads": {"rotary_dim": 16},
        "inner size, tied": {"n_inner": 72, "tie_word_embeddings": True},
        "relu": {"activation_function": "relu"},
    },
    "codegen": {
        "half of heads": {},
        "eight heads": {"n_head": 8, "rotary_dim": 4},
        "inner size": {"n_inner": 72},
    },
    "falcon": {
        "multi-query": {},
        "multi-head": {"multi_query": False},
        "sequential, biases": {"parallel_attn": False, "bias": True},
        "grouped, two norms": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "grouped, one norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "untied": {"tie_word_embeddings": False, "ffn_hidden_size": 80},
        "alibi": {"alibi": True},
        "alibi, multi-head, sequential, biases": {
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
        "alibi, grouped, six heads": {
            "alibi": True,
            "new_decoder_architecture": True,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
        },
    },
    "helium": PLAIN
    | {"biases": {"attention_bias": True, "mlp_bias": True}, "linear rope": {"rope_parameters": LINEAR}},
    "nemotron": PLAIN
    | {
        "biases, whole heads": {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0},
        "own head size, relu": {"head_dim": 20, "hidden_act": "relu"},
    },
    "gemma2": {
        "soft-caps": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        "no soft-caps, no window": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "full_attention"],
        },
        "query scale, biases, untied": {
            "query_pre_attn_scalar": 5,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 3.0,
        },
        "layer types, relu": THREE_LAYERS | {"hidden_activation": "relu", "num_key_value_heads": 4},
    },
    "gemma3_text": {
        "layer types": THREE_LAYERS,
        "two rotary bases, untied": THREE_LAYERS
        | {
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "query_pre_attn_scalar": 5,
            "tie_word_embeddings": False,
        },
        "pattern of three, soft-cap": {
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 2.0,
        },
        "biases, no window": {
            "attention_bias": True,
            "layer_types": ["full_attention", "full_attention"],
            "num_key_value_heads": 4,
        },
    },
    "gemma4_text": {
        "experts beside a dense layer": {"layer_types": ["sliding_attention", "full_attention"]}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 24}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 9.0},
        "inputs of layers, shared keys": {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        "keys are values, untied": SLIDING_AND_FULL
        | {"attention_k_eq_v": True, "tie_word_embeddings": False, "hidden_activation": "silu"},
        "layers of their own, two rotations, biases": SLIDING_AND_FULL
        | {
            "global_head_dim": ABSENT,
            "attention_bias": True,
            "per_layer_config": {layer: {"head_dim": 16, "num_key_value_heads": 4} for layer in ("1", "3")},
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
            },
        },
    },
    "bloom": {
        "four heads": {},
        "six heads, untied": {"n_head": 6, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        "one head": {"n_head": 1, "n_layer": 1},
    },
    "starcoder2": PLAIN | {"window, no biases": {"sliding_window": 7, "use_bias": False}},
    "gpt_bigcode": {
        "multi-query": {},
        "multi-head": {"multi_query": False},
        "untied, inner size": {"tie_word_embeddings": False, "n_inner": 72},
    },
}
CASES |= {
    "gemma": PLAIN
    | {
        "the first release's activation": {"hidden_act": "gelu"},
        "biases, untied, relu": {"attention_bias": True, "tie_word_embeddings": False, "hidden_act": "relu"},
    },
    "olmo": PLAIN | {"biases": {"attention_bias": True}, "llama3 rope": {"rope_parameters": LLAMA3}},
    "ernie4_5": PLAIN
    | {"biases, untied": {"use_bias": True, "tie_word_embeddings": False}, "linear rope": {"rope_parameters": LINEAR}},
    "arcee": PLAIN
    | {
        "biases, own head size": {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
        "yarn rope, silu": {"rope_parameters": YARN, "hidden_act": "silu"},
    },
    "jais2": PLAIN
    | {
        "no biases, relu": {"attention_bias": False, "mlp_bias": False, "hidden_act": "relu", "layer_norm_eps": 1e-3},
        "own head size, linear rope": {"head_dim": 20, "rope_parameters": LINEAR},
    },
    "cwm": PLAIN
    | {
        "layer types, biases": THREE_LAYERS | {"mlp_bias": True, "rope_parameters": LLAMA3},
        "four layers, old keys": {"num_hidden_layers": 4} | old_spelling(LINEAR),
        "no window": {"layer_types": ["full_attention"] * 2},
    },
    "ministral": PLAIN
    | {
        "layer types": THREE_LAYERS,
        "window on every layer, yarn rope": {"sliding_window": 7, "rope_parameters": YARN, "head_dim": 20},
        "no window": {"layer_types": ["full_attention"] * 2},
    },
    "vaultgemma": {
        "soft-caps": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        "no soft-caps, biases, untied": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "layer types, query scale": THREE_LAYERS | {"query_pre_attn_scalar": 5, "num_key_value_heads": 4},
    },
    "hyperclovax": PLAIN
    | {
        "multipliers": {
            "embedding_multiplier": 10.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.15,
            "logits_scaling": 0.125,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "no norms behind, own head size": {
            "use_post_norm": False,
            "residual_multiplier": 0.3,
            "head_dim": 20,
            "attention_multiplier": None,
            "rope_parameters": LINEAR,
        },
    },
    "nanochat": PLAIN
    | {
        "no soft-cap, biases": {"final_logit_softcapping": None, "attention_bias": True, "rms_norm_eps": 1e-3},
        "soft-cap, linear rope": {"final_logit_softcapping": 1.5, "rope_parameters": LINEAR, "hidden_act": "relu"},
    },
    "internlm3": PLAIN
    | {
        "own names of biases": {"qkv_bias": True, "bias": True, "rope_scaling": {"type": "dynamic", "factor": 6.0}},
        "biases, llama3 rope": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    },
    "iquestcoder": PLAIN
    | {"biases, linear rope": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}},
    "granite_swa": {
        "plain weights": {"sliding_window": 7, "num_hidden_layers": 5},
        "bases of layers, multipliers, biases": THREE_LAYERS
        | {
            "layer_rope_theta": [1000.0, 0, 10000],
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        "linear rope": {"rope_parameters": LINEAR, "layer_rope_theta": [500.0, 100], "sliding_window": 5},
    },
    "granitemoe_swa": {
        "plain weights": {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
        "bases of layers, multipliers, no shared expert": THREE_LAYERS
        | {
            "num_local_experts": 4,
            "layer_rope_theta": [1000.0, 0, 10000],
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "flint": {
        "plain weights": FLINT | {"num_hidden_layers": 5, "sliding_window": 6},
        "layer types, no dense layer, tied": FLINT
        | THREE_LAYERS
        | {"mlp_only_layers": [], "norm_topk_prob": False, "tie_word_embeddings": True, "attention_bias": True},
    },
    "laguna": {
        "plain weights": FLINT | {"num_hidden_layers": 3, "num_attention_heads_per_layer": [4, 2, 6]},
        "layer types, gates of elements, tied": FLINT
        | THREE_LAYERS
        | {"gating": "per-element", "moe_routed_scaling_factor": 2.5, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        "two rotations, all experts": FLINT
        | {"num_experts_per_tok": 5, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
        | {"mlp_layer_types": ["sparse", "sparse"], "head_dim": 16}
        | {
            "rope_parameters": {
                "full_attention": YARN | {"partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            }
        },
    },
    "lfm3": {
        "three kinds": {
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "sliding_window": 7,
        },
        "no gates, no norms behind, biases, untied": {
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "num_hidden_layers": 3,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "attention_bias": True,
            "conv_bias": True,
            "conv_L_cache": 3,
            "tie_word_embeddings": False,
            "sliding_window": 5,
        },
        "two rotations": {
            "layer_types": ["full_attention", "conv", "sliding_attention"],
            "num_hidden_layers": 3,
            "norm_eps": 0.1,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "five layers": {"num_hidden_layers": 5, "sliding_window": 7, "conv_L_cache": 2, "norm_eps": 0.1},
    },
    "gpt_neo": {
        "global and local": {},
        "inner size, relu, untied": {
            "intermediate_size": 72,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        }
        | {"attention_types": [[["local"], 1], [["global"], 1]], "layer_norm_epsilon": 1e-2},
        "global alone": {"attention_types": [[["global"], 2]], "vocab_size": 131, "num_heads": 6},
    },
    "cohere2_moe": {
        "plain weights": {"num_experts": 5, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 7}
        | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 56, "pad_token_id": 0}
        | {"sliding_window_pattern": 2},
        "sigmoids, averaged with shared experts, RMSNorms": THREE_LAYERS
        | {"num_experts": 4, "num_experts_per_tok": 3, "head_dim": 16, "pad_token_id": 0, "num_shared_experts": 2}
        | {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-4, "attention_bias": True, "logit_scale": 0.5}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "prefix_dense_sliding_window_pattern": 2},
        "sums, not renormalised, untied": {
            "num_experts": 4,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "head_dim": 12,
            "tie_word_embeddings": False,
            "sliding_window": 5,
            "rope_theta": 100.0,
            "pad_token_id": 0,
        },
    },
    "phimoe": {
        "plain weights": {"num_local_experts": 5},
        "longrope, biases, tied": {
            "num_local_experts": 6,
            "attention_bias": True,
            "lm_head_bias": True,
            "tie_word_embeddings": True,
            "router_jitter_noise": 0.3,
            "max_position_embeddings": 256,
            "rope_parameters": LONGROPE | {"long_factor": SHORT, "short_mscale": 1.1, "long_mscale": 1.4},
        },
        "window, large epsilon": {
            "num_local_experts": 4,
            "sliding_window": 7,
            "rms_norm_eps": 1e-2,
            "router_jitter_noise": 0.05,
            "num_key_value_heads": 4,
        },
    },
    "apertus": PLAIN
    | {
        "own rotation, no rotation in the file": {"max_position_embeddings": 65536},
        "squared relu, biases, yarn rope": {"hidden_act": "relu2", "attention_bias": True, "rope_parameters": YARN},
        "biases, llama3 rope, large epsilon": {
            "attention_bias": True,
            "rope_parameters": LLAMA3,
            "rms_norm_eps": 1e-2,
        },
    },
    "hunyuan_v1_dense": PLAIN
    | {
        "alpha, own head size": {
            "head_dim": 20,
            "rope_scaling": {
                "type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
            }
            | {"mscale_all_dim": 0.0},
        },
        "biases, yarn rope, large epsilon": {
            "attention_bias": True,
            "rope_parameters": YARN,
            "rms_norm_eps": 1e-2,
            "head_dim": 12,
        },
    },
    "hunyuan_v1_moe": {
        "plain weights": {"num_experts": 5, "moe_topk": 3},
        "alpha, choices by layer, tied": {
            "num_experts": 6,
            "moe_topk": [2, 3],
            "head_dim": 16,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
            "tie_word_embeddings": True,
        },
        "biases": {"num_experts": 4, "moe_topk": 1, "attention_bias": True, "num_key_value_heads": 4},
    },
    "minicpm3": {
        "plain weights, untied": {"tie_word_embeddings": False, "scale_emb": 2, "dim_model_base": 16},
        "whole queries, no multipliers, biases": {
            "q_lora_rank": None,
            "scale_depth": None,
            "dim_model_base": None,
            "scale_emb": 1,
            "v_head_dim": None,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "longrope": {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": SHORT[:4],
                "long_factor": SHORT[1:5],
                "original_max_position_embeddings": 64,
            },
            "max_position_embeddings": 256,
        },
    },
    "youtu": {
        "plain weights": {},
        "whole queries, yarn rope, biases, untied": {
            "q_lora_rank": None,
            "rope_parameters": LATENT_YARN,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "halves rotated": {"rope_interleave": False, "v_head_dim": 8},
    },
    "bamba": {
        "two kinds": {"attn_layer_indices": [1]},
        "biases, no convolution bias, tied": {
            "attn_layer_indices": [0, 2],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "time_step_limit": [0.2, 1.5],
        },
        "whole heads": {
            "attn_layer_indices": [0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    },
    "dots1": {
        "plain weights": {"first_k_dense_replace": 1, "routed_scaling_factor": 0.5},
        "groups, windows, biases": {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 0.5, "norm_topk_prob": True}
        | {"sliding_window": 6, "max_window_layers": 1, "attention_bias": True, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1},
        "layer types, tied, yarn rope": THREE_LAYERS
        | {"tie_word_embeddings": True, "rope_parameters": YARN, "num_key_value_heads": 4}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 0.5},
    },
    "solar_open": {
        "plain weights": {},
        "groups, biases, tied": {"n_group": 3, "topk_group": 2, "attention_bias": True, "tie_word_embeddings": True}
        | {"routed_scaling_factor": 1.5, "norm_topk_prob": False, "n_shared_experts": 2},
        "yarn rope": {"rope_parameters": YARN, "num_key_value_heads": 4},
    },
    "exaone_moe": {
        "plain weights": {},
        "groups, kinds of layers, tied": {"n_group": 3, "topk_group": 2, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False, "num_shared_experts": 2},
        "window in every second layer, linear rope": {"sliding_window_pattern": 2, "rope_parameters": LINEAR}
        | {"first_k_dense_replace": 0, "num_experts_per_tok": 1},
    },
    "hy_v3": {
        "plain weights": {},
        "biases, kinds of layers, tied": {"attention_bias": True, "mlp_bias": False, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["sparse", "sparse", "dense"], "num_shared_experts": 2, "router_scaling_factor": 1.5},
        "llama3 rope": {"rope_parameters": LLAMA3, "num_experts_per_tok": 1},
    },
    "granitemoeshared": {
        "plain weights": {"shared_intermediate_size": 24},
        "multipliers, biases, tied": {
            "shared_intermediate_size": 56,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "no shared expert": {"num_experts_per_tok": 3},
    },
    "afmoe": {
        "plain weights": {},
        "scaled embedding, layer types, tied": {"mup_enabled": True, "tie_word_embeddings": True, "num_dense_layers": 2}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_shared_experts": 1},
        "every second layer, llama3 rope": {"global_attn_every_n_layers": 2, "rope_parameters": LLAMA3}
        | {"num_dense_layers": 0, "route_scale": 0.5, "num_key_value_heads": 4, "num_experts_per_tok": 1},
    },
    "mellum": {
        "plain weights": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "a dense layer, biases, tied": {"mlp_layer_types": ["dense", "sparse", "sparse"], "attention_bias": True}
        | {"tie_word_embeddings": True, "norm_topk_prob": False},
        "two rotations": {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": LINEAR | {"rope_theta": 100.0}},
        },
    },
}
SOURCE_TOKENS = 41


def config_of(family: str, case: Case) -> Case:
    """A ``config.json``: BASE with the changes of the case. Qwen3's own default head size of 128 is in one case."""
    base = BASES.get(family, BASE | ({"head_dim": 12} if family == "qwen3" else {}))
    config = {"model_type": family} | base | case
    return {key: value for key, value in config.items() if value is not ABSENT}


def build(config: Case, seed: int) -> PreTrainedModel:
    """transformers' model of a configuration with the weights of a seed, in fp32."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(keys)))
    seq2seq = config["model_type"] in ENCODER_DECODERS
    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    # Falcon's eager attention adds ALiBi twice in transformers 5.23: it is in the mask already.
    attention = "sdpa" if config.get("alibi") else "eager"
    experts = {"experts_implementation": "eager"} if config["model_type"] in MIXTURES else {}
    model = auto.from_config(hf_config, attn_implementation=attention, dtype=torch.float32, **experts).eval()
    if seq2seq and not parsed(config).tied_head:  # transformers 5 ties such a head until a checkpoint says otherwise
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    parameters = parameters_of(model)
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    if config["model_type"] in OWN_NAMES:
        shapes = {name: p.shape for name, p in spec_of(config).parameters.items() if name not in spec_of(config).tied}
    weights = random_tensors(seed, shapes, config["model_type"])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(values_of(config, name, weights)))
    return model


def spec_of(config: Case) -> Spec:
    """The tensors of a checkpoint, as this project knows them."""
    return models.find(config).spec(parsed(config))


def values_of(config: Case, name: str, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """The values of transformers' parameter ``name``, which may hold the matrices of all experts."""
    if config["model_type"] not in OWN_NAMES:
        return weights[name]
    spec = spec_of(config)
    for pattern, replacement in spec.aliases:
        name = re.sub(f"^{pattern}$", replacement, name)
    if name not in weights and name.endswith(JOINED):
        return np.concatenate([weights[part] for part in parts_of(name)])
    if name not in spec.fused:
        return weights[name]
    return spec.fused[name].joined(weights)


def tensors_of(config: Case, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of the model's checkpoint by name; experts have matrices of their own."""
    found = {name: parameter.detach().numpy() for name, parameter in parameters_of(model).items()}
    if config["model_type"] not in OWN_NAMES:
        return found
    spec, split = spec_of(config), {}
    for name, values in found.items():
        for pattern, replacement in spec.aliases:
            name = re.sub(f"^{pattern}$", replacement, name)
        if name not in spec.parameters and name.endswith(JOINED):
            ends = np.cumsum([spec.parameters[part].shape[0] for part in parts_of(name)])[:-1]
            split |= dict(zip(parts_of(name), np.split(values, ends), strict=True))
            continue
        fused = spec.fused.get(name)
        for names, expert in zip(fused.experts if fused else (), values, strict=False):
            split |= dict(zip(names, fused.parts(expert), strict=True))
        if fused is None:
            split[name] = values
    return split


def parts_of(name: str) -> list[str]:
    """The tensors of a file that transformers joins to one."""
    return [name.replace(JOINED, f"{part}_{JOINED}") for part in "qkv"]


def parsed(config: Case) -> Any:
    """The configuration as this project parses it."""
    return models.find(config).parse(config)


def parameters_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors under the names that checkpoints have; a tied head is there once, under the embedding's name."""
    renamed = {"lm_head.weight": "embed_out.weight"} if model.config.model_type == "gpt_neox" else {}
    names = ("e_score_correction_bias", "expert_bias", "layer_scalar", "act_fn.beta", "act_fn.eps")
    biases = {name: b for name, b in model.named_buffers() if name.endswith(names)}
    return {renamed.get(name, name): parameter for name, parameter in model.named_parameters()} | biases


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """fp32 ``[tokens, vocab]``."""
    return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


@torch.no_grad()
def encoded_and_logits(model: PreTrainedModel, source: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The encoder's output for a source, and the decoder's logits, fp32 ``[n, features]`` and ``[tokens, vocab]``."""
    ids, decoder_ids = (torch.from_numpy(x.astype(np.int64))[None] for x in (source, tokens))
    output = model(input_ids=ids, decoder_input_ids=decoder_ids)
    return output.encoder_last_hidden_state[0].numpy(), output.logits[0].numpy()


def make(family: str) -> None:
    """Write one family's two files."""
    cases, arrays = {}, {}
    for seed, (name, case) in enumerate(CASES[family].items(), start=1000 * (EVERY.index(family) + 1)):
        config = config_of(family, case)
        model = build(config, seed)
        tokens = random_tokens(seed, TOKENS, config["vocab_size"])
        weights = digest(tensors_of(config, model))
        cases[name] = {"config": config, "seed": seed, "weights": weights, "tokens": tokens.tolist()}
        if family in ENCODER_DECODERS:
            source = random_tokens(seed + 500, SOURCE_TOKENS, config["vocab_size"])
            cases[name]["source"] = source.tolist()
            arrays[f"{name}, encoded"], arrays[name] = encoded_and_logits(model, source, tokens)
        else:
            arrays[name] = logits_of(model, tokens)
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    GOLDENS.mkdir(exist_ok=True)
    (GOLDENS / f"{family}.json").write_text("{\n" + text + "\n}\n")
    np.savez_compressed(GOLDENS / f"{family}.npz", **arrays)
    print(f"{family}: {len(cases)} configurations")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", choices=[*EVERY, []], help=", ".join(EVERY))
    for family in parser.parse_args().families or EVERY:
        make(family)


if __name__ == "__main__":
    main()
