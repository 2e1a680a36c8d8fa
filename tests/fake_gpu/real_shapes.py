"""One layer of models of real sizes on the fake GPU, without computing: every launch is checked, none is run.

``python -m fake_gpu.real_shapes PROFILE`` prints what was asked for, as :func:`fake_gpu.report` gives it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np

import fake_gpu
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import ForwardBatch, sequential_tables
from bminf_lite.layers.cache import KVCache

from . import uncomputed

MORE: dict[str, dict[str, Any]] = {
    "heads of 256, one of them for keys": {
        "model_type": "mistral", "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16,
        "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 1, "vocab_size": 256000,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    },
    "a wide feed-forward layer": {
        "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 152064, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_act": "silu",
    },
    "norms of heads": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    },
    "learned positions": {
        "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_attention_heads": 40, "num_hidden_layers": 1,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 5120,
    },
    "parallel residual": {
        "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64,
        "num_hidden_layers": 1, "vocab_size": 50432, "max_position_embeddings": 2048, "rotary_pct": 0.25,
    },
    "experts beside a shared one, with windows and sinks": {
        "model_type": "granitemoe_swa", "hidden_act": "silu", "rms_norm_eps": 1e-05, "hidden_size": 1536,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 4,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 10000.0, "vocab_size": 100352,
        "shared_intermediate_size": 1024, "num_local_experts": 40, "num_experts_per_tok": 8, "sliding_window": 128,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "logits_scaling": 6.0, "layer_types": ["full_attention", "sliding_attention"],
    },
    "experts beside attention": {
        "model_type": "cohere2_moe", "hidden_act": "silu", "layer_norm_eps": 1e-05, "hidden_size": 4096,
        "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4, "max_position_embeddings": 132096,
        "tie_word_embeddings": True, "rope_theta": 50000.0, "vocab_size": 256000, "head_dim": 128,
        "prefix_dense_intermediate_size": 14336, "first_k_dense_replace": 1, "num_experts": 64,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid", "norm_topk_prob": True, "layer_types": ["full_attention",
        "sliding_attention"],
    },
    "sigmoid routers, sinks and a shared expert": {
        "model_type": "flint", "hidden_act": "silu", "rms_norm_eps": 1e-06, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 262144, "tie_word_embeddings": False, "rope_theta": 10000.0,
        "vocab_size": 150144, "sliding_window": 513, "num_experts": 256, "num_experts_per_tok": 6,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "layer_types": ["full_attention",
        "sliding_attention"], "mlp_only_layers": [0],
    },
    "gates of heads, and layers of different widths": {
        "model_type": "laguna", "hidden_act": "silu", "rms_norm_eps": 1e-06, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "sliding_window": 512, "layer_types": ["full_attention",
        "sliding_attention"], "gating": True, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
}  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm_roberta", "distilbert", "mpnet", "modernbert", "nomic_bert")
LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer")
SOURCE = 64


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The package's shapes that generate text and some more, each with one layer of every kind that it has."""
    for file in (resources.files("bminf_lite") / "configs").iterdir():
        if file.name.endswith(".json"):
            config = json.loads(file.read_text(encoding="utf-8"))
            if config["model_type"].replace("-", "_") in ENCODERS:
                continue
            yield file.name, config | {name: 1 for name in LAYERS if name in config} | one_of_each_kind(config)
    yield from MORE.items()


def one_of_each_kind(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model with a layer of each kind that ``config`` has, if its layers differ."""
    if "full_attn_idxs" in config:
        return {"num_hidden_layers": 2, "full_attn_idxs": [1]}
    if "attn_layer_indices" in config:
        return {"num_hidden_layers": 2, "attn_layer_indices": [1]}
    if "attention_types" in config:
        return {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    if "hybrid_override_pattern" in config:
        letters = "".join(dict.fromkeys(config["hybrid_override_pattern"]))
        return {"num_hidden_layers": len(letters), "hybrid_override_pattern": letters}
    if "linear_attn_config" in config:
        numbers = {"kda_layers": [1], "full_attn_layers": [2]}
        return {"num_hidden_layers": 2, "linear_attn_config": config["linear_attn_config"] | numbers}
    kinds = list(dict.fromkeys(config.get("layer_types", ())))
    if not kinds:
        return {}
    if config.get("num_kv_shared_layers"):  # of each kind one that shares keys, too
        return {"num_hidden_layers": 2 * len(kinds), "layer_types": 2 * kinds, "num_kv_shared_layers": len(kinds)}
    dense: dict[str, Any] = {"num_dense_layers": 1} if "num_dense_layers" in config else {}
    if config.get("mlp_only_layers"):
        dense = {"mlp_only_layers": [0]}
    return {"num_hidden_layers": len(kinds), "layer_types": kinds, **dense}


def steps(context: int) -> Iterator[tuple[int, int, int]]:
    """Sequences, new tokens of each, and tokens that it has already."""
    yield from ((1, 1, context - 1), (1, 1, 3), (2, 1, 40), (16, 1, 100), (1, context, 0), (3, 17, 0))


def batch_of(ops: Backend, count: int, new: int, context_len: int, tables: Sequence[np.ndarray]) -> ForwardBatch:
    sources = sequential_tables(count, SOURCE)
    tokens, lengths = np.zeros((count, new)), [context_len] * count
    return ForwardBatch.packed(ops.array, tokens, lengths, tables, sources, [SOURCE] * count)


def run(name: str, config: dict[str, Any]) -> None:
    """All steps of one model."""
    from bminf_lite.backend.cuda.backend import CudaBackend
    from bminf_lite.bench.model import random_model

    ops = CudaBackend(0, "10GiB")
    bench_model = random_model(name, config, ops)
    limits, network = bench_model.engine_config, bench_model.network
    context = min(2048, limits.context_length)
    for count, new, context_len in steps(context):
        cache = KVCache.for_sequences(ops, limits.cache_layout, count, context)
        tables = cache.tables(count, context)
        if limits.is_encoder_decoder:
            cache.source = KVCache.for_sequences(ops, limits.cache_layout, count, SOURCE)
            network.encode_to_cache(batch_of(ops, count, SOURCE, 0, tables), cache.source)  # type: ignore[attr-defined]
        network(batch_of(ops, count, new, context_len, tables), cache)
        cache.close()
    ops.close()


def main(profile: str) -> None:
    """Everything on one profile."""
    machine = uncomputed.install(profile)
    for name, config in configs():
        run(name, config)
    print(fake_gpu.report(machine))


if __name__ == "__main__":
    main(sys.argv[1])
