"""Gemma 4 in GGUF files, as llama.cpp's converter writes them.

Layers without a window have heads of another size, and their number of key-value heads is in a list. The pairs of their
heads that are not rotated have a frequency factor of ``UNROTATED`` in the tensor ``rope_freqs.weight``. Layers that
share keys may hold keys of their own, which nothing reads.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .header import GgufHeader
from .rope import FACTORS, number, small_tensor

UNROTATED = 1e30
"""The factor by which the wavelength of a pair is multiplied that is not rotated."""
KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "attention.key_length_swa": "head_dim",
    "attention.key_length": "global_head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
TENSORS = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""The names in a layer of tensors that are no ``.weight``."""


def further(header: GgufHeader, config: dict[str, Any]) -> None:
    """What the list of keys does not say."""
    layers, shared = config["num_hidden_layers"], config.setdefault("num_kv_shared_layers", 0)
    pattern = header.of_model("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise _error(header, f"sliding_window_pattern is not a list of {layers} flags")
    types = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    config["layer_types"] = types
    counts = header.of_model("attention.head_count_kv", config["num_attention_heads"])
    counts = counts if isinstance(counts, list) else [counts] * layers
    of_types = {
        kind: {n for n, own in zip(counts, types, strict=False) if own == kind} for kind in dict.fromkeys(types)
    }
    if len(counts) != layers or any(len(numbers) > 1 for numbers in of_types.values()):
        raise _error(header, f"attention.head_count_kv is {counts}, not one number for each kind of layer")
    of_windows, (whole,) = of_types.get("sliding_attention", {counts[-1]}), of_types["full_attention"]
    (config["num_key_value_heads"],) = of_windows
    has_values = {i: f"blk.{i}.attn_v.weight" in header.tensors for i in range(layers - shared)}
    full = [i for i in has_values if types[i] == "full_attention"]
    config["attention_k_eq_v"] = bool(full) and not any(has_values[i] for i in full)
    if config["attention_k_eq_v"]:
        config["num_global_key_value_heads"] = whole
    elif whole != config["num_key_value_heads"]:
        own = {"head_dim": config["global_head_dim"], "num_key_value_heads": whole}
        config["per_layer_config"] = {str(i): own for i, kind in enumerate(types) if kind == "full_attention"}
    widths = header.of_model("feed_forward_length")
    widths = widths if isinstance(widths, list) else [widths] * layers
    config["intermediate_size"] = widths[0]
    config["use_double_wide_mlp"] = shared > 0 and widths[-1] == 2 * widths[0]
    config["hidden_size_per_layer_input"] = config.get("hidden_size_per_layer_input") or 0
    if "per_layer_token_embd.weight" in header.tensors:
        config["vocab_size_per_layer_input"] = header.tensors["per_layer_token_embd.weight"].shape[0]
    config["enable_moe_block"] = bool(config.get("num_experts"))
    config["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": number(header, "rope.freq_base", 10000.0),
            "partial_rotary_factor": _rotated_part(header),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": number(header, "rope.freq_base_swa", 10000.0)},
    }
    for kind, size in (("", "global_head_dim"), ("_swa", "head_dim")):
        for key in (f"attention.value_length{kind}", f"rope.dimension_count{kind}"):
            if header.of_model(key, config[size]) != config[size]:
                raise _error(header, f"{key} is {header.of_model(key)}, not the {config[size]} elements of a head")


def _rotated_part(header: GgufHeader) -> float:
    """The rotated part of the heads of layers without a window."""
    if FACTORS not in header.tensors:
        return 1.0
    factors = small_tensor(header, FACTORS)
    rotated = int(np.count_nonzero(factors == 1))
    if not (factors[:rotated] == 1).all() or not (factors[rotated:] >= UNROTATED / 2).all():
        raise CheckpointError(
            f"{header.path}: the tensor {FACTORS} has other factors than 1 and {UNROTATED:g} behind these; migrate the "
            "model's Hugging Face folder instead"
        )
    return rotated / len(factors)


def unread_tensors(header: GgufHeader) -> set[str]:
    """Keys and values of layers that read those of others, and the factors of the rotation."""
    first = header.of_model("block_count") - (header.of_model("attention.shared_kv_layers") or 0)
    found = {FACTORS}
    for name in header.tensors:
        match = re.match(r"blk\.(\d+)\.attn_(k|v|k_norm)\.", name)
        if match and int(match[1]) >= first:
            found.add(name)
    return found


def _error(header: GgufHeader, problem: str) -> CheckpointError:
    return CheckpointError(f"{header.path}: {header.architecture}.{problem}; export the model again")
