"""Random configurations of the families in ``tiny_models.DECODERS`` and ``MIXTURES``: any combination of options."""

from __future__ import annotations

from typing import Any

import numpy as np

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
GPT_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "intermediate_size": "n_inner", "hidden_act": "activation_function",
}  # fmt: skip
"""Names that GPT-2's kin have instead."""


NULL = object()
"""The value of a key that is null in the file, and not left out."""


class Draw:
    """Random choices."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def one_of(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def up_to(self, high: int, low: int = 1) -> int:
        """A number from ``low`` to ``high - 1``."""
        return int(self.rng.integers(low, high))

    def flag(self) -> bool:
        return bool(self.rng.integers(2))

    def layer_types(self, layers: int) -> list[str]:
        return [self.one_of(FULL, SLIDING) for _ in range(layers)]


def random_decoder_config(rng: np.random.Generator, family: str, ropes: list[Config]) -> Config:
    """A configuration of ``family``; ``ropes`` are rotary parameters with scalings."""
    draw = Draw(rng)
    kv_heads, group, layers = draw.up_to(4), draw.up_to(4), draw.up_to(4)
    heads, head_dim = kv_heads * group, 4 * draw.up_to(6, 2)
    config = {
        "model_type": family, "vocab_size": draw.up_to(200, 20), "hidden_size": heads * head_dim,
        "intermediate_size": draw.up_to(120, 16), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 128, "tie_word_embeddings": draw.flag(),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.one_of(100.0, 10000.0)},
    }  # fmt: skip
    chosen = config | OWN[family](draw, config, ropes)
    return {key: None if value is NULL else value for key, value in chosen.items() if value is not None}


def phi3(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    part = draw.one_of(0.5, 1.0)
    pairs = int(config["hidden_size"] // config["num_attention_heads"] * part) // 2
    factors = [1 + i / pairs for i in range(pairs)]
    rope = {
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": factors, "long_factor": factors[::-1],
        "original_max_position_embeddings": 64, "partial_rotary_factor": part,
    }  # fmt: skip
    plain = config["rope_parameters"] | {"partial_rotary_factor": part}
    own = {"rope_parameters": draw.one_of(rope, plain), "original_max_position_embeddings": 64, "pad_token_id": 0}
    return own | {"sliding_window": draw.one_of(None, 1, 7, 39, 64)}


def olmo2(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = draw.one_of(config["rope_parameters"], *ropes)
    return {"rope_parameters": rope, "attention_bias": draw.flag(), "rms_norm_eps": draw.one_of(1e-5, 1e-3)}


def olmo3(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    scaled = {k: v for k, v in draw.one_of(*ropes).items() if k != "truncate"}  # which transformers reads elsewhere
    rope = {FULL: scaled, SLIDING: config["rope_parameters"]}
    own = {"rope_parameters": rope, "attention_bias": draw.flag(), "sliding_window": draw.up_to(41)}
    return own | {"layer_types": draw.layer_types(config["num_hidden_layers"])}


def granite(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    return {
        "embedding_multiplier": draw.one_of(1.0, 12.0), "residual_multiplier": draw.one_of(1.0, 0.22),
        "attention_multiplier": draw.one_of(0.1, 0.25), "logits_scaling": draw.one_of(8, 0.3),
        "attention_bias": draw.flag(), "mlp_bias": draw.flag(), "rope_parameters": draw.one_of(*ropes),
    }  # fmt: skip


def smollm3(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rotated = [draw.up_to(2, 0) for _ in range(config["num_hidden_layers"])]
    own = {"no_rope_layers": draw.one_of(None, rotated), "no_rope_layer_interval": draw.up_to(5), "pad_token_id": 0}
    own |= {"use_sliding_window": draw.flag(), "sliding_window": draw.one_of(None, 5)}
    return own | {"attention_bias": draw.flag(), "mlp_bias": draw.flag(), "rope_parameters": draw.one_of(*ropes)}


def ministral3(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": draw.one_of(0.1, 0.5),
    }  # fmt: skip
    head_dim, window = 2 * draw.up_to(20), draw.one_of(None, 5, 40)
    return {"rope_parameters": rope, "head_dim": head_dim, "sliding_window": window, "pad_token_id": 0}


def seed_oss(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    biases = {key: draw.flag() for key in ("attention_bias", "attention_out_bias", "mlp_bias")}
    return biases | {"head_dim": 2 * draw.up_to(20), "rope_parameters": draw.one_of(*ropes)}


def stablelm(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = config["rope_parameters"] | {"partial_rotary_factor": draw.one_of(0.5, 1.0)}
    own = {"use_parallel_residual": draw.flag(), "use_qkv_bias": draw.flag()}
    return own | {"rope_parameters": rope, "layer_norm_eps": draw.one_of(1e-5, 1e-3)}


def cohere(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    return {"attention_bias": draw.flag(), "logit_scale": draw.one_of(0.0625, 0.8)}


def cohere2(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    types = draw.one_of(None, draw.layer_types(config["num_hidden_layers"]))
    return cohere(draw, config, ropes) | {"layer_types": types, "sliding_window": draw.up_to(41)}


def glm(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = config["rope_parameters"] | {"partial_rotary_factor": draw.one_of(0.5, 1.0)}
    own = {"rope_parameters": rope, "attention_bias": draw.flag(), "pad_token_id": 0}
    return own | {"head_dim": 4 * draw.up_to(10), "rms_norm_eps": draw.one_of(1.5625e-7, 1e-5)}


def exaone4(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    types = draw.layer_types(config["num_hidden_layers"])
    return {"layer_types": types, "sliding_window": draw.up_to(41), "rope_parameters": draw.one_of(*ropes)}


def phi(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = config["rope_parameters"] | {"partial_rotary_factor": draw.one_of(0.5, 1.0)}
    return {"rope_parameters": rope, "hidden_act": draw.one_of("gelu_new", "gelu", "relu")}


def renamed(draw: Draw, config: Config) -> Config:
    """The keys of GPT-2's kin instead of the others."""
    own = {new: config[old] for old, new in GPT_KEYS.items() if old in config}
    own |= {"activation_function": draw.one_of("gelu_new", "gelu", "relu"), "n_inner": draw.one_of(None, 40)}
    return dict.fromkeys((*GPT_KEYS, "num_key_value_heads", "rope_parameters")) | own


