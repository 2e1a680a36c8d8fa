"""Architectures with attention and one feed-forward layer in each layer."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError
from . import gemma4
from .converted import (
    CAPS,
    COMMON,
    EPSILON,
    GRANITE,
    HEAD_SIZE,
    RMS,
    WINDOW,
    Converted,
    biases,
    granite,
    llama,
    partial,
    partial_of_head,
    windows,
)
from .header import REMEDY, GgufHeader
from .rope import LONG_FACTORS, number, shortest, small_tensor

GPT_NAMES = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "context_length": "n_positions",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
OLMO_EPS = 1e-5
"""The epsilon of OLMo's norms, which no ``config.json`` states."""


def _llama_or_mixtral(header: GgufHeader, config: dict[str, Any]) -> None:
    """Mixtral has the same name, and experts."""
    llama(header, config)
    if config.get("num_local_experts"):
        config["model_type"] = "mixtral"
    else:
        config.pop("num_experts_per_tok", None)


def _phi3(header: GgufHeader, config: dict[str, Any]) -> None:
    partial(header, config)
    long_rope(header, config)


def long_factors(header: GgufHeader) -> set[str]:
    """The tensors that :func:`long_rope` reads."""
    return set(LONG_FACTORS)


def long_rope(header: GgufHeader, config: dict[str, Any]) -> None:
    """The factors of LongRoPE, if the file has them, and the context before it."""
    if all(name in header.tensors for name in LONG_FACTORS):
        if header.of_model("rope.scaling.factor", 1) not in (0, 1):
            problem = "has rope.scaling.factor beside LongRoPE's factors, which are not combined here"
            raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
        short, long = ([shortest(x) for x in small_tensor(header, name)] for name in LONG_FACTORS)
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        factor = header.of_model("rope.scaling.attn_factor")
        if factor is not None:
            config["rope_scaling"]["attention_factor"] = shortest(factor)
    original = header.of_model("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original


def _stablelm(header: GgufHeader, config: dict[str, Any]) -> None:
    partial(header, config)
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.tensors


def _nemotron(header: GgufHeader, config: dict[str, Any]) -> None:
    partial(header, config)
    llama(header, config)
    config["head_dim"] = header.of_model("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    rotated = header.of_model("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotated / config["head_dim"]


def _falcon(header: GgufHeader, config: dict[str, Any]) -> None:
    """The newer architecture has grouped heads and two norms; the older one a single key-value head."""
    config["new_decoder_architecture"] = "blk.0.attn_norm_2.weight" in header.tensors
    config["multi_query"] = config["num_kv_heads"] == 1
    config["bias"] = "blk.0.attn_qkv.bias" in header.tensors
    if not config["new_decoder_architecture"] and not config["multi_query"]:
        problem = "is a Falcon of the first architecture with many key-value heads, which may have ALiBi"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")


def _gemma(header: GgufHeader, config: dict[str, Any], large: int) -> None:
    """The scale of queries: from the size of a head, or with ``large`` layers from the embedding's size over the heads.

    The numbers are those of llama.cpp, because the files do not hold them.
    """
    heads, is_large = config["num_attention_heads"], config["num_hidden_layers"] == large
    config["query_pre_attn_scalar"] = config["hidden_size"] / heads if is_large else config["head_dim"]


def _gemma2(header: GgufHeader, config: dict[str, Any]) -> None:
    _gemma(header, config, large=46)


def _gemma3(header: GgufHeader, config: dict[str, Any]) -> None:
    _gemma(header, config, large=62)
    if config.get("sliding_window") is None:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


def _gpt_neox(header: GgufHeader, config: dict[str, Any]) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config["rotary_pct"] = header.of_model("rope.dimension_count", head_dim) / head_dim
    config["rotary_emb_base"] = config.pop("rope_theta", 10000.0)


def _olmo(header: GgufHeader, config: dict[str, Any]) -> None:
    """The norms' epsilon is no key of Hugging Face's; queries, keys and values may be limited."""
    eps = header.of_model("attention.layer_norm_epsilon", OLMO_EPS)
    if shortest(eps) != OLMO_EPS:
        problem = f"attention.layer_norm_epsilon is {shortest(eps)}, but OLMo's norms have {OLMO_EPS}"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")
    if limit := header.of_model("attention.clamp_kqv"):
        problem = f"limits queries, keys and values to {shortest(limit)} (attention.clamp_kqv)"
        raise CheckpointError(f"{header.path}: {problem}, which this version does not run")


def _ernie4_5(header: GgufHeader, config: dict[str, Any]) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in header.tensors


def _olmo2(header: GgufHeader, config: dict[str, Any]) -> None:
    """OLMo 3 has the same name, and windows."""
    if header.of_model("attention.sliding_window"):
        config["model_type"] = "olmo3"
        windows(header, config)


def _seed_oss(header: GgufHeader, config: dict[str, Any]) -> None:
    biases(header, config)
    config["attention_out_bias"] = "blk.0.attn_output.bias" in header.tensors


def _glm4(header: GgufHeader, config: dict[str, Any]) -> None:
    """The text model of GLM-4V has rotations of its own, and GLM-OCR layers that predict further tokens."""
    for key, what in (("rope.dimension_sections", "rotations by sections"), ("nextn_predict_layers", "further layers")):
        if header.of_model(key):
            raise CheckpointError(f"{header.path}: has {what} ({key}), which this version does not run")
    biases(header, config)
    partial_of_head(header, config)


def _ministral3(header: GgufHeader, config: dict[str, Any]) -> None:
    """The file has the ``mscale_all_dim`` of YaRN; the ``mscale`` beside it is 1 in llama.cpp."""
    biases(header, config)
    multiplier, beta = (
        header.of_model("rope.scaling.yarn_log_multiplier"),
        header.of_model("attention.temperature_scale"),
    )
    if "rope_scaling" not in config or multiplier is None or beta is None:
        problem = "lacks the numbers of YaRN (rope.scaling.*) or attention.temperature_scale"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")
    if header.of_model("rope.scaling.attn_factor", 1.0) == 1:
        config["rope_scaling"].pop("attention_factor", None)  # it follows from these
    original = config["rope_scaling"].get("original_max_position_embeddings")
    if (length := header.of_model("attention.temperature_length", original)) != original:
        problem = f"attention.temperature_length is {length}, not the original context of {original}"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
    config["rope_scaling"] |= {
        "mscale": 1.0,
        "mscale_all_dim": shortest(multiplier),
        "llama_4_scaling_beta": number(header, "attention.temperature_scale"),
    }


DENSE: dict[str, Converted] = {
    "llama": Converted(
        "llama",
        COMMON | RMS | HEAD_SIZE | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        {},
        permuted=True,
        others=("mixtral",),
        further=_llama_or_mixtral,
    ),
    "qwen2": Converted("qwen2", COMMON | RMS, {"use_sliding_window": False}),
    "qwen3": Converted("qwen3", COMMON | RMS | HEAD_SIZE, {"use_sliding_window": False}),
    "phi3": Converted("phi3", COMMON | RMS | WINDOW, {}, unread=long_factors, further=_phi3),
    "olmo2": Converted("olmo2", COMMON | RMS, {}, others=("olmo3",), further=_olmo2),
    "granite": Converted(
        "granite",
        COMMON | RMS | GRANITE,
        {},
        permuted=True,
        further=granite,
    ),
    "stablelm": Converted("stablelm", COMMON | EPSILON, {}, further=_stablelm),
    "starcoder2": Converted("starcoder2", COMMON | {"attention.layer_norm_epsilon": "norm_epsilon"}, {}),
    "phi2": Converted("phi", COMMON | EPSILON, {}, further=partial),
    "command-r": Converted("cohere", COMMON | EPSILON | {"logit_scale": "logit_scale"}, {}),
    "cohere2": Converted(
        "cohere2",
        COMMON | WINDOW | EPSILON | {"logit_scale": "logit_scale"},
        {},
        required=("attention.sliding_window",),
    ),
    "smollm3": Converted("smollm3", COMMON | RMS, {"no_rope_layer_interval": 4}, permuted=True, further=biases),
    "nemotron": Converted(
        "nemotron", COMMON | {"attention.layer_norm_epsilon": "norm_eps"}, {}, norm_offset=True, further=_nemotron
    ),
    "falcon": Converted(
        "falcon",
        {key: name for key, name in COMMON.items() if key not in ("feed_forward_length", "attention.head_count_kv")}
        | {
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count_kv": "num_kv_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {"alibi": False},
        grouped_qkv=True,
        further=_falcon,
    ),
    "gemma": Converted("gemma", COMMON | RMS | HEAD_SIZE, {}, norm_offset=True),
    "olmo": Converted("olmo", COMMON, {}, permuted=True, further=_olmo),
    "ernie4_5": Converted("ernie4_5", COMMON | RMS | HEAD_SIZE, {}, further=_ernie4_5),
    "arcee": Converted("arcee", COMMON | RMS | HEAD_SIZE, {}, permuted=True, further=llama),
    "hunyuan-dense": Converted("hunyuan_v1_dense", COMMON | RMS | HEAD_SIZE, {}, further=biases),
    "jais2": Converted("jais2", COMMON | EPSILON | HEAD_SIZE, {}, further=biases),
    "gemma2": Converted("gemma2", COMMON | RMS | HEAD_SIZE | WINDOW | CAPS, {}, norm_offset=True, further=_gemma2),
    "gemma3": Converted(
        "gemma3_text",
        COMMON
        | RMS
        | HEAD_SIZE
        | WINDOW
        | CAPS
        | {"rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window_pattern": "sliding_window_pattern"},
        {},
        norm_offset=True,
        further=_gemma3,
    ),
    "gemma4": Converted(
        "gemma4_text",
        gemma4.KEYS,
        {},
        required=("attention.key_length", "attention.key_length_swa", "attention.sliding_window"),
        tensors=gemma4.TENSORS,
        unread=gemma4.unread_tensors,
        further=gemma4.further,
    ),
    "bloom": Converted(
        "bloom",
        {
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            "context_length": "seq_length",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {},
        grouped_qkv=True,
    ),
    "seed_oss": Converted("seed_oss", COMMON | RMS | HEAD_SIZE, {}, further=_seed_oss),
    "glm4": Converted("glm4", COMMON | RMS | HEAD_SIZE, {}, further=_glm4),
    "exaone4": Converted("exaone4", COMMON | RMS | HEAD_SIZE, {}, further=windows),
    "mistral3": Converted("ministral3", COMMON | RMS | HEAD_SIZE, {}, permuted=True, further=_ministral3),
    "starcoder": Converted("gpt_bigcode", GPT_NAMES, {"multi_query": True}),
    "gptneox": Converted(
        "gpt_neox",
        COMMON | EPSILON | {"use_parallel_residual": "use_parallel_residual"},
        {},
        grouped_qkv=True,
        required=("use_parallel_residual",),
        further=_gpt_neox,
    ),
    "gpt2": Converted("gpt2", GPT_NAMES, {}, transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
}