def gptj(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return renamed(draw, config) | {"rotary_dim": draw.one_of(2, 4, head_dim)}


def codegen(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    heads = draw.one_of(4, 8)
    return gptj(draw, config, ropes) | {"n_head": heads, "n_embd": heads * head_dim}


def falcon(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    new = draw.flag()
    own = dict.fromkeys(("num_key_value_heads", "intermediate_size"))
    own |= {"num_kv_heads": config["num_key_value_heads"] if new else None}
    own |= {"new_decoder_architecture": new, "num_ln_in_parallel_attn": draw.one_of(1, 2) if new else None}
    own |= {"multi_query": draw.flag(), "parallel_attn": new or draw.flag(), "bias": draw.flag()}
    own |= {"alibi": draw.flag()}
    return own | {"activation": draw.one_of("gelu", "relu"), "ffn_hidden_size": draw.one_of(None, 40)}


def gemma2(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = {"head_dim": 2 * draw.up_to(20), "hidden_activation": draw.one_of("gelu_pytorch_tanh", "silu")}
    own |= {"attn_logit_softcapping": draw.one_of(0.7, 4.0, 50.0), "final_logit_softcapping": draw.one_of(1.5, 30.0)}
    own |= {"query_pre_attn_scalar": draw.one_of(3, 24), "attention_bias": draw.flag(), "pad_token_id": 0}
    own |= {"layer_types": draw.one_of(None, draw.layer_types(config["num_hidden_layers"]))}
    return own | {"sliding_window": draw.up_to(41), "rms_norm_eps": draw.one_of(1e-6, 1e-3)}


def gemma3_text(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = {FULL: draw.one_of(*ropes[:2]), SLIDING: config["rope_parameters"]}
    own = gemma2(draw, config, ropes) | {"rope_parameters": draw.one_of(None, rope), "attn_logit_softcapping": None}
    return own | {"layer_types": draw.layer_types(config["num_hidden_layers"])}


def gemma4_text(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, heads = 2 * config["num_hidden_layers"], config["num_attention_heads"]
    full = {"rope_type": "proportional", "rope_theta": draw.one_of(1000.0, 1e6)}
    full |= {"partial_rotary_factor": draw.one_of(0.25, 0.5, 1.0)}
    own = {"head_dim": 2 * draw.up_to(12), "global_head_dim": 4 * draw.up_to(10), "num_hidden_layers": layers}
    own |= {"hidden_activation": draw.one_of("gelu_pytorch_tanh", "silu"), "attention_bias": draw.flag()}
    own |= {"final_logit_softcapping": draw.one_of(None, 30.0), "pad_token_id": 0, "sliding_window": draw.up_to(41)}
    own |= {"rope_parameters": draw.one_of(None, {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 50.0}})}
    own |= {"layer_types": [*draw.one_of(["sliding_attention"], [FULL]), *draw.layer_types(layers - 1)[:-1], FULL]}
    own |= {"hidden_size_per_layer_input": draw.one_of(0, 7, 8), "vocab_size_per_layer_input": config["vocab_size"]}
    if own["hidden_size_per_layer_input"]:  # without, transformers does not compute shared layers
        own |= {"layer_types": ["sliding_attention", FULL] * (layers // 2)}
        own |= {"num_kv_shared_layers": draw.up_to(layers - 1, 0)}
    own |= {"attention_k_eq_v": draw.flag(), "use_double_wide_mlp": draw.flag()}
    own |= {"num_global_key_value_heads": draw.one_of(None, 1, heads)}
    if draw.flag():
        count = draw.up_to(9, 2)
        own |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": draw.up_to(count + 1)}
        own |= {"moe_intermediate_size": draw.up_to(60, 8)}
    return own


def bloom(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    absent = ("num_key_value_heads", "intermediate_size", "max_position_embeddings", "rope_parameters")
    own = {"n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"]}
    return dict.fromkeys((*absent, "num_hidden_layers", "num_attention_heads")) | own


def starcoder2(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    return {"use_bias": draw.flag(), "sliding_window": draw.one_of(None, 7), "rope_parameters": draw.one_of(*ropes)}


def nemotron(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = config["rope_parameters"] | {"partial_rotary_factor": draw.one_of(0.5, 1.0)}
    own = {"rope_parameters": rope, "attention_bias": draw.flag(), "mlp_bias": draw.flag()}
    return own | {"hidden_act": draw.one_of("relu2", "relu2", "gelu"), "head_dim": draw.one_of(None, 12)}


def helium(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    own = {"attention_bias": draw.flag(), "mlp_bias": draw.flag(), "head_dim": head_dim, "pad_token_id": 0}
    return own | {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes), "rms_norm_eps": 1e-6}


def gpt_bigcode(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    return renamed(draw, config) | {"multi_query": draw.flag()}


def experts(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    family, count = config["model_type"], draw.up_to(9, 2)
    has_own_size = family in ("qwen2_moe", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "lfm2_moe")
    size = "moe_intermediate_size" if has_own_size else "intermediate_size"
    names = {"glm4_moe": "n_routed_experts", "ernie4_5_moe": "moe_num_experts"}
    names |= dict.fromkeys(("mixtral", "granitemoe", "minimax_m2", "gpt_oss", "llama4_text"), "num_local_experts")
    own = {
        names.get(family, "num_experts"): count,
        "moe_k" if family == "ernie4_5_moe" else "num_experts_per_tok": draw.up_to(count + 1),
        size: draw.up_to(60, 8),
        "rope_parameters": draw.one_of(config["rope_parameters"], *ropes),
    }
    if config["model_type"] == "mixtral":  # transformers' scaled rotations need a head_dim
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        return own | {"sliding_window": draw.one_of(None, 5, 33), "head_dim": head_dim}
    if family == "granitemoe":
        return own | granite(draw, config, ropes) | {"mlp_bias": None}
    layers = config["num_hidden_layers"]
    if family == "ernie4_5_moe":
        return own | {
            "use_bias": draw.flag(), "moe_num_shared_experts": draw.up_to(3, 0), "moe_layer_interval": draw.up_to(3),
            "moe_layer_start_index": draw.up_to(layers, 0), "moe_layer_end_index": draw.up_to(layers, -1),
            "moe_norm_min": draw.one_of(1e-12, 0.5),
        }  # fmt: skip
    if family == "llama4_text":
        plain = [rope for rope in ropes if rope["rope_type"] in ("linear", "llama3")]  # without a factor on scores
        return own | {
            "head_dim": 2 * draw.up_to(12, 2), "intermediate_size_mlp": draw.up_to(60, 8), "use_qk_norm": draw.flag(),
            "interleave_moe_layer_step": draw.up_to(3), "no_rope_layer_interval": draw.up_to(4, 2),
            "attention_bias": draw.flag(), "attn_temperature_tuning": draw.flag(),
            "rope_parameters": draw.one_of(config["rope_parameters"], *plain),
        }  # fmt: skip
    if family == "gpt_oss":
        return own | {
            "head_dim": 2 * draw.up_to(12, 2), "sliding_window": draw.up_to(40), "attention_bias": draw.flag(),
            "layer_types": draw.one_of(None, draw.layer_types(layers)), "swiglu_limit": draw.one_of(0.5, 7.0),
            "swiglu_alpha": draw.one_of(1.0, 1.702),
        }  # fmt: skip
    if family == "minimax_m2":
        head_dim = 4 * draw.up_to(8, 2)
        return own | {"head_dim": head_dim, "rotary_dim": draw.one_of(None, 4, head_dim)}
    if family == "lfm2_moe":
        shared = {key: value for key, value in lfm2(draw, config, ropes).items() if not key.startswith("block_")}
        return own | shared | {
            "use_expert_bias": draw.flag(), "norm_topk_prob": draw.flag(), "routed_scaling_factor": draw.up_to(3) / 2,
            "num_dense_layers": draw.up_to(layers + 1, 0),
        }  # fmt: skip
    own |= {"norm_topk_prob": draw.flag(), "attention_bias": draw.flag()}
    if family in ("olmoe", "flex_olmo"):
        return own | {"pad_token_id": 0}
    if family == "glm4_moe":
        groups = draw.one_of(1, 2) if count % 2 == 0 and count > 2 else 1
        return own | {
            "n_group": groups, "topk_group": groups, "use_qk_norm": draw.flag(), "n_shared_experts": draw.up_to(3),
            "first_k_dense_replace": draw.up_to(layers + 1, 0), "routed_scaling_factor": draw.one_of(1.0, 2.5),
            "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 0.5},
        }  # fmt: skip
    if family == "qwen2_moe":
        own |= {"attention_bias": None, "qkv_bias": draw.flag(), "shared_expert_intermediate_size": draw.up_to(60, 8)}
        return own | {"decoder_sparse_step": draw.up_to(3), "use_sliding_window": draw.flag(), "sliding_window": 9}
    return own | {
        "head_dim": config["hidden_size"] // config["num_attention_heads"], "decoder_sparse_step": draw.up_to(3),
        "mlp_only_layers": [layer for layer in range(layers) if draw.up_to(4) == 1],
        "use_sliding_window": draw.flag(), "sliding_window": draw.up_to(40),
    }  # fmt: skip


def latents(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    family, heads, layers, count = config["model_type"], config["num_attention_heads"], config["num_hidden_layers"], 6
    scaled = [rope | {"mscale": 0.7, "mscale_all_dim": draw.one_of(0.0, 0.9)} for rope in ropes]
    groups = draw.one_of((1, 1), (2, 1), (3, 2))
    own = {
        "num_key_value_heads": heads, "q_lora_rank": draw.one_of(None, 8, 20), "kv_lora_rank": draw.up_to(40, 4),
        "qk_nope_head_dim": draw.up_to(20), "qk_rope_head_dim": 2 * draw.up_to(6), "v_head_dim": draw.up_to(20),
        "n_routed_experts": count, "num_experts_per_tok": draw.up_to(3), "n_shared_experts": draw.up_to(3),
        "moe_intermediate_size": draw.up_to(60, 8), "n_group": groups[0], "topk_group": groups[1],
        "attention_bias": draw.flag(), "routed_scaling_factor": draw.one_of(1.0, 2.5),
        "rope_parameters": draw.one_of(config["rope_parameters"], *scaled),
    }  # fmt: skip
    if own["q_lora_rank"] is None:
        own["q_lora_rank"] = NULL
    if family == "deepseek_v2":  # whose rotation in transformers needs what lies before it to be even
        own |= {"kv_lora_rank": 2 * draw.up_to(20, 2), "qk_nope_head_dim": 2 * draw.up_to(10)}
        own |= {"topk_method": draw.one_of("greedy", "group_limited_greedy"), "mlp_bias": draw.flag()}
    else:
        own |= {"norm_topk_prob": draw.flag(), "rope_interleave": draw.flag()}
    if family == "glm4_moe_lite":
        return own | {"mlp_layer_types": [draw.one_of("dense", "sparse") for _ in range(layers)]}
    if family == "mistral4":  # whose plain rotation in transformers has the size of a whole head
        own["rope_parameters"] = next(rope for rope in scaled if rope["rope_type"] == "yarn")
        growth = {"original_max_position_embeddings": draw.up_to(40, 4), "llama_4_scaling_beta": draw.one_of(0.1, 0.5)}
        own["rope_parameters"] = own["rope_parameters"] | growth
    return own | {"first_k_dense_replace": draw.up_to(layers + 1, 0)}


def lfm2(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers = config["num_hidden_layers"]
    kinds = [draw.one_of("conv", FULL) for _ in range(layers - 1)] + [FULL]  # transformers needs an attention layer
    return {
        "layer_types": kinds, "conv_L_cache": draw.up_to(6, 2), "conv_bias": draw.flag(), "block_multiple_of": 8,
        "block_ffn_dim_multiplier": draw.one_of(1.0, 1.3), "block_auto_adjust_ff_dim": draw.flag(),
        "rope_parameters": draw.one_of(config["rope_parameters"], *ropes),
    }  # fmt: skip


def delta_net(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, family, key_heads = config["num_hidden_layers"], config["model_type"], draw.up_to(4)
    rope = draw.one_of(config["rope_parameters"], ropes[2]) | {"partial_rotary_factor": draw.one_of(0.5, 1.0)}
    own = {
        "layer_types": draw.one_of(None, [draw.one_of("linear_attention", FULL) for _ in range(layers - 1)] + [FULL]),
        "full_attention_interval": draw.up_to(layers + 1),  # transformers needs an attention layer
        "head_dim": 4 * draw.up_to(8), "attention_bias": draw.flag(), "rope_parameters": rope, "rms_norm_eps": 1e-3,
        "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw.up_to(4),
        "linear_key_head_dim": draw.up_to(30, 8), "linear_value_head_dim": draw.up_to(30, 8),
        "linear_conv_kernel_dim": draw.up_to(6),
    }  # fmt: skip
    if family == "qwen3_5_text":
        return own
    count = draw.up_to(9, 2)
    own |= {"num_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "moe_intermediate_size": 24}
    own |= {"shared_expert_intermediate_size": draw.up_to(60, 8)}
    if family == "qwen3_5_moe_text":
        return own | {"intermediate_size": None}
    dense = [layer for layer in range(layers) if draw.up_to(4) == 1]
    return own | {"mlp_only_layers": dense, "norm_topk_prob": draw.flag(), "decoder_sparse_step": draw.up_to(3)}


def mamba(draw: Draw, config: Config) -> Config:
    """Mamba 2 as the configurations of several families have it; ``mamba_expand`` times ``hidden_size`` features."""
    groups = draw.up_to(3)
    heads = groups * draw.one_of(1, 2, 4)
    return {
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_state": draw.up_to(30),
        "mamba_d_head": "auto",
        "mamba_d_conv": draw.up_to(5, 2),
        "mamba_conv_bias": draw.flag(),
        "mamba_proj_bias": draw.flag(),
        "mamba_expand": heads,
        "time_step_limit": draw.one_of((0.0, float("inf")), (0.2, 1.5)),
    }


def falcon_h1(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = mamba(draw, config)

    def multipliers(count: int) -> list[float]:
        return [draw.one_of(0.6, 1.0, 1.5) for _ in range(count)]

    names = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
    own |= {f"{name}_multiplier": value for name, value in zip(names, multipliers(len(names)), strict=True)}
    return own | {
        "mamba_d_ssm": own["mamba_n_heads"] * draw.up_to(20),
        "mamba_rms_norm": draw.flag(),
        "mamba_norm_before_gate": draw.flag(),
        "projectors_bias": draw.flag(),
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "rms_norm_eps": 1e-3,
        "ssm_multipliers": draw.one_of(None, multipliers(5)),
        "mlp_multipliers": draw.one_of(None, multipliers(2)),
        "pad_token_id": 0,
        "rope_parameters": draw.one_of(config["rope_parameters"], *ropes),
    }


def granitemoehybrid(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    count, kinds = draw.up_to(9, 2), [draw.one_of("mamba", "attention") for _ in range(config["num_hidden_layers"] - 1)]
    own = mamba(draw, config) | granite(draw, config, ropes) | {"mlp_bias": None, "rms_norm_eps": 1e-3}
    return own | {
        "layer_types": [*kinds, "attention"],  # transformers needs an attention layer
        "num_local_experts": draw.one_of(0, count),
        "num_experts_per_tok": draw.up_to(count + 1),
        "intermediate_size": draw.up_to(60, 8),
        "shared_intermediate_size": draw.up_to(60, 8),
        "position_embedding_type": draw.one_of("rope", "nope"),
    }


def nemotron_h(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    groups, count, layers = draw.up_to(3), 6, draw.up_to(5)
    of_experts = draw.one_of((1, 1), (2, 1), (3, 2))
    kinds = [draw.one_of("linear_attention", "full_attention", "moe", "mlp") for _ in range(layers)]
    return {
        "layers_block_type": [*kinds, "full_attention"],
        "num_hidden_layers": None,
        "rope_parameters": None,
        "head_dim": draw.up_to(20),
        "mamba_num_heads": groups * draw.up_to(4),
        "mamba_head_dim": draw.up_to(20),
        "n_groups": groups,
        "ssm_state_size": draw.up_to(30),
        "conv_kernel": draw.up_to(5, 2),
        "use_bias": draw.flag(),
        "use_conv_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "n_routed_experts": count,
        "num_experts_per_tok": draw.up_to(3),
        "moe_intermediate_size": draw.up_to(60, 8),
        "moe_shared_expert_intermediate_size": draw.up_to(60, 8),
        "n_group": of_experts[0],
        "topk_group": of_experts[1],
        "norm_topk_prob": draw.flag(),
        "routed_scaling_factor": draw.one_of(1.0, 2.5),
        "layer_norm_epsilon": 1e-3,
        "moe_latent_size": draw.one_of(None, draw.up_to(40, 4)),
        "mlp_hidden_act": draw.one_of("relu2", "relu", "silu"),
        "time_step_min": 1e-30,
        "tie_word_embeddings": False,
    }


def mamba2(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    groups, expand, each = draw.up_to(3), draw.up_to(2), draw.up_to(3)
    heads, head_dim = groups * each, 4 * draw.up_to(6, 2)
    hidden = heads * head_dim
    return {
        "hidden_size": hidden,
        "expand": expand,
        "num_heads": heads * expand,
        "head_dim": head_dim,
        "n_groups": groups,
        "state_size": draw.up_to(30, 8),
        "conv_kernel": draw.up_to(5, 2),
        "use_bias": draw.flag(),
        "use_conv_bias": draw.flag(),
        "time_step_limit": draw.one_of([0.0, float("inf")], [0.2, 0.9]),
        "layer_norm_epsilon": 1e-2,
    }


def kimi_linear(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    groups = draw.one_of((1, 1), (2, 1), (3, 2))
    kinds = [draw.one_of("linear_attention", FULL) for _ in range(layers - 1)]
    return {
        "rope_parameters": None,
        "max_position_embeddings": None,
        "model_max_length": 128,
        "num_key_value_heads": heads,
        "layer_types": ["linear_attention", *kinds, FULL],
        "num_hidden_layers": layers + 1,
        "mlp_layer_types": [draw.one_of("dense", "sparse", "sparse") for _ in range(layers + 1)],
        "kv_lora_rank": draw.up_to(40, 8),
        "q_lora_rank": draw.one_of(None, draw.up_to(40, 8)),
        "qk_rope_head_dim": 2 * draw.up_to(8),
        "qk_nope_head_dim": draw.up_to(30, 4),
        "v_head_dim": draw.up_to(30, 4),
        "num_experts": 6,
        "num_experts_per_token": draw.up_to(3),
        "num_shared_experts": draw.up_to(3),
        "num_expert_group": groups[0],
        "topk_group": groups[1],
        "moe_renormalize": draw.flag(),
        "moe_intermediate_size": draw.up_to(60, 8),
        "routed_scaling_factor": draw.one_of(1.0, 2.5),
        "attention_bias": draw.flag(),
        "tie_word_embeddings": False,
        "linear_num_heads": draw.up_to(5),
        "linear_head_dim": draw.up_to(30, 8),
        "linear_conv_kernel_dim": draw.up_to(6, 2),
        "rms_norm_eps": 1e-3,
        "pad_token_id": 0,
    }


def olmo_hybrid(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, key_heads = config["num_hidden_layers"], draw.up_to(4)
    kinds = [draw.one_of("linear_attention", FULL) for _ in range(layers - 1)]
    return {
        "layer_types": ["linear_attention", *kinds, FULL],
        "num_hidden_layers": layers + 1,
        "rms_norm_eps": 1e-3,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.up_to(4),
        "linear_key_head_dim": draw.up_to(30, 8),
        "linear_value_head_dim": draw.one_of(None, draw.up_to(30, 8)),
        "linear_conv_kernel_dim": draw.up_to(6),
        "linear_allow_neg_eigval": draw.flag(),
        "attention_bias": draw.flag(),
        "pad_token_id": 0,
        "rope_parameters": draw.one_of({"rope_type": "default", "rope_theta": None}, config["rope_parameters"]),
    }


def gemma(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = {"head_dim": 2 * draw.up_to(20), "hidden_act": draw.one_of("gelu", "gelu_pytorch_tanh", "silu")}
    own |= {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes), "attention_bias": draw.flag()}
    return own | {"rms_norm_eps": draw.one_of(1e-6, 1e-3), "pad_token_id": 0}


def olmo(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    return {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes), "attention_bias": draw.flag()}


def ernie4_5(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = {"use_bias": draw.flag(), "head_dim": draw.one_of(NULL, 4 * draw.up_to(10)), "pad_token_id": 0}
    return own | {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes)}


def arcee(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = {"attention_bias": draw.flag(), "mlp_bias": draw.flag(), "head_dim": draw.one_of(None, 2 * draw.up_to(20))}
    own |= {"hidden_act": draw.one_of("relu2", "silu", "relu"), "rms_norm_eps": draw.one_of(1e-5, 1e-3)}
    return own | {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes)}


def jais2(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    return arcee(draw, config, ropes) | {"layer_norm_eps": draw.one_of(1e-5, 1e-3), "rms_norm_eps": None}


def cwm(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    types = draw.one_of(None, draw.layer_types(config["num_hidden_layers"]))
    own = {
        "mlp_bias": draw.flag(),
        "head_dim": 2 * draw.up_to(20),
        "layer_types": types,
        "sliding_window": draw.up_to(41),
    }
    return own | {"rope_parameters": draw.one_of(None, config["rope_parameters"], *ropes)}


def ministral(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    types = draw.one_of(None, draw.layer_types(config["num_hidden_layers"]))
    own = {"head_dim": 2 * draw.up_to(20), "layer_types": types, "sliding_window": draw.up_to(41)}
    return own | {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes)}


def hyperclovax(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = {"use_post_norm": draw.flag(), "attention_multiplier": draw.one_of(None, 0.1, 0.25)}
    return granite(draw, config, ropes) | own | {"head_dim": draw.one_of(None, 2 * draw.up_to(20))}


def nanochat(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = {"hidden_act": draw.one_of("relu2", "relu", "silu"), "attention_bias": draw.flag(), "pad_token_id": 0}
    own |= {"final_logit_softcapping": draw.one_of(NULL, 1.5, 15.0), "rms_norm_eps": draw.one_of(1e-6, 1e-3)}
    return own | {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes)}


def youtu(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = latents(draw, config, ropes)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias")
    return {key: own[key] for key in (*names, "num_key_value_heads", "rope_parameters", "rope_interleave")}


def minicpm3(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    own = {key: value for key, value in youtu(draw, config, ropes).items() if key != "rope_interleave"}
    return own | {
        "scale_emb": draw.one_of(1, 12, 0.5),
        "scale_depth": draw.one_of(None, 1.4),
        "dim_model_base": draw.one_of(None, 8),
        "mlp_bias": draw.flag(),
    }


def apertus(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    rope = draw.one_of(config["rope_parameters"], *ropes)
    own = {"rope_parameters": rope, "attention_bias": draw.flag(), "rms_norm_eps": draw.one_of(1e-5, 1e-3)}
    return own | {"hidden_act": draw.one_of("xielu", "xielu", "gelu")}


def phimoe(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    factors, scale = [1 + i / pairs for i in range(pairs)], draw.one_of(1.0, 1.3)
    rope = {
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": factors, "long_factor": factors[::-1],
        "original_max_position_embeddings": 64, "short_mscale": scale, "long_mscale": draw.one_of(scale, 1.5),
    }  # fmt: skip
    return {
        "num_local_experts": draw.up_to(9, 2), "router_jitter_noise": draw.one_of(0.01, 0.3), "pad_token_id": 0,
        "attention_bias": draw.flag(), "lm_head_bias": draw.flag(), "sliding_window": draw.one_of(None, 5, 39),
        "rope_parameters": draw.one_of(config["rope_parameters"], rope),
    }  # fmt: skip


def named_llama(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    bias = draw.flag()
    own = {"attention_bias": bias, "mlp_bias": bias, "head_dim": 2 * draw.up_to(16, 2), "pad_token_id": 0}
    return own | {"rope_parameters": draw.one_of(config["rope_parameters"], *ropes)}


def granite_swa(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, count = config["num_hidden_layers"], draw.up_to(9, 2)
    thetas = [draw.one_of(0, 100.0, 10000) for _ in range(layers)]
    own = {"layer_rope_theta": draw.one_of(None, thetas), "sliding_window": draw.up_to(41)}
    own |= {"layer_types": draw.one_of(None, draw.layer_types(layers))}
    if config["model_type"] == "granite_swa":
        return granite(draw, config, ropes) | own
    own |= {"num_local_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "mlp_bias": None}
    return granite(draw, config, ropes) | own | {"shared_intermediate_size": draw.one_of(0, draw.up_to(60, 8))}


def flint(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, count = config["num_hidden_layers"], draw.up_to(9, 2)
    return {
        "num_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "moe_intermediate_size": draw.up_to(60, 8),
        "shared_expert_intermediate_size": draw.up_to(60, 8), "norm_topk_prob": draw.flag(), "pad_token_id": 0,
        "attention_bias": draw.flag(), "head_dim": 2 * draw.up_to(16, 2), "sliding_window": draw.up_to(41),
        "layer_types": draw.one_of(None, draw.layer_types(layers)), "decoder_sparse_step": draw.up_to(3),
        "mlp_only_layers": draw.one_of(None, [layer for layer in range(layers) if draw.flag()]),
        "rope_parameters": draw.one_of(config["rope_parameters"], *ropes),
    }  # fmt: skip


def cohere2_moe(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, count = config["num_hidden_layers"], draw.up_to(9, 2)
    kinds = [draw.one_of("dense", "sparse") for _ in range(layers)]
    return cohere(draw, config, ropes) | {
        "num_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "num_shared_experts": draw.up_to(3, 0),
        "shared_expert_combination_strategy": draw.one_of("average", "sum"), "norm_topk_prob": draw.flag(),
        "expert_selection_fn": draw.one_of("softmax", "sigmoid"), "rms_norm_eps": draw.one_of(None, 1e-5),
        "layer_types": draw.one_of(None, draw.layer_types(layers)), "sliding_window": draw.up_to(41),
        "mlp_layer_types": draw.one_of(None, kinds), "first_k_dense_replace": draw.up_to(layers + 1, 0),
        "prefix_dense_intermediate_size": draw.one_of(None, 40), "head_dim": 4 * draw.up_to(8, 2), "pad_token_id": 0,
        "prefix_dense_sliding_window_pattern": draw.up_to(3), "sliding_window_pattern": draw.up_to(4),
        "rope_parameters": None, "rope_theta": draw.one_of(100.0, 10000.0),
    }  # fmt: skip


def laguna(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, count, kv_heads = config["num_hidden_layers"], draw.up_to(9, 2), config["num_key_value_heads"]
    scaled = {k: v for k, v in draw.one_of(*ropes).items() if k != "truncate"}  # which transformers reads elsewhere
    part = {"partial_rotary_factor": draw.one_of(0.5, 1.0)}
    rope = {FULL: scaled | part, SLIDING: config["rope_parameters"] | part}
    return {
        "num_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "moe_intermediate_size": draw.up_to(60, 8),
        "shared_expert_intermediate_size": draw.up_to(60, 8), "gating": draw.one_of(True, "per-head", "per-element"),
        "moe_routed_scaling_factor": draw.one_of(1.0, 2.5), "head_dim": 4 * draw.up_to(8, 2), "pad_token_id": 0,
        "num_attention_heads_per_layer": draw.one_of(None, [kv_heads * draw.up_to(4) for _ in range(layers)]),
        "layer_types": draw.one_of(None, draw.layer_types(layers)), "sliding_window": draw.up_to(41),
        "mlp_layer_types": draw.one_of(None, [draw.one_of("dense", "sparse") for _ in range(layers)]),
        "rope_parameters": draw.one_of(None, rope),
    }  # fmt: skip


def gpt_neo(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    kinds = [[[draw.one_of("global", "local")], 1] for _ in range(config["num_hidden_layers"])]
    own = {"num_layers": config["num_hidden_layers"], "num_heads": config["num_attention_heads"]}
    absent = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rope_parameters"))
    return absent | own | {
        "attention_types": kinds, "window_size": draw.up_to(41), "intermediate_size": draw.one_of(None, 40),
        "activation_function": draw.one_of("gelu_new", "relu"),
    }  # fmt: skip


def lfm3(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    kinds = [draw.one_of("conv", SLIDING, FULL) for _ in range(config["num_hidden_layers"] - 1)]
    scaled = {k: v for k, v in draw.one_of(*ropes).items() if k != "truncate"}  # which transformers reads elsewhere
    has_gate = draw.flag()
    return {
        "layer_types": [*kinds, FULL], "use_attention_gate": has_gate, "use_sandwich_norm": draw.flag(),
        "attention_bias": draw.flag() and not has_gate, "conv_bias": draw.flag(), "conv_L_cache": draw.up_to(8),
        "sliding_window": draw.up_to(41), "head_dim": 4 * draw.up_to(8, 2), "pad_token_id": 0,
        "rope_parameters": draw.one_of(None, {FULL: scaled, SLIDING: config["rope_parameters"]}),
    }  # fmt: skip


def hunyuan(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    alpha = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": draw.one_of(2.0, 100.0)}
    count, layers = draw.up_to(9, 2), config["num_hidden_layers"]
    own = {
        "head_dim": 2 * draw.up_to(16, 2), "attention_bias": draw.flag(), "rms_norm_eps": draw.one_of(1e-5, 1e-3),
        "rope_parameters": draw.one_of(config["rope_parameters"], alpha, *ropes),
    }  # fmt: skip
    if config["model_type"] == "hunyuan_v1_dense":
        return own
    by_layer = [draw.up_to(count + 1) for _ in range(layers)]
    return own | {"num_experts": count, "moe_topk": draw.one_of(draw.up_to(count + 1), by_layer)}


def bamba(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers = config["num_hidden_layers"]
    attention = [layer for layer in range(layers - 1) if draw.flag()]
    rope = config["rope_parameters"] | draw.one_of({}, {"partial_rotary_factor": 1.0})
    return mamba(draw, config) | {
        "attn_layer_indices": [*attention, layers - 1],  # transformers needs an attention layer
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "rms_norm_eps": 1e-3,
        "pad_token_id": 0,
        "rope_parameters": rope,
    }


def sigmoid_experts(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    """DeepSeek-V3's experts beside grouped heads."""
    family, layers, count = config["model_type"], config["num_hidden_layers"], 6
    groups = draw.one_of((1, 1), (2, 1), (3, 2))
    is_deepseek = family in ("dots1", "solar_open")
    own = {
        "n_routed_experts" if is_deepseek else "num_experts": count, "num_experts_per_tok": draw.up_to(3),
        "n_shared_experts" if is_deepseek else "num_shared_experts": draw.up_to(3),
        "moe_intermediate_size": draw.up_to(60, 8), "n_group": groups[0], "topk_group": groups[1],
        "routed_scaling_factor": draw.one_of(1.0, 2.5), "norm_topk_prob": draw.flag(), "attention_bias": draw.flag(),
        "head_dim": 2 * draw.up_to(16, 2), "rope_parameters": draw.one_of(config["rope_parameters"], *ropes),
    }  # fmt: skip
    types = draw.one_of(None, draw.layer_types(layers))
    if family == "dots1":
        windows = {"sliding_window": draw.up_to(41), "max_window_layers": draw.up_to(layers + 1, 0)}
        return own | windows | {"layer_types": types, "first_k_dense_replace": draw.up_to(layers + 1, 0)}
    if family == "solar_open":
        return own | {"intermediate_size": None}
    mlps = [draw.one_of("dense", "sparse") for _ in range(layers)]
    if family == "exaone_moe":
        windows = {"sliding_window": draw.up_to(41), "sliding_window_pattern": draw.up_to(4), "layer_types": types}
        return own | windows | {"attention_bias": None, "mlp_layer_types": draw.one_of(None, mlps), "pad_token_id": 0}
    left_out = dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob"))
    return own | left_out | {"router_scaling_factor": draw.one_of(1.0, 2.5), "mlp_layer_types": mlps}


def granitemoeshared(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    count = draw.up_to(9, 2)
    own = {"num_local_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "mlp_bias": None}
    return granite(draw, config, ropes) | own | {"shared_intermediate_size": draw.one_of(0, draw.up_to(60, 8))}


def afmoe(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, count = config["num_hidden_layers"], draw.up_to(9, 2)
    return {
        "num_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "num_shared_experts": draw.up_to(3),
        "moe_intermediate_size": draw.up_to(60, 8), "num_dense_layers": draw.up_to(layers + 1, 0),
        "route_scale": draw.one_of(1.0, 2.5), "mup_enabled": draw.flag(), "head_dim": 2 * draw.up_to(16, 2),
        "layer_types": draw.one_of(None, draw.layer_types(layers)), "global_attn_every_n_layers": draw.up_to(5),
        "sliding_window": draw.up_to(41), "rope_parameters": draw.one_of(config["rope_parameters"], *ropes),
    }  # fmt: skip


def mellum(draw: Draw, config: Config, ropes: list[Config]) -> Config:
    layers, count = config["num_hidden_layers"], draw.up_to(9, 2)
    scaled = {k: v for k, v in draw.one_of(*ropes).items() if k != "truncate"}  # which transformers reads elsewhere
    rope = {FULL: scaled, SLIDING: config["rope_parameters"]}
    return {
        "num_experts": count, "num_experts_per_tok": draw.up_to(count + 1), "moe_intermediate_size": draw.up_to(60, 8),
        "norm_topk_prob": draw.flag(), "attention_bias": draw.flag(), "head_dim": 2 * draw.up_to(16, 2),
        "layer_types": draw.one_of(None, draw.layer_types(layers)), "sliding_window": draw.up_to(41),
        "mlp_layer_types": draw.one_of(None, [draw.one_of("dense", "sparse") for _ in range(layers)]),
        "rope_parameters": draw.one_of(None, rope),
    }  # fmt: skip


OWN = {
    "gemma": gemma, "olmo": olmo, "ernie4_5": ernie4_5, "arcee": arcee, "jais2": jais2, "cwm": cwm,
    "ministral": ministral, "vaultgemma": gemma2, "hyperclovax": hyperclovax, "nanochat": nanochat, "youtu": youtu,
    "minicpm3": minicpm3, "hunyuan_v1_dense": hunyuan, "hunyuan_v1_moe": hunyuan, "apertus": apertus, "phimoe": phimoe,
    "internlm3": named_llama, "iquestcoder": named_llama, "granite_swa": granite_swa, "granitemoe_swa": granite_swa,
    "flint": flint, "cohere2_moe": cohere2_moe, "laguna": laguna, "gpt_neo": gpt_neo, "lfm3": lfm3,
    "bamba": bamba, **dict.fromkeys(("dots1", "solar_open", "exaone_moe", "hy_v3"), sigmoid_experts),
    "granitemoeshared": granitemoeshared, "mellum": mellum, "afmoe": afmoe,
    "phi3": phi3, "olmo2": olmo2, "olmo3": olmo3, "granite": granite, "smollm3": smollm3, "ministral3": ministral3,
    "seed_oss": seed_oss, "stablelm": stablelm, "cohere": cohere, "cohere2": cohere2, "glm": glm, "glm4": glm,
    "exaone4": exaone4, "phi": phi, "gptj": gptj, "codegen": codegen, "falcon": falcon, "starcoder2": starcoder2,
    "gpt_bigcode": gpt_bigcode, "nemotron": nemotron, "helium": helium,
    "gemma2": gemma2, "gemma3_text": gemma3_text, "gemma4_text": gemma4_text, "bloom": bloom,
    "mixtral": experts, "qwen3_moe": experts, "olmoe": experts, "qwen2_moe": experts, "glm4_moe": experts,
    "flex_olmo": experts,
    "granitemoe": experts, "ernie4_5_moe": experts, "minimax_m2": experts, "lfm2_moe": experts,
    "gpt_oss": experts, "llama4_text": experts,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"), latents),
    "lfm2": lfm2, "qwen3_next": delta_net, "qwen3_5_text": delta_net, "qwen3_5_moe_text": delta_net,
    "falcon_h1": falcon_h1, "granitemoehybrid": granitemoehybrid, "nemotron_h": nemotron_h, "olmo_hybrid": olmo_hybrid,
    "mamba2": mamba2, "kimi_linear": kimi_linear,
}  # fmt: skip
"""What each family adds to the common keys."""
